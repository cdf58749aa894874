//! Decodes and prints each line of a capture of KV events.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use router_events::wire::{KvEvent, decode};
use serde_json::Value;

use super::capture::{message, text};

/// Counts of a decoded file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Lines of the file.
    pub lines: usize,
    /// Lines that are no message, or whose payload is no batch.
    pub bad_lines: usize,
    /// Decoded events.
    pub events: usize,
    /// Events that could not be read.
    pub broken: usize,
    /// Events of unknown kinds.
    pub skipped: usize,
}

/// Describes every line of a file; `show` gets each description.
pub fn inspect(path: &Path, mut show: impl FnMut(&str)) -> Result<Totals> {
    let mut totals = Totals::default();
    for (number, line) in text(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        totals.lines += 1;
        let described = match serde_json::from_str::<Value>(line) {
            Ok(line) => describe(&line, &mut totals),
            Err(error) => Err(format!("not JSON: {error}")),
        };
        match described {
            Ok(description) => show(&format!("line {}: {description}", number + 1)),
            Err(problem) => {
                totals.bad_lines += 1;
                show(&format!("line {}: error: {problem}", number + 1));
            }
        }
    }
    Ok(totals)
}

fn describe(line: &Value, totals: &mut Totals) -> Result<String, String> {
    let message = message(line)?;
    let mut out = String::new();
    for name in ["engine", "version", "case", "topic"] {
        if let Some(value) = line[name].as_str() {
            // Writing to a String cannot fail, here and below.
            let _infallible = write!(out, "{value} ");
        }
    }
    if let Some(sequence) = message.sequence {
        let _infallible = write!(out, "seq={sequence} ");
    }
    let batch = decode(&message.payload).map_err(|error| format!("{out}{error}"))?;
    let _infallible = write!(out, "ts={}", batch.timestamp);
    if let Some(rank) = batch.rank {
        let _infallible = write!(out, " rank={rank}");
    }
    for event in &batch.events {
        let _infallible = write!(out, "; {}", render(event));
    }
    for broken in &batch.broken {
        let _infallible = write!(out, "; error: {}", broken.error);
    }
    if batch.skipped > 0 {
        let _infallible = write!(out, "; {} of unknown kinds skipped", batch.skipped);
    }
    totals.events += batch.events.len();
    totals.broken += batch.broken.len();
    totals.skipped += batch.skipped;
    Ok(out)
}

/// Formats all fields of an event.
fn render(event: &KvEvent) -> String {
    match event {
        KvEvent::Cleared => "cleared".to_owned(),
        KvEvent::Moved(moved) => format!("moved {:?} to {:?} {:?}", moved.from, moved.to, moved.hashes),
        KvEvent::Removed(removed) => {
            let group = removed.group.map_or(String::new(), |group| format!(" group={group}"));
            format!("removed {:?} {:?}{group}", removed.tier, removed.hashes)
        }
        KvEvent::Stored(stored) => {
            let parent = stored.parent.map_or("none".to_owned(), |parent| parent.to_string());
            let mut out = format!(
                "stored {:?} {:?} parent={parent} block_size={} tokens={:?}",
                stored.tier, stored.hashes, stored.block_tokens, stored.tokens
            );
            let further = [
                stored.lora.as_ref().map(|lora| format!(" lora={lora:?}")),
                stored.cache_salt.as_ref().map(|salt| format!(" cache_salt={salt:?}")),
                (!stored.extras.is_empty()).then(|| format!(" extra_keys={:?}", stored.extras)),
                (!stored.routing_hashes.is_empty())
                    .then(|| format!(" routing_hashes={:?}", stored.routing_hashes)),
                stored.group.map(|group| format!(" group={group}")),
                (!stored.is_full_attention).then(|| " not-full-attention".to_owned()),
            ];
            out.extend(further.into_iter().flatten());
            out
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_says_what_it_is() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/engine-captures");
        let mut lines = Vec::new();
        let totals =
            inspect(&fixtures.join("kv-events-by-release.jsonl"), |line| lines.push(line.to_owned()));
        let totals = totals.expect("the capture");
        assert_eq!((totals.lines, totals.bad_lines, totals.broken, totals.skipped), (lines.len(), 0, 0, 0));
        assert!(
            lines[0].starts_with(
                "line 1: vllm 0.9.2 full ts=1700000000.5 rank=3; \
                 stored Device [81985529216486895, 18364758544493064720] parent=42 block_size=16 tokens=[100, 101,"
            ),
            "{}",
            lines[0]
        );
        assert!(
            lines[0]
                .ends_with("lora=\"lora_id:7\"; removed Device [81985529216486895, 18364758544493064720]")
        );
        let totals = inspect(&fixtures.join("vllm-0.32.0-live-events.jsonl"), |_| {}).expect("the capture");
        assert_eq!((totals.bad_lines, totals.broken), (0, 0));
        assert!(totals.events > 0);
    }

    #[test]
    fn odd_lines_are_named() {
        let file = std::env::temp_dir().join(format!("kvasir-inspect-{}.jsonl", std::process::id()));
        let text = "{\"payload_hex\":\"93cb41d954fc4020\"}\nnot json\n{\"payload_hex\":\"0g\"}\n{}\n";
        std::fs::write(&file, text).expect("written");
        let mut lines = Vec::new();
        let totals = inspect(&file, |line| lines.push(line.to_owned())).expect("read");
        std::fs::remove_file(&file).expect("removed");
        assert_eq!(totals.bad_lines, 4);
        assert_eq!(lines[0], "line 1: error: the bytes end too early (byte 2)");
        assert!(lines[1].starts_with("line 2: error: not JSON"));
        assert_eq!(lines[2], "line 3: error: \"0g\" is not a byte");
        assert_eq!(lines[3], "line 4: error: neither payload_hex nor frames_hex");
        assert!(inspect(Path::new("/nowhere"), |_| {}).is_err());
    }
}
