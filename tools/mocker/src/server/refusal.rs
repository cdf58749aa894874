//! Errors in the shapes of the engines.

use http::StatusCode;
use serde_json::json;

use crate::Dialect;

/// The error with which a request is refused.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
}

impl Refusal {
    /// 400: a value is invalid.
    pub(crate) fn bad(param: &str, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            message: message.into(),
            param: Some(param.to_owned()),
        }
    }

    /// 400: the body does not have the form of the surface.
    pub(crate) fn malformed(error: &serde_json::Error) -> Self {
        let text = error.to_string();
        let field = text.split('`').nth(1).filter(|_| text.starts_with('`'));
        let location = field.map_or_else(|| "body".to_owned(), |field| format!("body.{field}"));
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: format!("1 validation error:\n  {{'loc': '{location}', 'msg': '{text}'}}"),
            param: Some(location),
        }
    }

    /// 400: a field is missing.
    pub(crate) fn missing(field: &str) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: format!(
                "1 validation error:\n  {{'type': 'missing', 'loc': 'body.{field}', 'msg': 'Field required'}}"
            ),
            param: Some(format!("body.{field}")),
        }
    }

    /// 404: the request names another model.
    pub(crate) fn no_such_model(asked: &str, model: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            message: format!("The model `{asked}` does not exist. Valid aliases: {model}."),
            param: Some("model".to_owned()),
        }
    }

    /// 408: the body did not arrive in time.
    pub(crate) fn too_slow() -> Self {
        Self {
            status: StatusCode::REQUEST_TIMEOUT,
            kind: "RequestTimeoutError",
            message: "The request body did not arrive in time.".to_owned(),
            param: None,
        }
    }

    /// 413: the body is too large.
    pub(crate) fn too_large(bytes_max: usize) -> Self {
        Self {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            kind: "RequestEntityTooLargeError",
            message: format!("The request body is larger than {bytes_max} bytes."),
            param: None,
        }
    }

    /// 500: the engine failed.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            message: message.into(),
            param: None,
        }
    }

    /// 503: too many requests.
    pub(crate) fn overloaded() -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: "ServiceUnavailableError",
            message: "The request queue is full, try again later.".to_owned(),
            param: None,
        }
    }

    /// The body of the answer. `/v1/messages` has a shape of its own, but not for malformed bodies.
    pub(crate) fn to_json(&self, dialect: Dialect, is_anthropic: bool) -> String {
        let code = self.status.as_u16();
        match dialect {
            Dialect::Vllm if is_anthropic && self.kind != "Bad Request" => {
                json!({ "type": "error", "error": { "type": self.kind, "message": self.message } })
            }
            Dialect::Vllm => json!({ "error": {
                "message": self.message, "type": self.kind, "param": self.param, "code": code,
            } }),
            Dialect::Sglang => json!({
                "object": "error", "message": self.message, "type": self.kind, "param": self.param, "code": code,
            }),
        }
        .to_string()
    }
}
