//! The limiters of all keys and tenants, by name. They survive a reload of the keys file, so that a reload
//! cannot be used to evade a limit.
//!
//! At most [`LIMITERS_MAX`] are kept. An idle limiter, with full buckets and no request in flight, equals a
//! new one, so that removing it loses nothing; that happens when the table is full, and at most once a
//! second. A table full of busy limiters takes no further name: the request must be refused, since serving
//! it without a limit would let clients evade the limit through the bound. Names without any limit take no
//! space.
//!
//! Hot path: a read lock around one look-up, one count of an Arc. Only a new name takes the write lock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::Limiter;
use super::shared::{self, LimitReport, PeerReports};
use crate::grant::LimitConfig;

/// Largest number of limiters of one scope: about 16 MiB.
pub const LIMITERS_MAX: usize = 65_536;
/// Shortest time between two searches of a full table for idle limiters, in nanoseconds: a search takes a
/// millisecond.
const SEARCH_EVERY_NS: u64 = 1_000_000_000;

/// Owner of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// One key of the keys file.
    Key,
    /// One subject of tokens. Separate from keys, so that a token's subject cannot use up the limits of a
    /// key with the same name.
    Subject,
    /// All keys of a tenant together.
    Tenant,
}

type Named = RwLock<HashMap<Arc<str>, Arc<Limiter>>>;

/// The table has no space for a further name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableFull;

/// All limiters.
#[derive(Debug)]
pub struct LimitTable {
    keys: Named,
    subjects: Named,
    tenants: Named,
    limiters_max: usize,
    peers: PeerReports,
    /// Earliest time of the next search of a full table.
    search_at: AtomicU64,
}

impl Default for LimitTable {
    fn default() -> Self {
        Self::with_room(LIMITERS_MAX)
    }
}

impl LimitTable {
    fn with_room(limiters_max: usize) -> Self {
        Self {
            keys: Named::default(),
            subjects: Named::default(),
            tenants: Named::default(),
            limiters_max,
            peers: PeerReports::default(),
            search_at: AtomicU64::new(0),
        }
    }

    /// Returns the limiter of a name, created for a new name and updated when its limits changed; `None`
    /// for a name without limits. The time is in nanoseconds, of the same clock as for [`super::admit`].
    ///
    /// # Errors
    ///
    /// [`TableFull`] when the table is full of busy limiters and does not have the name.
    pub fn get(
        &self,
        scope: Scope,
        name: &Arc<str>,
        config: LimitConfig,
        now: u64,
    ) -> Result<Option<Arc<Limiter>>, TableFull> {
        if config == LimitConfig::default() {
            return Ok(None);
        }
        let limiter = match self.found(scope, name) {
            Some(limiter) => limiter,
            None => self.insert(scope, name, config, now)?,
        };
        if limiter.config() != config {
            limiter.set(config);
        }
        Ok(Some(limiter))
    }

    fn named(&self, scope: Scope) -> &Named {
        match scope {
            Scope::Key => &self.keys,
            Scope::Subject => &self.subjects,
            Scope::Tenant => &self.tenants,
        }
    }

