//! Reads a request's body: no byte before there is memory for the whole body, and no parsing before it is
//! known to be small enough as a tree.
//!
//! A body is assumed small until more bytes arrive. Then a body of known length is charged as a whole, and
//! one of unknown length repeatedly for a few times the bytes received. Excess charge is released when the
//! body is complete. A body must arrive in time, and a large one at an even pace: a body that falls behind
//! is refused and its memory released.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use http_body::Body as HttpBody;
use router_openai::ApiError;
use router_openai::{JsonCounts, JsonLimits};
use tokio::time::Instant;

use crate::memory::{Footprint, MemoryCharge, SMALL_BODY_BYTES, held_bytes};
use crate::service::Gateway;

/// Longest time for a request's body to arrive.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// Longest delay of a large body behind the even pace at which it would arrive within `BODY_WITHIN`.
const LAG_MAX: Duration = Duration::from_secs(15);

/// Objects, lists, strings, names and literals of a body. A conversation of 10,000 messages has fewer.
const NODES_MAX: usize = 128 << 10;
/// Numbers of a body that may be a prompt of token ids.
const IDS_MAX: usize = 1 << 20;
/// Nesting depth that the parsers here and in engines accept.
const DEPTH_MAX: usize = 128;

/// A body of unknown length that outgrows its memory is charged for this many times the bytes received.
const GROWTH: usize = 4;

/// Bytes after which the task yields to other tasks of its thread.
const TURN_BYTES: usize = 256 << 10;

/// Kind of body, which sets the limits on its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyKind {
    /// A conversation.
    Messages,
    /// Prompts, perhaps as token ids.
    Prompts,
    /// A form with a recording, not JSON.
    Form,
}

impl BodyKind {
    pub(crate) fn limits(self) -> JsonLimits {
        let numbers = if self == Self::Messages { NODES_MAX } else { IDS_MAX };
        JsonLimits { nodes: NODES_MAX, numbers, depth: DEPTH_MAX }
    }
}

/// Reads the body and returns it with its memory charge.
pub(crate) async fn read(
    gateway: &Gateway,
    request: Request,
    kind: BodyKind,
    bytes_max: usize,
) -> Result<(Bytes, Footprint), ApiError> {
    if let Some(encoding) =
        request.headers().get_all(header::CONTENT_ENCODING).iter().find(|&how| !is_plain(how))
    {
        let message = format!("A body in the encoding {encoding:?} is not read: send it as it is.");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "unsupported_encoding"));
    }
    let limit = bytes_max.min(gateway.memory.body_bytes_max());
    let body = request.into_body();
    let announced_length = body
        .size_hint()
        .exact()
        .map(|announced_length| usize::try_from(announced_length).unwrap_or(usize::MAX));
    if announced_length.is_some_and(|announced_length| announced_length > limit) {
        return Err(too_large(limit));
    }
    let held = gateway.in_line(gateway.memory.hold(first_bytes(announced_length, limit))).await?;
    let mut incoming = Incoming { body, announced_length, began: Instant::now(), got: 0, since_turn: 0 };
    let (bytes, held) = collect(gateway, &mut incoming, limit, held).await?;
    // The token count is not known yet: one token for every four bytes is assumed.
    held.resize(held_bytes(bytes.len(), bytes.len() / 4));
    let mut footprint = Footprint { held: Some(Arc::new(held)), work_bytes: 0 };
    if kind == BodyKind::Form {
        footprint.work_bytes = bytes.len();
        return Ok((bytes, footprint));
    }
    let limits = kind.limits();
    let pass = gateway.pass(bytes.len(), &footprint);
    let shape = if pass.is_inline() {
        JsonCounts::of(&bytes, &limits)
    } else {
        let bytes = bytes.clone();
        pass.run(move |_| JsonCounts::of(&bytes, &limits)).await?
    };
    let shape = shape.map_err(|excess| ApiError::new(StatusCode::BAD_REQUEST, excess, "body_too_complex"))?;
    footprint.work_bytes = shape.work_bytes(bytes.len());
    Ok((bytes, footprint))
}

/// Whether a content encoding leaves the body unencoded.
fn is_plain(encoding: &HeaderValue) -> bool {
    let mut parts = encoding.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
    parts.all(|part| part.is_empty() || part.eq_ignore_ascii_case(b"identity"))
}

