//! Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, repeated.
//!
//! Source: the Hermes function calling format (NousResearch, "Hermes-Function-Calling") and the chat
//! templates of Qwen2.5 and Qwen3. The object is read as JSON, so that `</tool_call>` inside a string does
//! not end it. A missing closing tag is forgiven. White space after a call is dropped, other text after it
//! is content; text before the first call is content as written, white space included, as in vLLM.

use crate::call::{FeedResult, Gate, JsonCall};
use crate::machine::{Found, Machine, PrefixMatch, Step, begins, find, skip_space, skip_space_then};
use crate::output::Sink;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
enum State {
    Content,
    Call(JsonCall),
    /// After the object, before the closing tag.
    Closing,
    /// After a call.
    After,
}

/// The parser of the Hermes format.
#[derive(Debug)]
pub(crate) struct Hermes {
    state: State,
}

impl Hermes {
    pub(crate) fn new() -> Self {
        Self { state: State::Content }
    }
}

impl Machine for Hermes {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::Content => match find(text, &[OPEN], last) {
                Found::Nothing { safe } => {
                    sink.content(&text[..safe]);
                    Step::wait(safe)
                }
                Found::At { at, .. } => {
                    sink.content(&text[..at]);
                    self.state = State::Call(JsonCall::new(OPEN.to_owned(), Gate::Announced));
                    Step::again(at + OPEN.len())
                }
            },
            State::Call(call) => {
                let (used, fed) = call.feed(text, sink);
                match fed {
                    FeedResult::More => return Step::wait(used),
                    FeedResult::Done => self.state = State::Closing,
                    FeedResult::Failed => {
                        call.abandon(sink);
                        self.state = State::Content;
                    }
                }
                Step::again(used)
            }
            State::Closing => {
                let (space, more) = skip_space(text);
                if !more {
                    return Step::wait(space);
                }
                match begins(&text[space..], &[CLOSE], last) {
                    PrefixMatch::With(_) => {
                        self.state = State::After;
                        Step::again(space + CLOSE.len())
                    }
                    PrefixMatch::Maybe => Step::wait(space),
                    PrefixMatch::No => {
                        self.state = State::Content;
                        Step::again(space)
                    }
                }
            }
            State::After => skip_space_then(State::Content, &mut self.state, text),
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        if let State::Call(call) = &mut self.state {
            call.abandon(sink);
        }
    }
}
