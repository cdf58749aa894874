//! Errors in the shape that Anthropic's clients understand.
//!
//! Source: <https://docs.anthropic.com/en/api/errors>.

use http::StatusCode;
use serde_json::{Value, json};

/// The body of an answer with this status.
#[must_use]
pub fn error_body(status: StatusCode, message: &str) -> Value {
    json!({ "type": "error", "error": { "type": kind(status.as_u16()), "message": message } })
}

fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        409 => "conflict_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        503 | 529 => "overloaded_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_type() {
        let cases = [
            (400, "invalid_request_error"),
            (401, "authentication_error"),
            (404, "not_found_error"),
            (405, "invalid_request_error"),
            (413, "request_too_large"),
            (422, "invalid_request_error"),
            (429, "rate_limit_error"),
            (500, "api_error"),
            (501, "api_error"),
            (503, "overloaded_error"),
            (529, "overloaded_error"),
        ];
        for (status, wanted) in cases {
            let body = error_body(StatusCode::from_u16(status).expect("a status"), "m");
            assert_eq!(body, json!({ "type": "error", "error": { "type": wanted, "message": "m" } }));
        }
    }
}
