//! A small S3 service with real HTTP/1.1: signatures are checked, objects live in memory, faults come from a plan.
//!
//! PUT, GET, HEAD and DELETE of objects with ranges, `If-Match` and `If-None-Match: *`; ListObjectsV2 with
//! delimiter, `start-after` and pages; uploads in parts. Errors have S3's codes. Path style only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::StreamExt;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use kvstore_object::{Credentials, Location, ObjectConfig, S3Config, Secret};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use super::faults::{Fault, Plan};
use super::sigv4::{Account, percent_decode, sha256, verify};
use super::{FINGERPRINT, quick, time};

type Body = BoxBody<Bytes, std::io::Error>;

pub(crate) const BUCKET: &str = "kv-bucket";

#[derive(Debug, Clone)]
struct Object {
    bytes: Bytes,
    e_tag: String,
    changed_unix_s: i64,
}

#[derive(Debug, Default)]
struct Upload {
    key: String,
    parts: BTreeMap<u32, Bytes>,
}

/// The state of the service.
#[derive(Debug)]
pub(crate) struct State {
    account: Account,
    objects: Mutex<BTreeMap<String, Object>>,
    uploads: Mutex<HashMap<String, Upload>>,
    plan: Mutex<Plan>,
    /// Requests by "METHOD operation".
    requests: Mutex<BTreeMap<String, u64>>,
    pub(crate) faults: AtomicU64,
    pub(crate) body_bytes: AtomicU64,
    pub(crate) bad_signatures: AtomicU64,
    /// Answers 501 to `If-None-Match`.
    pub(crate) knows_no_conditions: AtomicBool,
    pub(crate) page_objects: AtomicUsize,
    /// Put into every error, as a hostile or careless service would.
    pub(crate) echo: Mutex<String>,
}

/// The running service.
pub(crate) struct Double {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<State>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Double {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn account() -> Account {
    Account {
        key_id: "AKIDEXAMPLE".into(),
        secret: "canary-secret-6d1f".into(),
        token: Some("canary-token-77aa".into()),
        region: "us-east-1".into(),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test panics with a lock")
}

impl Double {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let state = Arc::new(State {
            account: account(),
            objects: Mutex::default(),
            uploads: Mutex::default(),
            plan: Mutex::new(Plan::none()),
            requests: Mutex::default(),
            faults: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
            bad_signatures: AtomicU64::new(0),
            knows_no_conditions: AtomicBool::new(false),
            page_objects: AtomicUsize::new(1000),
            echo: Mutex::default(),
        });
        let task = tokio::spawn(accept(listener, state.clone()));
        Self { address, state, task }
    }

    /// A configuration for this service.
    pub(crate) fn config(&self) -> ObjectConfig {
        let account = &self.state.account;
        let credentials = Credentials::Keys {
            access_key_id: Secret::new(&account.key_id),
            secret_access_key: Secret::new(&account.secret),
            session_token: Secret::new(account.token.clone().unwrap_or_default()),
        };
        let mut s3 = S3Config::new(BUCKET, credentials);
        s3.endpoint = Some(format!("http://{}", self.address));
        s3.allow_http = true;
        s3.part_bytes = 5 << 20;
        quick(ObjectConfig::new(Location::S3(s3), FINGERPRINT))
    }

    pub(crate) fn plan(&self, plan: Plan) {
        *locked(&self.state.plan) = plan;
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        locked(&self.state.objects).keys().cloned().collect()
    }

    pub(crate) fn uploads(&self) -> usize {
        locked(&self.state.uploads).len()
    }

    pub(crate) fn insert(&self, key: &str, bytes: Bytes) {
        let object = Object { e_tag: e_tag(&bytes), bytes, changed_unix_s: now_unix_s() };
        locked(&self.state.objects).insert(key.to_owned(), object);
    }

