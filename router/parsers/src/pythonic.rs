//! Llama 4 and other pythonic models: `[f(a=1, b="x"), g()]` as the whole output, optionally between
//! `<|python_start|>` and `<|python_end|>` or after `<|python_tag|>`.
//!
//! Source: Meta's prompt format of Llama 4 ("zero-shot function calling"), and vLLM's documentation of
//! `pythonic`. Arguments become JSON as they arrive. A call starts when its first argument's `=` or its
//! closing parenthesis has arrived and its name is an offered tool, so that a list or a Markdown link at the
//! beginning of an answer stays content. Positional arguments are no call.

use crate::limits::HEADER_BYTES_MAX;
use crate::machine::{Machine, PrefixMatch, Step, begins, skip_space};
use crate::output::Sink;
use crate::python::{FeedResult, Literal};

const BEFORE: [&str; 3] = ["<|python_start|>", "<|python_tag|>", "["];
const END: &str = "<|python_end|>";

#[derive(Debug)]
enum State {
    /// Before the bracket; `tagged` after a marker.
    Start {
        tagged: bool,
    },
    Name(String),
    /// After the opening parenthesis or a comma, in or before an argument's name.
    Key {
        name: String,
        key: String,
        key_ended: bool,
    },
    Value(Literal),
    AfterValue,
    AfterCall,
    /// After the closing bracket.
    After,
    Content,
}

/// The parser of pythonic calls.
#[derive(Debug)]
pub(crate) struct Pythonic {
    state: State,
    /// Text of the call that has not started yet.
    raw: String,
    started: bool,
    any_argument: bool,
}

impl Pythonic {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Start { tagged: false },
            raw: String::new(),
            started: false,
            any_argument: false,
        }
    }

    /// Ends the parsing: the rest, from the present character or word on, is content.
    fn give_up(&mut self, sink: &mut Sink<'_>) {
        if std::mem::take(&mut self.started) {
            sink.end(false);
            match &self.state {
                State::Value(literal) => sink.content(&literal.pending()),
                State::Key { key, .. } => sink.content(key),
                _ => {}
            }
        }
        sink.content(&std::mem::take(&mut self.raw));
        self.state = State::Content;
    }

    fn begin(&mut self, text: &str, tagged: bool, last: bool, sink: &mut Sink<'_>) -> Step {
        let space = text.len() - text.trim_start_matches([' ', '\t', '\n', '\r']).len();
        let room = HEADER_BYTES_MAX.saturating_sub(self.raw.len());
        let space = space.min(room);
        self.raw.push_str(&text[..space]);
        if space == text.len() {
            return Step::wait(space);
        }
        let literals = if tagged { &BEFORE[2..] } else { &BEFORE[..] };
        match begins(&text[space..], literals, last) {
            PrefixMatch::Maybe => Step::wait(space),
            PrefixMatch::With(index) => {
                self.raw.push_str(literals[index]);
                self.state = match literals[index] {
                    "[" => State::Name(String::new()),
                    _ => State::Start { tagged: true },
                };
                Step::again(space + literals[index].len())
            }
            PrefixMatch::No => {
                self.give_up(sink);
                Step::again(space)
            }
        }
    }

    /// Consumes one character inside the list; `false` when it is invalid there.
    fn take(&mut self, c: char, json: &mut String, sink: &mut Sink<'_>) -> bool {
        let space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match &mut self.state {
            State::Name(name) => match c {
                '(' if !name.is_empty() && sink.plausible(name) => {
                    let name = std::mem::take(name);
                    self.any_argument = false;
                    self.state = State::Key { name, key: String::new(), key_ended: false };
                }
                _ if space && name.is_empty() => {}
                _ if c.is_alphanumeric() || matches!(c, '_' | '.' | '-') => name.push(c),
                _ => return false,
            },
            State::Key { key, key_ended, .. } => match c {
                ')' if key.is_empty() => {
                    self.start(sink);
                    json.push_str(if self.any_argument { "}" } else { "{}" });
                    self.end(json, sink);
                }
                '=' if !key.is_empty() => {
                    let key = std::mem::take(key);
                    self.start(sink);
                    json.push_str(if self.any_argument { ", " } else { "{" });
                    json.push_str(&serde_json::Value::from(key).to_string());
                    json.push_str(": ");
                    self.any_argument = true;
                    self.state = State::Value(Literal::new());
                }
                _ if space => *key_ended = !key.is_empty(),
                _ if !*key_ended && (c.is_alphanumeric() || c == '_') => {
                    if key.len() > HEADER_BYTES_MAX {
                        return false;
                    }
                    key.push(c);
                }
                _ => return false,
            },
            State::Value(literal) => match literal.feed(c, json) {
                FeedResult::More => {}
                FeedResult::Ended => self.state = State::AfterValue,
                FeedResult::EndedBefore => {
                    self.state = State::AfterValue;
                    return self.take(c, json, sink);
                }
                FeedResult::Wrong => return false,
            },
            State::AfterValue => match c {
                ',' => {
                    self.state = State::Key { name: String::new(), key: String::new(), key_ended: false };
                }
                ')' => {
                    json.push('}');
                    self.end(json, sink);
                }
                _ if space => {}
                _ => return false,
            },
            State::AfterCall => match c {
                ',' => self.state = State::Name(String::new()),
                ']' => self.state = State::After,
                _ if space => {}
                _ => return false,
            },
            State::Start { .. } | State::After | State::Content => return false,
        }
        true
    }

    fn start(&mut self, sink: &mut Sink<'_>) {
        if let (false, State::Key { name, .. }) = (self.started, &self.state) {
            sink.start(name, None);
            self.started = true;
            self.raw.clear();
        }
    }

    fn end(&mut self, json: &mut String, sink: &mut Sink<'_>) {
        sink.arguments(json);
        json.clear();
        sink.end(true);
        self.started = false;
        self.state = State::AfterCall;
    }

    fn list(&mut self, text: &str, sink: &mut Sink<'_>) -> Step {
        let mut json = String::new();
        for (at, c) in text.char_indices() {
            let fits = self.started || self.raw.len() < HEADER_BYTES_MAX;
            let taken = fits && self.take(c, &mut json, sink);
            if !taken {
                sink.arguments(&json);
                self.give_up(sink);
                return Step::again(at);
            }
            match self.state {
                State::After => return Step::again(at + 1),
                // Text between calls is not content, unless the next call is malformed.
                _ if !self.started && !matches!(self.state, State::AfterCall) => self.raw.push(c),
                _ => {}
            }
        }
        sink.arguments(&json);
        Step::wait(text.len())
    }
}

impl Machine for Pythonic {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        match &self.state {
            State::Start { tagged } => {
                let tagged = *tagged;
                self.begin(text, tagged, last, sink)
            }
            State::After => {
                let (space, more) = skip_space(text);
                if !more {
                    return Step::wait(space);
                }
                let used = match begins(&text[space..], &[END], last) {
                    PrefixMatch::Maybe => return Step::wait(space),
                    PrefixMatch::With(_) => space + END.len(),
                    PrefixMatch::No => {
                        self.state = State::Content;
                        space
                    }
                };
                Step::again(used)
            }
            State::Content => {
                sink.content(text);
                Step::wait(text.len())
            }
            _ => self.list(text, sink),
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        if let State::Value(literal) = &self.state {
            sink.arguments(&literal.pending());
            sink.end(false);
        } else if !matches!(self.state, State::After | State::Content) {
            self.give_up(sink);
        }
    }
}
