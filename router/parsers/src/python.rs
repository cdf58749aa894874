//! Converts one Python literal to JSON as it arrives, for pythonic calls and for values that a model wrote in Python instead of
//! JSON.
//!
//! Supported are strings (single, double and triple quotes, with Python's escapes), numbers, `True`, `False`, `None` and their
//! JSON spellings, lists, tuples and dictionaries. Separators are written as by Python's `json.dumps`. Source: "Lexical
//! analysis" in the Python language reference.

use serde_json::Value;

use crate::limits::{BARE_WORD_BYTES_MAX, NESTING_MAX};

/// Result of feeding one character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FeedResult {
    /// The literal continues.
    More,
    /// The literal ended with this character.
    Ended,
    /// The literal ended before this character.
    EndedBefore,
    /// The text is not a literal.
    Wrong,
}

#[derive(Debug)]
enum State {
    /// Before a value. A closing bracket is allowed if `closable`. After a `comma` the separator is written with the next value,
    /// since a trailing comma is valid in Python only.
    Value {
        closable: bool,
        comma: bool,
    },
    /// After an opening quote, which may be the first of three.
    Quote {
        quote: char,
        seen: u8,
    },
    String {
        quote: char,
        triple: bool,
        closing: u8,
    },
    Escape {
        quote: char,
        triple: bool,
    },
    /// Inside `\x41`, `\u0041` or `\U00000041`; the text after the backslash so far.
    Hex {
        quote: char,
        triple: bool,
        code: String,
    },
    Word(String),
    /// After an element.
    Element,
    Ended,
}

#[derive(Debug)]
struct Frame {
    close: char,
    dictionary: bool,
    /// In a dictionary: whether the present element is a key.
    key: bool,
}

/// The converter of one literal.
#[derive(Debug)]
pub(crate) struct Literal {
    state: State,
    frames: Vec<Frame>,
}

impl Literal {
    pub(crate) fn new() -> Self {
        Self { state: State::Value { closable: false, comma: false }, frames: Vec::new() }
    }