    /// Requests so far whose name starts so, for example `GET`.
    pub(crate) fn requests(&self, name: &str) -> u64 {
        let requests = locked(&self.state.requests);
        requests.iter().filter(|(key, _)| key.starts_with(name)).map(|(_, count)| count).sum()
    }
}

pub(crate) fn now_unix_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

fn e_tag(bytes: &[u8]) -> String {
    format!("\"{}\"", &sha256(bytes)[..32])
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (state, reset) = (state.clone(), Arc::new(AtomicBool::new(false)));
        let connection = Connection { stream, reset: reset.clone() };
        tokio::spawn(async move {
            let service = hyper::service::service_fn(|request| {
                let (state, reset) = (state.clone(), reset.clone());
                async move { Ok::<_, Infallible>(serve(&state, &reset, request).await) }
            });
            // Ends with an error when a fault cuts the body off.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(connection), service)
                .await;
        });
    }
}

/// A connection that can end with a TCP reset.
struct Connection {
    stream: TcpStream,
    reset: Arc<AtomicBool>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.reset.load(Ordering::Relaxed) {
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn serve(state: &State, reset: &AtomicBool, request: Request<Incoming>) -> Response<Body> {
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
        // The header promises more than comes; for an empty body, one byte more.
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

fn answer(status: u16, bytes: Bytes) -> Response<Bytes> {
    let mut response = Response::new(bytes);
    *response.status_mut() = StatusCode::from_u16(status).expect("valid status");
    response
}

fn failure(status: u16, code: &str) -> Response<Bytes> {
    answer(status, Bytes::copy_from_slice(code.as_bytes()))
}

/// An error, with everything in it that a service should not repeat.
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

/// Status and code.
type Refusal = (u16, &'static str);

fn is_create(parts: &http::request::Parts) -> bool {
    parts.headers.get("if-none-match").is_some_and(|value| value == "*")
}

fn store(state: &State, key: &str, create: bool, bytes: Bytes) -> Result<String, Refusal> {
    if create && state.knows_no_conditions.load(Ordering::Relaxed) {
        return Err((501, "NotImplemented"));
    }
    let e_tag = e_tag(&bytes);
    let mut objects = locked(&state.objects);
    if create && objects.contains_key(key) {
        return Err((412, "PreconditionFailed"));
    }
    objects.insert(key.to_owned(), Object { bytes, e_tag: e_tag.clone(), changed_unix_s: now_unix_s() });
    Ok(e_tag)
}

fn with_e_tag(mut response: Response<Bytes>, e_tag: &str) -> Response<Bytes> {
    response.headers_mut().insert("etag", http::HeaderValue::from_str(e_tag).expect("hex"));
    response
}

fn put_object(state: &State, key: &str, parts: &http::request::Parts, body: Bytes) -> Response<Bytes> {
    match store(state, key, is_create(parts), body) {
        Ok(e_tag) => with_e_tag(answer(200, Bytes::new()), &e_tag),
        Err((status, code)) => failure(status, code),
    }
}

fn get_object(state: &State, key: &str, parts: &http::request::Parts) -> Response<Bytes> {
    let Some(object) = locked(&state.objects).get(key).cloned() else { return failure(404, "NoSuchKey") };
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    if header("if-match").is_some_and(|wanted| wanted != object.e_tag) {
        return failure(412, "PreconditionFailed");
    }
    let size = object.bytes.len();
    let range = header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let mut response = match range {
        Some((first, last)) => {
            let Ok(first) = first.parse::<usize>() else { return failure(416, "InvalidRange") };
            let end = last.parse::<usize>().map_or(size, |last| (last + 1).min(size));
            if first >= end {
                return failure(416, "InvalidRange");
            }
            let mut response = answer(206, object.bytes.slice(first..end));
            let content = format!("bytes {first}-{}/{size}", end - 1);
            let content = http::HeaderValue::from_str(&content).expect("digits");
            response.headers_mut().insert("content-range", content);
            response
        }
        None => answer(200, object.bytes.clone()),
    };
    let changed = http::HeaderValue::from_str(&time::http(object.changed_unix_s)).expect("a date");
    response.headers_mut().insert("last-modified", changed);
    with_e_tag(response, &object.e_tag)
}

fn create_upload(state: &State, key: &str) -> Response<Bytes> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let id = format!("upload-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    locked(&state.uploads).insert(id.clone(), Upload { key: key.into(), ..Upload::default() });
    let xml = format!(
        "<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{key}</Key>\
         <UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
    );
    answer(200, xml.into())
}

fn put_part(state: &State, id: &str, query: &Query, body: Bytes) -> Response<Bytes> {
    let mut uploads = locked(&state.uploads);
    let Some(upload) = uploads.get_mut(id) else { return failure(404, "NoSuchUpload") };
    let Some(number) = query.get("partNumber").and_then(|number| number.parse().ok()) else {
        return failure(400, "InvalidArgument");
    };
    let e_tag = e_tag(&body);
    upload.parts.insert(number, body);
    with_e_tag(answer(200, Bytes::new()), &e_tag)
}

fn complete_upload(state: &State, id: &str, parts: &http::request::Parts, body: &[u8]) -> Response<Bytes> {
    let body = String::from_utf8_lossy(body).replace("&quot;", "\"");
    let mut uploads = locked(&state.uploads);
    let Some(upload) = uploads.get(id) else { return failure(404, "NoSuchUpload") };
    let between = |text: &str, tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(value, _)| value.to_owned())
    };
    let mut bytes = Vec::new();
    let listed: Vec<&str> = body.split("<Part>").skip(1).collect();
    for (position, part) in listed.iter().enumerate() {
        let number = between(part, "PartNumber").and_then(|number| number.parse::<u32>().ok());
        let Some(stored) = number.and_then(|number| upload.parts.get(&number)) else {
            return failure(400, "InvalidPart");
        };
        let tag = between(part, "ETag").unwrap_or_default();
        if tag.trim_matches('"') != e_tag(stored).trim_matches('"') {
            return failure(400, "InvalidPart");
        }
        if position + 1 < listed.len() && stored.len() < 5 << 20 {
            return failure(400, "EntityTooSmall");
        }
        bytes.extend_from_slice(stored);
    }
    let key = upload.key.clone();
    match store(state, &key, is_create(parts), bytes.into()) {
        Ok(e_tag) => {
            uploads.remove(id);
            let xml = format!(
                "<CompleteMultipartUploadResult><Location>x</Location><Bucket>{BUCKET}</Bucket>\
                 <Key>{key}</Key><ETag>{e_tag}</ETag></CompleteMultipartUploadResult>"
            );
            answer(200, xml.into())
        }
        Err((status, code)) => failure(status, code),
    }
}

fn list(state: &State, query: &Query) -> Response<Bytes> {
    let prefix = query.get("prefix").unwrap_or_default();
    let delimiter = query.get("delimiter");
    let after = query.get("continuation-token").or_else(|| query.get("start-after")).unwrap_or_default();
    let limit = state.page_objects.load(Ordering::Relaxed);
    let (mut contents, mut folders, mut last, mut more) = (String::new(), BTreeSet::new(), None, false);
    let objects = locked(&state.objects);
    let mut count = 0;
    for (key, object) in objects.iter() {
        let Some(rest) = key.strip_prefix(&prefix) else { continue };
        let folder = delimiter
            .as_ref()
            .and_then(|delimiter| rest.split_once(delimiter.as_str()))
            .map(|(folder, _)| format!("{prefix}{folder}/"));
        let name = folder.clone().unwrap_or_else(|| key.clone());
        if name <= after || folder.as_ref().is_some_and(|folder| folders.contains(folder)) {
            continue;
        }
        if count == limit {
            more = true;
            break;
        }
        count += 1;
        last = Some(name);
        match folder {
            Some(folder) => {
                folders.insert(folder);
            }
            None => contents.push_str(&format!(
                "<Contents><Key>{key}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size></Contents>",
                time::iso(object.changed_unix_s),
                object.e_tag.replace('"', "&quot;"),
                object.bytes.len()
            )),
        }
    }
    let folders: String = folders
        .iter()
        .map(|folder| format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"))
        .collect();
    let token = last
        .filter(|_| more)
        .map(|last| format!("<NextContinuationToken>{last}</NextContinuationToken>"))
        .unwrap_or_default();
    let xml = format!(
        "<ListBucketResult><Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><KeyCount>{count}</KeyCount>\
         <MaxKeys>{limit}</MaxKeys><IsTruncated>{more}</IsTruncated>{token}{contents}{folders}</ListBucketResult>"
    );
    answer(200, xml.into())
}

/// The parameters of a query, decoded.
struct Query(HashMap<String, String>);

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

    fn get(&self, name: &str) -> Option<String> {
        self.0.get(name).cloned()
    }
}
