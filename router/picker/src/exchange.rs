//! The exchange of messages about one request, from the proxy's first message to the last.
//!
//! ```text
//! receive ──the gateway hands it over──▶ engine_head ──the engine's head──▶ Answering ──▶ over
//!    │                                     │   │                             (or unseen, where answers are not shown)
//!    │                                     │   └──the proxy's own answer──▶ the gateway's error ──┐
//!    └──the gateway answers itself─────────┴──the gateway gives up──────────────────────────────▶ ImmediateResponse
//! ```
//!
//! Order of messages in the mode FULL_DUPLEX_STREAMED, which `external_processor.proto` asks for: headers are answered before
//! the first piece of the body; pieces need not be answered one by one; no piece follows one with the end of the stream, and
//! none precedes the first piece that came; where trailers come, they are answered in place of the end of the stream. Envoy
//! may send the end of a body twice (envoyproxy/envoy#46237): a second one is ignored.
//!
//! A request that the gateway aborts (deadline passed, blocked by a guardrail, stop string found) ends for the client at once:
//! by an ImmediateResponse while no byte of the answer has been shown, which Envoy accepts at any time, and by the end of the
//! body after that. Envoy then resets its request to the engine.
//!
//! A proxy that closes the stream has lost its client, or needs no more: all state of the request is dropped, which ends it in
//! the gateway like any request whose client has disconnected.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use axum::{Error, Router};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::{HeaderMap, StatusCode, Uri, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::{BodyExt, Limited};
use prost_types::value::Kind;
use router_engines::dialect::authority_of;
use router_engines::proxy_dispatch::{BodyPiece, ProxyDispatch, ProxyRequest, ReplySender, ServedElsewhere};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tonic::Status;
use tower_service::Service;

use crate::message::{
    Head, immediate, pieces, request_body, request_headers, request_trailers, response_body, response_head,
    response_headers, response_trailers, served,
};
use crate::proto::ext_proc::processing_request::Request as Part;
use crate::proto::ext_proc::{BodySendMode, HttpHeaders, Metadata, ProcessingRequest, ProcessingResponse};

/// Pieces of a request's body between the proxy and the gateway.
const PIECES_MAX: usize = 1;
/// Largest answer that is sent without an engine.
const IMMEDIATE_BYTES_MAX: usize = 4 << 20;

/// Longest wait for the first message of a stream, and for the end of a body that has all bytes that were announced.
const MESSAGE_WITHIN: Duration = Duration::from_secs(30);
/// Longest wait for the end of an engine's answer after the end of the client's: Envoy can then reuse the connection.
const END_WITHIN: Duration = Duration::from_millis(100);
/// Time limit of resolving a worker's name.
const RESOLVE_WITHIN: Duration = Duration::from_secs(2);

/// Sender of messages to the proxy. The receiver is read by the task that polls the exchange.
pub(crate) type Outgoing = mpsc::Sender<ProcessingResponse>;

/// Sends a message; an error when the proxy has closed the stream.
async fn send(out: &Outgoing, message: ProcessingResponse) -> Result<(), Status> {
    out.send(message).await.map_err(|_| gone())
}

fn gone() -> Status {
    Status::cancelled("the proxy has gone")
}

fn unexpected(part: &Part, while_: &str) -> Status {
    let name = match part {
        Part::RequestHeaders(_) => "request_headers",
        Part::ResponseHeaders(_) => "response_headers",
        Part::RequestBody(_) => "request_body",
        Part::ResponseBody(_) => "response_body",
        Part::RequestTrailers(_) => "request_trailers",
        Part::ResponseTrailers(_) => "response_trailers",
    };
    Status::invalid_argument(format!("{name} while {while_}"))
}

/// The next message's part; `None` when the proxy has closed the stream.
async fn next<I>(incoming: &mut I) -> Result<Option<Part>, Status>
where
    I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
{
    Ok(next_message(incoming).await?.map(|(part, _, _)| part))
}

/// The next message's part, with the proxy's attributes and metadata in that message.
async fn next_message<I>(incoming: &mut I) -> Result<Option<(Part, Attributes, Option<Metadata>)>, Status>
where
    I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
{
    match incoming.next().await {
        None => Ok(None),
        Some(message) => match message? {
            ProcessingRequest { request: Some(part), attributes, metadata_context, .. } => {
                Ok(Some((part, attributes, metadata_context)))
            }
            _ => Err(Status::invalid_argument("a message without a part that is known here")),
        },
    }
}

