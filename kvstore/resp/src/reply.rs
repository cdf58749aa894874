//! Encoding of answers, in both versions of the protocol.
//!
//! Version 3 adds types for null and for maps; version 2 writes the first as a bulk string of length
//! -1 and the second as an array of twice the length.

use std::borrow::Cow;

use bytes::Bytes;

use crate::output::Output;
use crate::values::Value;

/// Version of the protocol, which a client chooses with `HELLO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// RESP2, which every connection begins with.
    #[default]
    Two,
    /// RESP3.
    Three,
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// A short text without line ends.
    Simple(&'static str),
    /// A failure: a word in capitals and a sentence.
    Error(Cow<'static, str>),
    /// A number.
    Integer(i64),
    /// Bytes.
    Bulk(Value),
    /// Null: no value.
    Null,
    /// Several answers.
    Array(Vec<Reply>),
    /// Pairs of answers.
    Map(Vec<(Reply, Reply)>),
}

impl Reply {
    /// `+OK`.
    pub(crate) const OK: Self = Self::Simple("OK");

    pub(crate) fn error(text: impl Into<Cow<'static, str>>) -> Self {
        Self::Error(text.into())
    }

    pub(crate) fn text(text: impl Into<Bytes>) -> Self {
        Self::Bulk(Value::from(text.into()))
    }

    /// Returns an integer answer for a count of things in memory, which fits.
    pub(crate) fn count(count: usize) -> Self {
        Self::Integer(i64::try_from(count).unwrap_or(i64::MAX))
    }

    /// Bytes that the answer keeps in memory until it is sent, without headers.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Bulk(value) => value.len(),
            Self::Array(replies) => replies.iter().map(Self::bytes).sum(),
            Self::Map(pairs) => pairs.iter().map(|(key, value)| key.bytes() + value.bytes()).sum(),
            _ => 0,
        }
    }

    /// Appends the encoded answer to `output`.
    pub(crate) fn encode(&self, protocol: Protocol, output: &mut Output) {
        match self {
            Self::Simple(text) => line(output, b'+', text),
            Self::Error(text) => line(output, b'-', text),
            Self::Integer(number) => output.put_number(b':', *number),
            Self::Bulk(value) => {
                number(output, b'$', value.len());
                value.pieces().for_each(|piece| output.put_piece(piece));
                output.put(b"\r\n");
            }
            Self::Null if protocol == Protocol::Three => output.put(b"_\r\n"),
            Self::Null => output.put(b"$-1\r\n"),
            Self::Array(replies) => {
                number(output, b'*', replies.len());
                replies.iter().for_each(|reply| reply.encode(protocol, output));
            }
            Self::Map(pairs) => {
                match protocol {
                    Protocol::Three => number(output, b'%', pairs.len()),
                    Protocol::Two => number(output, b'*', pairs.len() * 2),
                }
                for (key, value) in pairs {
                    key.encode(protocol, output);
                    value.encode(protocol, output);
                }
            }
        }
    }
}

fn number(output: &mut Output, kind: u8, length: usize) {
    // Lengths of things in memory fit.
    output.put_number(kind, i64::try_from(length).unwrap_or(i64::MAX));
}

/// Writes a line; line ends in the text are replaced, since a client would read them as the end of the answer.
fn line(output: &mut Output, kind: u8, text: &str) {
    output.put(&[kind]);
    for part in text.split_inclusive(['\r', '\n']) {
        let clean = part.trim_end_matches(['\r', '\n']);
        output.put(clean.as_bytes());
        if clean.len() < part.len() {
            output.put(b" ");
        }
    }
    output.put(b"\r\n");
}

#[cfg(test)]
mod tests {
    use bytes::Buf;

    use super::*;

    #[test]
    fn both_versions_as_the_specification_writes_them() {
        let reply = Reply::Array(vec![
            Reply::OK,
            Reply::error("ERR two\r\nlines"),
            Reply::Integer(-7),
            Reply::text("a\r\nb"),
            Reply::text(""),
            Reply::Null,
            Reply::Map(vec![(Reply::text("k"), Reply::Array(Vec::new()))]),
        ]);
        let same = "*7\r\n+OK\r\n-ERR two  lines\r\n:-7\r\n$4\r\na\r\nb\r\n$0\r\n\r\n";
        for (protocol, different) in [
            (Protocol::Two, "$-1\r\n*2\r\n$1\r\nk\r\n*0\r\n"),
            (Protocol::Three, "_\r\n%1\r\n$1\r\nk\r\n*0\r\n"),
        ] {
            let mut output = Output::default();
            reply.encode(protocol, &mut output);
            let bytes = output.copy_to_bytes(output.remaining());
            assert_eq!(String::from_utf8_lossy(&bytes), format!("{same}{different}"));
        }
        assert_eq!(reply.bytes(), 5);
    }
}
