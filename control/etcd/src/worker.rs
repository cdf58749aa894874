//! A worker as the value of a key.

use control_discovery::{Endpoint, EndpointState, Role};
use serde::{Deserialize, Serialize};

/// Largest value in bytes: the description of a worker is short.
pub(crate) const BYTES_MAX: usize = 16 << 10;

/// Value of a worker's key, as JSON. The fields are those of a file's `[[worker]]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: String,
    /// `prefill`, `decode` or `both`; `None` leaves it to the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Name of the worker's pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Name of the worker's model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Identity of the process: a different value means a different worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Version of the deployment: prefill and decode workers of different generations are not paired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// The worker is about to stop: no new requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

impl Worker {
    /// Parses the worker of a value: JSON, or its URL alone.
    ///
    /// # Errors
    ///
    /// A description of the mistake.
    pub fn parse(value: &[u8]) -> Result<Self, String> {
        if value.len() > BYTES_MAX {
            return Err(format!("the value has more than {BYTES_MAX} bytes"));
        }
        let text = std::str::from_utf8(value).map_err(|_| "the value is no text".to_owned())?.trim();
        let worker = match text.starts_with('{') {
            true => serde_json::from_str(text).map_err(|error| error.to_string())?,
            false => Self { url: text.to_owned(), ..Self::default() },
        };
        worker.check()?;
        Ok(worker)
    }

    fn check(&self) -> Result<(), String> {
        let rest = self.url.strip_prefix("http://").or_else(|| self.url.strip_prefix("https://"));
        let is_plain = |host: &str| !host.is_empty() && host.chars().all(|letter| letter.is_ascii_graphic());
        if !rest.is_some_and(is_plain) {
            return Err(format!("{:?} is not of the form http://HOST:PORT or https://HOST:PORT", self.url));
        }
        match self.role.as_deref() {
            Some(role) if Role::from_name(role).is_none() => {
                Err(format!("a role is prefill, decode or both, not {role:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the value of the worker's key.
    #[must_use]
    pub fn to_value(&self) -> String {
        // A struct of texts and a flag can always be serialised.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the worker as an endpoint of discovery.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            uid: self.uid.clone(),
            role: self.role.as_deref().and_then(Role::from_name),
            pool: self.pool.clone(),
            model: self.model.clone(),
            generation: self.generation.clone(),
            state: if self.draining { EndpointState::Draining } else { EndpointState::Ready },
            ..Endpoint::new(self.url.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_json_or_a_url() {
        assert_eq!(
            Worker::parse(b" http://a:1\n"),
            Ok(Worker { url: "http://a:1".to_owned(), ..Worker::default() })
        );
        let all = Worker {
            url: "http://[::1]:8000".to_owned(),
            role: Some("decode".to_owned()),
            pool: Some("p".to_owned()),
            model: Some("m".to_owned()),
            uid: Some("u".to_owned()),
            generation: Some("2".to_owned()),
            draining: true,
        };
        assert_eq!(Worker::parse(all.to_value().as_bytes()), Ok(all.clone()));
        assert_eq!(all.endpoint().role, Some(Role::Decode));
        assert_eq!(all.endpoint().state, EndpointState::Draining);
        assert_eq!(
            Worker { draining: false, ..Worker::parse(b"http://a:1").expect("a URL") }.to_value(),
            "{\"url\":\"http://a:1\"}"
        );
    }

    #[test]
    fn mistakes_are_named() {
        let long = vec![b'a'; BYTES_MAX + 1];
        for (value, part) in [
            (&b""[..], "http://HOST:PORT"),
            (b"engine:8000", "engine:8000"),
            (b"http://a b:1", "a b"),
            (b"{\"url\": \"http://a:1\", \"rol\": \"both\"}", "rol"),
            (b"{\"url\": \"http://a:1\", \"role\": \"boss\"}", "boss"),
            (b"{\"role\": \"both\"}", "url"),
            (b"{", "EOF"),
            (b"\xff", "no text"),
            (&long, "more than"),
        ] {
            let error = Worker::parse(value).expect_err("a mistake");
            assert!(error.contains(part), "{error}");
        }
    }
}