type Attributes = BTreeMap<String, prost_types::Struct>;

/// The body of a request as it comes from the proxy.
struct RequestBody {
    pieces: mpsc::Receiver<Bytes>,
    left: Option<u64>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = ready!(self.pieces.poll_recv(context));
        if let (Some(left), Some(piece)) = (&mut self.left, &piece) {
            *left = left.saturating_sub(piece.len() as u64);
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// Queue of pieces for a reader that may be slower than the proxy. While it is not empty, no further message is read.
struct Feed<T> {
    sender: Option<mpsc::Sender<T>>,
    waiting: VecDeque<T>,
}

impl<T> Feed<T> {
    fn new(sender: Option<mpsc::Sender<T>>) -> Self {
        Self { sender, waiting: VecDeque::new() }
    }

    fn push(&mut self, piece: T) {
        if self.sender.is_some() {
            self.waiting.push_back(piece);
        }
    }

    /// Whether the reader was dropped.
    fn is_unread(&self) -> bool {
        self.sender.as_ref().is_none_or(mpsc::Sender::is_closed)
    }

    fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Delivers one piece. Cancel-safe.
    async fn deliver(&mut self) {
        let Some(sender) = &self.sender else { return };
        if let Ok(permit) = sender.reserve().await {
            if let Some(piece) = self.waiting.pop_front() {
                permit.send(piece);
            }
            return;
        }
        // The reader was dropped.
        self.waiting.clear();
        self.sender = None;
    }
}

/// Runs a request through the gateway's routes.
pub(crate) async fn exchange<I>(
    mut incoming: I,
    out: Outgoing,
    mut routes: Router,
    places: Arc<Semaphore>,
) -> Result<(), Status>
where
    I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
{
    let first = tokio::time::timeout(MESSAGE_WITHIN, incoming.next()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("no first message"))?;
    let Some(first) = first.transpose()? else { return Ok(()) };
    if first.observability_mode {
        return Err(Status::invalid_argument(
            "observability_mode must be off: the proxy would ignore the picker's decisions",
        ));
    }
    let (headers, is_complete) = match &first.request {
        Some(Part::RequestHeaders(HttpHeaders { headers: Some(headers), end_of_stream })) => {
            (headers, *end_of_stream)
        }
        Some(part) => return Err(unexpected(part, "the request's headers were awaited")),
        None => return Err(Status::invalid_argument("a first message without headers")),
    };
    let mut head = match Head::read(&first, headers) {
        Ok(head) => head,
        Err(reason) => return refuse(&out, StatusCode::BAD_REQUEST, reason).await,
    };
    if !is_complete && head.modes.request != BodySendMode::FullDuplexStreamed {
        let reason =
            "the proxy must send request bodies in the mode FULL_DUPLEX_STREAMED (request_body_mode)";
        tracing::error!("{reason}, and not {}", head.modes.request.as_str_name());
        return refuse(&out, StatusCode::INTERNAL_SERVER_ERROR, reason).await;
    }
    let Ok(_place) = places.try_acquire() else {
        return refuse(
            &out,
            StatusCode::SERVICE_UNAVAILABLE,
            "too many requests are under way (picker.requests_max)",
        )
        .await;
    };
    let shows_answers = head.modes.response == BodySendMode::FullDuplexStreamed;
    let (proxy_dispatch, mut handed_over) = ProxyDispatch::new(shows_answers, head.allowed_workers.take());
    let client = Client { headers: head.headers.clone(), uri: head.uri.clone(), has_body: !is_complete };
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    let body = match is_complete {
        true => Body::empty(),
        false => Body::new(RequestBody { pieces: receiver, left: head.content_length() }),
    };
    let mut request = head.into_request(body);
    request.extensions_mut().insert(proxy_dispatch);
    let mut answer = pin!(routes.call(request));

    let upload = (!is_complete).then_some(sender);
    let (handed_over, end) = match receive(&mut incoming, answer.as_mut(), &mut handed_over, upload).await? {
        ReceiveOutcome::HandedOver(handed_over, end) => (handed_over, end),
        ReceiveOutcome::Answered(response) => return send_immediately(&out, response).await,
        ReceiveOutcome::WithoutEnd => {
            return refuse(&out, StatusCode::REQUEST_TIMEOUT, "the body has no end").await;
        }
        ReceiveOutcome::Closed => return Ok(()),
    };
    let worker = handed_over.base.clone();
    let (reply, destination) = client.send(&out, *handed_over, end).await?;
    let (engine, served) = match engine_head(&mut incoming, answer.as_mut()).await? {
        HeadOutcome::Engine(engine, served) => (engine, served),
        HeadOutcome::Local(local, served) => {
            let is_worker_failure = local.is_worker_failure()
                && !served.is_some_and(|served| is_elsewhere(&served, &destination));
            let reason = format!("the proxy got no answer from it: {}", local.details);
            reply.failed(&worker, &reason, is_worker_failure);
            let Ok(response) = answer.await;
            return send_immediately(&out, response).await;
        }
        HeadOutcome::Answered(response) => return send_immediately(&out, response).await,
        HeadOutcome::Closed => return Ok(()),
    };
    let is_complete = engine.end_of_stream;
    let mut engine = response_head(&engine.headers.unwrap_or_default());
    if let Some(served) = served.filter(|served| is_elsewhere(served, &destination)) {
        engine.extensions_mut().insert(ServedElsewhere(served));
    }
    let feed = Feed::new(reply.answered(engine.clone()).ok());
    match shows_answers {
        true if is_complete => without_body(&engine, feed, &out, answer).await,
        true => AnswerExchange::new(engine, feed).run(&mut incoming, &out, answer).await,
        false => headers_only(&engine, is_complete, feed, &mut incoming, &out, answer).await,
    }
}

/// Result of receiving a request.
enum ReceiveOutcome {
    /// The gateway handed the request over for sending; its body ended like this.
    HandedOver(Box<ProxyRequest>, End),
    /// The gateway answered without an engine.
    Answered(Response),
    /// Handed over, but the body's end is missing after all announced bytes.
    WithoutEnd,
    /// The proxy has closed the stream.
    Closed,
}

/// Receives the request's body, through `upload` if there is one, until the gateway hands the request over and the body has ended.
async fn receive<I>(
    incoming: &mut I,
    mut answer: Pin<&mut impl Future<Output = Result<Response, Infallible>>>,
    proxy_dispatch: &mut oneshot::Receiver<ProxyRequest>,
    upload: Option<mpsc::Sender<Bytes>>,
) -> Result<ReceiveOutcome, Status>
where
    I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
{
    let mut end = upload.is_none().then_some(End::Body);
    let mut feed = Feed::new(upload);
    let (mut handed_over, mut is_declined) = (None, false);
    // Runs from the hand-over on: the gateway may have read all announced bytes while the end is still to come.
    let mut overdue = pin!(tokio::time::sleep(MESSAGE_WITHIN));
    loop {
        if let (Some(_), Some(end)) = (&handed_over, end) {
            return Ok(handed_over
                .map_or(ReceiveOutcome::Closed, |handed_over| ReceiveOutcome::HandedOver(handed_over, end)));
        }
        if end.is_some() && !feed.is_waiting() {
            feed.sender = None;
        }
        tokio::select! {
            biased;
            taken = &mut *proxy_dispatch, if handed_over.is_none() && !is_declined => match taken {
                Ok(taken) => {
                    handed_over = Some(Box::new(taken));
                    // Bytes beyond the announced length are dropped.
                    feed = Feed::new(None);
                    // Most bodies have ended by now, and need no timer.
                    if end.is_none() {
                        overdue.as_mut().reset(tokio::time::Instant::now() + MESSAGE_WITHIN);
                    }
                }
                // The gateway answers without an engine.
                Err(_) => is_declined = true,
            },
            response = &mut answer => {
                let Ok(response) = response;
                return Ok(ReceiveOutcome::Answered(response));
            }
            () = feed.deliver(), if feed.is_waiting() => {}
            () = &mut overdue, if handed_over.is_some() => return Ok(ReceiveOutcome::WithoutEnd),
            part = next(incoming), if !feed.is_waiting() => match part? {
                None => return Ok(ReceiveOutcome::Closed),
                Some(Part::RequestBody(_) | Part::RequestTrailers(_)) if end.is_some() => {}
                Some(Part::RequestBody(piece)) => {
                    feed.push(piece.body);
                    end = piece.end_of_stream.then_some(End::Body);
                }
                Some(Part::RequestTrailers(_)) => end = Some(End::Trailers),
                Some(part) => return Err(unexpected(&part, "the request was awaited")),
            },
        }
    }
}

/// Outcome of a request that the proxy has sent.
enum HeadOutcome {
    /// The head of an engine's answer, and the engine's address, if the proxy reports it.
    Engine(HttpHeaders, Option<String>),
    /// The proxy's own answer in the engine's place, and the engine that it had tried, if it reports that.
    Local(LocalReply, Option<String>),
    /// The gateway ended the request (deadline, guardrail) before the engine's head came.
    Answered(Response),
    /// The proxy has closed the stream.
    Closed,
}

/// Whether the endpoint reported by a proxy differs from the destination that it was given. False for texts that are no address.
fn is_elsewhere(served: &str, destination: &str) -> bool {
    let address = |text: &str| text.trim().parse::<SocketAddr>().ok();
    address(served).zip(address(destination)).is_some_and(|(served, destination)| served != destination)
}

/// Waits for the head of the engine's answer.
async fn engine_head<I>(
    incoming: &mut I,
    mut answer: Pin<&mut impl Future<Output = Result<Response, Infallible>>>,
) -> Result<HeadOutcome, Status>
where
    I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
{
    loop {
        tokio::select! {
            part = next_message(incoming) => match part? {
                None => return Ok(HeadOutcome::Closed),
                Some((Part::ResponseHeaders(headers), attributes, metadata)) => {
                    let served = served(metadata.as_ref()).map(str::to_owned);
                    return Ok(match LocalReply::read(&attributes) {
                        Some(local) => HeadOutcome::Local(local, served),
                        None => HeadOutcome::Engine(headers, served),
                    });
                }
                Some((Part::RequestBody(_) | Part::RequestTrailers(_), ..)) => {}
                Some((part, ..)) => return Err(unexpected(&part, "the engine's answer was awaited")),
            },
            response = &mut answer => {
                let Ok(response) = response;
                return Ok(HeadOutcome::Answered(response));
            }
        }
    }
}

/// Head of the client's request.
struct Client {
    headers: HeaderMap,
    uri: Uri,
    has_body: bool,
}

impl Client {
    /// Tells the proxy the destination and the changed request; returns the destination.
    async fn send(
        &self,
        out: &Outgoing,
        handed_over: ProxyRequest,
        end: End,
    ) -> Result<(ReplySender, String), Status> {
        let destination = destination(&handed_over.base).await.map_err(|reason| {
            tracing::error!(worker = handed_over.base, "{reason}");
            Status::unavailable(reason)
        })?;
        send(out, request_headers(&self.headers, &self.uri, &handed_over, &destination)).await?;
        if self.has_body {
            for (piece, is_last) in pieces(handed_over.call.body, end == End::Body) {
                send(out, request_body(piece, is_last)).await?;
            }
        }
        if end == End::Trailers {
            send(out, request_trailers()).await?;
        }
        Ok((handed_over.reply, destination))
    }
}

/// `IP:PORT` of an engine.
async fn destination(base: &str) -> Result<String, String> {
    let authority = authority_of(base);
    if authority.parse::<SocketAddr>().is_ok() {
        return Ok(authority.to_owned());
    }
    let usual = if base.starts_with("https:") { 443 } else { 80 };
    if let Ok(ip) = authority.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, usual).to_string());
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().map_err(|_| format!("{authority} has no port"))?),
        None => (authority, usual),
    };
    let resolving = tokio::time::timeout(RESOLVE_WITHIN, tokio::net::lookup_host((host, port))).await;
    let resolved = resolving.map_err(|_| format!("{host}: not resolved within {RESOLVE_WITHIN:?}"))?;
    let mut addresses = resolved.map_err(|error| format!("{host}: {error}"))?;
    addresses.next().map(|address| address.to_string()).ok_or_else(|| format!("{host} has no address"))
}

