//! HTTP client for a worker's, or another gateway's, description, health and metrics.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use router_openai::ApiError;
use router_tls::ClientTls;
use serde::Deserialize;
use serde_json::Value;

use crate::dialect::TokenCount;
use crate::handoff::DataPlaneAddress;
use crate::upstream::{Call, ReplyBody, Upstream};

/// Largest answer to [`EngineClient::get_large`]: a snapshot of some 37 million blocks.
const LARGE_BYTES_MAX: usize = 1 << 30;
/// Largest answer to [`EngineClient::post_large`]: the events since an engine's last poll.
const POLLED_BYTES_MAX: usize = 64 << 20;
/// Largest answer to a query about the worker itself.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Failure of a query to a worker.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The worker could not be reached, or the connection broke.
    #[error("{worker}: {reason}")]
    Connection {
        /// The worker's URL.
        worker: String,
        /// Text of the failure.
        reason: String,
    },
    /// The worker refused the request; the client should see this error.
    #[error("{0}")]
    Refused(ApiError),
    /// The answer does not follow the worker's protocol.
    #[error("{worker}: {reason}")]
    Protocol {
        /// The worker's URL.
        worker: String,
        /// Text of the protocol error.
        reason: String,
    },
}

/// Answer of the reference engine to `GET /kvasir/worker`.
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
    /// KV blocks in the worker's host memory and disk tiers; 0: no such tier.
    #[serde(default)]
    pub lower_blocks: [usize; 2],
    /// Number of this run of the process.
    pub instance: u64,
    /// Endpoint at which KV events are published; `None`: none are published.
    pub events: Option<String>,
    /// Endpoint from which missed events can be fetched.
    pub replay: Option<String>,
    /// Addresses of the worker's data plane.
    pub data_plane: DataPlaneAddress,
}

/// A client for one worker. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EngineClient {
    upstream: Arc<Upstream>,
    /// Secret sent to other gateways.
    peer_key: Option<HeaderValue>,
}

impl EngineClient {
    /// A client for the worker at `base` (`http://host:port`, or `https://` with `tls`).
    #[must_use]
    pub fn new(base: &str, tls: Option<&Arc<ClientTls>>) -> Self {
        Self::over(&Upstream::new(base, tls))
    }

    /// Returns a client that uses the connections of `upstream`.
    #[must_use]
    pub fn over(upstream: &Arc<Upstream>) -> Self {
        Self { upstream: Arc::clone(upstream), peer_key: None }
    }

    /// Sends this key with every request, to authenticate to another gateway.
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
        let path: Uri = path.parse().map_err(|error| self.protocol(error))?;
        let mut headers = HeaderMap::with_capacity(4);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &self.peer_key {
            headers.insert(HeaderName::from_static("x-kvasir-peer"), key.clone());
        }
        let call = Call { method, path, headers, body, once: false };
        self.upstream.send(&call).await.map_err(|error| self.connection(error.reason))
    }

    /// Sends a `GET` with a small answer and returns the body of a 200.
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

    /// As [`Self::get`], but `None` for a 4xx: the path does not exist, or not for this gateway.
    pub async fn get_if_present(&self, path: &str) -> Result<Option<Bytes>, EngineError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        match status {
            StatusCode::OK => Ok(Some(body)),
            _ if status.is_client_error() => Ok(None),
            _ => Err(self.protocol(format!("GET {path} answered {status}"))),
        }
    }

    /// Sends a `GET` for a path that not every release has. Returns the body of a 200, and `None` for any other answer except
    /// temporary ones (overload, a proxy without its engine), which are errors.
    pub async fn get_optional(&self, path: &str) -> Result<Option<Bytes>, EngineError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        match status {
            StatusCode::OK => Ok(Some(body)),
            StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_EARLY
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => Err(self.protocol(format!("GET {path} answered {status}"))),
            _ => Ok(None),
        }
    }

    /// Sends a `GET` and returns the status only.
    pub async fn status(&self, path: &str) -> Result<StatusCode, EngineError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let status = response.status();
        self.whole_body(response).await.map(|_| status)
    }

    /// Sends a small request and returns the body of a 2xx, or the text of the refusal.
    pub async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, EngineError> {
        let response = self.send(method, path, body).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        if status.is_success() {
            return Ok(body);
        }
        let told: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        Err(match told["error"]["message"].as_str() {
            Some(message) => EngineError::Refused(ApiError::new(status, message, "refused")),
            None => self.protocol(format!("{path} answered {status}")),
        })
    }

    /// Sends a `POST` with a small answer and returns the body of a 200.
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

    /// Sends a `GET` with a large answer and returns the body of a 200.
    pub async fn get_large(&self, path: &str) -> Result<Bytes, EngineError> {
        self.large(Method::GET, path, Bytes::new(), LARGE_BYTES_MAX).await
    }

    /// Sends a `POST` with a large answer and returns the body of a 200.
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

    /// Requests the worker's description.
    pub async fn describe(&self) -> Result<WorkerDescription, EngineError> {
        let body = self.get("/kvasir/worker").await?;
        serde_json::from_slice(&body).map_err(|error| self.protocol(error))
    }

    /// Whether the worker's health check succeeds.
    pub async fn is_healthy(&self) -> bool {
        self.get("/health").await.is_ok()
    }

    /// Requests the number of tokens of a prompt. An engine's refusal is [`EngineError::Refused`] with its status: 404 when it
    /// has no such path.
    pub async fn count_tokens(&self, how: TokenCount, body: Bytes) -> Result<usize, EngineError> {
        let path = how.path();
        let response = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let body = self.whole_body(response).await?;
        if status != StatusCode::OK {
            return Err(EngineError::Refused(refusal(status, &body)));
        }
        let counted: TokenCountReply =
            serde_json::from_slice(&body).map_err(|error| self.protocol(format!("POST {path}: {error}")))?;
        let count = match how {
            TokenCount::Tokenize => counted.count,
            TokenCount::Messages => counted.input_tokens,
        };
        count.ok_or_else(|| self.protocol(format!("POST {path} answered without a count")))
    }
}

/// The number in an answer about a prompt's tokens. The tokens themselves are skipped by the parser.
#[derive(Deserialize)]
struct TokenCountReply {
    count: Option<usize>,
    input_tokens: Option<usize>,
}

/// An engine's error as an error of the API.
#[must_use]
pub fn refusal(status: StatusCode, body: &[u8]) -> ApiError {
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    // Older releases of vLLM have the fields at the top level instead of under `error`.
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
