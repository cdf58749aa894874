//! What goes wrong with a request, and which gRPC status says so.

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::Value;
use tonic::{Code, Status};

/// More of an error's body is not read.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// More of an error's words is not passed on.
const MESSAGE_BYTES_MAX: usize = 2 << 10;

/// Headers of an answer that become metadata of the call.
const RETURNED: [&str; 2] = ["retry-after", "x-request-id"];

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A tensor or a parameter is not as it must be.
    #[error("`{name}`: {reason}")]
    Field {
        /// Of the tensor or the parameter.
        name: String,
        /// What it must be.
        reason: String,
    },
    /// The request as a whole is not as it must be.
    #[error("{0}")]
    Request(String),
    /// There is no such model or version.
    #[error("{0}")]
    NotFound(String),
    /// The backend refused.
    #[error("{message}")]
    Refused {
        /// With which status.
        status: StatusCode,
        /// In its words.
        message: String,
        /// Those headers of the answer that the client may see.
        metadata: Box<HeaderMap>,
    },
    /// The backend's answer cannot be used.
    #[error("the answer cannot be used: {0}")]
    Answer(String),
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// The budget of bytes is used up.
    #[error("the server holds as many bytes of requests as it may; try again")]
    Overloaded,
}

impl Error {
    pub(crate) fn field(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Field { name: name.into(), reason: reason.into() }
    }

    /// A refusal before anything was asked.
    pub(crate) fn of(status: StatusCode, message: String) -> Self {
        Self::Refused { status, message, metadata: Box::default() }
    }

    /// Reads a refusal of the backend.
    pub(crate) async fn refused(answer: Response<Body>) -> Self {
        let (head, body) = answer.into_parts();
        let text = match Limited::new(body, ERROR_BYTES_MAX).collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(_) => bytes::Bytes::new(),
        };
        let mut message = message_of(&text).unwrap_or_else(|| format!("the server answered {}", head.status));
        // It travels in a header, and clients have limits for those.
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        Self::Refused { status: head.status, message, metadata: Box::new(returned(&head.headers)) }
    }

    fn code(&self) -> Code {
        match self {
            Self::Field { .. } | Self::Request(_) => Code::InvalidArgument,
            Self::NotFound(_) => Code::NotFound,
            Self::Refused { status, .. } => code_of(*status),
            Self::Answer(_) => Code::Internal,
            Self::Deadline => Code::DeadlineExceeded,
            Self::Overloaded => Code::ResourceExhausted,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut status = Status::new(error.code(), error.to_string());
        if let Error::Refused { metadata, .. } = error {
            *status.metadata_mut() = tonic::metadata::MetadataMap::from_headers(*metadata);
        }
        status
    }
}

/// Those headers of an answer that the client sees as metadata.
pub(crate) fn returned(headers: &HeaderMap) -> HeaderMap {
    let kept = RETURNED.iter().filter_map(|name| Some((*name, headers.get(*name)?.clone())));
    kept.map(|(name, value): (_, HeaderValue)| (header::HeaderName::from_static(name), value)).collect()
}

/// The message of an error object, as OpenAI and the engines write it.
pub(crate) fn message_of(text: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(text).ok()?;
    let message = body["error"]["message"].as_str().or(body["error"].as_str()).or(body["message"].as_str());
    message.or(body["detail"].as_str()).map(str::to_owned)
}

/// The code for an HTTP status of OpenAI's surface.
fn code_of(status: StatusCode) -> Code {
    match status.as_u16() {
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        408 | 504 => Code::DeadlineExceeded,
        409 => Code::Aborted,
        413 | 429 => Code::ResourceExhausted,
        499 => Code::Cancelled,
        501 => Code::Unimplemented,
        503 => Code::Unavailable,
        400..=498 => Code::InvalidArgument,
        _ => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_every_shape() {
        let cases = [
            (r#"{"error":{"message":"a","code":400}}"#, Some("a")),
            (r#"{"error":"b"}"#, Some("b")),
            (r#"{"message":"c","code":400}"#, Some("c")),
            (r#"{"detail":"d"}"#, Some("d")),
            (r#"{}"#, None),
            ("Bad Gateway", None),
        ];
        for (body, wanted) in cases {
            assert_eq!(message_of(body.as_bytes()).as_deref(), wanted, "{body}");
        }
    }
}
