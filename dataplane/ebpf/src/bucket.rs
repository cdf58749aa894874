//! The token bucket of `bpf/admission.bpf.c` in Rust, where a table of times can test it. The program itself
//! is tested with bursts and pauses of the real clock.
//!
//! A bucket is one number, the time at which it will be full again. That needs no division and no second
//! field, so that the program updates it with one compare-and-swap.

/// A token bucket; a new one is full.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bucket {
    full_at_ns: u64,
}

impl Bucket {
    /// Takes a token at time `now_ns`; false when there is none. A token returns every `interval_ns`; the
    /// bucket holds `burst_ns / interval_ns` of them.
    pub fn take(&mut self, now_ns: u64, interval_ns: u64, burst_ns: u64) -> bool {
        let next = self.full_at_ns.max(now_ns) + interval_ns;
        let taken = next - now_ns <= burst_ns;
        if taken {
            self.full_at_ns = next;
        }
        taken
    }
}

/// Returns the interval between two tokens and the span of a full bucket, both in ns; (0, 0) when `rate` is
/// 0, which means no limit. `rate` is per second.
pub(crate) fn spans_ns(rate: u32, burst: u32) -> (u64, u64) {
    match 1_000_000_000u64.checked_div(u64::from(rate)) {
        None => (0, 0),
        Some(interval) => (interval, interval * u64::from(burst)),
    }
}

#[cfg(test)]
mod tests {
    use super::{Bucket, spans_ns};

    #[test]
    fn takes_what_the_table_says() {
        // 10 per second, bursts of 3: a token each 100 ms.
        let (interval, burst) = spans_ns(10, 3);
        assert_eq!((interval, burst), (100_000_000, 300_000_000));
        let mut bucket = Bucket::default();
        for (at_ms, taken) in [
            (1000, true),
            (1000, true),
            (1000, true),
            (1000, false),
            (1099, false),
            (1100, true),
            (1100, false),
            (1350, true),
            (1350, true),
            (1350, false),
            (9000, true),
            (9000, true),
            (9000, true),
            (9000, false),
            // The clock of another CPU may lag a little: no extra tokens, and no wrap-around.
            (8999, false),
        ] {
            assert_eq!(bucket.take(at_ms * 1_000_000, interval, burst), taken, "at {at_ms} ms");
        }
    }

    #[test]
    fn no_rate_is_no_limit() {
        assert_eq!(spans_ns(0, 100), (0, 0));
    }
}
