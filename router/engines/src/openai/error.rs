use http::StatusCode;
use serde_json::json;

/// An error in the shape that OpenAI clients understand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What is wrong, for people.
    pub message: String,
    /// The offending parameter.
    pub param: Option<String>,
    /// A short code for programs.
    pub code: Option<&'static str>,
    /// Seconds after which it may be tried again, if that is known.
    pub retry_after_seconds: Option<u64>,
}

impl ApiError {
    /// Any status.
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

    /// 400: the body is not a request at all.
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

    /// 400: the prompt does not fit.
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

    /// 503: nobody can serve this now.
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

    /// 500: our fault.
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
