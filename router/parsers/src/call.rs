//! A call as a JSON object: `{"name": …, "arguments": {…}}`, with `parameters` as an alternative to `arguments`, any order of
//! keys, and unknown keys skipped.
//!
//! The call starts when its name is known and the first byte of its arguments has arrived; until then the text is held, so that
//! an object that turns out to be no call becomes content as the model wrote it. From then on the arguments pass through
//! verbatim. The rest of the object after them is held in the same way. An object with a name and no arguments is a call with
//! `{}`. Arguments before the name are held until it is known.

use crate::json::{JsonScanner, Scan};
use crate::limits::{ARGUMENTS_HELD_BYTES_MAX, HEADER_BYTES_MAX};
use crate::machine::prefix;
use crate::output::Sink;

/// Conditions under which an object counts as a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// A marker came before the object: a name is enough.
    Announced,
    /// No marker came before; the object may be a JSON answer: it needs arguments and the name of an offered tool.
    Bare,
}

/// Result of feeding text to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FeedResult {
    /// All text was consumed.
    More,
    /// The object's closing brace was the last byte used.
    Done,
    /// The next byte cannot belong to a call.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    KeyOrClose,
    Key,
    InKey { escaped: bool },
    Colon(Field),
    Value(Field),
    InName { escaped: bool },
    Scanned(Field),
    Bare(Field),
    AfterValue,
}

/// The parser of one such object.
#[derive(Debug)]
pub(crate) struct JsonCall {
    gate: Gate,
    state: State,
    /// Held text: from the marker on until the call starts, and after its arguments.
    raw: String,
    /// The quoted key or name that is being read.
    token: String,
    name: Option<String>,
    /// Arguments that arrived before the name.
    held: Option<String>,
    scanner: JsonScanner,
    started: bool,
    has_arguments: bool,
    arguments_ended: bool,
    arguments_valid: bool,
}

impl JsonCall {
    /// Returns a parser for a call whose opening text, such as its marker, is `raw`.
    pub(crate) fn new(raw: String, gate: Gate) -> Self {
        Self {
            gate,
            state: State::Open,
            raw,
            token: String::new(),
            name: None,
            held: None,
            scanner: JsonScanner::new(),
            started: false,
            has_arguments: false,
            arguments_ended: false,
            arguments_valid: true,
        }
    }

    pub(crate) fn feed(&mut self, text: &str, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        let mut at = 0;
        while at < text.len() {
            let (holds, started) = (self.holds(), self.started);
            let limit = match &self.held {
                _ if !holds => usize::MAX,
                None => HEADER_BYTES_MAX,
                Some(_) => ARGUMENTS_HELD_BYTES_MAX,
            };
            let slice = prefix(&text[at..], limit.saturating_sub(self.raw.len()));
            if slice.is_empty() {
                return (at, FeedResult::Failed);
            }
            let (used, fed) = self.advance(slice, sink);
            at += used;
            // The text up to the start of the call is decided, and is not held any more.
            if fed == FeedResult::Done || started != self.started {
                self.raw.clear();
            } else if holds {
                self.raw.push_str(&slice[..used]);
            }
            if fed != FeedResult::More {
                return (at, fed);
            }
        }
        (at, FeedResult::More)
    }

    /// Whether text is held at present: before the call starts, and after its arguments, where the rest of the object may still
    /// turn out to be invalid.
    fn holds(&self) -> bool {
        !self.started || self.arguments_ended
    }

    /// Ends a call that failed or was cut off: a started call ends, and the held text becomes content.
    pub(crate) fn abandon(&mut self, sink: &mut Sink<'_>) {
        if self.started {
            sink.end(self.arguments_ended && self.arguments_valid);
            if self.raw.trim().is_empty() {
                return;
            }
        }
        sink.content(&std::mem::take(&mut self.raw));
    }

