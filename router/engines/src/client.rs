//! Talking to a worker that speaks vLLM's HTTP surface.
//!
//! Everything the gateway generates goes through [`EngineClient::complete`]: a streamed completion of token
//! ids. Dropping the [`CompletionStream`] closes its connection, which is how an engine learns of a
//! cancellation. Nagle's algorithm is off; a chunk is handed on as soon as its event is whole.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use http_body_util::BodyExt;
use router_tls::ClientTls;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::dialect::TokenCount;
use crate::handoff::DataPlaneAddress;
use crate::openai::{ApiError, Finish};
use crate::upstream::{Call, ReplyBody, Upstream};

/// Largest single event of a stream; a worker that sends more is broken.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// Largest answer to [`EngineClient::get_large`]: a snapshot of some 37 million blocks.
const LARGE_BYTES_MAX: usize = 1 << 30;
/// Largest answer to [`EngineClient::post_large`]: what an engine has to tell since it was asked last.
const POLLED_BYTES_MAX: usize = 64 << 20;
/// Largest answer to a question about the worker itself.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Why a worker did not answer properly.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// It could not be reached, or the connection broke.
    #[error("{worker}: {reason}")]
    Connection {
        /// The worker's URL.
        worker: String,
        /// What happened.
        reason: String,
    },
    /// It refused the request; the client should see this.
    #[error("{0}")]
    Refused(ApiError),
    /// It answered something that is not its protocol.
    #[error("{worker}: {reason}")]
    Protocol {
        /// The worker's URL.
        worker: String,
        /// What is wrong.
        reason: String,
    },
}

impl EngineError {
    /// Whether another worker may do better.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connection { .. } | Self::Protocol { .. } => true,
            Self::Refused(error) => error.status.is_server_error(),
        }
    }
}

/// What a worker says about itself at `GET /kvasir/worker`.
#[derive(Debug, Clone, PartialEq, Deserialize, serde::Serialize)]
pub struct WorkerDescription {
    /// `prefill`, `decode` or `both`.
    pub role: String,
    /// The model's name.
    pub model: String,
    /// Longest sequence in tokens.
    pub context_tokens: usize,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// KV blocks in the worker's own pool.
    pub blocks: usize,
    /// KV blocks that its host memory and disk tiers hold; 0 is none.
    #[serde(default)]
    pub lower_blocks: [usize; 2],
    /// Identifies this run of the process.
    pub instance: u64,
    /// Where its KV events are published, if they are.
    pub events: Option<String>,
    /// Where missed events can be had again.
    pub replay: Option<String>,
    /// Its data plane.
    pub data_plane: DataPlaneAddress,
}

/// One piece of a completion.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CompletionPiece {
    /// Tokens of this piece.
    pub token_ids: Vec<u32>,
    /// Text of this piece, as the engine sees it.
    pub text: String,
    /// Per token: its log-probability and the alternatives (id, log-probability), when asked for.
    pub logprobs: Vec<(f32, Vec<(u32, f32)>)>,
    /// Set on the last piece.
    pub finish: Option<Finish>,
    /// `usage.prompt_tokens_details.cached_tokens`, when the engine reports it.
    pub cached_tokens: Option<usize>,
}

/// A client for one worker. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EngineClient {
    upstream: Arc<Upstream>,
    /// Shown to other gateways.
    peer_key: Option<HeaderValue>,
}

impl EngineClient {
    /// A client for the worker at `base` (`http://host:port`, or `https://` with `tls`).
    #[must_use]
    pub fn new(base: &str, tls: Option<&Arc<ClientTls>>) -> Self {
        Self::over(&Upstream::new(base, tls))
    }

    /// A client that shares connections.
    #[must_use]
    pub fn over(upstream: &Arc<Upstream>) -> Self {
        Self { upstream: Arc::clone(upstream), peer_key: None }
    }

    /// Shows this key to another gateway.
    #[must_use]
    pub fn with_peer_key(mut self, key: Option<&str>) -> Self {
        self.peer_key = key.and_then(|key| HeaderValue::from_str(key).ok());
        self
    }

