//! Scans JSON text byte by byte, without storing it, to find the end of a value.
//!
//! End and validity are determined separately. The end of the value depends on strings and brackets alone, so that a mistake
//! inside (a single quote, a trailing comma) does not consume the rest of the output. Validity (RFC 8259) only decides whether
//! the call counts as complete.

use crate::limits::NESTING_MAX;

/// Result of scanning text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scan {
    /// The value continues.
    Inside,
    /// The last consumed byte ends the value.
    Ended,
    /// The next byte closes a bracket that is not open, or nests too deep.
    Broken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expect {
    Value,
    ValueOrClose,
    Key,
    KeyOrClose,
    Colon,
    CommaOrClose,
}

/// Position of a number or literal in its grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bare {
    Literal(&'static [u8]),
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    Wrong,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    None,
    String { key: bool },
    Escape { key: bool },
    Unicode { key: bool, left: u8 },
    Bare(Bare),
}

/// A scanner of one object, list or string.
#[derive(Debug)]
pub(crate) struct JsonScanner {
    open: Vec<u8>,
    expect: Expect,
    token: Token,
    valid: bool,
}

impl JsonScanner {
    pub(crate) fn new() -> Self {
        Self { open: Vec::new(), expect: Expect::Value, token: Token::None, valid: true }
    }

    /// Whether all text so far was valid.
    pub(crate) fn valid(&self) -> bool {
        self.valid
    }

    /// Whether the value's first byte was consumed.
    pub(crate) fn begun(&self) -> bool {
        !self.open.is_empty() || self.token != Token::None
    }

    /// Consumes text up to the end of the value; the count includes the closing byte, but not a breaking one.
    pub(crate) fn feed(&mut self, text: &str) -> (usize, Scan) {
        for (at, byte) in text.bytes().enumerate() {
            match self.byte(byte) {
                Scan::Inside => {}
                Scan::Ended => return (at + 1, Scan::Ended),
                Scan::Broken => return (at, Scan::Broken),
            }
        }
        (text.len(), Scan::Inside)
    }

    fn byte(&mut self, byte: u8) -> Scan {
        match self.token {
            Token::String { key } => self.in_string(byte, key),
            Token::Escape { key } => {
                self.valid &= matches!(byte, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' | b'u');
                self.token =
                    if byte == b'u' { Token::Unicode { key, left: 4 } } else { Token::String { key } };
                Scan::Inside
            }
            Token::Unicode { key, left } if byte.is_ascii_hexdigit() => {
                self.token =
                    if left > 1 { Token::Unicode { key, left: left - 1 } } else { Token::String { key } };
                Scan::Inside
            }
            Token::Unicode { key, .. } => {
                self.valid = false;
                self.token = Token::String { key };
                self.in_string(byte, key)
            }
            Token::Bare(bare) => match byte {
                b',' | b']' | b'}' | b' ' | b'\t' | b'\n' | b'\r' | b'"' | b'[' | b'{' | b':' => {
                    self.valid &= bare.ends();
                    self.token = Token::None;
                    self.between(byte)
                }
                _ => {
                    self.token = Token::Bare(bare.next(byte));
                    Scan::Inside
                }
            },
            Token::None => self.between(byte),
        }
    }

    fn in_string(&mut self, byte: u8, key: bool) -> Scan {
        match byte {
            b'"' => {
                self.token = Token::None;
                self.expect = if key { Expect::Colon } else { Expect::CommaOrClose };
                if self.open.is_empty() { Scan::Ended } else { Scan::Inside }
            }
            b'\\' => {
                self.token = Token::Escape { key };
                Scan::Inside
            }
            _ => {
                self.valid &= byte >= 0x20;
                Scan::Inside
            }
        }
    }

    /// Consumes a byte outside of strings and bare words.
    fn between(&mut self, byte: u8) -> Scan {
        let wants_value = matches!(self.expect, Expect::Value | Expect::ValueOrClose);
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => {}
            b'{' | b'[' => {
                if self.open.len() == NESTING_MAX {
                    return Scan::Broken;
                }
                self.valid &= wants_value;
                self.open.push(byte);
                self.expect = if byte == b'{' { Expect::KeyOrClose } else { Expect::ValueOrClose };
            }
            b'}' | b']' => return self.close(byte),
            b'"' => {
                let key = matches!(self.expect, Expect::Key | Expect::KeyOrClose);
                self.valid &= wants_value || key;
                self.token = Token::String { key };
            }
            b':' => {
                self.valid &= self.expect == Expect::Colon;
                self.expect = Expect::Value;
            }
            b',' => {
                self.valid &= self.expect == Expect::CommaOrClose;
                self.expect = if self.open.last() == Some(&b'{') { Expect::Key } else { Expect::Value };
            }
            _ => {
                self.valid &= wants_value;
                self.token = Token::Bare(Bare::first(byte));
                self.expect = Expect::CommaOrClose;
            }
        }
        Scan::Inside
    }

