//! `kvasir top`.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use router_tls::{ClientTls, ClientTlsConfig};
use tools_top::{TopConfig, once, run};

/// Size of a frame that goes to no terminal.
const FRAME: (u16, u16) = (120, 40);

/// Arguments.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// The gateway, as HOST:PORT or https://HOST:PORT.
    #[arg(default_value = "127.0.0.1:8000", value_name = "GATEWAY")]
    gateway: String,
    /// File with an administrator's key, for a gateway with keys; else the variable KVASIR_KEY.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Certificate authority of the gateway (PEM), in place of those of the system.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate to show to the gateway (PEM), when it wants one.
    #[arg(long, value_name = "FILE", requires = "client_key")]
    client_certificate: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "client_certificate")]
    client_key: Option<PathBuf>,
    /// Milliseconds between two looks.
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    interval: u64,
    /// Print one frame as text and end, as is done when the output is no terminal.
    #[arg(long)]
    once: bool,
}

fn key(arguments: &TopArgs) -> Result<Option<String>> {
    let Some(file) = &arguments.key_file else {
        return Ok(std::env::var("KVASIR_KEY").ok().filter(|key| !key.is_empty()));
    };
    let key = std::fs::read_to_string(file).with_context(|| format!("{}: the key", file.display()))?;
    Ok(Some(key.trim().to_owned()))
}

pub(crate) fn execute(arguments: &TopArgs) -> Result<ExitCode> {
    let is_tls = arguments.gateway.starts_with("https://");
    let files = ClientTlsConfig {
        ca_file: arguments.ca.clone(),
        // A house of its own needs no others.
        system_roots: arguments.ca.is_none(),
        certificate_file: arguments.client_certificate.clone(),
        key_file: arguments.client_key.clone(),
        ..ClientTlsConfig::default()
    };
    let config = TopConfig {
        gateway: arguments.gateway.clone(),
        key: key(arguments)?,
        tls: is_tls.then(|| ClientTls::load(&files)).transpose()?,
        interval: Duration::from_millis(arguments.interval),
    };
    if arguments.once || !std::io::stdout().is_terminal() {
        println!("{}", once(config, FRAME.0, FRAME.1)?);
    } else {
        run(config)?;
    }
    Ok(ExitCode::SUCCESS)
}
