//! `kvasir inspect`.

use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;
use tools_inspect::{audit, events};

/// What to look into.
#[derive(Subcommand)]
pub(crate) enum InspectCommand {
    /// Each line of a capture of KV events, as it is understood.
    Events {
        /// JSON lines with `payload_hex` or `frames_hex`; may be gzip.
        file: PathBuf,
    },
    /// Predicted against reported cached tokens: events and requests of live engines, replayed in time order.
    Audit {
        /// JSON lines with `t`, `topic`, `seq` and `payload_hex`; may be gzip.
        events: PathBuf,
        /// JSON lines with `i`, `port`, `t_send`, `cached_tokens` and `prompt_token_ids`; may be gzip.
        requests: PathBuf,
    },
}

pub(crate) fn run(command: InspectCommand) -> Result<ExitCode> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    match command {
        InspectCommand::Events { file } => {
            let mut failed = None;
            let totals =
                events::inspect(&file, |line| failed = writeln!(out, "{line}").err().or(failed.take()))?;
            if let Some(error) = failed {
                return Err(error.into());
            }
            writeln!(
                out,
                "{} lines, {} events; {} lines not understood, {} events not understood, {} of unknown kinds",
                totals.lines, totals.events, totals.bad_lines, totals.broken, totals.skipped
            )?;
            out.flush()?;
            Ok(if totals.bad_lines + totals.broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        InspectCommand::Audit { events, requests } => {
            let audit = audit::audit(&events, &requests)?;
            for request in audit.requests.iter().filter(|request| request.predicted != request.reported) {
                writeln!(
                    out,
                    "request {} to port {}, {} tokens, sent at {:.3}: predicted {}, reported {}",
                    request.request,
                    request.engine,
                    request.prompt,
                    request.sent,
                    request.predicted,
                    request.reported
                )?;
            }
            writeln!(
                out,
                "{} event batches, {} gaps; exact: {} of {}",
                audit.batches,
                audit.gaps,
                audit.exact(),
                audit.requests.len()
            )?;
            out.flush()?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
