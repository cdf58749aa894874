//! Qwen3-Coder (and Qwen3.5): `<tool_call>`, `<function=NAME>`, any number of `<parameter=KEY>`, value,
//! `</parameter>`, then `</function>` and `</tool_call>`, each on its own line.
//!
//! Source: the chat template of Qwen3-Coder-480B-A35B-Instruct, and vLLM's `qwen3_coder` for the tolerated deviations: a
//! missing `<tool_call>` (if the function is offered), a missing `</parameter>` before a line that begins with the next tag, a
//! missing `</function>`. One newline after the opening and one before the closing tag of a value is not part of it. Values are
//! typed by the schema ([`crate::value`]); an argument that the schema does not know is a string.
//!
//! A call starts with its `<function=NAME>`. When its content is malformed the arguments are closed, the call ends as
//! incomplete, and the text from there on is content.

use crate::arguments::ArgumentWriter;
use crate::limits::HEADER_BYTES_MAX;
use crate::machine::{
    Found, Machine, PrefixMatch, Step, begins, find, leading_space, prefix, skip_space, skip_space_then,
};
use crate::output::Sink;
use crate::value::Kind;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";

/// Markers that end a value, and the number of their bytes that are consumed with it.
const VALUE_ENDS: [(&str, usize); 4] =
    [("\n</parameter>", 13), ("</parameter>", 12), ("\n<parameter=", 1), ("\n</function>", 1)];

#[derive(Debug)]
enum State {
    Content,
    /// After `<tool_call>`.
    Opened,
    Name {
        text: String,
        announced: bool,
    },
    /// Between parameters.
    Body,
    Key(String),
    /// Before a value, where one newline is skipped.
    Lead,
    Value,
    /// After `</function>`.
    Closing,
    After,
}

/// The parser of Qwen3-Coder's format.
#[derive(Debug)]
pub(crate) struct QwenCoder {
    state: State,
    /// Text of the call that has not started yet.
    raw: String,
    name: String,
    writer: ArgumentWriter,
}

