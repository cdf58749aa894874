//! Server-sent events of a body.

use std::collections::VecDeque;

use axum::body::Body;
use http_body_util::BodyExt;
use router_openai::sse::{EventBuffer, data_of, events};

use crate::error::Error;

/// The events of a body.
#[derive(Debug)]
pub(crate) struct Events {
    body: Body,
    buffer: EventBuffer,
    /// Data of complete events.
    ready: VecDeque<Vec<u8>>,
}

impl Events {
    /// Creates the events of a body, of at most `bytes_max` bytes each.
    pub(crate) fn new(body: Body, bytes_max: usize) -> Self {
        Self { body, buffer: EventBuffer::new(bytes_max), ready: VecDeque::new() }
    }

    /// Returns the data of the next event; `None` at the end. An event that the end cuts off is dropped.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Ok(Some(data));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(Error::Answer(format!("it broke off: {error}"))),
                Some(Ok(frame)) => {
                    let Ok(bytes) = frame.into_data() else { continue };
                    let whole = self.buffer.push(bytes);
                    let whole = whole.map_err(|_| Error::Answer("an event is too large".to_owned()))?;
                    let data = events(&whole).map(data_of).filter(|data| !data.is_empty());
                    self.ready.extend(data.map(|data| data.into_owned()));
                }
            }
        }
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
        let text = format!("data: {}\n\n", "x".repeat(2000));
        let pieces: Vec<_> =
            text.as_bytes().chunks(300).map(|piece| Ok::<_, Infallible>(piece.to_vec())).collect();
        let mut events = Events::new(Body::from_stream(stream::iter(pieces)), 1 << 10);
        assert!(events.next().await.is_err());
    }
}