async fn refuse(out: &Outgoing, status: StatusCode, reason: &'static str) -> Result<(), Status> {
    let mut response = http::Response::new(());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
    send(out, immediate(&response, Bytes::from_static(reason.as_bytes()))).await
}

/// Answers without an engine.
async fn send_immediately(out: &Outgoing, response: Response) -> Result<(), Status> {
    let (parts, body) = response.into_parts();
    let Ok(body) = Limited::new(body, IMMEDIATE_BYTES_MAX).collect().await else {
        return refuse(
            out,
            StatusCode::BAD_GATEWAY,
            "the answer is too large for the proxy: ask the gateway itself",
        )
        .await;
    };
    send(out, immediate(&http::Response::from_parts(parts, ()), body.to_bytes())).await
}

/// Follows an answer whose body the proxy does not pass on.
async fn headers_only<I>(
    engine: &http::Response<()>,
    is_complete: bool,
    mut feed: Feed<BodyPiece>,
    incoming: &mut I,
    out: &Outgoing,
    mut answer: Pin<&mut impl Future<Output = Result<Response, Infallible>>>,
) -> Result<(), Status>
where
    I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
{
    send(out, response_headers::<()>(engine, None)).await?;
    let mut is_over = is_complete;
    while !is_over {
        tokio::select! {
            part = next(incoming) => match part? {
                None => is_over = true,
                Some(Part::ResponseTrailers(_)) => {
                    send(out, response_trailers()).await?;
                    is_over = true;
                }
                Some(Part::RequestBody(_) | Part::RequestTrailers(_)) => {}
                Some(part) => return Err(unexpected(&part, "the answer's end was awaited")),
            },
            // Aborted in the middle: the client must not take a partial answer for the whole.
            _ = &mut answer => return Err(Status::aborted("the answer was given up")),
        }
    }
    feed.push(BodyPiece::End);
    feed.deliver().await;
    let _recorded = answer.await;
    Ok(())
}

