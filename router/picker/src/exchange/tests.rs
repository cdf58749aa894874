//! A gateway of a few routes behind the exchange, and a proxy whose messages the test sends.

use axum::extract::{Path, Request};
use axum::http::HeaderValue;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use futures_util::stream;
use router_engines::upstream::{Call, Upstream};
use tokio::task::JoinHandle;

use super::*;
use crate::proto::ext_proc::processing_response::Response as Answer;
use crate::proto::ext_proc::{
    HeaderMap as Headers, HeaderValue as Header, HttpBody as BodyPiece, HttpTrailers, ProtocolConfiguration,
};

/// Hands the request over to `http://10.0.0.1:8000` with its body doubled, and returns the engine's answer in capitals.
async fn relay(request: Request) -> Response {
    let proxy_dispatch = request.extensions().get::<ProxyDispatch>().cloned().expect("a proxy");
    let body = request.into_body().collect().await.expect("no error").to_bytes();
    let upstream = Upstream::new("http://10.0.0.1:8000", None);
    let call = Call::json("/v1/completions", [&body[..], &body[..]].concat().into());
    let reply = match proxy_dispatch.send(&upstream, call).await {
        Ok(reply) => reply,
        Err(error) => return (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    };
    let (head, body) = reply.into_parts();
    if !proxy_dispatch.shows_answers() {
        let _empty = body.whole(1 << 20).await;
        return StatusCode::OK.into_response();
    }
    let upper = body.map_frame(|frame| frame.map_data(|data| Bytes::from(data.to_ascii_uppercase())));
    let mut response = Response::new(Body::new(upper));
    *response.status_mut() = head.status;
    response.headers_mut().insert("x-own", HeaderValue::from_static("yes"));
    response
}

fn routes() -> Router {
    Router::new()
        .route("/relay", post(relay))
        .route("/known/{name}", get(async |Path(name): Path<String>| format!("known {name}")))
        .route("/slow", post(async || tokio::time::sleep(Duration::from_secs(3600)).await))
        // Returns without waiting for the end of the body.
        .route(
            "/slow_end",
            post(async |request: Request| {
                let proxy_dispatch = request.extensions().get::<ProxyDispatch>().cloned().expect("a proxy");
                let upstream = Upstream::new("http://10.0.0.1:8000", None);
                let _reply =
                    proxy_dispatch.send(&upstream, Call::json("/v1/completions", Bytes::new())).await;
            }),
        )
        // Returns the first words only, as with a stop string.
        .route(
            "/cut",
            post(async |request: Request| {
                let proxy_dispatch = request.extensions().get::<ProxyDispatch>().cloned().expect("a proxy");
                let upstream = Upstream::new("http://10.0.0.1:8000", None);
                let reply = proxy_dispatch.send(&upstream, Call::json("/v1/completions", Bytes::new())).await;
                let mut body = reply.expect("an answer").into_body();
                let first = body.frame().await.expect("a frame").expect("no error");
                Body::new(http_body_util::Full::new(first.into_data().expect("data")))
            }),
        )
        .route(
            "/late",
            post(async |request: Request| {
                let _never = tokio::time::timeout(Duration::from_millis(100), relay(request)).await;
                (StatusCode::GATEWAY_TIMEOUT, "late")
            }),
        )
}

struct Proxy {
    sender: mpsc::UnboundedSender<Result<ProcessingRequest, Status>>,
    answers: mpsc::Receiver<ProcessingResponse>,
    running: JoinHandle<Result<(), Status>>,
}

fn headers(pairs: &[(&str, &str)]) -> Headers {
    let header = |(key, value): &(&str, &str)| Header {
        key: (*key).to_owned(),
        value: (*value).to_owned(),
        raw_value: Bytes::new(),
    };
    Headers { headers: pairs.iter().map(header).collect() }
}

impl Proxy {
    fn start(
        method: &str,
        path: &str,
        is_complete: bool,
        modes: Option<(BodySendMode, BodySendMode)>,
    ) -> Self {
        Self::start_with(method, path, is_complete, modes, 8)
    }

    fn start_with(
        method: &str,
        path: &str,
        is_complete: bool,
        modes: Option<(BodySendMode, BodySendMode)>,
        places: usize,
    ) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (out, answers) = mpsc::channel(64);
        let incoming =
            stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
        let places = Arc::new(Semaphore::new(places));
        let running = tokio::spawn(async move { exchange(Box::pin(incoming), out, routes(), places).await });
        let proxy = Self { sender, answers, running };
        let map = headers(&[(":method", method), (":path", path), ("authorization", "Bearer x")]);
        proxy.message(ProcessingRequest {
            request: Some(Part::RequestHeaders(HttpHeaders {
                headers: Some(map),
                end_of_stream: is_complete,
            })),
            protocol_config: modes.map(|(request, response)| ProtocolConfiguration {
                request_body_mode: request.into(),
                response_body_mode: response.into(),
                ..ProtocolConfiguration::default()
            }),
            ..ProcessingRequest::default()
        });
        proxy
    }

    fn message(&self, message: ProcessingRequest) {
        self.sender.send(Ok(message)).expect("the exchange reads");
    }

    fn part(&self, part: Part) {
        self.message(ProcessingRequest { request: Some(part), ..ProcessingRequest::default() });
    }

    fn request_body(&self, text: &str, end_of_stream: bool) {
        self.part(Part::RequestBody(BodyPiece { body: text.to_owned().into(), end_of_stream }));
    }

    fn response_body(&self, text: &str, end_of_stream: bool) {
        self.part(Part::ResponseBody(BodyPiece { body: text.to_owned().into(), end_of_stream }));
    }

    fn response_headers(&self, status: &str, end_of_stream: bool) {
        let map = headers(&[(":status", status), ("x-engine", "vllm"), ("content-type", "text/plain")]);
        self.part(Part::ResponseHeaders(HttpHeaders { headers: Some(map), end_of_stream }));
    }

    async fn next(&mut self) -> Option<Answer> {
        let answer = tokio::time::timeout(Duration::from_secs(5), self.answers.recv()).await;
        answer.expect("in time").map(|message| message.response.expect("a response"))
    }

    /// Receives the next message as text.
    async fn told(&mut self) -> String {
        let body = |response: Option<crate::proto::ext_proc::CommonResponse>| {
            use crate::proto::ext_proc::body_mutation::Mutation;
            match response.and_then(|common| common.body_mutation).and_then(|mutation| mutation.mutation) {
                Some(Mutation::StreamedResponse(piece)) => {
                    let end = if piece.end_of_stream { " end" } else { "" };
                    format!("{:?}{end}", String::from_utf8_lossy(&piece.body))
                }
                other => format!("{other:?}"),
            }
        };
        let set = |common: Option<crate::proto::ext_proc::CommonResponse>, wanted: &str| {
            let mutation = common.and_then(|common| common.header_mutation).unwrap_or_default();
            let headers = mutation.set_headers.into_iter().filter_map(|option| option.header);
            let found = headers.into_iter().find(|header| header.key == wanted);
            let removed = mutation.remove_headers.join(",");
            let value = found.map(|header| String::from_utf8_lossy(&header.raw_value).into_owned());
            format!("{} -[{removed}]", value.unwrap_or_default())
        };
        match self.next().await {
            None => "over".to_owned(),
            Some(Answer::RequestHeaders(headers)) => {
                format!("to {}", set(headers.response, crate::message::DESTINATION))
            }
            Some(Answer::ResponseHeaders(headers)) => format!("answer {}", set(headers.response, "x-own")),
            Some(Answer::RequestBody(piece)) => format!("request {}", body(piece.response)),
            Some(Answer::ResponseBody(piece)) => format!("body {}", body(piece.response)),
            Some(Answer::RequestTrailers(_)) => "request trailers".to_owned(),
            Some(Answer::ResponseTrailers(_)) => "trailers".to_owned(),
            Some(Answer::ImmediateResponse(response)) => {
                let status = response.status.map_or(0, |status| status.code);
                format!("{status} {}", String::from_utf8_lossy(&response.body))
            }
        }
    }

    async fn ended(self) -> Result<(), tonic::Code> {
        let ended = tokio::time::timeout(Duration::from_secs(5), self.running).await.expect("in time");
        ended.expect("no panic").map_err(|status| status.code())
    }
}

