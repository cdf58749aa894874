//! Mistral: `[TOOL_CALLS]`, and then one of two forms.
//!
//! Tokenizers before version 11 write a list, `[TOOL_CALLS] [{"name": "f", "arguments": {…}}]`. Later
//! ones write each call by itself, `[TOOL_CALLS]f[ARGS]{…}`, some with an id, `[TOOL_CALLS]f[CALL_ID]id`
//! `[ARGS]{…}`; when an engine drops the tokens inside, `[TOOL_CALLS]f{…}` is left. The byte after the
//! marker tells the forms apart, so that one parser reads all. Source: mistral-common's instruct
//! tokenizers v3 to v13, and vLLM's documentation of its `mistral` parser.

use crate::call::FeedResult;
use crate::json::{JsonScanner, Scan};
use crate::limits::HEADER_BYTES_MAX;
use crate::list::CallList;
use crate::machine::{Found, Machine, Step, find, leading_space, prefix, skip_space_then};
use crate::output::Sink;

const MARKER: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

#[derive(Debug)]
enum State {
    Content,
    /// After the marker.
    Opened,
    List(CallList),
    /// In the name, or in the id after it.
    Header {
        name: Option<String>,
        part: String,
    },
    /// Before the arguments' first byte.
    Lead {
        name: String,
        id: Option<String>,
    },
    Arguments(JsonScanner),
    /// After a call.
    After,
}

/// The parser of Mistral's calls.
#[derive(Debug)]
pub(crate) struct Mistral {
    state: State,
    /// The text of the call that has not started yet.
    raw: String,
}

impl Mistral {
    pub(crate) fn new() -> Self {
        Self { state: State::Content, raw: String::new() }
    }

    fn malformed(&mut self, used: usize, sink: &mut Sink<'_>) -> Step {
        sink.content(&std::mem::take(&mut self.raw));
        self.state = State::Content;
        Step::again(used)
    }

    fn held_space(&mut self, text: &str) -> Option<usize> {
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        let space = leading_space(text).min(room);
        self.raw.push_str(&text[..space]);
        (space < text.len()).then_some(space)
    }

    fn header(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        const ENDS: [&str; 3] = [ARGUMENTS, CALL_ID, "{"];
        let State::Header { name, part } = &mut self.state else { return Step::again(0) };
        let (end, marker) = match find(text, &ENDS, last) {
            Found::Nothing { safe } => (safe, None),
            Found::At { at, marker } => (at, Some(marker)),
        };
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        let good = text[..end].bytes().take_while(|&byte| named(byte)).count();
        if good < end || end > room {
            let taken = prefix(text, good.min(room));
            self.raw.push_str(taken);
            return self.malformed(taken.len(), sink);
        }
        part.push_str(&text[..end]);
        self.raw.push_str(&text[..end]);
        let Some(marker) = marker else { return Step::wait(end) };
        if part.is_empty() {
            return self.malformed(end, sink);
        }
        let part = std::mem::take(part);
        let next = match (name.take(), marker) {
            (None, 1) => State::Header { name: Some(part), part: String::new() },
            (None, _) => State::Lead { name: part, id: None },
            (Some(_), 1) => return self.malformed(end, sink),
            (Some(name), _) => State::Lead { name, id: Some(part) },
        };
        self.state = next;
        let marker = if marker == 2 { "" } else { ENDS[marker] };
        self.raw.push_str(marker);
        Step::again(end + marker.len())
    }
}

/// Bytes that OpenAI's API allows in a function's name, and the dot of namespaces.
fn named(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

impl Machine for Mistral {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::Content => match find(text, &[MARKER], last) {
                Found::Nothing { safe } => {
                    sink.content(&text[..safe]);
                    Step::wait(safe)
                }
                Found::At { at, .. } => {
                    sink.content(&text[..at]);
                    self.raw = MARKER.to_owned();
                    self.state = State::Opened;
                    Step::again(at + MARKER.len())
                }
            },
            State::Opened => {
                let Some(space) = self.held_space(text) else { return Step::wait(text.len()) };
                self.state = match text.as_bytes().get(space) {
                    Some(b'[') => State::List(CallList::bracketed(std::mem::take(&mut self.raw))),
                    _ => State::Header { name: None, part: String::new() },
                };
                Step::again(space)
            }
            State::List(list) => {
                let (used, fed) = list.feed(text, sink);
                match fed {
                    FeedResult::More => return Step::wait(used),
                    FeedResult::Done => self.state = State::After,
                    FeedResult::Failed => self.state = State::Content,
                }
                Step::again(used)
            }
            State::Header { .. } => self.header(text, last, sink),
            State::Lead { .. } => {
                let Some(space) = self.held_space(text) else { return Step::wait(text.len()) };
                if !text[space..].starts_with('{') {
                    return self.malformed(space, sink);
                }
                let State::Lead { name, id } = &mut self.state else { return Step::again(space) };
                sink.start(name, id.take());
                self.raw.clear();
                self.state = State::Arguments(JsonScanner::new());
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
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &mut self.state {
            State::Opened | State::Header { .. } | State::Lead { .. } => {
                sink.content(&std::mem::take(&mut self.raw));
            }
            State::List(list) => list.finish(sink),
            State::Arguments(_) => sink.end(false),
            State::Content | State::After => {}
        }
    }
}