/// Kind of the end of a request or an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Body,
    Trailers,
}

/// Handles an engine's answer without a body. The client's may have one, which a proxy does not accept in pieces.
async fn without_body(
    engine: &http::Response<()>,
    mut feed: Feed<BodyPiece>,
    out: &Outgoing,
    answer: Pin<&mut impl Future<Output = Result<Response, Infallible>>>,
) -> Result<(), Status> {
    feed.push(BodyPiece::End);
    feed.deliver().await;
    let Ok(response) = answer.await;
    let (parts, body) = response.into_parts();
    let Ok(body) = Limited::new(body, IMMEDIATE_BYTES_MAX).collect().await.map(|body| body.to_bytes()) else {
        return Err(Status::aborted("the answer broke off"));
    };
    let response = http::Response::from_parts(parts, ());
    match body.is_empty() {
        true => send(out, response_headers(engine, Some(&response))).await,
        false => send(out, immediate(&response, body)).await,
    }
}

/// State of an answer whose body goes through the gateway.
struct AnswerExchange {
    engine: http::Response<()>,
    feed: Feed<BodyPiece>,
    engine_body: EngineBody,
}

/// Progress of an engine's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineBody {
    Awaited,
    Begun,
    Over { has_begun: bool, end: End },
}

impl EngineBody {
    fn has_begun(self) -> bool {
        matches!(self, Self::Begun | Self::Over { has_begun: true, .. })
    }
}