const DUPLEX: Option<(BodySendMode, BodySendMode)> =
    Some((BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed));
const UNSEEN: Option<(BodySendMode, BodySendMode)> =
    Some((BodySendMode::FullDuplexStreamed, BodySendMode::None));

#[tokio::test]
async fn a_request_and_its_answer_go_through_the_gateway() {
    for modes in [DUPLEX, None] {
        let mut proxy = Proxy::start("POST", "/relay", false, modes);
        proxy.request_body("a", false);
        proxy.request_body("b", true);
        // Envoy may send the last piece twice.
        proxy.request_body("b", true);
        assert_eq!(proxy.told().await, "to 10.0.0.1:8000 -[authorization]");
        assert_eq!(proxy.told().await, "request \"abab\" end");
        proxy.response_headers("200", false);
        assert_eq!(proxy.told().await, "answer yes -[x-engine,content-type]");
        proxy.response_body("one", false);
        assert_eq!(proxy.told().await, "body \"ONE\"");
        proxy.response_body("two", true);
        proxy.response_body("two", true);
        let (mut text, mut ends) = (String::new(), 0);
        while ends == 0 {
            let told = proxy.told().await;
            ends += usize::from(told.ends_with(" end"));
            text.push_str(&told);
        }
        assert!(text == "body \"TWO\" end" || text == "body \"TWO\"body \"\" end", "{text}");
        assert_eq!(proxy.told().await, "over");
        assert_eq!(proxy.ended().await, Ok(()));
    }
}

