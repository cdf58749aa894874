//! Handling of requests, signatures and faults included.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{Method, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};

use super::super::faults::Fault;
use super::super::sigv4::{percent_decode, verify};
use super::objects::{answer, get_object, list, put_object};
use super::uploads::{complete_upload, create_upload, put_part};
use super::{BUCKET, State, locked, now_unix_s};

type Body = BoxBody<Bytes, std::io::Error>;

pub(super) async fn serve(state: &State, reset: &AtomicBool, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return refuse(state, 400, "IncompleteBody") };
    let body = body.to_bytes();
    let query = Query::of(parts.uri.query().unwrap_or_default());
    let operation = if query.get("list-type").is_some() {
        "list"
    } else if query.get("uploadId").is_some() || query.get("uploads").is_some() {
        "upload"
    } else {
        "object"
    };
    *locked(&state.requests).entry(format!("{} {operation}", parts.method)).or_default() += 1;
    if let Err(reason) = verify(&parts, &body, &state.account, now_unix_s()) {
        state.bad_signatures.fetch_add(1, Ordering::Relaxed);
        return refuse(state, 403, &format!("SignatureDoesNotMatch {reason}"));
    }
    let (fault, place) = {
        let mut plan = locked(&state.plan);
        (plan.next(), plan.place(usize::MAX))
    };
    if fault.is_some() {
        state.faults.fetch_add(1, Ordering::Relaxed);
    }
    match fault {
        Some(Fault::Status(status)) => return refuse(state, status, "SlowDown"),
        Some(Fault::Hang) => std::future::pending::<()>().await,
        _ => {}
    }
    let path = String::from_utf8_lossy(&percent_decode(parts.uri.path())).into_owned();
    let Some(key) = path.strip_prefix(&format!("/{BUCKET}")) else {
        return refuse(state, 404, "NoSuchBucket");
    };
    let key = key.trim_start_matches('/').to_owned();
    let answer = match (&parts.method, query.get("uploadId"), key.is_empty()) {
        (&Method::GET, None, true) => list(state, &query),
        (&Method::POST, None, false) => create_upload(state, &key),
        (&Method::PUT, Some(id), false) => put_part(state, &id, &query, body),
        (&Method::POST, Some(id), false) => complete_upload(state, &id, &parts, &body),
        (&Method::DELETE, Some(id), false) => {
            locked(&state.uploads).remove(&id);
            answer(204, Bytes::new())
        }
        (&Method::PUT, None, false) => put_object(state, &key, &parts, body),
        (&Method::GET | &Method::HEAD, None, false) => get_object(state, &key, &parts),
        (&Method::DELETE, None, false) => {
            locked(&state.objects).remove(&key);
            answer(204, Bytes::new())
        }
        _ => return refuse(state, 405, "MethodNotAllowed"),
    };
    spoil(state, reset, fault, place, answer)
}

/// Applies a fault to a finished answer.
fn spoil(
    state: &State,
    reset: &AtomicBool,
    fault: Option<Fault>,
    place: usize,
    answer: Response<Bytes>,
) -> Response<Body> {
    let (mut parts, mut bytes) = answer.into_parts();
    if parts.status.is_client_error() || parts.status.is_server_error() {
        return refuse(state, parts.status.as_u16(), &String::from_utf8_lossy(&bytes));
    }
    let whole = bytes.len();
    let mut pauses = Duration::ZERO;
    let mut cut = None;
    match fault {
        Some(Fault::LostAnswer(status)) => return refuse(state, status, "InternalError"),
        Some(Fault::WrongETag) => {
            parts.headers.insert("etag", http::HeaderValue::from_static("\"0badc0de\""));
        }
        Some(Fault::BitFlip) if whole > 0 => {
            let mut flipped = bytes.to_vec();
            flipped[place / 8 % whole] ^= 1 << (place % 8);
            bytes = flipped.into();
        }
        Some(Fault::ShortObject) if whole > 0 => bytes = bytes.slice(..place % whole),
        Some(Fault::Truncate) => cut = Some(place % whole.max(1)),
        Some(Fault::Reset) => {
            reset.store(true, Ordering::Relaxed);
            cut = Some(place % whole.max(1));
        }
        Some(Fault::Slow(pause)) => pauses = pause,
        _ => {}
    }
    state.body_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    if let Some(cut) = cut {
        // The header promises more bytes than follow; for an empty body, one byte more.
        parts.headers.insert("content-length", http::HeaderValue::from(whole.max(1)));
        let frames =
            vec![Ok(Frame::data(bytes.slice(..cut.min(whole)))), Err(std::io::Error::other("cut off"))];
        let body = BodyExt::boxed(StreamBody::new(futures_util::stream::iter(frames)));
        return Response::from_parts(parts, body);
    }
    if pauses > Duration::ZERO {
        let pieces: Vec<Bytes> =
            (0..whole).step_by(256).map(|at| bytes.slice(at..whole.min(at + 256))).collect();
        let frames = futures_util::stream::iter(pieces).then(move |piece| async move {
            tokio::time::sleep(pauses).await;
            Ok(Frame::data(piece))
        });
        parts.headers.insert("content-length", http::HeaderValue::from(whole));
        return Response::from_parts(parts, BodyExt::boxed(StreamBody::new(frames)));
    }
    Response::from_parts(parts, full(bytes))
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed()
}

/// Returns an error that contains everything a service should not repeat.
fn refuse(state: &State, status: u16, code: &str) -> Response<Body> {
    let echo = locked(&state.echo).clone();
    let body = format!("<Error><Code>{code}{echo}</Code><Message>{echo}</Message></Error>");
    let mut response = answer(status, Bytes::from(body));
    if !echo.is_empty() {
        let value = |text: &str| http::HeaderValue::from_str(text).expect("plain text");
        response.headers_mut().insert("x-echo", value(&echo));
        response.headers_mut().insert("location", value(&format!("http://127.0.0.1:1/{echo}")));
    }
    let (parts, bytes) = response.into_parts();
    // RFC 9110: no body with 204 and 304.
    let bytes = if matches!(status, 204 | 304) { Bytes::new() } else { bytes };
    Response::from_parts(parts, full(bytes))
}

/// The parameters of a query, decoded.
pub(super) struct Query(HashMap<String, String>);

impl Query {
    fn of(text: &str) -> Self {
        let decode = |part: &str| String::from_utf8_lossy(&percent_decode(part)).into_owned();
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(name, value)| (decode(name), decode(value)))
                .collect(),
        )
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }
}
