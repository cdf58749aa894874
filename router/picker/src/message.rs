//! Conversion between Envoy's messages and HTTP's. No I/O.

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap as Headers, Method, Request, Response, StatusCode, Uri};
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use router_engines::proxy_dispatch::ProxyRequest;

use crate::proto::ext_proc::body_mutation::Mutation;
use crate::proto::ext_proc::header_value_option::HeaderAppendAction;
use crate::proto::ext_proc::processing_response::Response as Answer;
use crate::proto::ext_proc::{
    BodyMutation, BodyResponse, BodySendMode, CommonResponse, HeaderMap, HeaderMutation,
    HeaderValue as WireHeader, HeaderValueOption, HeadersResponse, HttpStatus, ImmediateResponse, Metadata,
    ProcessingRequest, ProcessingResponse, StreamedBodyResponse, TrailersResponse,
};

/// Destination of a request: header, and key of the metadata in [`DESTINATION_NAMESPACE`].
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";
const DESTINATION_NAMESPACE: &str = "envoy.lb";
/// Longest endpoint address that is read: a DNS name and a port.
const ENDPOINT_BYTES_MAX: usize = 253 + 6;
/// Largest number of endpoints in a hint, which bounds the search for each worker.
const SUBSET_MAX: usize = 4096;
const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Metadata namespace of the only endpoints that a proxy can reach.
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Largest piece of a body in one message: proxies take 64 KiB.
pub(crate) const PIECE_BYTES_MAX: usize = 62_000;

/// Largest number of headers of one head.
const HEADERS_MAX: usize = 256;

/// Client headers that are kept for engines in addition to those that the gateway passes on: the description of the body, and
/// headers that the proxy itself has set.
const KEPT: [&str; 9] = [
    "host",
    "content-type",
    "content-length",
    "transfer-encoding",
    "accept",
    "user-agent",
    "te",
    "via",
    "x-forwarded-for",
];

/// The head of a request.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) headers: Headers,
    /// Workers that the proxy can reach, as `HOST:PORT` or `HOST`; `None`: all.
    pub(crate) allowed_workers: Option<Vec<String>>,
    pub(crate) modes: Modes,
}

/// Body modes of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Modes {
    pub(crate) request: BodySendMode,
    pub(crate) response: BodySendMode,
}

impl Modes {
    /// Modes of a first message. Proxies that do not report them are assumed to use those of the Endpoint Picker Protocol.
    fn of(message: &ProcessingRequest) -> Self {
        let duplex =
            Self { request: BodySendMode::FullDuplexStreamed, response: BodySendMode::FullDuplexStreamed };
        message.protocol_config.as_ref().map_or(duplex, |config| Self {
            request: config.request_body_mode(),
            response: config.response_body_mode(),
        })
    }
}

fn value_of(header: &WireHeader) -> &[u8] {
    if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value }
}

/// Headers and pseudo-headers, and whether all of them could be read.
fn headers_of(map: Option<&HeaderMap>) -> (Headers, Vec<(&str, &[u8])>, bool) {
    let (mut headers, mut pseudo, mut is_whole) = (Headers::new(), Vec::new(), true);
    for header in map.iter().flat_map(|map| &map.headers) {
        if header.key.starts_with(':') {
            pseudo.push((header.key.as_str(), value_of(header)));
        } else if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(header.key.as_bytes()), HeaderValue::from_bytes(value_of(header)))
        {
            // A map that is full, or a head of more headers than any server accepts, is refused and not cut.
            is_whole &= headers.len() < HEADERS_MAX && headers.try_append(name, value).is_ok();
        } else {
            is_whole = false;
        }
    }
    (headers, pseudo, is_whole)
}

fn pseudo<'a>(all: &[(&str, &'a [u8])], name: &str) -> Option<&'a [u8]> {
    all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

impl Head {
    /// Reads the head in the first message of a stream; an error says what is wrong with it.
    pub(crate) fn read(message: &ProcessingRequest, headers: &HeaderMap) -> Result<Self, &'static str> {
        let (mut headers, all, is_whole) = headers_of(Some(headers));
        if !is_whole {
            // A header that cannot be read could not be removed from the engine's request either.
            return Err("a header has a name or a value that HTTP does not allow");
        }
        let method = pseudo(&all, ":method").and_then(|method| Method::from_bytes(method).ok());
        let uri = pseudo(&all, ":path").and_then(|path| Uri::try_from(path).ok());
        let (Some(method), Some(uri)) = (method, uri) else {
            return Err("the request has no :method or no :path");
        };
        if let Some(host) = pseudo(&all, ":authority").and_then(|host| HeaderValue::from_bytes(host).ok()) {
            headers.insert(header::HOST, host);
        }
        let allowed_workers = subset(message.metadata_context.as_ref());
        Ok(Self { method, uri, headers, allowed_workers, modes: Modes::of(message) })
    }

    /// Length of the body, if the client sends it.
    pub(crate) fn content_length(&self) -> Option<u64> {
        self.headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
    }

    /// Converts the head to an HTTP request.
    pub(crate) fn into_request<B>(self, body: B) -> Request<B> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        *request.headers_mut() = self.headers;
        request
    }
}

