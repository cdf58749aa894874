//! A workload as text, one operation a line, applied in file order:
//!
//! * `S worker parent block:sequence …`: stored after that parent, `-` for the start of a chain;
//! * `R worker sequence …`: removed;
//! * `Q block …`: looked up.
//!
//! Hashes are unsigned 64-bit numbers, workers are numbered from 0. Empty lines and lines that begin with `#` are
//! skipped.

use crate::{Operation, Workload};

/// Larger than any index: a larger number is an error in the line.
const WORKERS_MAX: usize = 1 << 20;

/// Error: a line is not an operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct TextError {
    /// Line number, from 1.
    pub line: usize,
    /// Description of the error.
    pub problem: String,
}

/// Parses a workload.
pub fn parse(text: &str) -> Result<Workload, TextError> {
    let mut workload = Workload::default();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (operation, worker) = operation(line).map_err(|problem| TextError { line: at + 1, problem })?;
        workload.workers = workload.workers.max(worker.map_or(0, |worker| worker + 1));
        workload.operations.push(operation);
    }
    Ok(workload)
}

fn operation(line: &str) -> Result<(Operation, Option<usize>), String> {
    let mut words = line.split_ascii_whitespace();
    match words.next() {
        Some("S") => {
            let worker = worker(words.next())?;
            let parent = match words.next() {
                Some("-") => None,
                Some(word) => Some(number(word, "parent")?),
                None => return Err("the parent is missing: a sequence hash, or - for none".to_owned()),
            };
            let pair = |word: &str| {
                let (block, sequence) =
                    word.split_once(':').ok_or_else(|| format!("{word:?} is not block:sequence"))?;
                Ok((number(block, "block hash")?, number(sequence, "sequence hash")?))
            };
            let blocks = words.map(pair).collect::<Result<Vec<_>, String>>()?;
            Ok((Operation::Stored { worker, parent, blocks }, Some(worker)))
        }
        Some("R") => {
            let worker = worker(words.next())?;
            let sequences = words.map(|word| number(word, "sequence hash")).collect::<Result<_, _>>()?;
            Ok((Operation::Removed { worker, sequences }, Some(worker)))
        }
        Some("Q") => {
            let blocks = words.map(|word| number(word, "block hash")).collect::<Result<_, _>>()?;
            Ok((Operation::Lookup { blocks }, None))
        }
        other => Err(format!("{:?} is not an operation: S, R or Q", other.unwrap_or_default())),
    }
}

fn number(word: &str, what: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("{word:?} is not a {what}: an unsigned 64-bit number"))
}

fn worker(word: Option<&str>) -> Result<usize, String> {
    let word = word.ok_or("the worker is missing")?;
    let worker = word.parse().ok().filter(|&worker| worker < WORKERS_MAX);
    worker.ok_or_else(|| format!("{word:?} is not a worker: a number below {WORKERS_MAX}"))
}

/// Formats a workload.
#[must_use]
pub fn render(workload: &Workload) -> String {
    let join = |numbers: &[u64]| numbers.iter().map(|number| format!(" {number}")).collect::<String>();
    let line = |operation: &Operation| match operation {
        Operation::Stored { worker, parent, blocks } => {
            let parent = parent.map_or("-".to_owned(), |parent| parent.to_string());
            let blocks: String =
                blocks.iter().map(|(block, sequence)| format!(" {block}:{sequence}")).collect();
            format!("S {worker} {parent}{blocks}\n")
        }
        Operation::Removed { worker, sequences } => format!("R {worker}{}\n", join(sequences)),
        Operation::Lookup { blocks } => format!("Q{}\n", join(blocks)),
    };
    workload.operations.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_back_as_they_went() {
        let workload =
            crate::tree::workload(&crate::tree::Shape { chains: 20, ..crate::tree::Shape::default() });
        assert_eq!(parse(&render(&workload)), Ok(workload));
    }

    #[test]
    fn wrong_lines_are_named() {
        let problem = |text: &str| parse(text).expect_err("a problem").to_string();
        assert_eq!(problem("# fine\n\nQ 1 2\nX"), "line 4: \"X\" is not an operation: S, R or Q");
        assert_eq!(problem("S 0 - 1"), "line 1: \"1\" is not block:sequence");
        assert_eq!(problem("S 0"), "line 1: the parent is missing: a sequence hash, or - for none");
        assert_eq!(problem("R 99999999 1"), "line 1: \"99999999\" is not a worker: a number below 1048576");
        assert_eq!(problem("Q -4"), "line 1: \"-4\" is not a block hash: an unsigned 64-bit number");
    }
}
