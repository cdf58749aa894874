//! Lengths of the last served requests, for planners.
//!
//! Hot path: three relaxed operations, no lock, no allocation. A concurrent reader may see the lengths of
//! two requests mixed in one entry, which is acceptable in a sample.

use std::sync::atomic::{AtomicU64, Ordering};

use router_openai::Usage;

/// Number of requests whose lengths are kept.
const KEPT: usize = 128;

pub(crate) struct Lengths {
    /// Requests so far.
    count: AtomicU64,
    /// Prompt and cached tokens share one word; the answer's tokens are the other.
    slots: [[AtomicU64; 2]; KEPT],
}

impl Default for Lengths {
    fn default() -> Self {
        Self { count: AtomicU64::new(0), slots: std::array::from_fn(|_| Default::default()) }
    }
}

impl Lengths {
    pub(crate) fn record(&self, usage: &Usage) {
        if usage.prompt == 0 || usage.completion == 0 {
            return;
        }
        let half = |tokens: usize| u64::from(u32::try_from(tokens).unwrap_or(u32::MAX));
        let slot = &self.slots[self.count.fetch_add(1, Ordering::Relaxed) as usize % KEPT];
        let cached = usage.cached.unwrap_or(0).min(usage.prompt);
        slot[0].store((half(usage.prompt) << 32) | half(cached), Ordering::Relaxed);
        slot[1].store(half(usage.completion), Ordering::Relaxed);
    }

    /// Returns the number of requests so far, and the lengths of the last ones, newest first: prompt, its
    /// cached tokens, answer.
    pub(crate) fn recent(&self) -> (u64, Vec<[u64; 3]>) {
        let count = self.count.load(Ordering::Relaxed);
        let kept = count.min(KEPT as u64);
        let recent = (0..kept).map(|back| {
            let slot = &self.slots[(count - 1 - back) as usize % KEPT];
            let prompt = slot[0].load(Ordering::Relaxed);
            [prompt >> 32, prompt & u64::from(u32::MAX), slot[1].load(Ordering::Relaxed)]
        });
        (count, recent.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept_newest_first() {
        let lengths = Lengths::default();
        assert_eq!(lengths.recent(), (0, Vec::new()));
        for request in 1..=KEPT + 3 {
            let usage = Usage {
                prompt: request,
                completion: 2 * request,
                cached: Some(request + 7),
                ..Usage::default()
            };
            lengths.record(&usage);
        }
        lengths.record(&Usage { prompt: 9, ..Usage::default() });
        let (count, recent) = lengths.recent();
        assert_eq!((count, recent.len()), (KEPT as u64 + 3, KEPT));
        assert_eq!(recent[0], [131, 131, 262], "no more cached than there is");
        assert_eq!(recent[KEPT - 1], [4, 4, 8]);
        lengths.record(&Usage { prompt: usize::MAX, completion: usize::MAX, ..Usage::default() });
        assert_eq!(lengths.recent().1[0], [u64::from(u32::MAX), 0, u64::from(u32::MAX)]);
    }
}
