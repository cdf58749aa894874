//! Llama 3.x: `{"name": "f", "parameters": {…}}` as the whole output, several of them separated by `;`,
//! and optionally `<|python_tag|>` before.
//!
//! Source: Meta's prompt format of Llama 3.1 and 3.2 ("JSON based tool calling"), and vLLM's
//! documentation of `llama3_json`. Without the tag nothing but its position tells a call from a JSON
//! answer, so there the object must begin the output, have parameters and name an offered tool. The tag is
//! recognised anywhere; code after it that is no JSON object (the built-in tools) is content, tag included.

use crate::call::{FeedResult, Gate};
use crate::limits::HEADER_BYTES_MAX;
use crate::list::CallList;
use crate::machine::{Found, Machine, PrefixMatch, Step, begins, find, leading_space, skip_space_then};
use crate::output::Sink;

const TAG: &str = "<|python_tag|>";

#[derive(Debug)]
enum State {
    /// Before any content; holds leading white space.
    Start(String),
    Content,
    Calls(CallList),
    /// After calls.
    After,
}

/// The parser of Llama 3's JSON calls.
#[derive(Debug)]
pub(crate) struct Llama {
    state: State,
}

impl Llama {
    pub(crate) fn new() -> Self {
        Self { state: State::Start(String::new()) }
    }
}

impl Machine for Llama {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::Start(held) => {
                let space = leading_space(text);
                held.push_str(&text[..space]);
                let rest = &text[space..];
                if held.len() <= HEADER_BYTES_MAX {
                    if rest.is_empty() || matches!(begins(rest, &[TAG], last), PrefixMatch::Maybe) {
                        return Step::wait(space);
                    }
                    if rest.starts_with('{') {
                        let list = CallList::in_a_row(std::mem::take(held), Gate::Bare);
                        self.state = State::Calls(list);
                        return Step::again(space);
                    }
                }
                sink.content(held);
                self.state = State::Content;
                Step::again(space)
            }
            State::Content => match find(text, &[TAG], last) {
                Found::Nothing { safe } => {
                    sink.content(&text[..safe]);
                    Step::wait(safe)
                }
                Found::At { at, .. } => {
                    sink.content(&text[..at]);
                    self.state = State::Calls(CallList::in_a_row(TAG.to_owned(), Gate::Announced));
                    Step::again(at + TAG.len())
                }
            },
            State::Calls(list) => {
                let (used, fed) = list.feed(text, sink);
                match fed {
                    FeedResult::More => return Step::wait(used),
                    FeedResult::Done => self.state = State::After,
                    FeedResult::Failed => self.state = State::Content,
                }
                Step::again(used)
            }
            State::After => skip_space_then(State::Content, &mut self.state, text),
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &mut self.state {
            State::Start(held) => sink.content(&std::mem::take(held)),
            State::Calls(list) => list.finish(sink),
            State::Content | State::After => {}
        }
    }
}
