//! The backend that answers completions: any server of OpenAI's API over HTTP types.

use std::future::Future;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};

/// An answer in the form of OpenAI's API: JSON, server-sent events, or an error with its status.
pub type Answer = http::Response<Body>;

/// A completion that a client asked for.
#[derive(Debug, Clone)]
pub struct Call {
    /// Headers made of the call's metadata ([`crate::FORWARDED_METADATA`]).
    pub headers: HeaderMap,
    /// The body of `POST /v1/completions`.
    pub body: Bytes,
}

impl Call {
    /// Converts the call to the equivalent HTTP request.
    #[must_use]
    pub fn into_request(self) -> Request<Body> {
        let mut request = Request::new(Body::from(self.body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static("/v1/completions");
        *request.headers_mut() = self.headers;
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        request
    }
}

/// Answers translated calls. Errors are answers with their HTTP status and OpenAI's error object.
///
/// A future or a body that is dropped before its end means that the client has disconnected or its deadline
/// has passed.
pub trait Backend: Send + Sync + 'static {
    /// Whether the server runs at all.
    fn is_live(&self) -> bool;

    /// Whether the server can answer completions now.
    fn is_ready(&self) -> bool;

    /// Whether a client with these headers may send anything at all; asked before its message is read. The error is
    /// OpenAI's, with its HTTP status.
    fn admits(&self, headers: &HeaderMap) -> Result<(), (http::StatusCode, String)>;

    /// The answer of `GET /v1/models`, for a client with these headers.
    fn models(&self, headers: HeaderMap) -> impl Future<Output = Answer> + Send;

    /// The answer of `POST /v1/completions`: server-sent events if the body says `"stream": true`.
    fn completions(&self, call: Call) -> impl Future<Output = Answer> + Send;
}