impl QwenCoder {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Content,
            raw: String::new(),
            name: String::new(),
            writer: ArgumentWriter::default(),
        }
    }

    fn malformed(&mut self, used: usize, sink: &mut Sink<'_>) -> Step {
        sink.content(&std::mem::take(&mut self.raw));
        self.state = State::Content;
        Step::again(used)
    }

    /// Ends a started call.
    fn end(&mut self, complete: bool, sink: &mut Sink<'_>) {
        self.writer.close(sink);
        sink.end(complete);
    }

    fn content(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match find(text, &[CALL, FUNCTION], last) {
            Found::Nothing { safe } => {
                sink.content(&text[..safe]);
                Step::wait(safe)
            }
            Found::At { at, marker } => {
                sink.content(&text[..at]);
                let marker = [CALL, FUNCTION][marker];
                self.raw = marker.to_owned();
                self.state = match marker {
                    CALL => State::Opened,
                    _ => State::Name { text: String::new(), announced: false },
                };
                Step::again(at + marker.len())
            }
        }
    }

    fn opened(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        let space = leading_space(text).min(room);
        self.raw.push_str(&text[..space]);
        if space == text.len() {
            return Step::wait(space);
        }
        match begins(&text[space..], &[FUNCTION], last) {
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::No => self.malformed(space, sink),
            PrefixMatch::With(_) => {
                self.raw.push_str(FUNCTION);
                self.state = State::Name { text: String::new(), announced: true };
                Step::again(space + FUNCTION.len())
            }
        }
    }

    fn name(&mut self, text: &str, sink: &mut Sink<'_>) -> Step {
        let State::Name { text: name, announced } = &mut self.state else { return Step::again(0) };
        let end = text.find(['>', '<', '\n']);
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        let part = prefix(&text[..end.unwrap_or(text.len())], room);
        name.push_str(part);
        self.raw.push_str(part);
        let used = part.len();
        if used == text.len() {
            return Step::wait(used);
        }
        let trimmed = name.trim();
        let good = text.as_bytes().get(used) == Some(&b'>')
            && !trimmed.is_empty()
            && (*announced || sink.plausible(trimmed));
        if !good {
            return self.malformed(used, sink);
        }
        self.name = trimmed.to_owned();
        sink.start(&self.name, None);
        self.raw.clear();
        self.writer = ArgumentWriter::default();
        self.state = State::Body;
        Step::again(used + 1)
    }

    fn body(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        const TAGS: [&str; 3] = [PARAMETER, FUNCTION_END, CALL_END];
        let (space, more) = skip_space(text);
        if !more {
            return Step::wait(space);
        }
        let used = match begins(&text[space..], &TAGS, last) {
            PrefixMatch::Maybe => return Step::wait(space),
            PrefixMatch::With(index) => {
                if index != 0 {
                    self.end(true, sink);
                }
                self.state = match index {
                    0 => State::Key(String::new()),
                    1 => State::Closing,
                    _ => State::After,
                };
                space + TAGS[index].len()
            }
            PrefixMatch::No => {
                self.end(false, sink);
                self.state = State::Content;
                space
            }
        };
        Step::again(used)
    }

    fn key(&mut self, text: &str, sink: &mut Sink<'_>) -> Step {
        let State::Key(key) = &mut self.state else { return Step::again(0) };
        let end = text.find(['>', '<', '\n']).unwrap_or(text.len());
        let part = prefix(&text[..end], HEADER_BYTES_MAX.saturating_sub(key.len()));
        key.push_str(part);
        let used = part.len();
        if used == text.len() {
            return Step::wait(used);
        }
        if text.as_bytes().get(used) != Some(&b'>') {
            let lost = format!("{PARAMETER}{key}");
            self.end(false, sink);
            sink.content(&lost);
            self.state = State::Content;
            return Step::again(used);
        }
        let schema = sink.tool(&self.name).and_then(|tool| tool.argument(key));
        let kind = schema.map_or(Kind::String, Kind::of);
        self.writer.begin(key, kind, sink);
        self.state = State::Lead;
        Step::again(used + 1)
    }

    fn value(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match find(text, &VALUE_ENDS.map(|(tag, _)| tag), last) {
            Found::Nothing { safe } => {
                self.writer.push(&text[..safe], sink);
                Step::wait(safe)
            }
            Found::At { at, marker } => {
                self.writer.push(&text[..at], sink);
                self.writer.end(sink);
                self.state = State::Body;
                Step::again(at + VALUE_ENDS[marker].1)
            }
        }
    }

    fn closing(&mut self, text: &str, last: bool) -> Step {
        let (space, more) = skip_space(text);
        if !more {
            return Step::wait(space);
        }
        match begins(&text[space..], &[CALL_END, FUNCTION], last) {
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::With(0) => {
                self.state = State::After;
                Step::again(space + CALL_END.len())
            }
            PrefixMatch::With(_) => {
                self.raw = FUNCTION.to_owned();
                self.state = State::Name { text: String::new(), announced: true };
                Step::again(space + FUNCTION.len())
            }
            PrefixMatch::No => {
                self.state = State::Content;
                Step::again(space)
            }
        }
    }
}

impl Machine for QwenCoder {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::Content => self.content(text, last, sink),
            State::Opened => self.opened(text, last, sink),
            State::Name { .. } => self.name(text, sink),
            State::Body => self.body(text, last, sink),
            State::Key(_) => self.key(text, sink),
            State::Lead => {
                // A newline that begins the closing tag's line is skipped here, too.
                self.state = State::Value;
                Step::again(usize::from(text.starts_with('\n')))
            }
            State::Value => self.value(text, last, sink),
            State::Closing => self.closing(text, last),
            State::After => skip_space_then(State::Content, &mut self.state, text),
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &self.state {
            State::Opened | State::Name { .. } => sink.content(&std::mem::take(&mut self.raw)),
            State::Key(key) => {
                sink.end(false);
                sink.content(&format!("{PARAMETER}{key}"));
            }
            State::Body | State::Lead | State::Value => {
                self.writer.cut_off(sink);
                sink.end(false);
            }
            State::Content | State::Closing | State::After => {}
        }
    }
}
