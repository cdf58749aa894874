//! The limiters of all keys and tenants, by name. They outlive a reload of the keys file, so that a reload is no
//! way around a limit.
//!
//! At most [`LIMITERS_MAX`] are kept. One that is idle, full buckets and nobody inside, equals a new one, so that
//! forgetting it loses nothing; that happens when the table is full, and at most once a second. A table full of busy
//! ones takes no further name: the request must be turned away, since serving it without a limit would make the
//! bound the way around. Names without any limit take no room.
//!
//! Hot path: a read lock around one look-up, one count of an Arc. Only a new name takes the write lock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::Limiter;
use crate::grant::LimitConfig;

/// Limiters of one scope that are kept at most: about 16 MiB.
pub const LIMITERS_MAX: usize = 65_536;
/// A full table is searched for idle ones no more often, in nanoseconds: the search takes a millisecond.
const SEARCH_EVERY_NS: u64 = 1_000_000_000;

/// Whose limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Of one key of the keys file.
    Key,
    /// Of one subject of tokens. Apart from keys, so that nobody can use up a key by a name.
    Subject,
    /// Of all keys of a tenant together.
    Tenant,
}

type Named = RwLock<HashMap<Arc<str>, Arc<Limiter>>>;

/// There is no room for a further name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableFull;

/// All limiters.
#[derive(Debug)]
pub struct LimitTable {
    keys: Named,
    subjects: Named,
    tenants: Named,
    limiters_max: usize,
    /// Not before this time is a full table searched again.
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
            search_at: AtomicU64::new(0),
        }
    }

    /// The limiter of a name, made when it is new and changed when its limits changed; `None` for a name without
    /// limits. The time is in nanoseconds, of the same clock as for [`super::admit`].
    ///
    /// # Errors
    ///
    /// [`TableFull`] when the table is full of busy ones and does not know the name.
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
        let named = match scope {
            Scope::Key => &self.keys,
            Scope::Subject => &self.subjects,
            Scope::Tenant => &self.tenants,
        };
        let found = named.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        let limiter = match found {
            Some(limiter) => limiter,
            None => self.insert(named, name, config, now)?,
        };
        if limiter.config() != config {
            limiter.set(config);
        }
        Ok(Some(limiter))
    }

    fn insert(
        &self,
        named: &Named,
        name: &Arc<str>,
        config: LimitConfig,
        now: u64,
    ) -> Result<Arc<Limiter>, TableFull> {
        let mut named = named.write().unwrap_or_else(PoisonError::into_inner);
        if named.len() >= self.limiters_max && !named.contains_key(name) {
            // Under the write lock: nobody else changes it.
            if now < self.search_at.load(Ordering::Relaxed) {
                return Err(TableFull);
            }
            self.search_at.store(now.saturating_add(SEARCH_EVERY_NS), Ordering::Relaxed);
            // Whoever holds the Arc is about to use it.
            named.retain(|_, limiter| Arc::strong_count(limiter) > 1 || !limiter.is_idle(now));
            if named.len() >= self.limiters_max {
                return Err(TableFull);
            }
        }
        let limiter = named.entry(Arc::clone(name)).or_insert_with(|| Arc::new(Limiter::new(config)));
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
