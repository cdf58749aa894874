//! One line of the audit log.
//!
//! serde_json escapes quotes, backslashes and control characters, so that no text of a client can end a
//! line or a string; and texts are truncated, so that a line has a bounded length. All other characters
//! that are not printable ASCII are written as `\uXXXX`: otherwise a terminal, a viewer that splits at
//! U+2028 or a reader that interprets DEL or a direction mark could be attacked through the log.

use std::fmt::Write as _;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Serialize, Serializer};

/// Longest text in a line, in bytes before escaping.
const TEXT_BYTES_MAX: usize = 256;
/// Initial capacity for a typical line.
const LINE_BYTES: usize = 512;

/// Fields of a request's audit line. Missing values are left out of the line.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct AuditRecord<'a> {
    /// Arrival time in Unix nanoseconds; RFC 3339 in the line.
    #[serde(rename = "time", serialize_with = "as_time")]
    pub time_unix_ns: u64,
    /// The gateway's id of the request.
    #[serde(serialize_with = "as_text")]
    pub request_id: &'a str,
    /// Name of the key or subject of the token.
    #[serde(serialize_with = "as_optional_text", skip_serializing_if = "Option::is_none")]
    pub key: Option<&'a str>,
    /// Tenant that is charged.
    #[serde(serialize_with = "as_optional_text", skip_serializing_if = "Option::is_none")]
    pub tenant: Option<&'a str>,
    /// The client's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<std::net::IpAddr>,
    /// The model asked for.
    #[serde(serialize_with = "as_optional_text", skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
    /// The surface: `chat`, `completions`, `messages`.
    #[serde(serialize_with = "as_text")]
    pub surface: &'a str,
    /// HTTP status.
    pub status: u16,
    /// Code of the refusal or failure, not a text.
    #[serde(serialize_with = "as_optional_text", skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Cached tokens of the prompt.
    pub cached_tokens: u64,
    /// Tokens of the answer.
    pub answer_tokens: u64,
    /// The worker that answered.
    #[serde(serialize_with = "as_optional_text", skip_serializing_if = "Option::is_none")]
    pub worker: Option<&'a str>,
    /// Time in the queue before the workers.
    #[serde(rename = "queued_ms", serialize_with = "as_ms")]
    pub queued: Duration,
    /// Time to the first token.
    #[serde(
        rename = "first_token_ms",
        serialize_with = "as_optional_ms",
        skip_serializing_if = "Option::is_none"
    )]
    pub first_token: Option<Duration>,
    /// Time to the end of the answer.
    #[serde(rename = "total_ms", serialize_with = "as_ms")]
    pub total: Duration,
}

impl AuditRecord<'_> {
    /// Returns the line, newline included.
    #[must_use]
    pub fn to_line(&self) -> String {
        let mut bytes = Vec::with_capacity(LINE_BYTES);
        // Writing texts and numbers to memory cannot fail; if it did, the line would say so.
        let text = match serde_json::to_writer(&mut bytes, self) {
            Ok(()) => String::from_utf8_lossy(&bytes),
            Err(_) => "{\"error\":\"unwritable\"}".into(),
        };
        let mut line = String::with_capacity(text.len() + 1);
        for letter in text.chars() {
            if letter.is_ascii_graphic() || letter == ' ' {
                line.push(letter);
                continue;
            }
            // Such characters only occur inside strings: the rest of the line is printable ASCII.
            for unit in letter.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(line, "\\u{unit:04x}");
            }
        }
        line.push('\n');
        line
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

fn as_text<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(text))
}

fn as_optional_text<S: Serializer>(text: &Option<&str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(text.unwrap_or_default()))
}

fn as_time<S: Serializer>(ns: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    match Timestamp::from_nanosecond(i128::from(*ns)) {
        Ok(time) => serializer.collect_str(&format_args!("{time:.6}")),
        Err(_) => serializer.serialize_u64(*ns),
    }
}

/// Milliseconds with three decimals.
fn as_ms<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_micros() as f64 / 1e3)
}

fn as_optional_ms<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    as_ms(&duration.unwrap_or_default(), serializer)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_line_has_everything_and_leaves_out_what_is_missing() {
        let record = AuditRecord {
            time_unix_ns: 1_800_000_000_123_456_789,
            request_id: "chatcmpl-1",
            key: Some("app"),
            tenant: Some("acme"),
            client: Some([10, 0, 0, 1].into()),
            model: Some("small"),
            surface: "chat",
            status: 200,
            reason: None,
            prompt_tokens: 10,
            cached_tokens: 8,
            answer_tokens: 3,
            worker: Some("w0"),
            queued: Duration::from_micros(1500),
            first_token: Some(Duration::from_millis(20)),
            total: Duration::from_millis(70),
        };
        let expected = concat!(
            r#"{"time":"2027-01-15T08:00:00.123456Z","request_id":"chatcmpl-1","key":"app","tenant":"acme","#,
            r#""client":"10.0.0.1","model":"small","surface":"chat","status":200,"prompt_tokens":10,"#,
            r#""cached_tokens":8,"answer_tokens":3,"worker":"w0","queued_ms":1.5,"first_token_ms":20.0,"total_ms":70.0}"#,
            "\n"
        );
        assert_eq!(record.to_line(), expected);
        let least = AuditRecord { surface: "chat", status: 401, ..AuditRecord::default() }.to_line();
        assert!(!least.contains("key") && !least.contains("null") && least.contains("1970"), "{least}");
    }

    #[test]
    fn no_text_breaks_out_of_its_string() {
        let texts = [
            "a\nb",
            "a\r\nb",
            "\",\"status\":200,\"x\":\"",
            "\\",
            "\\\"",
            "\u{0}\u{1b}[2J\u{7f}\u{85}",
            "\u{2028}\u{2029}\u{202e}",
            "ü 漢 😀",
        ];
        for text in texts {
            let record = AuditRecord {
                request_id: text,
                key: Some(text),
                model: Some(text),
                worker: Some(text),
                surface: text,
                status: 400,
                ..AuditRecord::default()
            };
            let line = record.to_line();
            let body = line.strip_suffix('\n').expect("a newline at its end");
            assert!(body.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{body:?}");
            let parsed: Value = serde_json::from_str(body).expect("JSON");
            for field in ["request_id", "key", "model", "worker", "surface"] {
                assert_eq!(parsed[field], text);
            }
            assert_eq!(parsed["status"], 400);
        }
    }

    #[test]
    fn lines_are_bounded() {
        let text = "😀".repeat(10_000);
        let record = AuditRecord {
            request_id: &text,
            key: Some(&text),
            tenant: Some(&text),
            client: Some(std::net::Ipv6Addr::from([255; 16]).into()),
            model: Some(&text),
            surface: &text,
            reason: Some(&text),
            worker: Some(&text),
            time_unix_ns: u64::MAX,
            ..AuditRecord::default()
        };
        let line = record.to_line();
        assert!(line.len() < 8 * 3 * TEXT_BYTES_MAX + LINE_BYTES, "{}", line.len());
        assert!(serde_json::from_str::<Value>(&line).is_ok());
    }
}
