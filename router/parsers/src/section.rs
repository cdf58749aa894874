//! Calls between special tokens in a section: DeepSeek V3, R1 and V3.1, and Kimi K2.
//!
//! DeepSeek V3 and R1 write `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a
//! line with three backticks and `json`, the arguments, three backticks and `<｜tool▁call▁end｜>`, calls
//! separated by newlines, then `<｜tool▁calls▁end｜>`. V3.1 drops the type and the fence:
//! `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`. Kimi K2 writes
//! `<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}`
//! `<|tool_call_end|><|tool_calls_section_end|>`, and its `functions.NAME:0` is the call's id.
//!
//! Source: the chat templates of those models, and Moonshot's "Tool Calling" guidance. A call starts at the first byte of its
//! arguments; text that is malformed before that becomes content from the section's marker on. Arguments end where their JSON
//! ends; an end marker inside a string does not end them.

use crate::json::{JsonScanner, Scan};
use crate::limits::HEADER_BYTES_MAX;
use crate::machine::{
    Found, Machine, PrefixMatch, Step, begins, find, leading_space, skip_space, skip_space_then,
};
use crate::output::Sink;

const FENCE: &str = "```";

/// Name of a call, and its id if the header has one.
type Header = (String, Option<String>);

/// Markers and header format of one family's section.
#[derive(Debug)]
pub(crate) struct Dialect {
    section_begin: &'static str,
    section_end: &'static str,
    call_begin: &'static str,
    arguments_begin: &'static str,
    call_end: &'static str,
    header: fn(&str) -> Option<Header>,
}

/// DeepSeek V3 and R1.
pub(crate) const DEEPSEEK_V3: Dialect = Dialect {
    section_begin: "<｜tool▁calls▁begin｜>",
    section_end: "<｜tool▁calls▁end｜>",
    call_begin: "<｜tool▁call▁begin｜>",
    arguments_begin: "```json",
    call_end: "<｜tool▁call▁end｜>",
    header: |text| {
        let (kind, name) = text.split_once("<｜tool▁sep｜>")?;
        (kind.trim() == "function").then(|| plain_name(name))?
    },
};

/// DeepSeek V3.1.
pub(crate) const DEEPSEEK_V31: Dialect =
    Dialect { arguments_begin: "<｜tool▁sep｜>", header: plain_name, ..DEEPSEEK_V3 };

/// Kimi K2.
pub(crate) const KIMI_K2: Dialect = Dialect {
    section_begin: KIMI_SECTION_BEGIN,
    section_end: "<|tool_calls_section_end|>",
    call_begin: "<|tool_call_begin|>",
    arguments_begin: "<|tool_call_argument_begin|>",
    call_end: "<|tool_call_end|>",
    header: |text| {
        let id = text.trim();
        let (path, number) = id.rsplit_once(':')?;
        let counted = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let (name, _) = counted.then(|| plain_name(path.strip_prefix("functions.").unwrap_or(path)))??;
        Some((name, Some(id.to_owned())))
    },
};

/// Marker that begins Kimi's section, and ends its reasoning when the closing tag is missing.
pub(crate) const KIMI_SECTION_BEGIN: &str = "<|tool_calls_section_begin|>";

fn plain_name(text: &str) -> Option<Header> {
    let name = text.trim();
    let plain = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '<');
    plain.then(|| (name.to_owned(), None))
}

#[derive(Debug)]
enum State {
    Content,
    /// After the section's marker, before the first call's marker.
    Section,
    Header(String),
    /// Before the arguments' first byte.
    Lead(Header),
    Arguments(JsonScanner),
    /// After the arguments, before the call's end marker.
    Tail {
        valid: bool,
        fence_seen: bool,
    },
    /// Between calls of the section.
    Between,
    /// After the section.
    After,
}

/// The parser of a section of calls.
#[derive(Debug)]
pub(crate) struct Section {
    dialect: &'static Dialect,
    state: State,
    /// Text of the call that has not started yet.
    raw: String,
}

impl Section {
    pub(crate) fn new(dialect: &'static Dialect) -> Self {
        Self { dialect, state: State::Content, raw: String::new() }
    }

    /// Ends a malformed call that has not started: its text becomes content.
    fn malformed(&mut self, used: usize, sink: &mut Sink<'_>) -> Step {
        sink.content(&std::mem::take(&mut self.raw));
        self.state = State::Content;
        Step::again(used)
    }

    fn content(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let markers = [self.dialect.section_begin, self.dialect.call_begin];
        match find(text, &markers, last) {
            Found::Nothing { safe } => {
                sink.content(&text[..safe]);
                Step::wait(safe)
            }
            Found::At { at, marker } => {
                sink.content(&text[..at]);
                self.raw = markers[marker].to_owned();
                self.state = if marker == 0 { State::Section } else { State::Header(String::new()) };
                Step::again(at + markers[marker].len())
            }
        }
    }

