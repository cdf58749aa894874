//! Conversion of `[etcd]` into a client.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use control_config::Settings;
use control_etcd::{Client, ClientConfig};
use router_tls::{Alpn, ClientTls, ClientTlsConfig};

use crate::compose::some;
use crate::{secret, tls};

/// Connection settings, key prefix and credentials of etcd.
pub(crate) struct Etcd {
    config: ClientConfig,
    /// Prefix of all keys.
    pub(crate) prefix: String,
    tls: Option<Arc<ClientTls>>,
}

impl Etcd {
    /// Returns `None` if no endpoint is named.
    pub(crate) fn new(settings: &Settings) -> Result<Option<Self>> {
        let etcd = &settings.etcd;
        if etcd.endpoints.is_empty() {
            return Ok(None);
        }
        if etcd.prefix.is_empty() {
            bail!("etcd.prefix is empty: fleets that share this etcd would overwrite each other's keys");
        }
        let user = match (some(&etcd.user), some(&etcd.password_file)) {
            (Some(user), Some(file)) => {
                let password = secret::read("etcd.password_file", &file)?;
                Some((user, password.trim_end_matches(['\r', '\n']).to_owned()))
            }
            (None, None) => None,
            _ => bail!("[etcd] user and password_file go together"),
        };
        let file = |name: &str| some(name).map(PathBuf::from);
        let needs_tls = etcd.endpoints.iter().any(|endpoint| endpoint.starts_with("https://"));
        let tls = match needs_tls {
            true => {
                let files = ClientTlsConfig {
                    ca_file: file(&etcd.ca_file),
                    // A given authority replaces those of the system.
                    system_roots: etcd.ca_file.is_empty(),
                    certificate_file: file(&etcd.certificate_file),
                    key_file: file(&etcd.key_file),
                    alpn: vec![Alpn::Http2],
                    ..ClientTlsConfig::default()
                };
                Some(ClientTls::load(&files).context("[etcd]")?)
            }
            false => None,
        };
        let config = ClientConfig { endpoints: etcd.endpoints.clone(), tls: tls.clone(), user };
        Ok(Some(Self { config, prefix: etcd.prefix.clone(), tls }))
    }

    /// Creates a client. Must be called within a Tokio runtime.
    pub(crate) fn client(&self) -> Result<Client> {
        if let Some(tls) = &self.tls {
            // The task ends with the runtime: certificates are reloaded as long as there are connections.
            tokio::spawn(Arc::clone(tls).watch(tls::CHECK_INTERVAL));
        }
        Client::new(self.config.clone()).context("etcd.endpoints")
    }
}