    /// The worker's URL.
    #[must_use]
    pub fn base(&self) -> &str {
        self.upstream.base()
    }

    fn connection(&self, reason: impl ToString) -> EngineError {
        EngineError::Connection { worker: self.base().to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn protocol(&self, reason: impl ToString) -> EngineError {
        EngineError::Protocol { worker: self.base().to_owned(), reason: reason.to_string() }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<ReplyBody>, EngineError> {
        self.send_with(method, path, None, HeaderMap::with_capacity(4), body).await
    }

    async fn send_with(
        &self,
        method: Method,
        path: &str,
        request_id: Option<&str>,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<ReplyBody>, EngineError> {
        let path: Uri = path.parse().map_err(|error| self.protocol(error))?;
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &self.peer_key {
            headers.insert(HeaderName::from_static("x-kvasir-peer"), key.clone());
        }
        let mut call = Call { method, path, headers, body, once: false };
        if let Some(id) = request_id {
            call = call.with(HeaderName::from_static("x-request-id"), id);
        }
        self.upstream.send(&call).await.map_err(|error| self.connection(error.reason))
    }

    /// A small `GET`; the body of a 200.
    pub async fn get(&self, path: &str) -> Result<Bytes, EngineError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        if status == StatusCode::OK {
            Ok(body)
        } else {
            Err(self.protocol(format!("GET {path} answered {status}")))
        }
    }

    /// A small request; the body of a 200, or what its refusal says.
    pub async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, EngineError> {
        let response = self.send(method, path, body).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        if status == StatusCode::OK {
            return Ok(body);
        }
        let told: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        Err(match told["error"]["message"].as_str() {
            Some(message) => EngineError::Refused(ApiError::new(status, message, "refused")),
            None => self.protocol(format!("{path} answered {status}")),
        })
    }

    /// A small `POST`; the body of a 200.
    pub async fn post(&self, path: &str, body: Bytes) -> Result<Bytes, EngineError> {
        let response = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        if status == StatusCode::OK {
            Ok(body)
        } else {
            Err(self.protocol(format!("POST {path} answered {status}")))
        }
    }

    /// A `GET` whose answer may be large; the body of a 200.
    pub async fn get_large(&self, path: &str) -> Result<Bytes, EngineError> {
        self.large(Method::GET, path, Bytes::new(), LARGE_BYTES_MAX).await
    }

    /// A `POST` whose answer may be large; the body of a 200.
    pub async fn post_large(&self, path: &str, body: Bytes) -> Result<Bytes, EngineError> {
        self.large(Method::POST, path, body, POLLED_BYTES_MAX).await
    }

    async fn large(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        bytes_max: usize,
    ) -> Result<Bytes, EngineError> {
        let response = self.send(method.clone(), path, body).await?;
        let status = response.status();
        let body = response.into_body().whole(bytes_max).await;
        let body = body.map_err(|error| self.connection(error.reason))?;
        if status == StatusCode::OK {
            Ok(body)
        } else {
            Err(self.protocol(format!("{method} {path} answered {status}")))
        }
    }

    async fn whole_body(&self, response: Response<ReplyBody>) -> Result<Bytes, EngineError> {
        let body = response.into_body().whole(ANSWER_BYTES_MAX).await;
        body.map_err(|error| self.connection(error.reason))
    }

    /// Asks the worker who it is.
    pub async fn describe(&self) -> Result<WorkerDescription, EngineError> {
        let body = self.get("/kvasir/worker").await?;
        serde_json::from_slice(&body).map_err(|error| self.protocol(error))
    }

    /// Whether the worker says that it is well.
    pub async fn is_healthy(&self) -> bool {
        self.get("/health").await.is_ok()
    }

    /// Asks how many tokens a prompt has. What the engine refuses comes back as [`EngineError::Refused`], with its status:
    /// 404 when it has no such path.
    pub async fn count_tokens(&self, how: TokenCount, body: Bytes) -> Result<usize, EngineError> {
        let path = how.path();
        let response = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        if status != StatusCode::OK {
            return Err(EngineError::Refused(refusal(status, &body)));
        }
        let counted: Counted =
            serde_json::from_slice(&body).map_err(|error| self.protocol(format!("POST {path}: {error}")))?;
        let count = match how {
            TokenCount::Tokenize => counted.count,
            TokenCount::Messages => counted.input_tokens,
        };
        count.ok_or_else(|| self.protocol(format!("POST {path} answered without a count")))
    }

    /// Starts a completion of `prompt`; `fields` is the rest of the request body, `headers` go with it. The prompt is written behind
    /// the fields, since a tree of thousands of JSON numbers would cost more than all the rest.
    pub async fn complete(
        &self,
        request_id: &str,
        headers: HeaderMap,
        fields: &Map<String, Value>,
        prompt: &[u32],
    ) -> Result<CompletionStream, EngineError> {
        let mut body = serde_json::to_vec(fields).map_err(|error| self.protocol(error))?;
        body.pop();
        body.extend_from_slice(if fields.is_empty() { b"\"prompt\":" } else { b",\"prompt\":" });
        serde_json::to_writer(&mut body, prompt).map_err(|error| self.protocol(error))?;
        body.push(b'}');
        let response =
            self.send_with(Method::POST, "/v1/completions", Some(request_id), headers, body.into()).await?;
        let status = response.status();
        if status != StatusCode::OK {
            let body = self.whole_body(response).await?;
            return Err(EngineError::Refused(refusal(status, &body)));
        }
        Ok(CompletionStream {
            worker: self.base().to_owned(),
            body: response.into_body(),
            buffer: BytesMut::with_capacity(4096),
            ended: false,
        })
    }
}

/// The number in an answer about a prompt's tokens. The tokens themselves are skipped by the parser.
#[derive(Deserialize)]
struct Counted {
    count: Option<usize>,
    input_tokens: Option<usize>,
}

/// The engine's own error, in our shape.
fn refusal(status: StatusCode, body: &[u8]) -> ApiError {
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    // vLLM answered with the fields at the top before it nested them under `error`.
    let error = if parsed["error"].is_object() { &parsed["error"] } else { &parsed };
    let message =
        error["message"].as_str().map_or_else(|| format!("the engine answered {status}"), str::to_owned);
    ApiError {
        status,
        message,
        param: error["param"].as_str().map(str::to_owned),
        code: None,
        retry_after_seconds: None,
    }
}

/// The pieces of one completion, as they come. Dropping it cancels the completion.
#[derive(Debug)]
pub struct CompletionStream {
    worker: String,
    body: ReplyBody,
    buffer: BytesMut,
    ended: bool,
}

impl CompletionStream {
    /// The next piece; `None` after the engine's `[DONE]`. A stream that just stops is an error.
    pub async fn next(&mut self) -> Result<Option<CompletionPiece>, EngineError> {
        loop {
            while let Some(event) = take_event(&mut self.buffer) {
                if event == "[DONE]" {
                    self.ended = true;
                    // The end of the body is usually here already: the connection can be used again.
                    let _end = self.body.frame().now_or_never();
                    return Ok(None);
                }
                if !event.is_empty() {
                    return parse_piece(&event).map(Some).map_err(|reason| self.protocol(reason));
                }
            }
            if self.ended {
                return Ok(None);
            }
            if self.buffer.len() > EVENT_BYTES_MAX {
                return Err(self.protocol("an event without end".to_owned()));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.buffer.extend_from_slice(data);
                    }
                }
                Some(Err(error)) => return Err(self.connection(error.reason)),
                None => return Err(self.connection("the stream ended too early".to_owned())),
            }
        }
    }

    fn protocol(&self, reason: String) -> EngineError {
        EngineError::Protocol { worker: self.worker.clone(), reason }
    }

    fn connection(&self, reason: String) -> EngineError {
        EngineError::Connection { worker: self.worker.clone(), reason }
    }
}

/// Takes one server-sent event off the buffer: the text behind `data:`, possibly empty (a comment).
fn take_event(buffer: &mut BytesMut) -> Option<String> {
    let (end, separator) = buffer.windows(2).enumerate().find_map(|(at, pair)| match pair {
        b"\n\n" => Some((at, 2)),
        b"\r\n" if buffer[at..].starts_with(b"\r\n\r\n") => Some((at, 4)),
        _ => None,
    })?;
    let event = buffer.split_to(end);
    buffer.advance(separator);
    let mut data = String::new();
    for line in event[..].split(|&byte| byte == b'\n') {
        if let Some(rest) = line.strip_prefix(b"data:") {
            let rest = rest.strip_prefix(b" ").unwrap_or(rest);
            data.push_str(String::from_utf8_lossy(rest).trim_end_matches('\r'));
        }
    }
    Some(data)
}

/// The parts of an event that count; everything else is skipped by the parser.
#[derive(Deserialize, Default)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<EventUsage>,
    error: Option<Value>,
}

