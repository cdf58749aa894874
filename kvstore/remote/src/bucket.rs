//! A token bucket: how many bytes may go now. Time is an argument.

use std::time::Instant;

#[derive(Debug)]
pub(crate) struct TokenBucket {
    bytes_per_second: u64,
    burst_bytes: u64,
    tokens: u64,
    filled_at: Instant,
}

impl TokenBucket {
    /// Full at first: one second's worth.
    pub(crate) fn new(bytes_per_second: u64, now: Instant) -> Self {
        Self { bytes_per_second, burst_bytes: bytes_per_second, tokens: bytes_per_second, filled_at: now }
    }

    /// Takes `bytes`, or nothing. What is larger than a full bucket goes when the bucket is full.
    pub(crate) fn take(&mut self, bytes: u64, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.filled_at);
        let new = (u128::from(self.bytes_per_second) * passed.as_nanos() / 1_000_000_000) as u64;
        if new > 0 {
            self.tokens = self.tokens.saturating_add(new).min(self.burst_bytes);
            self.filled_at = now;
        }
        let price = bytes.min(self.burst_bytes);
        if self.burst_bytes == 0 || self.tokens < price {
            return false;
        }
        self.tokens -= price;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_rate_is_kept() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(1000, start);
        assert!(bucket.take(1000, start) && !bucket.take(1, start));
        let taken = (1..=2000_u64).filter(|&ms| bucket.take(10, start + Duration::from_millis(ms))).count();
        assert_eq!(taken, 200, "10 bytes at a time, 1000 a second, for two seconds");
        assert!(bucket.take(1 << 40, start + Duration::from_secs(9)), "a full bucket lets anything go");
        assert!(!TokenBucket::new(0, start).take(1, start + Duration::from_secs(99)), "zero is never");
    }
}
