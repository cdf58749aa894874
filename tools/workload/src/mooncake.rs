//! The Mooncake conversation trace (FAST'25): requests with arrival times, lengths, and an id for each 512-token
//! block of the prompt; equal ids mean equal prefixes up to there.

use std::collections::HashSet;
use std::path::Path;

use serde::Deserialize;

use crate::{Operation, Workload, chained};

/// Number of tokens of one of the trace's blocks.
pub const BLOCK_TOKENS: usize = 512;

/// One request.
#[derive(Debug, Clone, Deserialize)]
pub struct Request {
    /// Arrival time in milliseconds from the start.
    pub timestamp: u64,
    /// Number of prompt tokens.
    pub input_length: usize,
    /// Number of generated tokens.
    pub output_length: usize,
    /// One id per block; the last block may be partial.
    pub hash_ids: Vec<u64>,
}

/// Error of reading the trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    File {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// A line is invalid.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// Path of the file.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// Description of the error.
        problem: String,
    },
}

/// Reads a trace.
pub fn read(path: &Path) -> Result<Vec<Request>, TraceError> {
    let shown = path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|error| TraceError::File { path: shown.clone(), error })?;
    let mut before = 0;
    let request = |(at, line): (usize, &str)| {
        let wrong = |problem: String| TraceError::Line { path: shown.clone(), line: at + 1, problem };
        let request: Request = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        if request.input_length.max(request.output_length) > LENGTH_MAX {
            return Err(wrong(format!("a length above {LENGTH_MAX} tokens")));
        }
        if request.timestamp < before || request.timestamp > TIME_MAX {
            return Err(wrong(format!(
                "the timestamp {} is before the last one, or too large",
                request.timestamp
            )));
        }
        before = request.timestamp;
        Ok(request)
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(request).collect()
}

/// Longest prompt or answer in tokens.
pub(crate) const LENGTH_MAX: usize = 1 << 30;
/// Latest time: a century in milliseconds.
const TIME_MAX: u64 = 100 * 366 * 86_400_000;

/// The block hashes of a request when blocks have `BLOCK_TOKENS / split` tokens: each id becomes `split` hashes.
#[must_use]
pub fn block_hashes(request: &Request, split: usize) -> Vec<u64> {
    let tokens_per_block = BLOCK_TOKENS / split;
    let whole = request.input_length / tokens_per_block;
    let hashes = request.hash_ids.iter().flat_map(|&id| {
        (0..split as u64).map(move |part| {
            let word =
                id.wrapping_mul(split as u64).wrapping_add(part + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            word ^ word >> 32
        })
    });
    hashes.take(whole).collect()
}

/// The trace's prompts, assigned to workers in turn, with blocks of 16 tokens; each request is looked up and then stored at
/// its worker.
#[must_use]
pub fn workload(requests: &[Request], workers: usize, split: usize) -> Workload {
    let mut held: Vec<HashSet<u64>> = vec![HashSet::new(); workers];
    let mut operations = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        let blocks = block_hashes(request, split);
        let sequences = chained(&blocks);
        let worker = number % workers;
        let known = sequences.iter().take_while(|hash| held[worker].contains(hash)).count();
        operations.push(Operation::Lookup { blocks: blocks.clone() });
        if known < blocks.len() {
            held[worker].extend(&sequences[known..]);
            operations.push(Operation::Stored {
                worker,
                parent: known.checked_sub(1).map(|last| sequences[last]),
                blocks: blocks[known..].iter().copied().zip(sequences[known..].iter().copied()).collect(),
            });
        }
    }
    Workload { workers, operations }
}