#[tokio::test]
async fn trailers_take_the_place_of_the_end() {
    let mut proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    proxy.request_body("a", false);
    proxy.part(Part::RequestTrailers(HttpTrailers::default()));
    assert!(proxy.told().await.starts_with("to "));
    assert_eq!(proxy.told().await, "request \"aa\"");
    assert_eq!(proxy.told().await, "request trailers");
    proxy.response_headers("200", false);
    assert!(proxy.told().await.starts_with("answer"));
    proxy.response_body("x", false);
    assert_eq!(proxy.told().await, "body \"X\"");
    proxy.part(Part::ResponseTrailers(HttpTrailers::default()));
    assert_eq!(proxy.told().await, "trailers");
    assert_eq!(proxy.ended().await, Ok(()));
}

#[tokio::test]
async fn an_answer_of_trailers_alone_ends() {
    let mut proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    proxy.request_body("a", true);
    proxy.told().await;
    proxy.told().await;
    proxy.response_headers("200", false);
    proxy.part(Part::ResponseTrailers(HttpTrailers::default()));
    assert!(proxy.told().await.starts_with("answer"));
    assert_eq!(proxy.told().await, "trailers");
    assert_eq!(proxy.ended().await, Ok(()));
}

#[tokio::test]
async fn what_needs_no_engine_is_answered_at_once() {
    let mut proxy = Proxy::start("GET", "/known/x", true, DUPLEX);
    assert_eq!(proxy.told().await, "200 known x");
    let mut proxy = Proxy::start("POST", "/nowhere", false, DUPLEX);
    assert!(proxy.told().await.starts_with("404"));
    let mut proxy = Proxy::start_with("GET", "/known/x", true, DUPLEX, 0);
    assert!(proxy.told().await.starts_with("503"));
    let mut proxy = Proxy::start("POST", "/relay", false, Some((BodySendMode::Buffered, BodySendMode::None)));
    let told = proxy.told().await;
    assert!(told.starts_with("500") && told.contains("FULL_DUPLEX_STREAMED"), "{told}");
}

