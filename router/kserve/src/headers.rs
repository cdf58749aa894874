//! Conversion of a call's metadata to HTTP headers and to a deadline.

use std::future::Future;
use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use crate::error::Error;

/// Metadata that is passed to the backend as headers, if the client sent it: credentials, the request's id,
/// the trace and the session. No other metadata is passed.
pub const FORWARDED_METADATA: [&str; 6] =
    ["authorization", "x-api-key", "x-request-id", "traceparent", "tracestate", "x-session-id"];

/// Seconds above which a deadline counts as none, since a clock cannot be set to it.
const DEADLINE_SECONDS_MAX: u64 = 365 * 24 * 3600;

/// Returns the headers for the backend.
pub(crate) fn passed_on(metadata: &MetadataMap) -> HeaderMap {
    let given = metadata.as_ref();
    let mut headers = HeaderMap::new();
    for name in FORWARDED_METADATA {
        for value in given.get_all(name) {
            headers.append(name, value.clone());
        }
    }
    headers
}

/// Returns the deadline of a call. A malformed `grpc-timeout` is ignored, as in other servers.
pub(crate) fn deadline(metadata: &MetadataMap) -> Option<Instant> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    after(timeout(text)?)
}

/// Returns the instant after `timeout`; `None` if that is beyond the clock's range.
pub(crate) fn after(timeout: Duration) -> Option<Instant> {
    (timeout.as_secs() <= DEADLINE_SECONDS_MAX).then(|| Instant::now() + timeout)
}

/// Returns the earlier of two deadlines.
pub(crate) fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// Runs work until the deadline, at which it is dropped.
pub(crate) async fn within<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Result<T, Error> {
    match deadline {
        None => Ok(work.await),
        Some(deadline) => tokio::time::timeout_at(deadline, work).await.map_err(|_| Error::Deadline),
    }
}

/// Parses `grpc-timeout`: at most eight digits and a unit.
fn timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_every_unit() {
        let cases = [
            ("2H", Some(Duration::from_secs(7200))),
            ("3M", Some(Duration::from_secs(180))),
            ("4S", Some(Duration::from_secs(4))),
            ("50m", Some(Duration::from_millis(50))),
            ("99999999u", Some(Duration::from_micros(99_999_999))),
            ("7n", Some(Duration::from_nanos(7))),
            ("100000000n", None),
            ("m", None),
            ("", None),
            ("+5S", None),
            ("5x", None),
            ("5é", None),
        ];
        for (text, wanted) in cases {
            assert_eq!(timeout(text), wanted, "{text}");
        }
    }

    #[test]
    fn only_named_metadata_is_passed_on() {
        let mut metadata = MetadataMap::new();
        metadata.insert("authorization", "Bearer a".parse().expect("a value"));
        metadata.insert("x-forwarded-for", "1.2.3.4".parse().expect("a value"));
        let headers = passed_on(&metadata);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["authorization"], "Bearer a");
    }
}
