//! `kvasir top`.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use tools_top::{TopConfig, once, run};

use crate::credentials::Credentials;

/// Size of a frame that goes to no terminal.
const FRAME: (u16, u16) = (120, 40);

/// Arguments.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// The gateway, as HOST:PORT or https://HOST:PORT.
    #[arg(default_value = "127.0.0.1:8000", value_name = "GATEWAY")]
    gateway: String,
    #[command(flatten)]
    credentials: Credentials,
    /// Milliseconds between two looks.
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    interval: u64,
    /// Print one frame as text and end, as is done when the output is no terminal.
    #[arg(long)]
    once: bool,
}

pub(crate) fn execute(arguments: &TopArgs) -> Result<ExitCode> {
    let config = TopConfig {
        gateway: arguments.gateway.clone(),
        key: arguments.credentials.key()?,
        tls: arguments.credentials.tls(&arguments.gateway)?,
        interval: Duration::from_millis(arguments.interval),
    };
    if arguments.once || !std::io::stdout().is_terminal() {
        println!("{}", once(config, FRAME.0, FRAME.1)?);
    } else {
        run(config)?;
    }
    Ok(ExitCode::SUCCESS)
}
