//! Rate limits: requests per minute, tokens per minute and concurrent requests, of a key and of its tenant.
//!
//! [`admit`] takes from up to six limits at once, all or nothing: units taken before a refusal are given
//! back. In between another request can be refused because of units that are about to be given back; its
//! retry time is short, and no request is ever admitted in excess.
//!
//! Tokens are charged before they are known, by [`Estimate`], and corrected by [`Charge::reconcile`] when they
//! are: an excess is given back immediately, and a shortfall becomes a debt for which later requests wait.
//! A [`Charge`] that is dropped unsettled keeps the estimate charged and frees its place; a charge whose
//! request never reached a worker is given back by [`Charge::cancel`].
//!
//! Hot path: two Arc clones and at most six compare-and-swaps; no lock, no allocation, no clock. All orderings are
//! relaxed: counters guard no other memory.

mod bucket;
mod rate;
mod shared;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bucket::{Bucket, BucketRefusal};
pub use rate::{Rate, RateState, retry_after_seconds};
pub use shared::LimitReport;
pub use table::{LIMITERS_MAX, LimitTable, Scope, TableFull};

use crate::grant::LimitConfig;

/// Retry advice when all places are taken: the end of a running request is unknown.
const CONCURRENCY_RETRY: Duration = Duration::from_secs(1);

/// The limits of one key or one tenant.
#[derive(Debug, Default)]
pub struct Limiter {
    requests: Bucket,
    tokens: Bucket,
    /// Requests in flight at this gateway.
    running: AtomicU32,
    /// Requests in flight at other gateways, by their last reports.
    peers_running: AtomicU32,
    /// Largest number of requests in flight; 0 for no limit.
    running_max: AtomicU32,
}

impl Limiter {
    /// Creates full buckets with these limits.
    #[must_use]
    pub fn new(config: LimitConfig) -> Self {
        Self {
            requests: Bucket::new(config.requests_per_minute),
            tokens: Bucket::new(config.tokens_per_minute),
            running: AtomicU32::new(0),
            peers_running: AtomicU32::new(0),
            running_max: AtomicU32::new(config.concurrent_max.unwrap_or(0)),
        }
    }

    /// Changes the limits; used units stay used.
    pub fn set(&self, config: LimitConfig) {
        self.requests.set(config.requests_per_minute);
        self.tokens.set(config.tokens_per_minute);
        self.running_max.store(config.concurrent_max.unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns the limits in force.
    #[must_use]
    pub fn config(&self) -> LimitConfig {
        LimitConfig {
            requests_per_minute: self.requests.per_minute(),
            tokens_per_minute: self.tokens.per_minute(),
            concurrent_max: Some(self.running_max.load(Ordering::Relaxed)).filter(|&limit| limit > 0),
        }
    }

    /// Returns the number of requests in flight.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }

    /// Whether the limiter equals a new one, so that it may be removed.
    fn is_idle(&self, now: u64) -> bool {
        self.running() == 0
            && self.peers_running.load(Ordering::Relaxed) == 0
            && self.requests.is_full(now)
            && self.tokens.is_full(now)
    }

    fn take(&self, tokens: u64, now: u64) -> Result<Taken, (LimitKind, BucketRefusal)> {
        let limit = self.running_max.load(Ordering::Relaxed);
        let before = self.running.fetch_add(1, Ordering::Relaxed);
        if limit > 0 && before.saturating_add(self.peers_running.load(Ordering::Relaxed)) >= limit {
            self.running.fetch_sub(1, Ordering::Relaxed);
            return Err((LimitKind::Concurrency, BucketRefusal::RetryAfter(CONCURRENCY_RETRY)));
        }
        let requests_cost = self.requests.take(1, now).map_err(|empty| {
            self.running.fetch_sub(1, Ordering::Relaxed);
            (LimitKind::Requests, empty)
        })?;
        let tokens_cost = self.tokens.take(tokens, now).map_err(|empty| {
            self.running.fetch_sub(1, Ordering::Relaxed);
            self.requests.give_back(requests_cost);
            (LimitKind::Tokens, empty)
        })?;
        Ok(Taken { requests_cost, tokens_cost })
    }

    /// Counts the charges of a peer between two of its reports.
    fn charge_peers(&self, before: &LimitReport, after: &LimitReport, now: u64) {
        let [requests, tokens] = [0, 1].map(|at| (before.spent[at], after.spent[at]));
        self.requests.take_for_peer(requests.0, requests.1, now);
        self.tokens.take_for_peer(tokens.0, tokens.1, now);
        self.peers_running.fetch_add(after.running.wrapping_sub(before.running), Ordering::Relaxed);
    }

    /// Counts the charges of a peer before its first report.
    fn raise(&self, missing: [u64; 2], running: u32, now: u64) {
        self.requests.raise(missing[0], now);
        self.tokens.raise(missing[1], now);
        self.peers_running.fetch_add(running, Ordering::Relaxed);
    }

    /// Removes the requests in flight of a peer that is gone.
    fn remove_peer_running(&self, running: u32) {
        self.peers_running.fetch_sub(running, Ordering::Relaxed);
    }

    fn give_back(&self, taken: Taken) {
        self.running.fetch_sub(1, Ordering::Relaxed);
        self.requests.give_back(taken.requests_cost);
        self.tokens.give_back(taken.tokens_cost);
    }
}

/// Units taken for one request, in nanoseconds of refilling.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    requests_cost: u64,
    tokens_cost: u64,
}

/// Kind of the exceeded limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitKind {
    /// Requests per minute.
    Requests,
    /// Tokens per minute.
    Tokens,
    /// Concurrent requests.
    Concurrency,
}

