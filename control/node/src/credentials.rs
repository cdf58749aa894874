//! Administrator credentials that commands present to a gateway.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use router_engines::client::EngineClient;
use router_engines::key::ApiKey;
use router_engines::upstream::Upstream;
use router_tls::{ClientTls, ClientTlsConfig};

/// A key, a certificate, or neither.
#[derive(Args)]
pub(crate) struct Credentials {
    /// File with an administrator's key, for a gateway with keys (default: the variable KVASIR_KEY).
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Certificate authority of the gateway (PEM), instead of those of the system.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Client certificate (PEM), if the gateway requires one.
    #[arg(long, value_name = "FILE", requires = "client_key")]
    client_certificate: Option<PathBuf>,
    /// Private key of the client certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "client_certificate")]
    client_key: Option<PathBuf>,
}

impl Credentials {
    /// Returns the key, if one is given.
    pub(crate) fn key(&self) -> Result<Option<String>> {
        let Some(file) = &self.key_file else {
            return Ok(std::env::var("KVASIR_KEY").ok().filter(|key| !key.is_empty()));
        };
        let key = std::fs::read_to_string(file).with_context(|| format!("{}: the key", file.display()))?;
        Ok(Some(key.trim().to_owned()))
    }

    /// Returns a client for a gateway, given as HOST:PORT or with its scheme.
    pub(crate) fn client(&self, gateway: &str) -> Result<EngineClient> {
        let tls = self.tls(gateway)?;
        let key = match self.key()? {
            Some(key) => Some(ApiKey::new(&key).context("the key is no plain text")?),
            None => None,
        };
        let base = if gateway.contains("://") { gateway.to_owned() } else { format!("http://{gateway}") };
        let upstream = Upstream::with_key(base.trim_end_matches('/'), tls.as_ref(), key.as_ref());
        Ok(EngineClient::over(&upstream))
    }

    /// Returns the TLS configuration for a gateway whose address begins with `https://`.
    pub(crate) fn tls(&self, gateway: &str) -> Result<Option<Arc<ClientTls>>> {
        if !gateway.starts_with("https://") {
            return Ok(None);
        }
        let files = ClientTlsConfig {
            ca_file: self.ca.clone(),
            // A given authority replaces those of the system.
            system_roots: self.ca.is_none(),
            certificate_file: self.client_certificate.clone(),
            key_file: self.client_key.clone(),
            ..ClientTlsConfig::default()
        };
        Ok(Some(ClientTls::load(&files)?))
    }
}
