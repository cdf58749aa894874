//! Several calls as JSON objects: a list `[{…}, {…}]` (Mistral's older models, forced tool choice), or
//! objects in a row with `;` between (Llama 3).

use crate::call::{FeedResult, Gate, JsonCall};
use crate::limits::HEADER_BYTES_MAX;
use crate::machine::leading_space;
use crate::output::Sink;

#[derive(Debug)]
enum State {
    /// Before the opening bracket.
    Open,
    /// Before an object, which must come.
    Object,
    Call(JsonCall),
    /// After an object.
    Between,
}

/// The parser of several objects.
#[derive(Debug)]
pub(crate) struct CallList {
    state: State,
    raw: String,
    gate: Gate,
    bracketed: bool,
}

impl CallList {
    /// A list in brackets, whose text so far is `raw`.
    pub(crate) fn bracketed(raw: String) -> Self {
        Self { state: State::Open, raw, gate: Gate::Announced, bracketed: true }
    }

    /// Objects in a row, whose text so far is `raw`.
    pub(crate) fn in_a_row(raw: String, gate: Gate) -> Self {
        Self { state: State::Object, raw, gate, bracketed: false }
    }

    /// Takes text. On `Done` and on `Failed` the rest belongs to the caller; a failed list has given its
    /// own text out.
    pub(crate) fn feed(&mut self, text: &str, sink: &mut Sink<'_>) -> (usize, FeedResult) {
        let mut at = 0;
        loop {
            let rest = &text[at..];
            if let State::Call(call) = &mut self.state {
                let (used, fed) = call.feed(rest, sink);
                at += used;
                match fed {
                    FeedResult::More => return (at, FeedResult::More),
                    FeedResult::Done => self.state = State::Between,
                    FeedResult::Failed => {
                        call.abandon(sink);
                        return (at, FeedResult::Failed);
                    }
                }
                continue;
            }
            let held = !matches!(self.state, State::Between);
            let room = if held { HEADER_BYTES_MAX.saturating_sub(self.raw.len()) } else { usize::MAX };
            let space = leading_space(rest).min(room);
            if held {
                self.raw.push_str(&rest[..space]);
            }
            at += space;
            let Some(&byte) = rest.as_bytes().get(space) else { return (at, FeedResult::More) };
            match (&self.state, byte) {
                (State::Open, b'[') => {
                    self.raw.push('[');
                    at += 1;
                    self.state = State::Object;
                }
                (State::Object, b'{') => {
                    self.state = State::Call(JsonCall::new(std::mem::take(&mut self.raw), self.gate));
                }
                (State::Between, b',') if self.bracketed => {
                    self.raw.push(',');
                    at += 1;
                    self.state = State::Object;
                }
                (State::Between, b']') if self.bracketed => return (at + 1, FeedResult::Done),
                (State::Between, b';') if !self.bracketed => {
                    self.raw.push(';');
                    at += 1;
                    self.state = State::Object;
                }
                (State::Between, b'{') if !self.bracketed => self.state = State::Object,
                (State::Between, _) => return (at, FeedResult::Done),
                _ => {
                    sink.content(&std::mem::take(&mut self.raw));
                    return (at, FeedResult::Failed);
                }
            }
        }
    }

    /// Ends the output inside the list.
    pub(crate) fn finish(&mut self, sink: &mut Sink<'_>) {
        match &mut self.state {
            State::Call(call) => call.abandon(sink),
            // A separator after the last call is no text of the model.
            State::Object if matches!(self.raw.trim_end(), "," | ";") => {}
            _ => sink.content(&std::mem::take(&mut self.raw)),
        }
    }
}
