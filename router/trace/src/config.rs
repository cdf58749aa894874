//! Settings of the trace export. One conversion path: a reader of configuration files makes this struct.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};

use crate::TraceError;

/// Largest [`TraceConfig::queue_max`].
pub const QUEUE_MAX_LIMIT: usize = 1 << 20;
/// Range of [`TraceConfig::timeout`].
const TIMEOUTS: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(300);

/// Settings of the trace export.
#[derive(Clone)]
pub struct TraceConfig {
    /// The collector's OTLP gRPC address: `http://collector:4317`, or `https://…`.
    pub endpoint: String,
    /// `service.name` of the resource.
    pub service_name: String,
    /// `service.instance.id` of the resource, which identifies the gateway.
    pub instance: String,
    /// Share of the requests without a caller's decision that is traced, from 0 to 1.
    pub sample_ratio: f64,
    /// Headers of each export, such as `authorization`. The standard variable `OTEL_EXPORTER_OTLP_HEADERS` adds further ones.
    pub headers: Vec<(String, String)>,
    /// Certificate authority (PEM) that is trusted in addition to those of the system.
    pub authority: Option<Vec<u8>>,
    /// Finished traces that may wait for the exporter; further ones are dropped. From 1 to [`QUEUE_MAX_LIMIT`]. A usual trace
    /// holds about 4 KiB, so the default is 16 MiB at most while a collector is unreachable.
    pub queue_max: usize,
    /// Longest time for one batch, all its retries included. From 10 ms to 5 minutes.
    pub timeout: Duration,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self {
            endpoint: "http://127.0.0.1:4317".to_owned(),
            service_name: "kvasir".to_owned(),
            instance: String::new(),
            sample_ratio: 0.01,
            headers: Vec::new(),
            authority: None,
            queue_max: 4096,
            timeout: Duration::from_secs(10),
        }
    }
}

/// Leaves out the headers' values.
impl fmt::Debug for TraceConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        out.debug_struct("TraceConfig")
            .field("endpoint", &self.endpoint)
            .field("service_name", &self.service_name)
            .field("instance", &self.instance)
            .field("sample_ratio", &self.sample_ratio)
            .field("headers", &headers)
            .field("queue_max", &self.queue_max)
            .field("timeout", &self.timeout)
            .finish()
    }
}

fn bad<T>(what: &'static str, reason: impl Into<String>) -> Result<T, TraceError> {
    Err(TraceError::Config { what, reason: reason.into() })
}

impl TraceConfig {
    /// Checks every value and returns the headers of exports.
    pub(crate) fn check(&self) -> Result<HeaderMap, TraceError> {
        check_endpoint(&self.endpoint)?;
        if self.service_name.is_empty() {
            return bad("service_name", "is empty");
        }
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            return bad("sample_ratio", format!("{} is not between 0 and 1", self.sample_ratio));
        }
        if !(1..=QUEUE_MAX_LIMIT).contains(&self.queue_max) {
            return bad("queue_max", format!("{} is not between 1 and {QUEUE_MAX_LIMIT}", self.queue_max));
        }
        if !TIMEOUTS.contains(&self.timeout) {
            return bad("timeout", format!("{:?} is not between 10 ms and 5 minutes", self.timeout));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let Ok(key) = HeaderName::from_str(name) else {
                return bad("headers", format!("`{name}` is not a header's name"));
            };
            let Ok(mut value) = HeaderValue::from_str(value) else {
                return bad("headers", format!("the value of `{name}` cannot be sent"));
            };
            value.set_sensitive(true);
            headers.append(key, value);
        }
        Ok(headers)
    }
}

fn check_endpoint(endpoint: &str) -> Result<(), TraceError> {
    let Ok(uri) = Uri::from_str(endpoint) else {
        return bad("endpoint", format!("`{endpoint}` is not an address"));
    };
    match uri.scheme_str() {
        Some("http" | "https") => {}
        _ => return bad("endpoint", format!("`{endpoint}` does not start with http:// or https://")),
    }
    if !matches!(uri.path(), "" | "/") {
        return bad("endpoint", "has a path: this is OTLP over gRPC, usually port 4317, which has none");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_at_the_start() {
        let good = TraceConfig::default();
        assert!(good.check().is_ok());
        let bad: [(&str, TraceConfig); 12] = [
            ("endpoint", TraceConfig { endpoint: "collector:4317".into(), ..good.clone() }),
            ("endpoint", TraceConfig { endpoint: String::new(), ..good.clone() }),
            ("endpoint", TraceConfig { endpoint: "unix:///tmp/x".into(), ..good.clone() }),
            ("endpoint", TraceConfig { endpoint: "http://c:4318/v1/traces".into(), ..good.clone() }),
            ("service_name", TraceConfig { service_name: String::new(), ..good.clone() }),
            ("sample_ratio", TraceConfig { sample_ratio: 1.1, ..good.clone() }),
            ("sample_ratio", TraceConfig { sample_ratio: f64::NAN, ..good.clone() }),
            ("queue_max", TraceConfig { queue_max: 0, ..good.clone() }),
            ("queue_max", TraceConfig { queue_max: usize::MAX, ..good.clone() }),
            ("timeout", TraceConfig { timeout: Duration::ZERO, ..good.clone() }),
            ("headers", TraceConfig { headers: vec![("a b".into(), "x".into())], ..good.clone() }),
            ("headers", TraceConfig { headers: vec![("a".into(), "x\n".into())], ..good.clone() }),
        ];
        for (expected, config) in bad {
            match config.check() {
                Err(TraceError::Config { what, .. }) => assert_eq!(what, expected, "{config:?}"),
                other => panic!("{config:?}: {other:?}"),
            }
        }
        let tls = TraceConfig { endpoint: "https://collector:4317".into(), ..good };
        assert!(tls.check().is_ok());
    }

    #[test]
    fn a_secret_is_shown_nowhere() {
        let headers = vec![("authorization".to_owned(), "Bearer hush".to_owned())];
        let config = TraceConfig { headers, ..TraceConfig::default() };
        let sent = config.check().expect("good");
        assert_eq!(sent["authorization"], "Bearer hush");
        assert!(!format!("{config:?} {sent:?}").contains("hush"));
    }
}