    /// Consumes one character and appends JSON to `out`.
    pub(crate) fn feed(&mut self, c: char, out: &mut String) -> FeedResult {
        match &mut self.state {
            State::Value { closable, comma } => {
                let (closable, comma) = (*closable, *comma);
                self.value(c, closable, comma, out)
            }
            State::Quote { quote, seen } => {
                let (quote, seen) = (*quote, *seen);
                match (c == quote, seen) {
                    (true, 1) => self.state = State::Quote { quote, seen: 2 },
                    (true, _) => self.state = State::String { quote, triple: true, closing: 0 },
                    (false, 1) => {
                        self.state = State::String { quote, triple: false, closing: 0 };
                        return self.feed(c, out);
                    }
                    (false, _) => {
                        out.push('"');
                        return self.before(c, out);
                    }
                }
                FeedResult::More
            }
            State::String { .. } => self.string(c, out),
            State::Escape { quote, triple } => {
                let (quote, triple) = (*quote, *triple);
                self.escape(c, quote, triple, out)
            }
            State::Hex { quote, triple, code } => {
                if !c.is_ascii_hexdigit() {
                    return FeedResult::Wrong;
                }
                code.push(c);
                let width = match code.as_bytes().first() {
                    Some(b'x') => 2,
                    Some(b'u') => 4,
                    _ => 8,
                };
                if code.len() <= width {
                    return FeedResult::More;
                }
                let Ok(number) = u32::from_str_radix(&code[1..], 16) else { return FeedResult::Wrong };
                match char::from_u32(number) {
                    Some(c) => push_escaped(c, out),
                    // Half of a surrogate pair, which JSON writes the same way.
                    None if width == 4 => out.push_str(&format!("\\u{number:04x}")),
                    None => return FeedResult::Wrong,
                }
                self.state = State::String { quote: *quote, triple: *triple, closing: 0 };
                FeedResult::More
            }
            State::Word(word) => {
                if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '+' | '-') {
                    word.push(c);
                    return if word.len() > BARE_WORD_BYTES_MAX {
                        FeedResult::Wrong
                    } else {
                        FeedResult::More
                    };
                }
                let Some(json) = word_to_json(word) else { return FeedResult::Wrong };
                let key = self.frames.last().is_some_and(|frame| frame.dictionary && frame.key);
                if key {
                    out.push('"');
                }
                out.push_str(&json);
                if key {
                    out.push('"');
                }
                self.before(c, out)
            }
            State::Element => self.element(c, out),
            State::Ended => FeedResult::EndedBefore,
        }
    }

    /// Returns the consumed text that is not in the JSON yet, as it was written.
    pub(crate) fn pending(&self) -> String {
        match &self.state {
            State::Word(word) => word.clone(),
            State::Escape { .. } => "\\".to_owned(),
            State::Hex { code, .. } => format!("\\{code}"),
            State::String { quote, closing, .. } => quote.to_string().repeat(usize::from(*closing)),
            _ => String::new(),
        }
    }

    fn value(&mut self, c: char, closable: bool, comma: bool, out: &mut String) -> FeedResult {
        let key = self.frames.last().is_some_and(|frame| frame.dictionary && frame.key);
        if comma && !matches!(c, ' ' | '\t' | '\n' | '\r' | ']' | ')' | '}') {
            out.push_str(", ");
        }
        match c {
            ' ' | '\t' | '\n' | '\r' => {}
            '\'' | '"' => {
                out.push('"');
                self.state = State::Quote { quote: c, seen: 1 };
            }
            '[' | '(' | '{' if !key => {
                if self.frames.len() == NESTING_MAX {
                    return FeedResult::Wrong;
                }
                let dictionary = c == '{';
                let close = match c {
                    '[' => ']',
                    '(' => ')',
                    _ => '}',
                };
                out.push(if dictionary { '{' } else { '[' });
                self.frames.push(Frame { close, dictionary, key: dictionary });
                self.state = State::Value { closable: true, comma: false };
            }
            ']' | ')' | '}' if closable => return self.close(c, out),
            _ if c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-') => {
                self.state = State::Word(c.to_string());
            }
            _ => return FeedResult::Wrong,
        }
        FeedResult::More
    }

    fn string(&mut self, c: char, out: &mut String) -> FeedResult {
        let State::String { quote, triple, closing } = &mut self.state else { return FeedResult::Wrong };
        if c == *quote {
            *closing += 1;
            if *closing == if *triple { 3 } else { 1 } {
                out.push('"');
                return self.after();
            }
            return FeedResult::More;
        }
        // The quotes inside a triple-quoted string did not close it.
        for _ in 0..std::mem::take(closing) {
            push_escaped(*quote, out);
        }
        match c {
            '\\' => self.state = State::Escape { quote: *quote, triple: *triple },
            _ => push_escaped(c, out),
        }
        FeedResult::More
    }

    fn escape(&mut self, c: char, quote: char, triple: bool, out: &mut String) -> FeedResult {
        self.state = State::String { quote, triple, closing: 0 };
        let plain = match c {
            '\n' => return FeedResult::More,
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            '0' => '\0',
            '\\' | '\'' | '"' => c,
            'x' | 'u' | 'U' => {
                self.state = State::Hex { quote, triple, code: c.to_string() };
                return FeedResult::More;
            }
            // Python keeps the backslash of an unknown escape.
            _ => {
                out.push_str("\\\\");
                c
            }
        };
        push_escaped(plain, out);
        FeedResult::More
    }

    /// After an element whose last character was taken.
    fn after(&mut self) -> FeedResult {
        if self.frames.is_empty() {
            self.state = State::Ended;
            return FeedResult::Ended;
        }
        self.state = State::Element;
        FeedResult::More
    }

    /// After an element that ended before `c`.
    fn before(&mut self, c: char, out: &mut String) -> FeedResult {
        match self.after() {
            FeedResult::Ended => FeedResult::EndedBefore,
            _ => self.element(c, out),
        }
    }

    fn element(&mut self, c: char, out: &mut String) -> FeedResult {
        let Some(frame) = self.frames.last_mut() else { return FeedResult::Wrong };
        match c {
            ' ' | '\t' | '\n' | '\r' => self.state = State::Element,
            ':' if frame.dictionary && frame.key => {
                out.push_str(": ");
                frame.key = false;
                self.state = State::Value { closable: false, comma: false };
            }
            ',' if !(frame.dictionary && frame.key) => {
                frame.key = frame.dictionary;
                self.state = State::Value { closable: true, comma: true };
            }
            _ if c == frame.close && !(frame.dictionary && frame.key) => return self.close(c, out),
            _ => return FeedResult::Wrong,
        }
        FeedResult::More
    }

    fn close(&mut self, c: char, out: &mut String) -> FeedResult {
        match self.frames.pop() {
            Some(frame) if frame.close == c => {
                out.push(if frame.dictionary { '}' } else { ']' });
                self.after()
            }
            _ => FeedResult::Wrong,
        }
    }
}

/// Converts a whole literal, with white space around it.
pub(crate) fn to_json(text: &str) -> Option<String> {
    let mut literal = Literal::new();
    let mut out = String::with_capacity(text.len());
    for c in text.trim().chars() {
        if !matches!(literal.feed(c, &mut out), FeedResult::More | FeedResult::Ended) {
            return None;
        }
    }
    match literal.state {
        State::Ended => Some(out),
        // A space ends a literal that only the next character could end.
        _ => (literal.feed(' ', &mut out) == FeedResult::EndedBefore).then_some(out),
    }
}

fn word_to_json(word: &str) -> Option<String> {
    match word {
        "True" | "true" => return Some("true".to_owned()),
        "False" | "false" => return Some("false".to_owned()),
        "None" | "null" => return Some("null".to_owned()),
        _ => {}
    }
    if !word.ends_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    if serde_json::from_str::<serde_json::Number>(word).is_ok() {
        return Some(word.to_owned());
    }
    let digits = word.replace('_', "");
    if let Ok(integer) = digits.parse::<i64>() {
        return Some(integer.to_string());
    }
    let float = digits.parse::<f64>().ok()?;
    Value::from(float).is_number().then(|| Value::from(float).to_string())
}

/// Appends a character in the form that it has inside a JSON string.
pub(crate) fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => out.push(c),
    }
}