    fn close(&mut self, byte: u8) -> Scan {
        let opener = if byte == b'}' { b'{' } else { b'[' };
        if self.open.last() != Some(&opener) {
            return Scan::Broken;
        }
        self.open.pop();
        let empty = if byte == b'}' { Expect::KeyOrClose } else { Expect::ValueOrClose };
        self.valid &= self.expect == Expect::CommaOrClose || self.expect == empty;
        self.expect = Expect::CommaOrClose;
        if self.open.is_empty() { Scan::Ended } else { Scan::Inside }
    }
}

impl Bare {
    fn first(byte: u8) -> Self {
        match byte {
            b't' => Self::Literal(b"rue"),
            b'f' => Self::Literal(b"alse"),
            b'n' => Self::Literal(b"ull"),
            b'-' => Self::Minus,
            b'0' => Self::Zero,
            b'1'..=b'9' => Self::Integer,
            _ => Self::Wrong,
        }
    }

    fn next(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Literal([first, rest @ ..]), _) if *first == byte => Self::Literal(rest),
            (Self::Minus, b'0') => Self::Zero,
            (Self::Minus, b'1'..=b'9') | (Self::Integer, b'0'..=b'9') => Self::Integer,
            (Self::Zero | Self::Integer, b'.') => Self::Point,
            (Self::Point | Self::Fraction, b'0'..=b'9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Self::Exponent,
            (Self::Exponent, b'+' | b'-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, b'0'..=b'9') => Self::ExponentDigits,
            _ => Self::Wrong,
        }
    }

    fn ends(self) -> bool {
        matches!(self, Self::Literal([]) | Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits)
    }
}

#[cfg(test)]
mod tests {
    use super::{JsonScanner, Scan};

    /// The scanner agrees with serde_json on every prefix-free value, valid or not.
    #[test]
    fn validity_is_that_of_serde_json() {
        for text in [
            "{}",
            "[]",
            "\"\"",
            r#"{"a": [1, -0.5e+3, true, false, null, "\u00e9\n"], "b": {"c": {}}}"#,
            r#"{"a":0}"#,
            r#"{"a":01}"#,
            r#"{"a":1.}"#,
            r#"{"a":-}"#,
            r#"{"a":1e}"#,
            r#"{"a":tru}"#,
            r#"{"a":nulll}"#,
            r#"{"a":1,}"#,
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{,}"#,
            r#"{1:2}"#,
            r#"{"a":1 2}"#,
            r#"{"a" 1}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":"\u12g4"}"#,
            "{\"a\":\"\n\"}",
            "[1 2]",
            "[,]",
            "[1,]",
            "{'a':1}",
            r#"{"a":[}"#,
            r#"["a":1]"#,
            r#"{"a":1 "b":2}"#,
            r#"{"a":+1}"#,
            r#"{"a":1.5.2}"#,
            r#"{"a"::1}"#,
            r#"[[][]]"#,
            r#"["x""y"]"#,
        ] {
            let mut scanner = JsonScanner::new();
            let (used, scan) = scanner.feed(text);
            let valid = scan == Scan::Ended && used == text.len() && scanner.valid();
            assert_eq!(valid, serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok(), "{text}");
        }
    }
}
