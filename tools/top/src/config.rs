//! The configuration of the view, and its one conversion into a [`Target`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Uri};
use router_tls::ClientTls;

use crate::display::View;
use crate::error::TopError;

/// Shortest time between two polls.
pub const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Longest time between two polls.
pub const INTERVAL_MAX: Duration = Duration::from_secs(3600);
/// Largest number of cells (width × height) of a frame that [`once`](crate::once) renders.
pub const FRAME_CELLS_MAX: usize = 1 << 20;

const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// Settings of the view.
#[derive(Clone)]
pub struct TopConfig {
    /// URL of the gateway, as `http://HOST:PORT`, `https://HOST:PORT` or `HOST:PORT`; a path is put before `/kvasir/...`.
    pub gateway: String,
    /// Administrator's key, if the gateway has keys.
    pub key: Option<String>,
    /// TLS settings for `https://`.
    pub tls: Option<Arc<ClientTls>>,
    /// Time between two polls, from [`INTERVAL_MIN`] to [`INTERVAL_MAX`].
    pub interval: Duration,
    /// The first view; the only one that [`once`](crate::once) renders.
    pub view: View,
}

impl fmt::Debug for TopConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TopConfig")
            .field("gateway", &self.gateway)
            .field("key", &self.key.as_ref().map(|_| "..."))
            .field("interval", &self.interval)
            .field("view", &self.view)
            .finish()
    }
}

/// A checked [`TopConfig`].
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// Host and port as in the `Host` header.
    pub(crate) authority: String,
    /// Host without the brackets of an IPv6 address.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) tls: Option<Arc<ClientTls>>,
    /// Prefix of each path, without a slash at its end.
    pub(crate) prefix: String,
    /// Value of the `authorization` header, marked as sensitive.
    pub(crate) authorization: Option<HeaderValue>,
    pub(crate) interval: Duration,
}

impl TopConfig {
    pub(crate) fn target(&self) -> Result<Target, TopError> {
        let refused =
            |reason: &str| TopError::Config { what: "gateway's address", reason: reason.to_owned() };
        let with_scheme = match self.gateway.trim() {
            given if given.contains("://") => given.to_owned(),
            given => format!("http://{given}"),
        };
        let uri: Uri = with_scheme.parse().map_err(|_| refused("it is not of the form http://HOST:PORT"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") if self.tls.is_some() => {}
            Some("https") => return Err(refused("https needs settings of TLS")),
            _ => return Err(refused("it is not of the form http://HOST:PORT")),
        }
        let is_tls = uri.scheme_str() == Some("https");
        let authority = uri.authority().ok_or_else(|| refused("it names no host"))?;
        if authority.as_str().contains('@') {
            return Err(refused("it contains a name or a password"));
        }
        if uri.query().is_some() {
            return Err(refused("it contains a query"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(refused("it names no host"));
        }
        if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&self.interval) {
            let reason = format!("{:?} is not from {INTERVAL_MIN:?} to {INTERVAL_MAX:?}", self.interval);
            return Err(TopError::Config { what: "interval", reason });
        }
        Ok(Target {
            authority: authority.as_str().to_owned(),
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(if is_tls { HTTPS_PORT } else { HTTP_PORT }),
            tls: self.tls.clone().filter(|_| is_tls),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            authorization: self.key.as_deref().map(authorization).transpose()?,
            interval: self.interval,
        })
    }
}

/// Makes the header's value. The error never contains the key.
fn authorization(key: &str) -> Result<HeaderValue, TopError> {
    let refused = |reason: &str| TopError::Config { what: "key", reason: reason.to_owned() };
    let key = key.trim();
    if key.is_empty() {
        return Err(refused("it is empty"));
    }
    let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
        .map_err(|_| refused("it contains characters that no header may have"))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(gateway: &str) -> Result<Target, TopError> {
        TopConfig {
            gateway: gateway.to_owned(),
            key: None,
            tls: None,
            interval: Duration::from_secs(1),
            view: View::Overview,
        }
        .target()
    }

    #[test]
    fn addresses() {
        for (given, host, port, prefix) in [
            ("http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
            ("http://127.0.0.1:8080/", "127.0.0.1", 8080, ""),
            ("gateway.example:9", "gateway.example", 9, ""),
            ("http://gateway", "gateway", 80, ""),
            ("http://[::1]:7000/a/b/", "::1", 7000, "/a/b"),
            (" http://h:1 ", "h", 1, ""),
        ] {
            let target = target(given).expect(given);
            assert_eq!((target.host.as_str(), target.port, target.prefix.as_str()), (host, port, prefix));
        }
        for (given, reason) in [
            ("https://h:1", "https"),
            ("ftp://h:1", "http://HOST"),
            ("", "http://HOST"),
            ("http://", "http://HOST"),
            ("http://me:secret@h:1", "password"),
            ("http://h:1/?a=b", "query"),
            ("http://h:1\u{1b}[2J", "http://HOST"),
        ] {
            let error = target(given).expect_err(given).to_string();
            assert!(error.contains(reason) && !error.contains("secret"), "{given}: {error}");
        }
    }

    #[test]
    fn a_key_is_checked_and_never_shown() {
        let mut config = TopConfig {
            gateway: "http://h:1".to_owned(),
            key: Some(" sk-secret\n".to_owned()),
            tls: None,
            interval: Duration::from_secs(1),
            view: View::Overview,
        };
        let target = config.target().expect("good");
        assert_eq!(target.authorization.as_ref().expect("a key").as_bytes(), b"Bearer sk-secret");
        assert!(!format!("{config:?} {target:?}").contains("secret"));
        for bad in ["", " \n", "sk-secret\nx: y"] {
            config.key = Some(bad.to_owned());
            let error = config.target().expect_err("bad").to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_interval_has_bounds() {
        for (interval, good) in [(99, false), (100, true), (3_600_000, true), (3_600_001, false)] {
            let interval = Duration::from_millis(interval);
            let config =
                TopConfig { gateway: "h:1".to_owned(), key: None, tls: None, interval, view: View::Overview };
            assert_eq!(config.target().is_ok(), good, "{interval:?}");
        }
    }
}
