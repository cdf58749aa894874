//! Forced tool choice: the engine's grammar lets the model write pure JSON without any marker.
//!
//! `required` gives a list `[{"name": …, "parameters": {…}}, …]`, a named function gives that function's
//! bare arguments object. Source: vLLM's documentation of `tool_choice` ("Required" and "Named Function
//! Calling"). Text after the JSON is content, as is output that does not begin with it.

use crate::call::FeedResult;
use crate::json::{JsonScanner, Scan};
use crate::limits::HEADER_BYTES_MAX;
use crate::list::CallList;
use crate::machine::{Machine, Step, leading_space, skip_space_then};
use crate::output::Sink;

#[derive(Debug)]
enum State {
    List(CallList),
    /// Before the arguments of the named function; holds leading white space.
    Lead {
        name: String,
        held: String,
    },
    Arguments(JsonScanner),
    /// After the JSON.
    After,
    Content,
}

/// The parser of forced calls.
#[derive(Debug)]
pub(crate) struct Forced {
    state: State,
}

impl Forced {
    /// For a list of calls.
    pub(crate) fn list() -> Self {
        Self { state: State::List(CallList::bracketed(String::new())) }
    }

    /// For the arguments of one function.
    pub(crate) fn named(name: String) -> Self {
        Self { state: State::Lead { name, held: String::new() } }
    }
}

impl Machine for Forced {
    fn step(&mut self, text: &str, _last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::List(list) => {
                let (used, fed) = list.feed(text, sink);
                match fed {
                    FeedResult::More => return Step::wait(used),
                    FeedResult::Done => self.state = State::After,
                    FeedResult::Failed => self.state = State::Content,
                }
                Step::again(used)
            }
            State::Lead { name, held } => {
                let space = leading_space(text);
                held.push_str(&text[..space]);
                if space == text.len() && held.len() <= HEADER_BYTES_MAX {
                    return Step::wait(space);
                }
                if text[space..].starts_with('{') {
                    sink.start(name, None);
                    self.state = State::Arguments(JsonScanner::new());
                } else {
                    sink.content(held);
                    self.state = State::Content;
                }
                Step::again(space)
            }
            State::Arguments(scanner) => {
                let (used, scan) = scanner.feed(text);
                sink.arguments(&text[..used]);
                match scan {
                    Scan::Inside => return Step::wait(used),
                    Scan::Ended => {
                        sink.end(scanner.valid());
                        self.state = State::After;
                    }
                    Scan::Broken => {
                        sink.end(false);
                        self.state = State::Content;
                    }
                }
                Step::again(used)
            }
            State::After => skip_space_then(State::Content, &mut self.state, text),
            State::Content => {
                sink.content(text);
                Step::wait(text.len())
            }
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &mut self.state {
            State::List(list) => list.finish(sink),
            State::Lead { held, .. } => sink.content(&std::mem::take(held)),
            State::Arguments(_) => sink.end(false),
            State::After | State::Content => {}
        }
    }
}
