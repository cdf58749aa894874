//! Service speed: estimated tokens per second of one place, measured from requests that ended.
//!
//! The capacity of the gate is this speed times its places. It is measured per place, and not as tokens
//! that left the gate per second, because the latter is only demand while the gate is not full: when the
//! first request has to wait it would be far too low, and requests would be shed that had time. Requests
//! that slow each other down lower the speed by themselves. Costs are the queue's estimates, so that an
//! estimate that is always too high cancels out.
//!
//! Two running sums, tokens and seconds, each request replacing 1/64 of them, as two `f32` in one atomic: a
//! reader always sees a consistent pair. One attempt per request; a lost race loses one observation.

use std::sync::atomic::{AtomicU64, Ordering};

/// Share of the running sums that a new request replaces.
const NEW_SHARE: f32 = 1.0 / 64.0;

/// A running average of the speed; unknown until the first observation.
#[derive(Debug, Default)]
pub(super) struct Speed {
    sums: AtomicU64,
}

fn pack(tokens: f32, seconds: f32) -> u64 {
    u64::from(tokens.to_bits()) << 32 | u64::from(seconds.to_bits())
}

fn unpack(sums: u64) -> (f32, f32) {
    (f32::from_bits((sums >> 32) as u32), f32::from_bits(sums as u32))
}

impl Speed {
    /// Records that a request of `tokens` tokens held its place for `held_ns` nanoseconds.
    pub(super) fn observe(&self, tokens: u64, held_ns: u64) {
        let before = self.sums.load(Ordering::Relaxed);
        let (new_tokens, new_seconds) = (tokens as f32, held_ns as f32 / 1e9);
        let after = if before == 0 {
            pack(new_tokens, new_seconds)
        } else {
            let (tokens, seconds) = unpack(before);
            pack(tokens + (new_tokens - tokens) * NEW_SHARE, seconds + (new_seconds - seconds) * NEW_SHARE)
        };
        let _ = self.sums.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the tokens per second of one place; `None` before the first observation.
    pub(super) fn get(&self) -> Option<f64> {
        let (tokens, seconds) = unpack(self.sums.load(Ordering::Relaxed));
        let speed = f64::from(tokens) / f64::from(seconds);
        (speed.is_finite() && speed > 0.0).then_some(speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows() {
        let speed = Speed::default();
        assert_eq!(speed.get(), None);
        speed.observe(0, 0);
        assert_eq!(speed.get(), None);
        speed.observe(1000, 2_000_000_000);
        assert_eq!(speed.get(), Some(500.0));
        for _ in 0..400 {
            speed.observe(100, 1_000_000_000);
        }
        assert!((speed.get().expect("known") - 100.0).abs() < 2.0);
    }
}
