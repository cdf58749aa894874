//! Server-sent events: a reader of engines' streams, and a writer for clients.
//!
//! Source: HTML Living Standard, "Server-sent events", 9.2.6. Only fields that carry data are read; an end of line is LF or
//! CRLF.

use std::borrow::Cow;
use std::fmt::Write;

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use serde_json::Value;

/// Data of the event that ends a stream of OpenAI's API.
pub const DONE: &[u8] = b"[DONE]";

/// An event without an end is longer than its reader's limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine sent an event above the size limit")]
pub struct EventTooLarge;

/// Assembles the events of a stream from pieces of any size. Nothing is copied as long as pieces end where events end.
#[derive(Debug)]
pub struct EventBuffer {
    /// Beginning of an event whose end has not arrived.
    partial: BytesMut,
    /// Number of bytes of `partial` that contain no end of an event.
    searched: usize,
    partial_bytes_max: usize,
}

impl EventBuffer {
    /// Keeps at most `partial_bytes_max` bytes of an event whose end has not arrived.
    #[must_use]
    pub fn new(partial_bytes_max: usize) -> Self {
        Self { partial: BytesMut::new(), searched: 0, partial_bytes_max }
    }

    /// Adds bytes and returns the events that are complete now, possibly none.
    pub fn push(&mut self, bytes: Bytes) -> Result<Bytes, EventTooLarge> {
        if self.partial.is_empty() && (bytes.ends_with(b"\n\n") || bytes.ends_with(b"\r\n\r\n")) {
            return Ok(bytes);
        }
        self.partial.extend_from_slice(&bytes);
        // The end may begin up to three bytes before the new bytes.
        let from = self.searched.saturating_sub(3);
        let new = &self.partial[from..];
        let end = memmem::rfind(new, b"\n\n").map(|at| at + 2);
        let end = end.max(memmem::rfind(new, b"\r\n\r\n").map(|at| at + 4));
        let Some(end) = end else {
            self.searched = self.partial.len();
            let fits = self.partial.len() <= self.partial_bytes_max;
            return if fits { Ok(Bytes::new()) } else { Err(EventTooLarge) };
        };
        let whole = self.partial.split_to(from + end).freeze();
        self.searched = 0;
        Ok(whole)
    }
}

/// Splits the bytes of complete events into events, each with its end.
pub fn events(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let ends = |at: &usize| matches!(&bytes[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]);
        let end =
            memchr::memchr_iter(b'\n', bytes).find(ends).map_or(bytes.len(), |at| match bytes[at + 1] {
                b'\n' => at + 2,
                _ => at + 3,
            });
        let (event, rest) = bytes.split_at(end);
        bytes = rest;
        Some(event)
    })
}

/// Data of an event, its lines joined; empty for an event without data (a comment).
#[must_use]
pub fn data_of(event: &[u8]) -> Cow<'_, [u8]> {
    // Fast path: engines write one line of data and no other field.
    if let Some(data) = event.strip_prefix(b"data:") {
        let data = data.trim_ascii();
        if memchr::memchr(b'\n', data).is_none() {
            return Cow::Borrowed(data);
        }
    }
    let mut lines = event.split(|&byte| byte == b'\n').filter_map(|line| {
        let data = line.strip_suffix(b"\r").unwrap_or(line).strip_prefix(b"data:")?;
        Some(data.strip_prefix(b" ").unwrap_or(data))
    });
    let Some(first) = lines.next() else { return Cow::Borrowed(b"") };
    let Some(second) = lines.next() else { return Cow::Borrowed(first) };
    let mut data = [first, b"\n", second].concat();
    for line in lines {
        data.push(b'\n');
        data.extend_from_slice(line);
    }
    Cow::Owned(data)
}

/// Appends an event with a name, which is also the `type` of its data.
pub(crate) fn named_event(out: &mut String, name: &str, fields: &Value) {
    // Writing to a string cannot fail.
    let _ = write!(out, "event: {name}\ndata: {fields}\n\n");
}

/// Appends a text as a JSON string.
pub(crate) fn quoted(out: &mut String, text: &str) {
    let _ = write!(out, "{}", Value::from(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\r\n\r\nevent: x\ndata: {\"a\":1}\r\n\r\ndata:b\ndata: c\nid: 4\n\n\n\ndata: [DONE]\n\ndata: lost";

    fn read(cut: usize) -> Vec<String> {
        let mut buffer = EventBuffer::new(1 << 10);
        let mut seen = Vec::new();
        for piece in STREAM.as_bytes().chunks(cut) {
            let whole = buffer.push(Bytes::copy_from_slice(piece)).expect("small events");
            for event in events(&whole) {
                let data = data_of(event);
                if !data.is_empty() {
                    seen.push(String::from_utf8(data.into_owned()).expect("text"));
                }
            }
        }
        seen
    }

    #[test]
    fn however_the_bytes_are_cut() {
        for cut in 1..STREAM.len() {
            assert_eq!(read(cut), ["{\"a\":1}", "b\nc", "[DONE]"], "cut every {cut} bytes");
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut buffer = EventBuffer::new(4 << 10);
        let piece = Bytes::from(vec![b'x'; 1 << 10]);
        assert!((0..4).all(|_| buffer.push(piece.clone()) == Ok(Bytes::new())));
        assert_eq!(buffer.push(piece), Err(EventTooLarge));
    }

    #[test]
    fn whole_events_are_not_copied() {
        let piece = Bytes::from_static(b"data: 1\n\ndata: 2\n\n");
        let whole = EventBuffer::new(64).push(piece.clone()).expect("small");
        assert_eq!(whole.as_ptr(), piece.as_ptr());
    }
}
