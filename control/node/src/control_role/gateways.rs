//! The gateways that the control service observes: configured names, each with all its addresses.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use router_engines::client::EngineClient;

use crate::credentials::Credentials;

/// Longest time for one resolution.
const RESOLVE_WITHIN: Duration = Duration::from_secs(2);

/// A configured name: one gateway, or several behind one DNS name.
enum Name {
    /// Base URL of one gateway. A TLS name is not resolved here, because the certificate is for the name.
    Fixed(String),
    /// `HOST:PORT`, which is resolved periodically, and its last addresses.
    Resolved(String, Vec<String>),
}

pub(super) struct Gateways<'a> {
    names: Vec<Name>,
    credentials: &'a Credentials,
    interval: Duration,
    resolved: Option<Instant>,
    /// Clients by base URL, so that a gateway keeps its connections across resolutions.
    known: BTreeMap<String, EngineClient>,
    clients: Vec<EngineClient>,
}

impl<'a> Gateways<'a> {
    /// Creates the observer of `names`, which are resolved every `interval`.
    pub(super) fn new(names: &[String], credentials: &'a Credentials, interval: Duration) -> Result<Self> {
        let name = |text: &String| match text.strip_prefix("http://").unwrap_or(text) {
            // An `https://` URL or an IP address needs no resolution.
            host if host.contains("://") => Name::Fixed(text.clone()),
            host if host.parse::<std::net::SocketAddr>().is_ok() => Name::Fixed(format!("http://{host}")),
            host => Name::Resolved(host.trim_end_matches('/').to_owned(), Vec::new()),
        };
        // Unreadable credentials are an error at start.
        names.iter().try_for_each(|name| credentials.client(name).map(drop))?;
        Ok(Self {
            names: names.iter().map(name).collect(),
            credentials,
            interval,
            resolved: None,
            known: BTreeMap::new(),
            clients: Vec::new(),
        })
    }

    /// Returns the number of names without an address: gateways that are not observed.
    pub(super) fn unresolved(&self) -> usize {
        self.names
            .iter()
            .filter(|name| matches!(name, Name::Resolved(_, addresses) if addresses.is_empty()))
            .count()
    }

    /// Returns a client for each gateway. A name that cannot be resolved keeps its last addresses.
    pub(super) async fn clients(&mut self) -> &[EngineClient] {
        if self.resolved.is_some_and(|at| at.elapsed() < self.interval) {
            return &self.clients;
        }
        self.resolved = Some(Instant::now());
        let mut bases = Vec::new();
        for name in &mut self.names {
            match name {
                Name::Fixed(text) => bases.push(text.clone()),
                Name::Resolved(host, addresses) => {
                    let resolving = tokio::net::lookup_host(host.as_str());
                    match tokio::time::timeout(RESOLVE_WITHIN, resolving).await {
                        Ok(Ok(found)) => {
                            *addresses = found.map(|address| format!("http://{address}")).collect()
                        }
                        Ok(Err(error)) => {
                            tracing::warn!(host, "the gateways' name cannot be resolved: {error}")
                        }
                        Err(_) => tracing::warn!(
                            host,
                            "the gateways' name was not resolved within {RESOLVE_WITHIN:?}"
                        ),
                    }
                    bases.extend(addresses.iter().cloned());
                }
            }
        }
        bases.sort();
        bases.dedup();
        let mut known = BTreeMap::new();
        for base in bases {
            let client = self.known.remove(&base).map_or_else(|| self.credentials.client(&base), Ok);
            match client {
                Ok(client) => drop(known.insert(base, client)),
                Err(error) => tracing::warn!(base, "the gateway cannot be asked: {error:#}"),
            }
        }
        self.known = known;
        self.clients = self.known.values().cloned().collect();
        &self.clients
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        credentials: Credentials,
    }

    #[tokio::test]
    async fn a_name_is_all_its_addresses_and_one_gateway_is_counted_once() {
        let credentials = Arguments::parse_from(["test"]).credentials;
        let names =
            ["localhost:9", "127.0.0.1:9", "http://127.0.0.1:9", "https://gateway:8443"].map(str::to_owned);
        let mut gateways =
            Gateways::new(&names, &credentials, Duration::from_secs(60)).expect("no keys are needed");
        let mut bases: Vec<String> =
            gateways.clients().await.iter().map(|client| client.base().to_owned()).collect();
        bases.retain(|base| !base.contains("[::1]"));
        bases.sort();
        assert_eq!(bases, ["http://127.0.0.1:9", "https://gateway:8443"]);
    }
}
