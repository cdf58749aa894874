//! Server-sent events, as they come in a body: the data of each, however the bytes are cut.

use axum::body::Body;
use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;

use crate::error::Error;

/// The events of a body.
#[derive(Debug)]
pub(crate) struct Events {
    body: Body,
    buffer: BytesMut,
    /// So many bytes of the buffer have no line end.
    scanned: usize,
    data: Vec<u8>,
    bytes_max: usize,
}

impl Events {
    /// Events of at most so many bytes.
    pub(crate) fn new(body: Body, bytes_max: usize) -> Self {
        Self { body, buffer: BytesMut::new(), scanned: 0, data: Vec::new(), bytes_max }
    }

    /// The data of the next event; none at the end. An event that the end cuts off does not count.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        loop {
            while let Some(line) = self.line() {
                if let Some(data) = line.strip_prefix(b"data:") {
                    if !self.data.is_empty() {
                        self.data.push(b'\n');
                    }
                    self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
                } else if line.is_empty() && !self.data.is_empty() {
                    return Ok(Some(std::mem::take(&mut self.data)));
                }
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(Error::Answer(format!("it broke off: {error}"))),
                Some(Ok(frame)) => {
                    let Ok(bytes) = frame.into_data() else { continue };
                    if self.buffer.len() + self.data.len() + bytes.len() > self.bytes_max {
                        return Err(Error::Answer("an event is too large".to_owned()));
                    }
                    self.buffer.extend_from_slice(&bytes);
                }
            }
        }
    }

    /// The next line without its end.
    fn line(&mut self) -> Option<BytesMut> {
        let Some(end) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') else {
            self.scanned = self.buffer.len();
            return None;
        };
        let mut line = self.buffer.split_to(self.scanned + end);
        self.buffer.advance(1);
        self.scanned = 0;
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;

    use super::*;

    async fn read(text: &[u8], cut: usize) -> Vec<String> {
        let pieces: Vec<_> = text.chunks(cut).map(|piece| Ok::<_, Infallible>(piece.to_vec())).collect();
        let mut events = Events::new(Body::from_stream(stream::iter(pieces)), 1 << 10);
        let mut seen = Vec::new();
        while let Some(data) = events.next().await.expect("small events") {
            seen.push(String::from_utf8(data).expect("text"));
        }
        seen
    }

    #[tokio::test]
    async fn however_the_bytes_are_cut() {
        let text = b": hello\r\n\r\nevent: x\ndata: {\"a\":1}\r\n\r\ndata:b\ndata: c\nid: 4\n\n\n\ndata: [DONE]\n\ndata: lost";
        for cut in 1..text.len() {
            assert_eq!(read(text, cut).await, ["{\"a\":1}", "b\nc", "[DONE]"], "cut every {cut} bytes");
        }
    }

    #[tokio::test]
    async fn a_large_event_is_refused() {
        let mut events = Events::new(Body::from(format!("data: {}\n\n", "x".repeat(2000))), 1 << 10);
        assert!(events.next().await.is_err());
    }
}
