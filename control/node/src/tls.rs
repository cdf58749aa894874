//! Conversion of the TLS settings into the configurations of listeners and clients.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use control_config::Settings;
use router_tls::{Alpn, ClientCertificate, ClientTls, ClientTlsConfig, ServerTls, ServerTlsConfig, TlsError};

use crate::compose::some;

/// Interval at which certificate files are checked for changes.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the TLS configuration for upstream servers. It is loaded only if one of `urls` is https, so that
/// no system needs root certificates for plain HTTP.
pub(crate) fn upstream(settings: &Settings, urls: &[&str]) -> Result<Option<Arc<ClientTls>>> {
    let tls = &settings.tls;
    let is_set = ![&tls.upstream_ca_file, &tls.upstream_certificate_file, &tls.upstream_key_file]
        .into_iter()
        .all(String::is_empty);
    if !is_set && !urls.iter().any(|url| url.starts_with("https://")) {
        return Ok(None);
    }
    let file = |name: &str| some(name).map(PathBuf::from);
    let config = ClientTlsConfig {
        ca_file: file(&tls.upstream_ca_file),
        certificate_file: file(&tls.upstream_certificate_file),
        key_file: file(&tls.upstream_key_file),
        ..ClientTlsConfig::default()
    };
    // Without the system's root certificates, servers with a certificate of `upstream_ca_file` are still
    // reachable.
    let loaded = ClientTls::load(&config).or_else(|error| match error {
        TlsError::SystemRoots { .. } if config.ca_file.is_some() => {
            ClientTls::load(&ClientTlsConfig { system_roots: false, ..config.clone() })
        }
        error => Err(error),
    });
    loaded.map(Some).context("[tls] upstream_…")
}

/// Returns the gateway's certificate, if clients connect over TLS.
pub(crate) fn server(settings: &Settings, alpn: &[Alpn]) -> Result<Option<Arc<ServerTls>>> {
    let tls = &settings.tls;
    let (Some(certificate), Some(key)) = (some(&tls.certificate_file), some(&tls.key_file)) else {
        if tls.certificate_file.is_empty() != tls.key_file.is_empty() {
            bail!("[tls] certificate_file and key_file go together");
        }
        if tls.client_certificate != "off" {
            bail!("[tls] client_certificate needs certificate_file and key_file");
        }
        return Ok(None);
    };
    let config = ServerTlsConfig {
        client_ca_file: some(&tls.client_ca_file).map(PathBuf::from),
        client_certificate: match tls.client_certificate.as_str() {
            "optional" => ClientCertificate::Optional,
            "required" => ClientCertificate::Required,
            _ => ClientCertificate::Off,
        },
        alpn: alpn.to_vec(),
        ..ServerTlsConfig::new(certificate, key)
    };
    ServerTls::load(&config).map(Some).context("[tls]")
}

/// Returns the certificate of the endpoint picker, as `picker.tls` selects.
pub(crate) fn picker(settings: &Settings) -> Result<Option<Arc<ServerTls>>> {
    match settings.picker.tls.as_str() {
        "off" => Ok(None),
        "gateway" => match server(settings, &[Alpn::Http2])? {
            Some(tls) => Ok(Some(tls)),
            None => bail!("picker.tls = \"gateway\" needs [tls] certificate_file and key_file"),
        },
        _ => self_signed().map(Some).context("picker.tls = \"self-signed\""),
    }
}

/// Returns a self-signed certificate, kept in memory only: proxies that accept it encrypt, but cannot
/// authenticate the picker.
fn self_signed() -> Result<Arc<ServerTls>> {
    let made = rcgen::generate_simple_self_signed(["kvasir".to_owned()])?;
    let in_memory = |name: &str, text: String| -> Result<(std::fs::File, PathBuf)> {
        let mut file = std::fs::File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
        file.write_all(text.as_bytes())?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok((file, path))
    };
    let (_certificate, certificate_path) = in_memory("certificate", made.cert.pem())?;
    let (_key, key_path) = in_memory("key", made.signing_key.serialize_pem())?;
    let config =
        ServerTlsConfig { alpn: vec![Alpn::Http2], ..ServerTlsConfig::new(certificate_path, key_path) };
    Ok(ServerTls::load(&config)?)
}

/// Returns a worker's certificate, if its callers connect over TLS.
pub(crate) fn worker(settings: &Settings) -> Result<Option<Arc<ServerTls>>> {
    let worker = &settings.worker;
    let (Some(certificate), Some(key)) = (some(&worker.certificate_file), some(&worker.private_key_file))
    else {
        if worker.certificate_file.is_empty() != worker.private_key_file.is_empty() {
            bail!("[worker] certificate_file and private_key_file go together");
        }
        if !worker.client_ca_file.is_empty() {
            bail!("[worker] client_ca_file needs certificate_file and private_key_file");
        }
        return Ok(None);
    };
    let client_ca_file = some(&worker.client_ca_file).map(PathBuf::from);
    let client_certificate = match client_ca_file {
        Some(_) => ClientCertificate::Required,
        None => ClientCertificate::Off,
    };
    let config =
        ServerTlsConfig { client_ca_file, client_certificate, ..ServerTlsConfig::new(certificate, key) };
    ServerTls::load(&config).map(Some).context("[worker]")
}
