//! `kvasir inspect`: shows the contents of captures and of disk tier files.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Subcommand;
use kvstore_disk::{Area, inspect};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use tools_replay::inspect::{events, predictions};

/// Longest time for one answer of a disk.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Objects that can be inspected.
#[derive(Subcommand)]
pub(crate) enum InspectCommand {
    /// Show each line of a capture of KV events as the parser reads it.
    Events {
        /// JSON lines with `payload_hex` or `frames_hex`; may be gzip.
        file: PathBuf,
    },
    /// Show the contents of the files of a disk tier: blocks, damage, age, and bytes written. The tier must
    /// not be in use.
    Segments {
        /// Folder of the files (`disk_tier.path`, and the worker's folder in it).
        folder: PathBuf,
    },
    /// Compare predicted with reported cached tokens: events and requests of live engines, replayed in time
    /// order.
    Predictions {
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
        InspectCommand::Segments { folder } => {
            segments(&folder, &mut out)?;
            out.flush()?;
            Ok(ExitCode::SUCCESS)
        }
        InspectCommand::Predictions { events, requests } => {
            let comparison = predictions::compare(&events, &requests)?;
            for request in comparison.requests.iter().filter(|request| request.predicted != request.reported)
            {
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
                comparison.batches,
                comparison.gaps,
                comparison.exact(),
                comparison.requests.len()
            )?;
            out.flush()?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn segments(folder: &Path, out: &mut impl Write) -> Result<()> {
    let mut sizes = Vec::new();
    loop {
        let path = folder.join(format!("segment-{:04}", sizes.len()));
        match std::fs::metadata(&path) {
            Ok(of) => sizes.push(of.len()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        }
    }
    let Some(&bytes) = sizes.first() else { bail!("{} has no file segment-0000", folder.display()) };
    ensure!(sizes.iter().all(|&size| size == bytes), "the files in {} differ in size", folder.display());
    let files =
        open_folder(&FolderConfig { direct: false, ..FolderConfig::new(folder, bytes, sizes.len() as u32) })?;
    let mut engine = PreadEngine::new(files, &PreadConfig::default())?;
    let areas: Vec<Area> = (0..sizes.len() as u32).map(|file| Area { file, offset: 0, bytes }).collect();
    let summary = inspect(&mut engine, &areas, ANSWER_MAX)?;
    writeln!(
        out,
        "segment | state | slots of bytes | live | forgotten | damaged pages, records | oldest | newest"
    )?;
    let (mut live, mut live_bytes, mut damaged) = (0, 0, 0);
    for segment in &summary.segments {
        let age = |at: Option<u32>| at.map_or_else(|| "-".to_owned(), |at| at.to_string());
        let slots =
            segment.header.as_ref().map_or_else(String::new, |header| format!("{}", header.slot_bytes));
        writeln!(
            out,
            "{} | {:?} | {slots} | {} | {} | {}, {} | {} | {}",
            segment.segment,
            segment.state,
            segment.live,
            segment.tombstones,
            segment.pages_damaged,
            segment.records_damaged,
            age(segment.oldest_written_at_s),
            age(segment.newest_written_at_s)
        )?;
        live += u64::from(segment.live);
        live_bytes += segment.live_bytes;
        damaged += segment.pages_damaged + u64::from(segment.records_damaged);
    }
    writeln!(
        out,
        "{live} blocks, {live_bytes} bytes; {damaged} damaged pages and records; {} bytes written in all, {} on the latest day",
        summary.usage.total_bytes, summary.usage.day_bytes
    )?;
    Ok(())
}
