//! Rate limit headers for clients, in OpenAI's form.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use super::Limiter;
use super::bucket::Bucket;

/// The state of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Units per minute.
    pub limit: u64,
    /// Units that can be taken now.
    pub remaining: u64,
    /// Time until the limit is full again.
    pub reset: Duration,
}

/// The limits of a key and its tenant together: of each kind the one with fewer units left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateState {
    /// Requests, if limited.
    pub requests: Option<Rate>,
    /// Tokens, if limited.
    pub tokens: Option<Rate>,
}

impl RateState {
    /// Returns the state at a time in nanoseconds.
    #[must_use]
    pub fn of(key: Option<&Arc<Limiter>>, tenant: Option<&Arc<Limiter>>, now: u64) -> Self {
        let tightest = |bucket: fn(&Limiter) -> &Bucket| {
            let rates = [key, tenant].into_iter().flatten().filter_map(|limiter| {
                let bucket = bucket(limiter);
                let (remaining, reset) = bucket.level(now)?;
                Some(Rate { limit: bucket.per_minute()?, remaining, reset })
            });
            rates.min_by_key(|rate| rate.remaining)
        };
        Self { requests: tightest(|limiter| &limiter.requests), tokens: tightest(|limiter| &limiter.tokens) }
    }

    /// Returns the headers, `x-ratelimit-…`; none for a kind without a limit.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        const REQUESTS: [&str; 3] =
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
        const TOKENS: [&str; 3] =
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];
        [(REQUESTS, self.requests), (TOKENS, self.tokens)].into_iter().flat_map(|(names, rate)| {
            let values =
                rate.map(|rate| [rate.limit.to_string(), rate.remaining.to_string(), as_reset(rate.reset)]);
            values.into_iter().flat_map(move |values| names.into_iter().zip(values))
        })
    }
}

/// Formats a duration as OpenAI does: `86ms`, `8.64s`, `6m0s`, `1h2m3s`. Rounded up to a millisecond, and
/// to a second from a minute on.
fn as_reset(duration: Duration) -> String {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    if ms < 1000 {
        return format!("{ms}ms");
    }
    if ms < 60_000 {
        let (seconds, rest) = (ms / 1000, ms % 1000);
        let fraction = format!(".{rest:03}");
        return format!("{seconds}{}s", fraction.trim_end_matches('0').trim_end_matches('.'));
    }
    let seconds = ms.div_ceil(1000);
    let mut text = String::new();
    if seconds >= 3600 {
        // Writing to a string cannot fail.
        let _ = write!(text, "{}h", seconds / 3600);
    }
    let _ = write!(text, "{}m{}s", seconds / 60 % 60, seconds % 60);
    text
}

/// Returns the value of `retry-after`: whole seconds, rounded up, at least one.
#[must_use]
pub fn retry_after_seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grant::LimitConfig;
    use crate::limits::admit;

    #[test]
    fn resets_are_written_as_openai_does() {
        let cases = [
            (0, "0ms"),
            (1, "1ms"),
            (86_000_000, "86ms"),
            (999_000_001, "1s"),
            (8_640_000_000, "8.64s"),
            (12_000_000_000, "12s"),
            (59_999_000_001, "1m0s"),
            (360_000_000_000, "6m0s"),
            (360_000_000_001, "6m1s"),
            (3_723_000_000_000, "1h2m3s"),
        ];
        for (ns, expected) in cases {
            assert_eq!(as_reset(Duration::from_nanos(ns)), expected);
        }
    }

    #[test]
    fn waits_are_rounded_up() {
        for (ns, expected) in [(0, 1), (1, 1), (1_000_000_000, 1), (1_000_000_001, 2)] {
            assert_eq!(retry_after_seconds(Duration::from_nanos(ns)), expected);
        }
        assert_eq!(retry_after_seconds(Duration::MAX), u64::MAX);
    }

    #[test]
    fn the_tighter_limit_is_shown() {
        let limiter = |requests, tokens| {
            Arc::new(Limiter::new(LimitConfig {
                requests_per_minute: requests,
                tokens_per_minute: tokens,
                concurrent_max: None,
            }))
        };
        let (key, tenant) = (limiter(Some(10), None), limiter(Some(6), Some(6000)));
        let _charge = admit(Some(&key), Some(&tenant), 1000, 0).expect("fits");
        let headers: Vec<_> = RateState::of(Some(&key), Some(&tenant), 0).headers().collect();
        let expected = [
            ("x-ratelimit-limit-requests", "6"),
            ("x-ratelimit-remaining-requests", "5"),
            ("x-ratelimit-reset-requests", "10s"),
            ("x-ratelimit-limit-tokens", "6000"),
            ("x-ratelimit-remaining-tokens", "5000"),
            ("x-ratelimit-reset-tokens", "10s"),
        ];
        assert_eq!(headers, expected.map(|(name, value)| (name, value.to_owned())));
        assert_eq!(RateState::of(None, None, 0).headers().count(), 0);
    }
}
