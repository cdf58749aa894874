//! Errors of a request, and their gRPC statuses.

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::Value;
use tonic::{Code, Status};

/// Bytes of an error's body that are read.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Bytes of an error's message that are passed on.
const MESSAGE_BYTES_MAX: usize = 2 << 10;

/// Headers of an answer that become metadata of the call.
const RETURNED: [&str; 2] = ["retry-after", "x-request-id"];

/// Reason why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A tensor or a parameter is invalid.
    #[error("`{name}`: {reason}")]
    Field {
        /// Name of the tensor or the parameter.
        name: String,
        /// The requirement that it fails.
        reason: String,
    },
    /// The request as a whole is invalid.
    #[error("{0}")]
    Request(String),
    /// There is no such model or version.
    #[error("{0}")]
    NotFound(String),
    /// The backend refused.
    #[error("{message}")]
    Refused {
        /// HTTP status of the backend's answer.
        status: StatusCode,
        /// The backend's error message.
        message: String,
        /// Headers of the answer that the client may see.
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

    /// Returns a refusal without an answer of the backend.
    pub(crate) fn of(status: StatusCode, message: String) -> Self {
        Self::Refused { status, message, metadata: Box::default() }
    }

    /// Reads an error answer of the backend.
    pub(crate) async fn refused(answer: Response<Body>) -> Self {
        let (head, body) = answer.into_parts();
        let text = match Limited::new(body, ERROR_BYTES_MAX).collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(_) => bytes::Bytes::new(),
        };
        let mut message = message_of(&text).unwrap_or_else(|| format!("the server answered {}", head.status));
        // The message is sent in a header, and clients limit the size of headers.
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

/// Returns the headers of an answer that the client gets as metadata.
pub(crate) fn returned(headers: &HeaderMap) -> HeaderMap {
    let kept = RETURNED.iter().filter_map(|name| Some((*name, headers.get(*name)?.clone())));
    kept.map(|(name, value): (_, HeaderValue)| (header::HeaderName::from_static(name), value)).collect()
}

/// Returns the message of an error object, in the forms of OpenAI and the engines.
pub(crate) fn message_of(text: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(text).ok()?;
    let message = body["error"]["message"].as_str().or(body["error"].as_str()).or(body["message"].as_str());
    message.or(body["detail"].as_str()).map(str::to_owned)
}

/// Returns the gRPC code for an HTTP status of OpenAI's API.
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