#[tokio::test]
async fn an_answer_that_is_not_shown_ends_with_its_trailers_or_its_stream() {
    for has_trailers in [true, false] {
        let mut proxy = Proxy::start("POST", "/relay", false, UNSEEN);
        proxy.request_body("a", true);
        assert!(proxy.told().await.starts_with("to "));
        assert_eq!(proxy.told().await, "request \"aa\" end");
        proxy.response_headers("200", false);
        assert_eq!(proxy.told().await, "answer  -[]", "the engine's headers stay");
        if has_trailers {
            proxy.part(Part::ResponseTrailers(HttpTrailers::default()));
            assert_eq!(proxy.told().await, "trailers");
        } else {
            // The proxy closes the stream.
            let (closed, _) = mpsc::unbounded_channel();
            drop(std::mem::replace(&mut proxy.sender, closed));
        }
        assert_eq!(proxy.told().await, "over");
        assert_eq!(proxy.ended().await, Ok(()));
    }
}

#[tokio::test]
async fn an_answer_without_a_body_and_one_that_comes_too_late() {
    let mut proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    proxy.request_body("a", true);
    proxy.told().await;
    proxy.told().await;
    proxy.response_headers("204", true);
    assert_eq!(proxy.told().await, "answer yes -[x-engine,content-type]");
    assert_eq!(proxy.told().await, "over");
    let mut proxy = Proxy::start("POST", "/late", false, DUPLEX);
    proxy.request_body("a", true);
    proxy.told().await;
    proxy.told().await;
    assert_eq!(proxy.told().await, "504 late", "although the engine has not answered");
    assert_eq!(proxy.told().await, "over");
    // The engine has sent its head, and nothing more.
    let mut proxy = Proxy::start("POST", "/late", false, DUPLEX);
    proxy.request_body("a", true);
    proxy.told().await;
    proxy.told().await;
    proxy.response_headers("200", false);
    assert_eq!(proxy.told().await, "504 late");
}

#[tokio::test]
async fn an_answer_that_the_gateway_ends_is_over_for_the_client() {
    let mut proxy = Proxy::start("POST", "/cut", false, DUPLEX);
    proxy.request_body("a", true);
    proxy.told().await;
    assert_eq!(proxy.told().await, "request \"\" end");
    proxy.response_headers("200", false);
    proxy.response_body("one", false);
    assert!(proxy.told().await.starts_with("answer"));
    assert_eq!(proxy.told().await, "body \"one\"");
    assert_eq!(proxy.told().await, "body \"\" end", "although the engine goes on");
    assert_eq!(proxy.ended().await, Ok(()));
    let mut proxy = Proxy::start("POST", "/late", false, UNSEEN);
    proxy.request_body("a", true);
    proxy.told().await;
    proxy.told().await;
    proxy.response_headers("200", false);
    proxy.told().await;
    assert_eq!(proxy.ended().await, Err(tonic::Code::Aborted), "it must not look whole");
}

#[tokio::test]
async fn an_answer_of_the_proxys_own_is_no_engines_answer() {
    for (details, said) in [
        (
            "upstream_reset_before_response_started{connection_failure,Connection_refused}",
            "502 http://10.0.0.1:8000",
        ),
        ("response_timeout", "502 http://10.0.0.1:8000"),
        ("via_upstream", "answer"),
    ] {
        let mut proxy = Proxy::start("POST", "/relay", false, DUPLEX);
        proxy.request_body("a", true);
        proxy.told().await;
        proxy.told().await;
        let text = prost_types::Value { kind: Some(Kind::StringValue(details.to_owned())) };
        let fields = [("response.code_details".to_owned(), text)].into();
        proxy.message(ProcessingRequest {
            request: Some(Part::ResponseHeaders(HttpHeaders {
                headers: Some(headers(&[(":status", "503")])),
                end_of_stream: false,
            })),
            attributes: [("envoy.filters.http.ext_proc".to_owned(), prost_types::Struct { fields })].into(),
            ..ProcessingRequest::default()
        });
        let told = proxy.told().await;
        assert!(told.starts_with(said) && (said == "answer" || told.contains(details)), "{told}");
    }
    let local = |details: &str| LocalReply { details: details.to_owned() }.is_worker_failure();
    assert!(local("upstream_reset_before_response_started{connection_failure,delayed_connect_error:_111}"));
    assert!(local("upstream_reset_before_response_started{connection_termination}"));
    assert!(!local("upstream_reset_before_response_started{overflow}") && !local("response_timeout"));
}

