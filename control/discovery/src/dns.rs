//! Workers behind a DNS name: each address of the name (A and AAAA) is a worker, as with a headless Service
//! of Kubernetes or Consul.
//!
//! A name that has lost all its addresses is an empty list: see the guard (`source_state`). Names are
//! resolved by the system's resolver, which reports neither deletions nor identities: if a worker takes the
//! address of another one, the fleet tells them apart by their engines' reports.

use std::time::Duration;

use crate::endpoint::{Endpoint, url_of};
use crate::follow::Sender;
use crate::update::{Object, Update};

/// Longest time for one resolution: getaddrinfo asks each server several times.
const RESOLVE_MAX: Duration = Duration::from_secs(10);

/// A name whose addresses are workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dns {
    scheme: &'static str,
    host: String,
    port: u16,
    pool: Option<String>,
}

/// Error of an invalid name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DnsError {
    /// The text is not of the form `http://NAME:PORT`.
    Form(String),
}

impl std::fmt::Display for DnsError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self::Form(text) = self;
        write!(formatter, "{text:?} is not of the form http://NAME:PORT or https://NAME:PORT")
    }
}

impl std::error::Error for DnsError {}

impl Dns {
    /// Creates a source from `http://NAME:PORT`; its workers belong to `pool`.
    pub fn new(name: &str, pool: Option<String>) -> Result<Self, DnsError> {
        let error = || DnsError::Form(name.to_owned());
        let (scheme, rest) = match name.split_once("://") {
            Some(("http", rest)) => ("http", rest),
            Some(("https", rest)) => ("https", rest),
            _ => return Err(error()),
        };
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(error)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(error)?;
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        match !host.is_empty() && host.chars().all(is_name) {
            true => Ok(Self { scheme, host: host.to_owned(), port, pool }),
            false => Err(error()),
        }
    }

    /// Name of the source in the status.
    #[must_use]
    pub fn name(&self) -> String {
        format!("dns {}:{}", self.host, self.port)
    }

    /// Resolves the name every `interval`, until nothing receives the updates.
    pub async fn watch(self, interval: Duration, sender: Sender) {
        let mut had_addresses = false;
        loop {
            let update = match self.resolve().await {
                Update::Failed(reason) if had_addresses && says_none(&reason) => Update::Listed(Vec::new()),
                update => update,
            };
            had_addresses |= matches!(&update, Update::Listed(objects) if !objects.is_empty());
            if !sender.send(update).await {
                return;
            }
            tokio::time::sleep(interval).await;
        }
    }

    /// Resolves the name to its present addresses, or to a failure with the reason.
    async fn resolve(&self) -> Update {
        let resolving = tokio::net::lookup_host((self.host.as_str(), self.port));
        let addresses = match tokio::time::timeout(RESOLVE_MAX, resolving).await {
            Ok(Ok(addresses)) => addresses,
            Ok(Err(error)) => return Update::Failed(format!("{}: {error}", self.host)),
            Err(_) => return Update::Failed(format!("{}: no answer within {RESOLVE_MAX:?}", self.host)),
        };
        let mut hosts: Vec<String> = addresses.map(|address| address.ip().to_string()).collect();
        hosts.sort();
        hosts.dedup();
        let endpoint = |host: &String| Endpoint {
            pool: self.pool.clone(),
            ..Endpoint::new(url_of(self.scheme, host, self.port))
        };
        Update::Listed(hosts.iter().map(|host| Object::of(endpoint(host))).collect())
    }
}

/// Whether a resolver's error means that the name does not exist or has no address: the texts of
/// `gai_strerror` for EAI_NONAME and EAI_NODATA in glibc and musl. std does not expose the code.
fn says_none(reason: &str) -> bool {
    let texts = [
        "Name or service not known",
        "No address associated with hostname",
        "Name does not resolve",
        "Name has no usable address",
    ];
    texts.iter().any(|text| reason.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_names_are_refused() {
        for name in
            ["engines:8000", "http://engines", "http://engines:0", "http://a b:1", "http://:1", "ftp://a:1"]
        {
            let error = Dns::new(name, None).expect_err(name);
            assert!(error.to_string().contains(name), "{error}");
        }
        assert_eq!(
            Dns::new("https://engines.svc:8000/", None).expect("a name").name(),
            "dns engines.svc:8000"
        );
    }

    #[tokio::test]
    async fn addresses_of_a_name_are_workers_and_an_unknown_name_is_a_failure() {
        let dns = Dns::new("http://localhost:8000", Some("p".to_owned())).expect("a name");
        let Update::Listed(objects) = dns.resolve().await else { panic!("localhost has an address") };
        let local = objects.iter().find(|object| object.key == "http://127.0.0.1:8000");
        let local = local.expect("127.0.0.1 is among them");
        assert_eq!(local.endpoints[0].pool.as_deref(), Some("p"));
        assert!(says_none("a: failed to lookup address information: Name or service not known"));
        assert!(!says_none("a: failed to lookup address information: Temporary failure in name resolution"));
        let unknown = Dns::new("http://no-such-name.invalid:8000", None).expect("a name");
        let update = unknown.resolve().await;
        assert!(
            matches!(&update, Update::Failed(reason) if reason.starts_with("no-such-name.invalid:")),
            "{update:?}"
        );
    }
}