impl AnswerExchange {
    fn new(engine: http::Response<()>, feed: Feed<BodyPiece>) -> Self {
        Self { engine, feed, engine_body: EngineBody::Awaited }
    }

    async fn run<I>(
        mut self,
        incoming: &mut I,
        out: &Outgoing,
        mut answer: Pin<&mut impl Future<Output = Result<Response, Infallible>>>,
    ) -> Result<(), Status>
    where
        I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
    {
        let mut body = loop {
            tokio::select! {
                biased;
                response = &mut answer => {
                    let Ok(response) = response;
                    // The client's body does not come from the engine's, or the engine has none.
                    let is_own = self.feed.is_unread() || self.engine_body != EngineBody::Awaited;
                    if is_own && !self.engine_body.has_begun() && !response.body().is_end_stream() {
                        return send_immediately(out, response).await;
                    }
                    send(out, response_headers(&self.engine, Some(&response))).await?;
                    break response.into_body();
                }
                is_open = self.follow(incoming) => if !is_open? { return Ok(()) },
            }
        };
        while !body.is_end_stream() {
            tokio::select! {
                biased;
                // Envoy accepts no piece before it has sent one.
                frame = data_of(&mut body), if self.engine_body != EngineBody::Awaited => match frame {
                    None => break,
                    Some(Ok(data)) => {
                        // The last piece carries the end of the stream, if it is known already.
                        let is_over = matches!(self.engine_body, EngineBody::Over { end: End::Body, .. });
                        let is_last = is_over && body.is_end_stream();
                        for (piece, is_last) in pieces(data, is_last) {
                            send(out, response_body(piece, is_last)).await?;
                        }
                        if is_last {
                            return Ok(());
                        }
                    }
                    // The client must not take a partial answer for the whole.
                    Some(Err(error)) => return Err(Status::aborted(error.to_string())),
                },
                is_open = self.follow(incoming) => if !is_open? { return Ok(()) },
            }
        }
        let mut overdue = pin!(tokio::time::sleep(END_WITHIN));
        loop {
            if let EngineBody::Over { end, .. } = self.engine_body {
                return match end {
                    End::Body => send(out, response_body(Bytes::new(), true)).await,
                    End::Trailers => send(out, response_trailers()).await,
                };
            }
            tokio::select! {
                // The engine's end has arrived in most cases; the timer is set only otherwise.
                biased;
                is_open = self.follow(incoming) => if !is_open? { return Ok(()) },
                // The gateway does not wait any longer.
                () = &mut overdue => return send(out, response_body(Bytes::new(), true)).await,
            }
        }
    }