#[tokio::test(start_paused = true)]
async fn a_body_without_an_end_and_a_stream_without_a_message_end_in_time() {
    let mut proxy = Proxy::start("POST", "/slow_end", false, DUPLEX);
    proxy.request_body("a", false);
    let told = tokio::time::timeout(2 * MESSAGE_WITHIN, proxy.answers.recv()).await.expect("in time");
    let Some(Answer::ImmediateResponse(response)) = told.and_then(|message| message.response) else {
        panic!("an answer");
    };
    assert_eq!(response.status.map(|status| status.code), Some(408));
    let (out, _answers) = mpsc::channel(1);
    let silent = exchange(Box::pin(stream::pending()), out, routes(), Arc::new(Semaphore::new(1)));
    assert_eq!(silent.await.map_err(|status| status.code()), Err(tonic::Code::DeadlineExceeded));
}

#[tokio::test]
async fn a_proxy_that_goes_takes_the_request_with_it() {
    let mut proxy = Proxy::start("POST", "/slow", false, DUPLEX);
    proxy.request_body("a", true);
    let (closed, _) = mpsc::unbounded_channel();
    drop(std::mem::replace(&mut proxy.sender, closed));
    assert_eq!(proxy.told().await, "over");
    assert_eq!(proxy.ended().await, Ok(()));
    // In the middle of an answer: the client must not take it for complete.
    let mut proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    proxy.request_body("a", true);
    proxy.told().await;
    proxy.told().await;
    proxy.response_headers("200", false);
    proxy.told().await;
    proxy.response_body("x", false);
    proxy.told().await;
    proxy.sender.send(Err(Status::unavailable("cut"))).expect("the exchange reads");
    assert_eq!(proxy.ended().await, Err(tonic::Code::Unavailable));
}

#[tokio::test]
async fn messages_out_of_order_end_the_exchange() {
    let proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    proxy.response_body("x", true);
    assert_eq!(proxy.ended().await, Err(tonic::Code::InvalidArgument));
    let proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    proxy.message(ProcessingRequest::default());
    assert_eq!(proxy.ended().await, Err(tonic::Code::InvalidArgument));
}

#[tokio::test]
async fn large_bodies_are_cut_and_slow_readers_are_waited_for() {
    let mut proxy = Proxy::start("POST", "/relay", false, DUPLEX);
    let piece = "x".repeat(50_000);
    (0..20).for_each(|at| proxy.request_body(&piece, at == 19));
    assert!(proxy.told().await.starts_with("to "));
    let (mut bytes, mut is_over) = (0, false);
    while !is_over {
        let told = proxy.told().await;
        bytes += told.matches('x').count();
        is_over = told.ends_with(" end");
    }
    assert_eq!(bytes, 2_000_000);
    proxy.response_headers("200", false);
    proxy.told().await;
    (0..20).for_each(|at| proxy.response_body(&piece, at == 19));
    let (mut bytes, mut is_over) = (0, false);
    while !is_over {
        let told = proxy.told().await;
        bytes += told.matches('X').count();
        is_over = told.ends_with(" end");
    }
    assert_eq!(bytes, 1_000_000);
}

#[tokio::test]
async fn a_destination_is_an_address_with_a_port() {
    for (base, expected) in [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://[fd00::1]", "[fd00::1]:443"),
        ("http://[fd00::1]:9/base", "[fd00::1]:9"),
    ] {
        assert_eq!(destination(base).await.as_deref(), Ok(expected));
    }
    assert!(destination("http://localhost:8000").await.is_ok_and(|found| found.ends_with(":8000")));
}

#[test]
fn an_endpoint_is_another_one_by_address_and_not_by_spelling() {
    for (served, expected) in [
        ("10.0.0.1:8000", false),
        (" 10.0.0.1:8000 ", false),
        ("10.0.0.2:8000", true),
        ("10.0.0.1:8001", true),
        ("", false),
        ("engine:8000", false),
    ] {
        assert_eq!(is_elsewhere(served, "10.0.0.1:8000"), expected, "{served:?}");
    }
    assert!(!is_elsewhere("[fd00:0::7]:8000", "[fd00::7]:8000"));
}
