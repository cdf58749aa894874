//! A ring of the last routing decisions, with the reason for each.
//!
//! Hot path: a decision takes a number and writes nine words into its place of a ring; no lock, no allocation. Each place
//! has a version that is odd while it is written (a seqlock), so that a reader skips an entry that it read partially. Names and
//! reasons are made when the list is requested.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use router_policy::Strategy;
use serde_json::{Value, json};

/// Decisions that are kept.
const KEPT: usize = 256;
const WORDS: usize = 8;

/// One decision, as it is noted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Decision {
    /// Hash of the worker's name.
    pub(crate) worker: u64,
    /// Hash of the prefill worker's name; 0 without a prefill worker.
    pub(crate) prefill: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) blocks: u32,
    pub(crate) overlap_blocks: u32,
    pub(crate) uncached_tokens: u32,
    pub(crate) predicted_ms: f32,
    pub(crate) decided_us: f32,
    pub(crate) candidates: u32,
    pub(crate) is_warm_up: bool,
    /// Strategy at the time of the decision; the configuration may have changed since.
    pub(crate) strategy: Strategy,
    /// The runner-up: hash of its name, blocks that it holds, predicted milliseconds.
    pub(crate) runner_up: Option<(u64, u32, f32)>,
}

fn pair(upper: u32, lower: u32) -> u64 {
    u64::from(upper) << 32 | u64::from(lower)
}

fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

impl Decision {
    fn to_words(self) -> [u64; WORDS] {
        let (runner, runner_blocks, runner_ms) = self.runner_up.unwrap_or_default();
        let [is_warm_up, has_runner] = [self.is_warm_up, self.runner_up.is_some()].map(u32::from);
        let flags = (self.strategy as u32) << 2 | is_warm_up << 1 | has_runner;
        [
            self.worker,
            self.prefill,
            pair(self.prompt_tokens, self.blocks),
            pair(self.overlap_blocks, self.uncached_tokens),
            pair(self.predicted_ms.to_bits(), self.decided_us.to_bits()),
            pair(self.candidates, flags),
            runner,
            pair(runner_blocks, runner_ms.to_bits()),
        ]
    }

    fn from_words(words: [u64; WORDS]) -> Self {
        let [worker, prefill, size, held, times, seen, runner, runner_has] = words;
        let ((prompt_tokens, blocks), (overlap_blocks, uncached_tokens)) = (halves(size), halves(held));
        let ((predicted, decided), (candidates, flags)) = (halves(times), halves(seen));
        let (runner_blocks, runner_ms) = halves(runner_has);
        Self {
            worker,
            prefill,
            prompt_tokens,
            blocks,
            overlap_blocks,
            uncached_tokens,
            predicted_ms: f32::from_bits(predicted),
            decided_us: f32::from_bits(decided),
            candidates,
            is_warm_up: flags & 2 != 0,
            strategy: Strategy::ALL.get((flags >> 2) as usize).copied().unwrap_or_default(),
            runner_up: (flags & 1 != 0).then_some((runner, runner_blocks, f32::from_bits(runner_ms))),
        }
    }

    /// Reason for the choice of the worker, in words.
    fn reason(&self) -> String {
        if self.is_warm_up {
            return "it is cold: a share of requests goes to workers that are not warm yet".to_owned();
        }
        if self.candidates == 1 {
            return "it is the only one that can take it".to_owned();
        }
        let here = format!("{} of {} blocks are here", self.overlap_blocks, self.blocks);
        match self.runner_up {
            None => format!("by {}; {here}", self.strategy.name()),
            Some((_, blocks, ms)) if blocks > self.overlap_blocks => format!(
                "less to do: {:.1} ms; the next best has {blocks} blocks, and would take {ms:.1} ms",
                self.predicted_ms
            ),
            Some((_, blocks, ms)) if blocks == self.overlap_blocks => {
                format!("{here}, as with the next best, which would take {ms:.1} ms")
            }
            Some((_, blocks, ms)) => format!("{here}; the next best has {blocks} and would take {ms:.1} ms"),
        }
    }
}

fn unix_millis() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