/// Endpoint that served a request, as reported by the proxy: key of the metadata in [`DESTINATION_NAMESPACE`].
pub(crate) fn served(metadata: Option<&Metadata>) -> Option<&str> {
    match &metadata?.filter_metadata.get(DESTINATION_NAMESPACE)?.fields.get(SERVED)?.kind {
        Some(Kind::StringValue(endpoint)) if endpoint.len() <= ENDPOINT_BYTES_MAX => Some(endpoint),
        _ => None,
    }
}

/// Endpoints of a subset hint: a list, or one text with commas; at most [`SUBSET_MAX`] of them. A hint of another type allows no
/// worker.
fn subset(metadata: Option<&Metadata>) -> Option<Vec<String>> {
    let hint = metadata?.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?;
    let texts: Vec<&str> = match hint.kind.as_ref() {
        Some(Kind::StringValue(text)) => vec![text],
        Some(Kind::ListValue(ListValue { values })) => values
            .iter()
            .filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    let parts = texts.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|part| !part.is_empty());
    Some(parts.take(SUBSET_MAX).map(str::to_owned).collect())
}

/// Converts the head of an engine's answer. Its trailers and connection headers are left to the proxy.
pub(crate) fn response_head(headers: &HeaderMap) -> Response<()> {
    let (headers, all, _) = headers_of(Some(headers));
    let status = pseudo(&all, ":status").and_then(|status| StatusCode::from_bytes(status).ok());
    let mut response = Response::new(());
    *response.status_mut() = status.unwrap_or(StatusCode::BAD_GATEWAY);
    *response.headers_mut() = headers;
    response
}

fn set(name: &str, value: &[u8]) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(WireHeader {
            key: name.to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value),
        }),
        append: None,
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

/// Replaces the headers of these names. Further values of one name are appended.
fn set_all<'a>(headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) -> Vec<HeaderValueOption> {
    let mut last: Option<&HeaderName> = None;
    let mut all = Vec::new();
    for (name, value) in headers.filter(|(name, _)| !is_framing(name)) {
        let mut option = set(name.as_str(), value.as_bytes());
        // A map's iterator returns the values of one name one after the other.
        if last.replace(name) == Some(name) {
            option.append_action = HeaderAppendAction::AppendIfExistsOrAdd.into();
            option.append = Some(true);
        }
        all.push(option);
    }
    all
}

/// Whether a header is set by HTTP versions and proxies themselves.
fn is_framing(name: &HeaderName) -> bool {
    [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::CONNECTION, header::HOST].contains(name)
}

