//! Limits that several gateways share: each reports its charges to the others, and counts the charges that
//! they report.
//!
//! A report carries sums since the gateway's start, not differences: the next report makes up for a lost
//! one. A gateway that sees a limiter for the first time, or creates it later than its peers, takes over
//! how empty its buckets are there. Between two reports each gateway knows only the earlier charges of the
//! others, so together they may admit the limit's allowance for that time once per gateway.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::{Limiter, Scope};
use crate::grant::NAME_BYTES_MAX;

/// A gateway's charges to one limiter, in nanoseconds of refilling: for requests, and for tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    /// Charges since the gateway's start, less those given back, in nanoseconds of refilling. Wraps.
    pub(super) spent: [u64; 2],
    /// Time until the buckets are full at that gateway.
    missing: [u64; 2],
    /// Requests in flight at that gateway.
    pub(super) running: u32,
}

impl LimitReport {
    pub(super) fn of(limiter: &Limiter, now: u64) -> Self {
        Self {
            spent: [limiter.requests.spent(), limiter.tokens.spent()],
            missing: [limiter.requests.missing(now), limiter.tokens.missing(now)],
            running: limiter.running(),
        }
    }

    /// Returns a number that changes when something was charged; refilling alone does not change it.
    #[must_use]
    pub fn version(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.spent, self.running).hash(&mut hasher);
        hasher.finish()
    }
}

/// Scope and name of a limiter.
type Named = (Scope, Arc<str>);

#[derive(Debug)]
struct PeerReport {
    report: LimitReport,
    at: u64,
}

/// The last reports of all peers. Its lock may be taken while a lock of the table is held, never the other
/// way round.
#[derive(Debug, Default)]
pub(super) struct PeerReports {
    told: Mutex<HashMap<u64, HashMap<Named, PeerReport>>>,
}

impl PeerReports {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, HashMap<Named, PeerReport>>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a peer's report; `limiter` is the limiter of that name here, if there is one.
    pub(super) fn take(
        &self,
        peer: u64,
        name: Named,
        report: LimitReport,
        limiter: Option<&Limiter>,
        limiters_max: usize,
        now: u64,
    ) {
        let mut told = self.lock();
        let told = told.entry(peer).or_default();
        if told.len() >= limiters_max && !told.contains_key(&name) {
            told.retain(|_, told| told.report.running > 0 || told.missing(now) != [0, 0]);
            if told.len() >= limiters_max {
                return;
            }
        }
        let before = told.insert(name, PeerReport { report, at: now });
        let Some(limiter) = limiter else { return };
        match &before {
            Some(before) => limiter.charge_peers(&before.report, &report, now),
            None => limiter.raise(report.missing, report.running, now),
        }
    }

    /// Applies to a new limiter the charges that peers have reported for its name.
    pub(super) fn introduce(&self, name: &Named, limiter: &Limiter, now: u64) {
        for told in self.lock().values().filter_map(|told| told.get(name)) {
            limiter.raise(told.missing(now), told.report.running, now);
        }
    }

    /// Removes a peer's reports for limiters of a scope; its requests in flight no longer count.
    pub(super) fn forget<'a>(&self, peer: u64, scope: Scope, limiter: impl Fn(&str) -> Option<&'a Limiter>) {
        let mut all = self.lock();
        let Some(told) = all.get_mut(&peer) else { return };
        told.retain(|(of, name), told| {
            if *of == scope
                && let Some(limiter) = limiter(name)
            {
                limiter.remove_peer_running(told.report.running);
            }
            *of != scope
        });
        if told.is_empty() {
            all.remove(&peer);
        }
    }
}

impl PeerReport {
    fn missing(&self, now: u64) -> [u64; 2] {
        self.report.missing.map(|missing| missing.saturating_sub(now.saturating_sub(self.at)))
    }
}

impl Scope {
    fn letter(self) -> char {
        match self {
            Self::Key => 'k',
            Self::Subject => 's',
            Self::Tenant => 't',
        }
    }
}

/// Returns the name of a limiter in messages.
pub(super) fn written(scope: Scope, name: &str) -> String {
    format!("{}:{name}", scope.letter())
}

/// Parses the name of a limiter in a message.
pub(super) fn read(text: &str) -> Option<Named> {
    let (letter, name) = text.split_once(':')?;
    let scope = [Scope::Key, Scope::Subject, Scope::Tenant];
    let scope = scope.into_iter().find(|scope| letter.len() == 1 && letter.starts_with(scope.letter()))?;
    // A subject may be longer than a name: up to the length that is accepted from a token.
    (name.len() <= 8 * NAME_BYTES_MAX).then(|| (scope, name.into()))
}