    /// Consumes at least one byte of `text`, or fails.
    fn advance(&mut self, text: &str, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        match self.state {
            State::InKey { escaped } | State::InName { escaped } => return self.quoted(text, escaped, sink),
            State::Scanned(field) => return self.scanned(text, field, sink),
            State::Bare(field) => return self.bare(text, field, sink),
            _ => {}
        }
        let byte = text.as_bytes().first().copied().unwrap_or_default();
        if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
            return (1, FeedResult::More);
        }
        self.state = match (self.state, byte) {
            (State::Open, b'{') => State::KeyOrClose,
            (State::KeyOrClose | State::Key, b'"') => {
                self.token = String::from("\"");
                State::InKey { escaped: false }
            }
            (State::KeyOrClose | State::AfterValue, b'}') => return self.close(sink),
            (State::Colon(field), b':') => State::Value(field),
            (State::AfterValue, b',') => State::Key,
            (State::Value(Field::Name), b'"') => {
                self.token = String::from("\"");
                State::InName { escaped: false }
            }
            (State::Value(field @ (Field::Arguments | Field::Other)), _) => {
                if field == Field::Arguments && !self.open_arguments(sink) {
                    return (0, FeedResult::Failed);
                }
                match byte {
                    b'{' | b'[' | b'"' => {
                        self.scanner = JsonScanner::new();
                        State::Scanned(field)
                    }
                    b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => State::Bare(field),
                    _ => return (0, FeedResult::Failed),
                }
            }
            _ => return (0, FeedResult::Failed),
        };
        // The value's first byte belongs to the value, the others are structure.
        let value = matches!(self.state, State::Scanned(_) | State::Bare(_));
        if value { self.advance(text, sink) } else { (1, FeedResult::More) }
    }

    /// Starts the call, or begins to hold the arguments while the name is missing.
    fn open_arguments(&mut self, sink: &mut Sink<'_>) -> bool {
        self.has_arguments = true;
        if self.name.is_some() {
            return self.start(sink);
        }
        self.held = Some(String::new());
        true
    }

    fn start(&mut self, sink: &mut Sink<'_>) -> bool {
        let Some(name) = &self.name else { return false };
        if self.gate == Gate::Bare && !sink.plausible(name) {
            return false;
        }
        sink.start(name, None);
        self.started = true;
        true
    }

    fn emit(&mut self, text: &str, sink: &mut Sink<'_>) {
        match &mut self.held {
            Some(held) => held.push_str(text),
            None => sink.arguments(text),
        }
    }

    /// Consumes a key or the name, up to its closing quote.
    fn quoted(&mut self, text: &str, mut escaped: bool, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if byte < 0x20 => return (at, FeedResult::Failed),
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    self.token.push_str(&text[..=at]);
                    let Ok(token) = serde_json::from_str::<String>(&self.token) else {
                        return (at, FeedResult::Failed);
                    };
                    let taken = self.take_token(token, sink);
                    return if taken { (at + 1, FeedResult::More) } else { (at, FeedResult::Failed) };
                }
                _ => {}
            }
        }
        self.token.push_str(text);
        self.state = match self.state {
            State::InName { .. } => State::InName { escaped },
            _ => State::InKey { escaped },
        };
        (text.len(), FeedResult::More)
    }

    fn take_token(&mut self, token: String, sink: &mut Sink<'_>) -> bool {
        if matches!(self.state, State::InKey { .. }) {
            self.state = State::Colon(match token.as_str() {
                "name" if self.name.is_none() => Field::Name,
                "arguments" | "parameters" if !self.has_arguments => Field::Arguments,
                _ => Field::Other,
            });
            return true;
        }
        if token.is_empty() {
            return false;
        }
        self.name = Some(token);
        self.state = State::AfterValue;
        match self.held.take() {
            Some(held) => {
                let started = self.start(sink);
                if started {
                    sink.arguments(&held);
                } else {
                    self.held = Some(held);
                }
                started
            }
            None => true,
        }
    }

    fn scanned(&mut self, text: &str, field: Field, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        let (used, scan) = self.scanner.feed(text);
        if field == Field::Arguments {
            self.emit(&text[..used], sink);
            self.arguments_valid &= self.scanner.valid();
            self.arguments_ended |= scan == Scan::Ended;
        }
        match scan {
            Scan::Inside => (used, FeedResult::More),
            Scan::Ended => {
                self.state = State::AfterValue;
                (used, FeedResult::More)
            }
            Scan::Broken => (used, FeedResult::Failed),
        }
    }

    /// Consumes a number or literal, which ends before the next delimiter.
    fn bare(&mut self, text: &str, field: Field, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        let end =
            text.bytes().position(|byte| matches!(byte, b',' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r'));
        let used = end.unwrap_or(text.len());
        if field == Field::Arguments {
            self.emit(&text[..used], sink);
            self.arguments_ended |= end.is_some();
            // Scalar arguments are passed on, but are invalid for every function.
            self.arguments_valid = false;
        }
        if end.is_some() {
            self.state = State::AfterValue;
        }
        (used, FeedResult::More)
    }

    fn close(&mut self, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        if !self.started {
            let startable = self.name.is_some() && self.gate == Gate::Announced && self.held.is_none();
            if !startable || !self.start(sink) {
                return (0, FeedResult::Failed);
            }
            sink.arguments("{}");
            self.arguments_ended = true;
        }
        sink.end(self.arguments_ended && self.arguments_valid);
        (1, FeedResult::Done)
    }
}