#[derive(Deserialize, Default)]
struct Choice {
    #[serde(default)]
    text: String,
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Logprobs {
    #[serde(default)]
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Option<Vec<Option<HashMap<String, f32>>>>,
}

#[derive(Deserialize)]
struct EventUsage {
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<usize>,
}

fn parse_piece(event: &str) -> Result<CompletionPiece, String> {
    let event: Event =
        serde_json::from_str(event).map_err(|error| format!("an event is not understood: {error}"))?;
    if let Some(error) = event.error {
        return Err(format!("the engine failed mid-stream: {error}"));
    }
    let cached_tokens = event.usage.and_then(|usage| usage.prompt_tokens_details?.cached_tokens);
    let choice = event.choices.into_iter().next().unwrap_or_default();
    Ok(CompletionPiece {
        token_ids: choice.token_ids.unwrap_or_default(),
        text: choice.text,
        logprobs: choice.logprobs.map(pairs).unwrap_or_default(),
        finish: choice.finish_reason.as_deref().map(Finish::from_name),
        cached_tokens,
    })
}

/// Per token: its log-probability, and the alternatives by falling log-probability.
fn pairs(logprobs: Logprobs) -> Vec<(f32, Vec<(u32, f32)>)> {
    let mut tops = logprobs.top_logprobs.unwrap_or_default().into_iter();
    let chosen = logprobs.token_logprobs.into_iter();
    chosen
        .map(|logprob| {
            let named = tops.next().flatten().unwrap_or_default().into_iter();
            let mut top: Vec<(u32, f32)> = named
                .filter_map(|(name, value)| Some((name.strip_prefix("token_id:")?.parse().ok()?, value)))
                .collect();
            top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            (logprob.unwrap_or(0.0), top)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_cut_wherever_the_network_cuts() {
        let stream = b"data: {\"a\":1}\n\n: comment\n\ndata: x\r\n\r\ndata:[DONE]\n\n";
        for cut in 0..stream.len() {
            let mut buffer = BytesMut::new();
            let mut events = Vec::new();
            for part in [&stream[..cut], &stream[cut..]] {
                buffer.extend_from_slice(part);
                events.extend(std::iter::from_fn(|| take_event(&mut buffer)));
            }
            assert_eq!(events, ["{\"a\":1}", "", "x", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn a_piece_of_vllm_is_understood() {
        let event = r#"{"id":"cmpl-1","choices":[{"index":0,"text":"ab","token_ids":[5,6],"finish_reason":"length",
            "logprobs":{"token_logprobs":[-0.5,-1.0],"tokens":["token_id:5","token_id:6"],
            "top_logprobs":[{"token_id:5":-0.5,"token_id:9":-0.25},{"token_id:6":-1.0}],"text_offset":[0,1]}}],
            "usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let piece = parse_piece(event).expect("parses");
        assert_eq!(piece.token_ids, [5, 6]);
        assert_eq!(piece.logprobs[0], (-0.5, vec![(9, -0.25), (5, -0.5)]));
        assert_eq!(piece.finish, Some(Finish::Length));
        assert_eq!(piece.cached_tokens, Some(4));
        assert!(parse_piece(r#"{"error":{"message":"boom"}}"#).is_err());
    }
}