    /// Handles one message about the engine's answer, or delivers a piece of it; false when the proxy has closed the stream.
    /// Cancel-safe.
    async fn follow<I>(&mut self, incoming: &mut I) -> Result<bool, Status>
    where
        I: Stream<Item = Result<ProcessingRequest, Status>> + Unpin,
    {
        if self.feed.is_waiting() {
            self.feed.deliver().await;
            return Ok(true);
        }
        let is_over = matches!(self.engine_body, EngineBody::Over { .. });
        match next(incoming).await? {
            None => return Ok(false),
            Some(Part::ResponseBody(_) | Part::ResponseTrailers(_)) if is_over => {}
            Some(Part::ResponseBody(piece)) => {
                self.engine_body = match piece.end_of_stream {
                    true => EngineBody::Over { has_begun: true, end: End::Body },
                    false => EngineBody::Begun,
                };
                if !piece.body.is_empty() {
                    self.feed.push(BodyPiece::Data(piece.body));
                }
                if piece.end_of_stream {
                    self.feed.push(BodyPiece::End);
                }
            }
            Some(Part::ResponseTrailers(_)) => {
                let has_begun = self.engine_body.has_begun();
                self.engine_body = EngineBody::Over { has_begun, end: End::Trailers };
                self.feed.push(BodyPiece::End);
            }
            Some(Part::RequestBody(_) | Part::RequestTrailers(_)) => {}
            Some(part) => return Err(unexpected(&part, "the answer was awaited")),
        }
        Ok(true)
    }
}

/// The next data frame. The gateway sends no trailers, so other frames are skipped.
async fn data_of(body: &mut Body) -> Option<Result<Bytes, Error>> {
    loop {
        match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await? {
            Ok(frame) => match frame.into_data() {
                Ok(data) => return Some(Ok(data)),
                Err(_) => continue,
            },
            Err(error) => return Some(Err(error)),
        }
    }
}

/// An answer made by the proxy itself, in the engine's place.
struct LocalReply {
    /// Envoy's `response.code_details`.
    details: String,
}

impl LocalReply {
    /// Reads the attributes in the head of an answer. `None` for an engine's answer, and if the proxy does not report the
    /// attribute (`response_attributes` of its configuration).
    fn read(attributes: &Attributes) -> Option<Self> {
        let mut details = attributes.values().filter_map(|values| values.fields.get("response.code_details"));
        match details.next()?.kind.as_ref()? {
            Kind::StringValue(details) if details != "via_upstream" => {
                Some(Self { details: details.clone() })
            }
            _ => None,
        }
    }

    /// Whether the worker could not be reached, or broke the connection. Source: Envoy's `response_code_details.rst`.
    fn is_worker_failure(&self) -> bool {
        let Some(how) = self.details.strip_prefix("upstream_reset_before_response_started{") else {
            return false;
        };
        [
            "connection_failure",
            "remote_connection_failure",
            "connection_termination",
            "remote_reset",
            "connection_timeout",
        ]
        .iter()
        .any(|failure| how.starts_with(failure))
    }
}

#[cfg(test)]
mod tests;