/// Bytes charged before any byte arrives: a length that is only announced is charged no more than a small
/// body.
fn first_bytes(announced_length: Option<usize>, limit: usize) -> usize {
    announced_length.unwrap_or(SMALL_BODY_BYTES).min(SMALL_BODY_BYTES).min(limit)
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("The body is larger than {limit} bytes.");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message, "body_too_large")
}

async fn collect(
    gateway: &Gateway,
    incoming: &mut Incoming,
    limit: usize,
    mut held: MemoryCharge,
) -> Result<(Bytes, MemoryCharge), ApiError> {
    let mut room = first_bytes(incoming.announced_length, limit);
    let mut bytes = Vec::<u8>::new();
    while let Some(piece) = incoming.next().await? {
        // Most bodies come in one piece.
        if incoming.announced_length == Some(piece.len()) && piece.len() <= room {
            return Ok((piece, held));
        }
        if incoming.got > limit {
            return Err(too_large(limit));
        }
        if incoming.got > room {
            // The memory is released first: no request waits for memory while it holds some.
            drop(held);
            let since = Instant::now();
            // An announced length is charged once its bytes arrive; an unknown one grows with the bytes.
            room = incoming.announced_length.unwrap_or((incoming.got * GROWTH).min(limit));
            held = gateway.in_line(gateway.memory.hold(room)).await?;
            incoming.began += since.elapsed();
        }
        if bytes.is_empty() || bytes.capacity() < incoming.got {
            // Pages that are never written take no memory.
            bytes.reserve_exact(room - bytes.len());
        }
        bytes.extend_from_slice(&piece);
    }
    Ok((bytes.into(), held))
}

/// A body that is being received.
struct Incoming {
    body: Body,
    /// Announced length of the body, if known.
    announced_length: Option<usize>,
    began: Instant,
    got: usize,
    since_turn: usize,
}

impl Incoming {
    /// Returns the next piece, if it arrives in time; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        if self.since_turn >= TURN_BYTES {
            self.since_turn = 0;
            tokio::task::yield_now().await;
        }
        loop {
            let (due, body) = (self.due(), &mut self.body);
            let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
            let Ok(frame) = tokio::time::timeout_at(due, frame).await else {
                let message = format!("The body did not arrive within {} s.", BODY_WITHIN.as_secs());
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message, "body_too_slow"));
            };
            match frame {
                None => return Ok(None),
                Some(Err(_)) => {
                    let message = "The body broke off, or is not framed as HTTP says.";
                    return Err(ApiError::new(StatusCode::BAD_REQUEST, message, "incomplete_body"));
                }
                Some(Ok(frame)) => {
                    // Trailers are ignored.
                    let Ok(piece) = frame.into_data() else { continue };
                    self.got += piece.len();
                    self.since_turn += piece.len();
                    return Ok(Some(piece));
                }
            }
        }
    }

    /// Returns the time by which the next piece must arrive.
    fn due(&self) -> Instant {
        let latest = self.began + BODY_WITHIN;
        match self.announced_length {
            Some(announced_length) if announced_length > SMALL_BODY_BYTES => {
                let pace = BODY_WITHIN.mul_f64(self.got as f64 / announced_length as f64);
                latest.min(self.began + LAG_MAX + pace)
            }
            _ => latest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(body: Body, announced_length: Option<usize>) -> Incoming {
        Incoming { body, announced_length, began: Instant::now(), got: 0, since_turn: 0 }
    }

    #[test]
    fn a_large_body_must_arrive_evenly() {
        let mut large = incoming(Body::empty(), Some(16 << 20));
        assert_eq!(large.due() - large.began, LAG_MAX);
        large.got = 4 << 20;
        assert_eq!(large.due() - large.began, LAG_MAX + BODY_WITHIN / 4);
        large.got = 15 << 20;
        assert_eq!(large.due() - large.began, BODY_WITHIN);
        for announced_length in [None, Some(0), Some(SMALL_BODY_BYTES)] {
            let small = incoming(Body::empty(), announced_length);
            assert_eq!(small.due() - small.began, BODY_WITHIN);
        }
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_a_bad_request() {
        let pieces = [Ok("{\"a\":"), Err(std::io::Error::other("gone"))];
        let mut cut = incoming(Body::from_stream(futures_util::stream::iter(pieces)), Some(100));
        assert_eq!(cut.next().await.expect("a piece").as_deref(), Some(&b"{\"a\":"[..]));
        assert_eq!(cut.next().await.expect_err("broken").status, StatusCode::BAD_REQUEST);
    }
}