/// Returns the changes that turn the client's request into the engine's, with its destination. `client`: names of the client's
/// headers.
pub(crate) fn request_headers(
    client: &Headers,
    uri: &Uri,
    handed_over: &ProxyRequest,
    destination: &str,
) -> ProcessingResponse {
    let ProxyRequest { call, authorization, .. } = handed_over;
    let mut set_headers = vec![set(DESTINATION, destination.as_bytes())];
    if call.path.path_and_query() != uri.path_and_query() {
        set_headers
            .push(set(":path", call.path.path_and_query().map_or("/", |path| path.as_str()).as_bytes()));
    }
    set_headers.extend(set_all(call.headers.iter()));
    if let Some(key) = authorization {
        set_headers.push(set(header::AUTHORIZATION.as_str(), key.as_bytes()));
    }
    let is_set = |name: &HeaderName| {
        call.headers.contains_key(name) || (*name == header::AUTHORIZATION && authorization.is_some())
    };
    let is_kept = |name: &HeaderName| {
        KEPT.contains(&name.as_str())
            || (name.as_str().starts_with("x-envoy-") && !is_retry_option(name.as_str()))
            || name.as_str() == "x-forwarded-proto"
    };
    let removed =
        client.keys().filter(|name| !is_set(name) && !is_kept(name) && name.as_str() != DESTINATION);
    let mutation = HeaderMutation {
        set_headers,
        remove_headers: removed.map(|name| name.as_str().to_owned()).collect(),
    };
    let common = CommonResponse {
        header_mutation: Some(mutation),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    ProcessingResponse {
        response: Some(Answer::RequestHeaders(HeadersResponse { response: Some(common) })),
        dynamic_metadata: Some(destination_metadata(destination)),
    }
}

/// Whether a header lets a client have Envoy send its request twice, or end it early: a handed-over request must be sent once.
/// Source: Envoy's `router_filter.rst`, HTTP headers (consumed).
fn is_retry_option(name: &str) -> bool {
    ["x-envoy-retr", "x-envoy-max-retries", "x-envoy-hedge", "x-envoy-upstream-rq", "x-envoy-upstream-alt"]
        .iter()
        .any(|option| name.starts_with(option))
}

fn destination_metadata(destination: &str) -> Struct {
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let inner = Struct { fields: [(DESTINATION.to_owned(), text(destination))].into() };
    let value = Value { kind: Some(Kind::StructValue(inner)) };
    Struct { fields: [(DESTINATION_NAMESPACE.to_owned(), value)].into() }
}

/// Returns the changes that turn the engine's answer into the client's. `engine`: the engine's head; if the body is not passed
/// on (`client` is `None`) the headers stay unchanged.
pub(crate) fn response_headers<B>(engine: &Response<()>, client: Option<&Response<B>>) -> ProcessingResponse {
    let mut mutation = HeaderMutation::default();
    if let Some(client) = client {
        if client.status() != engine.status() {
            mutation.set_headers.push(set(":status", client.status().as_str().as_bytes()));
        }
        mutation.set_headers.extend(set_all(client.headers().iter()));
        let is_kept = |name: &HeaderName| {
            client.headers().contains_key(name)
                || is_framing(name)
                || name.as_str().starts_with("x-envoy-")
                || *name == header::DATE
        };
        let removed = engine.headers().keys().filter(|name| !is_kept(name));
        mutation.remove_headers = removed.map(|name| name.as_str().to_owned()).collect();
    }
    let common = CommonResponse { header_mutation: Some(mutation), ..CommonResponse::default() };
    answer(Answer::ResponseHeaders(HeadersResponse { response: Some(common) }))
}

fn answer(response: Answer) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

fn streamed(body: Bytes, end_of_stream: bool) -> BodyResponse {
    let piece = StreamedBodyResponse { body, end_of_stream };
    let mutation = BodyMutation { mutation: Some(Mutation::StreamedResponse(piece)) };
    BodyResponse {
        response: Some(CommonResponse { body_mutation: Some(mutation), ..CommonResponse::default() }),
    }
}

/// Splits a body into pieces that each fit a message. The last one ends the stream, if `is_last`.
pub(crate) fn pieces(mut body: Bytes, is_last: bool) -> impl Iterator<Item = (Bytes, bool)> {
    let mut is_over = body.is_empty() && !is_last;
    std::iter::from_fn(move || {
        if is_over {
            return None;
        }
        let piece = body.split_to(body.len().min(PIECE_BYTES_MAX));
        is_over = body.is_empty();
        Some((piece, is_over && is_last))
    })
}

/// A message with a piece of the request's body.
pub(crate) fn request_body(body: Bytes, end_of_stream: bool) -> ProcessingResponse {
    answer(Answer::RequestBody(streamed(body, end_of_stream)))
}

/// A message with a piece of the answer's body.
pub(crate) fn response_body(body: Bytes, end_of_stream: bool) -> ProcessingResponse {
    answer(Answer::ResponseBody(streamed(body, end_of_stream)))
}

/// A message that leaves the request's trailers unchanged.
pub(crate) fn request_trailers() -> ProcessingResponse {
    answer(Answer::RequestTrailers(TrailersResponse::default()))
}

/// A message that leaves the answer's trailers unchanged.
pub(crate) fn response_trailers() -> ProcessingResponse {
    answer(Answer::ResponseTrailers(TrailersResponse::default()))
}

/// An answer without an engine.
pub(crate) fn immediate(response: &Response<()>, body: Bytes) -> ProcessingResponse {
    let set_headers = set_all(response.headers().iter());
    answer(Answer::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(response.status().as_u16()) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body,
        details: "kvasir".to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_engines::proxy_dispatch::ProxyDispatch;
    use router_engines::upstream::{Call, Upstream};

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let header = |(key, value): &(&str, &str)| WireHeader {
            key: (*key).to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value.as_bytes()),
        };
        HeaderMap { headers: pairs.iter().map(header).collect() }
    }

    fn hint(value: Kind) -> ProcessingRequest {
        let fields = [(SUBSET.to_owned(), Value { kind: Some(value) })].into();
        let filter_metadata = [(SUBSET_NAMESPACE.to_owned(), Struct { fields })].into();
        ProcessingRequest {
            metadata_context: Some(Metadata { filter_metadata }),
            ..ProcessingRequest::default()
        }
    }

    #[test]
    fn a_head_is_read_with_its_pseudo_headers_and_its_subset() {
        let headers = map(&[
            (":method", "POST"),
            (":path", "/v1/completions?x=1"),
            (":authority", "api"),
            ("content-length", "7"),
        ]);
        let list = ["10.0.0.1:8000", "10.0.0.2:8000, 10.0.0.3:8000"]
            .map(|text| Value { kind: Some(Kind::StringValue(text.to_owned())) });
        let message = hint(Kind::ListValue(ListValue { values: list.into() }));
        let head = Head::read(&message, &headers).expect("a head");
        assert_eq!((head.method.as_str(), head.uri.to_string().as_str()), ("POST", "/v1/completions?x=1"));
        assert_eq!(
            (head.content_length(), head.headers.get("host").map(HeaderValue::as_bytes)),
            (Some(7), Some(&b"api"[..]))
        );
        assert_eq!(
            head.allowed_workers.as_deref(),
            Some(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"].map(str::to_owned)[..])
        );
        assert_eq!(head.modes.request, BodySendMode::FullDuplexStreamed);
        let none = Head::read(&hint(Kind::StringValue(String::new())), &headers).expect("a head");
        assert_eq!(none.allowed_workers, Some(Vec::new()), "an empty hint leaves none");
        assert!(Head::read(&ProcessingRequest::default(), &map(&[(":method", "POST")])).is_err());
        let many: Vec<String> = (0..30_000).map(|at| format!("x-{at}")).collect();
        let pseudo = [(":method", "POST"), (":path", "/")];
        let many: Vec<(&str, &str)> =
            pseudo.into_iter().chain(many.iter().map(|name| (name.as_str(), "x"))).collect();
        assert!(Head::read(&ProcessingRequest::default(), &map(&many)).is_err(), "no panic, and no cut head");
        let bad = map(&[(":method", "POST"), (":path", "/"), ("bad name", "x")]);
        assert!(Head::read(&ProcessingRequest::default(), &bad).is_err());
    }

    #[test]
    fn clients_headers_do_not_reach_engines() {
        let upstream = Upstream::new("http://10.0.0.1:8000", None);
        let (proxy_dispatch, mut proxy) = ProxyDispatch::new(true, None);
        let call =
            Call::json("/v1/completions", Bytes::new()).with(HeaderName::from_static("x-request-id"), "own");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let handed_over = runtime.block_on(async {
            tokio::select! {
                _ = proxy_dispatch.send(&upstream, call) => unreachable!("nobody answers"),
                handed_over = &mut proxy => handed_over.expect("a request"),
            }
        });
        let mut client = Headers::new();
        for (name, value) in [
            ("authorization", "Bearer secret"),
            ("x-api-key", "k"),
            ("content-type", "application/json"),
            ("x-data-parallel-rank", "3"),
            ("x-envoy-attempt-count", "1"),
            (DESTINATION, "6.6.6.6:1"),
            ("x-request-id", "theirs"),
        ] {
            client.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let uri = Uri::from_static("/v1/chat/completions");
        let message = request_headers(&client, &uri, &handed_over, "10.0.0.1:8000");
        let Some(Answer::RequestHeaders(HeadersResponse { response: Some(common) })) = message.response
        else {
            panic!("an answer to headers")
        };
        let mutation = common.header_mutation.expect("a mutation");
        let mut removed = mutation.remove_headers;
        removed.sort();
        assert_eq!(removed, ["authorization", "x-api-key", "x-data-parallel-rank"]);
        let set: Vec<(String, Bytes)> = mutation
            .set_headers
            .into_iter()
            .filter_map(|option| option.header.map(|header| (header.key, header.raw_value)))
            .collect();
        let value = |name: &str| set.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        assert_eq!(value(DESTINATION).as_deref(), Some(&b"10.0.0.1:8000"[..]));
        assert_eq!(value(":path").as_deref(), Some(&b"/v1/completions"[..]));
        assert_eq!(value("x-request-id").as_deref(), Some(&b"own"[..]));
        let metadata = message.dynamic_metadata.expect("metadata");
        let Some(Kind::StructValue(inner)) = &metadata.fields[DESTINATION_NAMESPACE].kind else {
            panic!("a struct")
        };
        assert_eq!(inner.fields[DESTINATION].kind, Some(Kind::StringValue("10.0.0.1:8000".to_owned())));
    }

    #[test]
    fn a_body_is_cut_into_pieces_of_which_the_last_ends_the_stream() {
        let cut = |bytes: usize, is_last| {
            pieces(Bytes::from(vec![b'x'; bytes]), is_last)
                .map(|(piece, end)| (piece.len(), end))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(0, true), [(0, true)]);
        assert_eq!(cut(0, false), []);
        assert_eq!(cut(PIECE_BYTES_MAX, true), [(PIECE_BYTES_MAX, true)]);
        assert_eq!(cut(PIECE_BYTES_MAX + 1, true), [(PIECE_BYTES_MAX, false), (1, true)]);
        assert_eq!(cut(PIECE_BYTES_MAX + 1, false), [(PIECE_BYTES_MAX, false), (1, false)]);
    }
}
