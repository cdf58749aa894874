//! The contract between the driver and a family's parser, and the search for markers that both stages use.
//!
//! A family is a state machine over text that arrives in pieces of any size. Each step consumes a prefix of the available text
//! and returns its length. The rule that makes the result independent of the pieces: a step decides only what no further text
//! could change, and otherwise waits. Its unused rest is always a proper prefix of a marker, so it is examined again at most a
//! marker's length of times, and the total work stays linear.

use crate::output::Sink;

/// Result of a step.
pub(crate) struct Step {
    /// Number of consumed bytes, always a whole number of characters.
    pub(crate) used: usize,
    /// Whether to step again with the rest; otherwise the rest waits for more text.
    pub(crate) again: bool,
}

impl Step {
    pub(crate) fn again(used: usize) -> Self {
        Self { used, again: true }
    }

    pub(crate) fn wait(used: usize) -> Self {
        Self { used, again: false }
    }
}

/// One family's parser of content and tool calls.
pub(crate) trait Machine: std::fmt::Debug + Send {
    /// Consumes a prefix of `text`, which is not empty. With `last` no more text will arrive, so a partial marker is plain text and
    /// all of `text` must be consumed in the end.
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step;

    /// Ends the output: a started call ends, and held text becomes content.
    fn finish(&mut self, sink: &mut Sink<'_>);
}

/// Position of the first of several markers.
pub(crate) enum Found {
    /// The marker with index `marker` begins at byte `at`.
    At { at: usize, marker: usize },
    /// No marker; the first `safe` bytes cannot be part of one, the rest may become one.
    Nothing { safe: usize },
}

/// Finds the first marker in one pass that stops at the first candidate.
pub(crate) fn find(text: &str, markers: &[&str], last: bool) -> Found {
    for (at, byte) in text.bytes().enumerate() {
        if !markers.iter().any(|marker| marker.as_bytes().first() == Some(&byte)) {
            continue;
        }
        // A first byte begins a character, so that this slice is on a boundary.
        let rest = &text[at..];
        if let Some(marker) = markers.iter().position(|marker| rest.starts_with(marker)) {
            return Found::At { at, marker };
        }
        if !last && markers.iter().any(|marker| marker.starts_with(rest)) {
            return Found::Nothing { safe: at };
        }
    }
    Found::Nothing { safe: text.len() }
}

/// Result of comparing the beginning of a text with several literals.
pub(crate) enum PrefixMatch {
    /// The text begins with the literal of this index.
    With(usize),
    /// Undecided: the whole text is a proper prefix of a literal.
    Maybe,
    /// The text begins with no literal.
    No,
}

/// Compares the beginning of a text with literals.
pub(crate) fn begins(text: &str, literals: &[&str], last: bool) -> PrefixMatch {
    if let Some(index) = literals.iter().position(|literal| text.starts_with(literal)) {
        return PrefixMatch::With(index);
    }
    if !last && literals.iter().any(|literal| literal.starts_with(text)) {
        return PrefixMatch::Maybe;
    }
    PrefixMatch::No
}

/// Number of bytes of JSON white space at the beginning of a text.
pub(crate) fn leading_space(text: &str) -> usize {
    text.bytes().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count()
}

/// Skips white space between or after calls; `true` means that other text follows.
pub(crate) fn skip_space(text: &str) -> (usize, bool) {
    let space = leading_space(text);
    (space, space < text.len())
}

/// A step that skips white space and then enters the state `next`, once other text has arrived.
pub(crate) fn skip_space_then<S>(next: S, state: &mut S, text: &str) -> Step {
    let (space, more) = skip_space(text);
    if !more {
        return Step::wait(space);
    }
    *state = next;
    Step::again(space)
}

/// The longest prefix of `text` with at most `bytes` bytes that ends on a character.
pub(crate) fn prefix(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
