//! GLM 4.5 to 4.7: `<tool_call>NAME`, any number of `<arg_key>KEY</arg_key>` and
//! `<arg_value>VALUE</arg_value>`, then `</tool_call>`; newlines between them are optional (4.7 writes none).
//!
//! Source: the chat templates of GLM-4.5 and GLM-4.7. The template writes a string bare and everything
//! else as JSON, so that the schema tells `5` from `"5"`; an argument that the schema does not know is
//! read as JSON if it is JSON, otherwise as a string. Strings are kept as written.
//!
//! A call starts when its name has ended at a newline or a tag. When its inside goes wrong the arguments
//! are closed, the call ends as incomplete, and the text from there on is content.

use crate::arguments::ArgumentWriter;
use crate::limits::HEADER_BYTES_MAX;
use crate::machine::{Found, Machine, PrefixMatch, Step, begins, find, prefix, skip_space, skip_space_then};
use crate::output::Sink;
use crate::value::Kind;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

#[derive(Debug)]
enum State {
    Content,
    Name(String),
    /// After a name, before the tag or newline that proves it.
    Body,
    Key(String),
    /// After a key, before its value.
    Lead(String),
    Value,
    After,
}

/// The parser of GLM's format.
#[derive(Debug)]
pub(crate) struct Glm {
    state: State,
    name: String,
    writer: ArgumentWriter,
}

impl Glm {
    pub(crate) fn new() -> Self {
        Self { state: State::Content, name: String::new(), writer: ArgumentWriter::default() }
    }

    fn broken(&mut self, lost: &str, used: usize, sink: &mut Sink<'_>) -> Step {
        self.writer.close(sink);
        sink.end(false);
        sink.content(lost);
        self.state = State::Content;
        Step::again(used)
    }

    fn name(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let State::Name(name) = &mut self.state else { return Step::again(0) };
        // Newlines before the name are skipped; the first one after it ends it.
        let lead = if name.trim().is_empty() { text.len() - text.trim_start().len() } else { 0 };
        let end = text[lead..].find(['\n', '<', '>', '{']).map_or(text.len(), |at| lead + at);
        let part = prefix(&text[..end], HEADER_BYTES_MAX.saturating_sub(name.len()));
        name.push_str(part);
        let used = part.len();
        if used == text.len() {
            return Step::wait(used);
        }
        let rest = &text[used..];
        let tag = match begins(rest, &["\n", KEY, CALL_END], last) {
            PrefixMatch::Maybe => return Step::wait(used),
            PrefixMatch::With(_) => true,
            PrefixMatch::No => false,
        };
        let trimmed = name.trim();
        if !tag || trimmed.is_empty() || trimmed.contains(char::is_whitespace) {
            sink.content(CALL);
            sink.content(name);
            self.state = State::Content;
            return Step::again(used);
        }
        self.name = trimmed.to_owned();
        sink.start(&self.name, None);
        self.writer = ArgumentWriter::default();
        self.state = State::Body;
        Step::again(used)
    }

    fn body(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let (space, more) = skip_space(text);
        if !more {
            return Step::wait(space);
        }
        match begins(&text[space..], &[KEY, CALL_END], last) {
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::With(0) => {
                self.state = State::Key(String::new());
                Step::again(space + KEY.len())
            }
            PrefixMatch::With(_) => {
                self.writer.close(sink);
                sink.end(true);
                self.state = State::After;
                Step::again(space + CALL_END.len())
            }
            PrefixMatch::No => self.broken("", space, sink),
        }
    }

    fn key(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let State::Key(key) = &mut self.state else { return Step::again(0) };
        let (end, found) = match find(text, &[KEY_END], last) {
            Found::Nothing { safe } => (safe, false),
            Found::At { at, .. } => (at, true),
        };
        let part = prefix(&text[..end], HEADER_BYTES_MAX.saturating_sub(key.len()));
        key.push_str(part);
        if part.len() < end {
            let lost = format!("{KEY}{key}");
            return self.broken(&lost, part.len(), sink);
        }
        if !found {
            return Step::wait(end);
        }
        self.state = State::Lead(std::mem::take(key));
        Step::again(end + KEY_END.len())
    }

    fn lead(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let State::Lead(key) = &mut self.state else { return Step::again(0) };
        let (space, more) = skip_space(text);
        if !more {
            return Step::wait(space);
        }
        match begins(&text[space..], &[VALUE], last) {
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::With(_) => {
                let key = key.trim();
                let schema = sink.tool(&self.name).and_then(|tool| tool.argument(key));
                let kind = schema.map_or(Kind::Any, Kind::of);
                self.writer.begin(key, kind, sink);
                self.state = State::Value;
                Step::again(space + VALUE.len())
            }
            PrefixMatch::No => {
                let lost = format!("{KEY}{key}{KEY_END}");
                self.broken(&lost, space, sink)
            }
        }
    }
}

impl Machine for Glm {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::Content => match find(text, &[CALL], last) {
                Found::Nothing { safe } => {
                    sink.content(&text[..safe]);
                    Step::wait(safe)
                }
                Found::At { at, .. } => {
                    sink.content(&text[..at]);
                    self.state = State::Name(String::new());
                    Step::again(at + CALL.len())
                }
            },
            State::Name(_) => self.name(text, last, sink),
            State::Body => self.body(text, last, sink),
            State::Key(_) => self.key(text, last, sink),
            State::Lead(_) => self.lead(text, last, sink),
            State::Value => match find(text, &[VALUE_END], last) {
                Found::Nothing { safe } => {
                    self.writer.push(&text[..safe], sink);
                    Step::wait(safe)
                }
                Found::At { at, .. } => {
                    self.writer.push(&text[..at], sink);
                    self.writer.end(sink);
                    self.state = State::Body;
                    Step::again(at + VALUE_END.len())
                }
            },
            State::After => skip_space_then(State::Content, &mut self.state, text),
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &self.state {
            State::Name(name) => {
                sink.content(CALL);
                sink.content(name);
            }
            State::Key(key) => {
                sink.end(false);
                sink.content(&format!("{KEY}{key}"));
            }
            State::Lead(key) => {
                sink.end(false);
                sink.content(&format!("{KEY}{key}{KEY_END}"));
            }
            State::Body | State::Value => {
                self.writer.cut_off(sink);
                sink.end(false);
            }
            State::Content | State::After => {}
        }
    }
}