/// A request that is over a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Scope of the limit.
    pub scope: Scope,
    /// Kind of the limit.
    pub kind: LimitKind,
    /// Time to retry after; `None` when the request asks for more than the limit ever gives.
    pub retry_after: Option<Duration>,
}

/// Number of tokens that are charged before they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Estimate {
    /// The prompt and the longest answer, as OpenAI does: no debt, but clients that leave `max_tokens`
    /// large are refused although they would have used little.
    #[default]
    PromptAndAnswer,
    /// The prompt alone: no request is refused for tokens that it might use, but long answers become debt,
    /// so that a key can be over its limit for as long as its requests run.
    Prompt,
}

impl Estimate {
    /// Returns the tokens to charge for `choices` answers to a prompt. Without `answer_max` the answer
    /// counts as `answer_default`.
    #[must_use]
    pub fn tokens(self, prompt: u64, answer_max: Option<u64>, answer_default: u64, choices: u64) -> u64 {
        match self {
            Self::PromptAndAnswer => {
                prompt.saturating_add(answer_max.unwrap_or(answer_default).saturating_mul(choices.max(1)))
            }
            Self::Prompt => prompt,
        }
    }
}

/// The charge of a request within its limits. Its place is freed on drop.
#[derive(Debug)]
pub struct Charge {
    limiters: [Option<(Arc<Limiter>, Taken)>; 2],
    tokens: u64,
}

impl Charge {
    /// Returns the tokens that were charged.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Corrects the charge when the usage is known. May be called again as it grows; the place stays taken.
    pub fn reconcile(&mut self, used: u64, now: u64) {
        let before = self.tokens;
        for (limiter, taken) in self.limiters.iter_mut().flatten() {
            if used >= before {
                let cost = limiter.tokens.take_into_debt(used - before, now);
                taken.tokens_cost = taken.tokens_cost.saturating_add(cost);
            } else {
                // In proportion to the cost at which the tokens were taken, since the limit may have
                // changed.
                let kept = u128::from(taken.tokens_cost) * u128::from(used) / u128::from(before);
                let kept = u64::try_from(kept).unwrap_or(taken.tokens_cost);
                limiter.tokens.give_back(taken.tokens_cost - kept);
                taken.tokens_cost = kept;
            }
        }
        self.tokens = used;
    }

    /// Gives everything back, for a request that never reached a worker.
    pub fn cancel(mut self) {
        for (limiter, taken) in self.limiters.iter_mut().filter_map(Option::take) {
            limiter.give_back(taken);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        for (limiter, _) in self.limiters.iter().flatten() {
            limiter.running.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Takes one request with `tokens` tokens from the limits of its key and of its tenant, at a time in
/// nanoseconds.
///
/// # Errors
///
/// The first limit that is exceeded; nothing is taken then.
pub fn admit(
    key: Option<&Arc<Limiter>>,
    tenant: Option<&Arc<Limiter>>,
    tokens: u64,
    now: u64,
) -> Result<Charge, Refused> {
    let mut charge = Charge { limiters: [None, None], tokens };
    for (index, (scope, limiter)) in [(Scope::Key, key), (Scope::Tenant, tenant)].into_iter().enumerate() {
        let Some(limiter) = limiter else { continue };
        match limiter.take(tokens, now) {
            Ok(taken) => charge.limiters[index] = Some((Arc::clone(limiter), taken)),
            Err((kind, empty)) => {
                charge.cancel();
                let retry_after = match empty {
                    BucketRefusal::RetryAfter(wait) => Some(wait),
                    BucketRefusal::ExceedsCapacity => None,
                };
                return Err(Refused { scope, kind, retry_after });
            }
        }
    }
    Ok(charge)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
