//! Errors as the API reports them.

use axum_core::body::Body;
use axum_core::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use serde_json::json;

use crate::{Surface, anthropic};

/// An error in the JSON format of OpenAI's API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Message for people.
    pub message: String,
    /// The offending parameter.
    pub param: Option<String>,
    /// A short code for programs.
    pub code: Option<&'static str>,
    /// Seconds after which the request may be retried, if known.
    pub retry_after_seconds: Option<u64>,
}

impl ApiError {
    /// Returns an error with any status.
    #[must_use]
    pub fn new(status: StatusCode, message: impl Into<String>, code: &'static str) -> Self {
        Self { status, message: message.into(), param: None, code: Some(code), retry_after_seconds: None }
    }

    /// 400: a parameter has a bad value.
    #[must_use]
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: Some(param.to_owned()),
            code: Some("invalid_value"),
            retry_after_seconds: None,
        }
    }

    /// 400: the body is not a request.
    #[must_use]
    pub fn malformed(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: None,
            code: Some("malformed_body"),
            retry_after_seconds: None,
        }
    }

    /// 400: the prompt exceeds the context length.
    #[must_use]
    pub fn context_length(param: &str, prompt: usize, context: usize) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: format!(
                "This model's maximum context length is {context} tokens, and the prompt has {prompt} (at least one more must be generated)."
            ),
            param: Some(param.to_owned()),
            code: Some("context_length_exceeded"),
            retry_after_seconds: None,
        }
    }

    /// 400: a valid feature that is not supported here.
    pub(crate) fn unsupported(param: &str, what: &str) -> Self {
        Self::invalid(param, format!("{what} is not supported (`{param}`)."))
    }

    /// 404: no such model.
    #[must_use]
    pub fn no_such_model(model: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            message: format!("The model `{model}` does not exist."),
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            retry_after_seconds: None,
        }
    }

    /// 503: no worker is available.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: message.into(),
            param: None,
            code: Some("unavailable"),
            retry_after_seconds: None,
        }
    }

    /// 500: a bug in the gateway.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message: message.into(),
            param: None,
            code: Some("internal_error"),
            retry_after_seconds: None,
        }
    }

    /// The body of the answer.
    #[must_use]
    pub fn to_json(&self) -> String {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            503 => "service_unavailable_error",
            _ => "server_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
            .to_string()
    }
}

impl ApiError {
    /// Returns the error as a server-sent event.
    #[must_use]
    pub fn to_event(&self) -> Bytes {
        format!("data: {}\n\n", self.to_json()).into()
    }

    /// Sets the seconds after which the request may be retried.
    #[must_use]
    pub fn retry_after(mut self, seconds: Option<u64>) -> Self {
        self.retry_after_seconds = seconds;
        self
    }

    /// Converts the error to the response format of a surface.
    #[must_use]
    pub fn respond_at(self, surface: Surface) -> Response {
        let body =
            surface.is_anthropic().then(|| anthropic::error_body(self.status, &self.message).to_string());
        let mut response = self.into_response();
        if let Some(body) = body {
            *response.body_mut() = Body::from(body);
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.to_json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let is_busy = self.status == StatusCode::SERVICE_UNAVAILABLE;
        if let Some(seconds) = self.retry_after_seconds.or(is_busy.then_some(1)) {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        response
    }
}