    fn found(&self, scope: Scope, name: &str) -> Option<Arc<Limiter>> {
        self.named(scope).read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Returns the charges of this gateway to every limiter, by names that [`Self::take_reports`] accepts.
    #[must_use]
    pub fn reports(&self, now: u64) -> HashMap<String, LimitReport> {
        let mut reports = HashMap::new();
        for scope in [Scope::Key, Scope::Subject, Scope::Tenant] {
            let named = self.named(scope).read().unwrap_or_else(PoisonError::into_inner);
            let of = |(name, limiter): (&Arc<str>, &Arc<Limiter>)| {
                (shared::written(scope, name), LimitReport::of(limiter, now))
            };
            reports.extend(named.iter().map(of));
        }
        reports
    }

    /// Counts the charges of another gateway. Invalid names are ignored.
    pub fn take_reports(&self, peer: u64, reports: HashMap<String, LimitReport>, now: u64) {
        for (name, report) in reports {
            let Some(name) = shared::read(&name) else { continue };
            // The lock is held meanwhile: a limiter that is created concurrently would apply the report a
            // second time.
            let named = self.named(name.0).read().unwrap_or_else(PoisonError::into_inner);
            let limiter = named.get(&name.1).map(Arc::as_ref);
            self.peers.take(peer, name, report, limiter, self.limiters_max, now);
        }
    }

    /// Removes the reports of a gateway that has gone silent.
    pub fn forget_peer(&self, peer: u64) {
        for scope in [Scope::Key, Scope::Subject, Scope::Tenant] {
            let named = self.named(scope).read().unwrap_or_else(PoisonError::into_inner);
            self.peers.forget(peer, scope, |name| named.get(name).map(Arc::as_ref));
        }
    }

    fn insert(
        &self,
        scope: Scope,
        name: &Arc<str>,
        config: LimitConfig,
        now: u64,
    ) -> Result<Arc<Limiter>, TableFull> {
        let mut named = self.named(scope).write().unwrap_or_else(PoisonError::into_inner);
        if named.len() >= self.limiters_max && !named.contains_key(name) {
            // Only changed under the write lock, which is held.
            if now < self.search_at.load(Ordering::Relaxed) {
                return Err(TableFull);
            }
            self.search_at.store(now.saturating_add(SEARCH_EVERY_NS), Ordering::Relaxed);
            // A limiter whose Arc is shared is about to be used.
            named.retain(|_, limiter| Arc::strong_count(limiter) > 1 || !limiter.is_idle(now));
            if named.len() >= self.limiters_max {
                return Err(TableFull);
            }
        }
        let limiter = named.entry(Arc::clone(name)).or_insert_with(|| {
            let limiter = Limiter::new(config);
            self.peers.introduce(&(scope, Arc::clone(name)), &limiter, now);
            Arc::new(limiter)
        });
        Ok(Arc::clone(limiter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::admit;

    const ONE: LimitConfig =
        LimitConfig { requests_per_minute: Some(1), tokens_per_minute: None, concurrent_max: None };

    #[test]
    fn a_name_keeps_its_limiter_and_gets_its_new_limits() {
        let table = LimitTable::default();
        let name: Arc<str> = "a".into();
        let get = |scope, limit| {
            let config = LimitConfig { requests_per_minute: limit, ..LimitConfig::default() };
            table.get(scope, &name, config, 0).expect("room")
        };
        let take = |limiter: &Option<Arc<Limiter>>| admit(limiter.as_ref(), None, 1, 0).is_ok();
        let first = get(Scope::Key, Some(2));
        assert!(take(&first));
        let again = get(Scope::Key, Some(2));
        assert!(first.as_ref().zip(again.as_ref()).is_some_and(|(first, again)| Arc::ptr_eq(first, again)));
        let more = get(Scope::Key, Some(4));
        assert!(take(&more) && take(&more) && !take(&more), "half of two was left, so half of four is");
        for scope in [Scope::Subject, Scope::Tenant] {
            assert!(take(&get(scope, Some(1))), "{scope:?}: another limiter of the same name");
        }
        assert!(get(Scope::Key, None).is_none());
    }

    /// Passes the reports of each table to the other.
    fn exchange(tables: [&LimitTable; 2], now: u64) {
        let [first, second] = tables;
        let (of_first, of_second) = (first.reports(now), second.reports(now));
        second.take_reports(1, of_first, now);
        first.take_reports(2, of_second, now);
    }

    #[test]
    fn gateways_that_tell_each_other_share_a_limit() {
        let config =
            LimitConfig { requests_per_minute: Some(60), concurrent_max: Some(3), ..LimitConfig::default() };
        let tables = [LimitTable::default(), LimitTable::default()];
        let name: Arc<str> = "a".into();
        let take = |at: usize, now| {
            let limiter = tables[at].get(Scope::Tenant, &name, config, now).expect("room");
            admit(None, limiter.as_ref(), 0, now)
        };
        let second = 1_000_000_000;
        let mut taken = 0;
        for now in (0..60).map(|at| at * second / 60) {
            exchange([&tables[0], &tables[1]], now);
            taken += [0, 1].into_iter().filter(|at| take(*at, now).is_ok()).count();
        }
        assert!((60..=62).contains(&taken), "{taken}: a minute's worth, and what refilled in a second");
        // A new table takes over how empty the buckets are.
        let new = LimitTable::default();
        new.take_reports(1, tables[0].reports(second), second);
        let limiter = new.get(Scope::Tenant, &name, config, second).expect("room");
        assert!(admit(None, limiter.as_ref(), 0, second).is_err());
        // Units given back at one gateway are available at both.
        let later = 60 * second;
        exchange([&tables[0], &tables[1]], later);
        let inside = [take(0, later).expect("a place"), take(0, later).expect("a place")];
        exchange([&tables[0], &tables[1]], later);
        let third = take(1, later).expect("the last place");
        assert_eq!(take(1, later).expect_err("no place").kind, crate::LimitKind::Concurrency);
        drop(inside);
        exchange([&tables[0], &tables[1]], later);
        assert!(take(1, later).is_ok());
        drop(third);
        // A peer that is gone no longer counts with its requests.
        let stuck = [take(0, later).expect("a place"), take(0, later).expect("a place")];
        exchange([&tables[0], &tables[1]], later);
        let other = take(1, later).expect("a place");
        assert!(take(1, later).is_err());
        tables[1].forget_peer(1);
        assert!(take(1, later).is_ok());
        drop((stuck, other));
        tables[1].take_reports(
            1,
            HashMap::from([("x:a".to_owned(), LimitReport::of(&Limiter::new(config), 0))]),
            later,
        );
    }

    #[test]
    fn a_report_that_is_lost_is_made_good_by_the_next() {
        let config = LimitConfig { tokens_per_minute: Some(600), ..LimitConfig::default() };
        let tables = [LimitTable::default(), LimitTable::default()];
        let name: Arc<str> = "a".into();
        let limiter =
            |at: usize| tables[at].get(Scope::Key, &name, config, 0).expect("room").expect("a limit");
        let left = |at: usize| limiter(at).tokens.level(0).expect("a limit").0;
        assert_eq!((left(0), left(1)), (600, 600));
        exchange([&tables[0], &tables[1]], 0);
        let mut charges = Vec::new();
        for (tokens, is_lost) in [(100, false), (50, true), (50, true), (100, false)] {
            charges.push(admit(Some(&limiter(0)), None, tokens, 0).expect("room"));
            if !is_lost {
                exchange([&tables[0], &tables[1]], 0);
            }
        }
        assert_eq!((left(0), left(1)), (300, 300));
        charges.remove(0).cancel();
        charges[0].reconcile(10, 0);
        exchange([&tables[0], &tables[1]], 0);
        exchange([&tables[0], &tables[1]], 0);
        assert_eq!((left(0), left(1)), (440, 440));
    }

    #[test]
    fn a_full_table_forgets_only_the_idle() {
        let table = LimitTable::with_room(2);
        let names: [Arc<str>; 3] = ["a", "b", "c"].map(Arc::from);
        for name in &names[..2] {
            let limiter = table.get(Scope::Key, name, ONE, 0).expect("room");
            drop(admit(limiter.as_ref(), None, 1, 0).expect("one"));
        }
        let minute = 60_000_000_000;
        let get = |index: usize, now| table.get(Scope::Key, &names[index], ONE, now).is_ok();
        assert!(!get(2, minute - 1), "both have something to remember");
        assert!(get(0, minute - 1), "the known are served");
        assert!(!get(2, minute), "it was searched a moment ago");
        assert!(get(2, minute + SEARCH_EVERY_NS));
    }
}