    /// Holds white space until the text after it decides. `None` while more white space may follow.
    fn held_space(&mut self, text: &str) -> Option<usize> {
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        let space = leading_space(text).min(room);
        self.raw.push_str(&text[..space]);
        (space < text.len()).then_some(space)
    }

    fn section(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let Some(space) = self.held_space(text) else { return Step::wait(text.len()) };
        let begin = self.dialect.call_begin;
        match begins(&text[space..], &[begin], last) {
            PrefixMatch::With(_) => {
                self.raw.push_str(begin);
                self.state = State::Header(String::new());
                Step::again(space + begin.len())
            }
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::No => self.malformed(space, sink),
        }
    }

    fn header(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let dialect = self.dialect;
        let markers = [dialect.arguments_begin, dialect.call_end, dialect.call_begin, dialect.section_end];
        let State::Header(header) = &mut self.state else { return Step::again(0) };
        let (end, marker) = match find(text, &markers, last) {
            Found::Nothing { safe } => (safe, None),
            Found::At { at, marker } => (at, Some(marker)),
        };
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        if end > room {
            let part = crate::machine::prefix(text, room);
            self.raw.push_str(part);
            return self.malformed(part.len(), sink);
        }
        header.push_str(&text[..end]);
        self.raw.push_str(&text[..end]);
        match marker {
            None => Step::wait(end),
            Some(0) => match (dialect.header)(header) {
                Some(header) => {
                    self.raw.push_str(dialect.arguments_begin);
                    self.state = State::Lead(header);
                    Step::again(end + dialect.arguments_begin.len())
                }
                None => self.malformed(end, sink),
            },
            Some(_) => self.malformed(end, sink),
        }
    }

    fn lead(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let Some(space) = self.held_space(text) else { return Step::wait(text.len()) };
        let empty = match begins(&text[space..], &["{", self.dialect.call_end], last) {
            PrefixMatch::With(index) => index == 1,
            PrefixMatch::Maybe => return Step::wait(space),
            PrefixMatch::No => return self.malformed(space, sink),
        };
        let State::Lead((name, id)) = &mut self.state else { return Step::again(0) };
        sink.start(name, id.take());
        self.raw.clear();
        if empty {
            sink.arguments("{}");
            self.state = State::Tail { valid: true, fence_seen: true };
        } else {
            self.state = State::Arguments(JsonScanner::new());
        }
        Step::again(space)
    }

    fn tail(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let State::Tail { valid, fence_seen } = &mut self.state else { return Step::again(0) };
        let (space, more) = skip_space(text);
        if !more {
            return Step::wait(space);
        }
        let end = self.dialect.call_end;
        let literals: &[&str] = if *fence_seen { &[end] } else { &[end, FENCE] };
        let used = match begins(&text[space..], literals, last) {
            PrefixMatch::Maybe => return Step::wait(space),
            PrefixMatch::With(1) => {
                *fence_seen = true;
                return Step::again(space + FENCE.len());
            }
            PrefixMatch::With(_) => space + end.len(),
            PrefixMatch::No => space,
        };
        sink.end(*valid);
        self.state = if used > space { State::Between } else { State::Content };
        Step::again(used)
    }

    fn between(&mut self, text: &str, last: bool) -> Step {
        let (space, more) = skip_space(text);
        if !more {
            return Step::wait(space);
        }
        let markers = [self.dialect.call_begin, self.dialect.section_end];
        match begins(&text[space..], &markers, last) {
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::With(0) => {
                self.raw = markers[0].to_owned();
                self.state = State::Header(String::new());
                Step::again(space + markers[0].len())
            }
            PrefixMatch::With(_) => {
                self.state = State::After;
                Step::again(space + markers[1].len())
            }
            PrefixMatch::No => {
                self.state = State::Content;
                Step::again(space)
            }
        }
    }
}

impl Machine for Section {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &mut self.state {
            State::Content => self.content(text, last, sink),
            State::Section => self.section(text, last, sink),
            State::Header(_) => self.header(text, last, sink),
            State::Lead(_) => self.lead(text, last, sink),
            State::Arguments(scanner) => {
                let (used, scan) = scanner.feed(text);
                sink.arguments(&text[..used]);
                match scan {
                    Scan::Inside => return Step::wait(used),
                    Scan::Ended => {
                        let fence_seen = self.dialect.arguments_begin != DEEPSEEK_V3.arguments_begin;
                        self.state = State::Tail { valid: scanner.valid(), fence_seen };
                    }
                    Scan::Broken => {
                        sink.end(false);
                        self.state = State::Content;
                    }
                }
                Step::again(used)
            }
            State::Tail { .. } => self.tail(text, last, sink),
            State::Between => self.between(text, last),
            State::After => skip_space_then(State::Content, &mut self.state, text),
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &self.state {
            State::Section | State::Header(_) | State::Lead(_) => {
                sink.content(&std::mem::take(&mut self.raw))
            }
            State::Arguments(_) => sink.end(false),
            State::Tail { valid, .. } => sink.end(*valid),
            State::Content | State::Between | State::After => {}
        }
    }
}