#[derive(Debug)]
struct RingSlot {
    /// Twice the decision's number plus two when it is whole; odd while it is written.
    version: AtomicU64,
    nanoseconds: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The ring.
#[derive(Debug)]
pub struct Decisions {
    next: AtomicU64,
    places: Box<[RingSlot]>,
    start: Instant,
    start_unix_ms: u64,
}

impl Decisions {
    pub(crate) fn new() -> Self {
        let place = || RingSlot {
            version: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Self {
            next: AtomicU64::new(0),
            places: (0..KEPT).map(|_| place()).collect(),
            start: Instant::now(),
            start_unix_ms: unix_millis(),
        }
    }

    pub(crate) fn note(&self, decision: &Decision, now: Instant) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let place = &self.places[number as usize % KEPT];
        let before = place.version.load(Ordering::Relaxed);
        // A writer that is a whole ring behind gives up: its entry is left out.
        if before & 1 == 1
            || before > number * 2
            || place
                .version
                .compare_exchange(before, number * 2 + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            return;
        }
        // Release: pairs with the acquire fence in `get`; a reader that sees a word written below sees the odd version, too.
        fence(Ordering::Release);
        place.nanoseconds.store(now.duration_since(self.start).as_nanos() as u64, Ordering::Relaxed);
        for (cell, word) in place.words.iter().zip(decision.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
        // Release: pairs with the acquire load in `get`.
        place.version.store(number * 2 + 2, Ordering::Release);
    }

    /// Returns a decision and its time by its number; `None` if it was overwritten or is being written.
    fn get(&self, number: u64) -> Option<(Decision, u64)> {
        let place = &self.places[number as usize % KEPT];
        let version = place.version.load(Ordering::Acquire);
        if version != number * 2 + 2 {
            return None;
        }
        let nanoseconds = place.nanoseconds.load(Ordering::Relaxed);
        let words = std::array::from_fn(|at| place.words[at].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (place.version.load(Ordering::Relaxed) == version)
            .then(|| (Decision::from_words(words), self.start_unix_ms + nanoseconds / 1_000_000))
    }

    /// Decisions after this number, the newest last.
    pub fn to_json(&self, after: Option<u64>, name_of: impl Fn(u64) -> Option<String>) -> Value {
        let next = self.next.load(Ordering::Relaxed);
        let first = next.saturating_sub(KEPT as u64).max(after.map_or(0, |after| after.saturating_add(1)));
        let name = |identity: u64| name_of(identity).unwrap_or_else(|| "gone".to_owned());
        let shown = (first..next).filter_map(|number| {
            let (decision, unix_ms) = self.get(number)?;
            let runner_up = decision.runner_up.map(|(runner, blocks, ms)| {
                json!({ "worker": name(runner), "overlap_blocks": blocks, "predicted_ms": ms })
            });
            let prefill = (decision.prefill != 0).then(|| name(decision.prefill));
            Some(json!({
                "sequence": number, "unix_ms": unix_ms, "worker": name(decision.worker), "prefill": prefill,
                "prompt_tokens": decision.prompt_tokens, "blocks": decision.blocks,
                "overlap_blocks": decision.overlap_blocks, "uncached_tokens": decision.uncached_tokens,
                "predicted_ms": decision.predicted_ms, "decided_us": decision.decided_us,
                "candidates": decision.candidates, "runner_up": runner_up, "reason": decision.reason(),
            }))
        });
        let decisions: Vec<Value> = shown.collect();
        // A client that continues from `last` sees an entry that is being written now.
        let last = decisions.last().map(|decision| decision["sequence"].clone());
        json!({ "last": last.or(after.map(Value::from)), "decisions": decisions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(number: u32) -> Decision {
        Decision {
            worker: u64::from(number),
            prefill: u64::from(number),
            prompt_tokens: number,
            blocks: number,
            overlap_blocks: number,
            uncached_tokens: number,
            predicted_ms: number as f32,
            decided_us: number as f32,
            candidates: number,
            is_warm_up: false,
            strategy: Strategy::ALL[number as usize % Strategy::ALL.len()],
            runner_up: Some((u64::from(number), number, number as f32)),
        }
    }

    #[test]
    fn what_is_read_is_whole_while_others_write() {
        let decisions = Decisions::new();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for number in 0..100_000 {
                        decisions.note(&decision(number % 1_000_000), Instant::now());
                    }
                });
            }
            let mut seen = 0;
            loop {
                let next = decisions.next.load(Ordering::Relaxed);
                for number in next.saturating_sub(KEPT as u64)..next {
                    if let Some((found, _)) = decisions.get(number) {
                        assert_eq!(found, decision(found.blocks), "torn");
                        seen += 1;
                    }
                }
                if next == 200_000 {
                    break;
                }
            }
            // At least the ring as it is at the end.
            assert!(seen > KEPT / 2, "{seen}");
        });
        let shown = decisions.to_json(None, |_| None);
        assert_eq!(shown["last"].as_u64(), Some(199_999));
        let kept = shown["decisions"].as_array().map_or(0, Vec::len);
        assert!((KEPT - 2..=KEPT).contains(&kept), "{kept}");
    }

    #[test]
    fn only_newer_ones_are_told_and_reasons_fit() {
        let decisions = Decisions::new();
        let base = Decision { worker: 1, blocks: 9, overlap_blocks: 4, candidates: 2, ..Decision::default() };
        let cases = [
            (Decision { candidates: 1, ..base }, "the only one"),
            (Decision { is_warm_up: true, ..base }, "cold"),
            (
                Decision { runner_up: Some((2, 1, 7.0)), ..base },
                "4 of 9 blocks are here; the next best has 1",
            ),
            (Decision { runner_up: Some((2, 8, 7.0)), ..base }, "less to do"),
            (Decision { runner_up: Some((2, 4, 7.0)), ..base }, "as with the next best"),
            (Decision { strategy: Strategy::RoundRobin, ..base }, "by round-robin"),
        ];
        for (case, _) in &cases {
            decisions.note(case, Instant::now());
        }
        let name = |identity: u64| (identity == 1).then(|| "one".to_owned());
        let all = decisions.to_json(None, name);
        for (shown, (_, reason)) in all["decisions"].as_array().expect("a list").iter().zip(&cases) {
            assert!(shown["reason"].as_str().is_some_and(|text| text.contains(reason)), "{shown}");
            assert_eq!(shown["worker"], "one");
        }
        let newer = decisions.to_json(Some(4), name);
        assert_eq!(newer["decisions"].as_array().map(Vec::len), Some(1));
        assert_eq!(decisions.to_json(Some(u64::MAX), name)["decisions"], json!([]));
    }
    #[test]
    fn each_decision_is_told_with_the_strategy_that_made_it() {
        let decisions = Decisions::new();
        for strategy in Strategy::ALL {
            let decision = Decision { candidates: 2, blocks: 1, strategy, ..Decision::default() };
            decisions.note(&decision, Instant::now());
        }
        let shown = decisions.to_json(None, |_| None);
        let shown = shown["decisions"].as_array().expect("a list");
        assert_eq!(shown.len(), Strategy::ALL.len());
        for (decision, strategy) in shown.iter().zip(Strategy::ALL) {
            let reason = format!("by {}; 0 of 1 blocks are here", strategy.name());
            assert_eq!(decision["reason"].as_str(), Some(reason.as_str()));
        }
    }
}
