//! What administrators changed of the configured roster while the gateway runs, and how gateways of one fleet agree on it.
//!
//! For each worker that was ever spoken of, the latest wish counts (a last-writer-wins map): each gateway merges what its
//! peers tell, in any order and as often as it likes, and all come to the same state. Versions are times of the wall clock,
//! made larger than every version seen so far, so a clock that is behind cannot lose a later wish of the same
//! administrator. At most [`CHANGES_MAX`] wishes are kept; the oldest are forgotten first, which means that the
//! configuration counts again.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use router_engines::dialect::Role;
use router_engines::key::EngineKeys;
use serde::{Deserialize, Serialize};

use crate::spec::{DEFAULT_POOL, SpecError, WORKERS_MAX, WorkerSpec, check_url};

/// Wishes that are kept.
const CHANGES_MAX: usize = WORKERS_MAX;

/// What is wanted of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// It takes requests.
    Serve,
    /// It gets no new requests; those that it has go on.
    Drain,
    /// It is no worker of this fleet.
    Remove,
}

/// A worker that no configuration names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Added {
    /// As in [`WorkerSpec::url`].
    pub url: String,
    /// `prefill`, `decode` or `both`; empty is what the worker says.
    #[serde(default)]
    pub role: String,
    /// As in [`WorkerSpec::pool`].
    #[serde(default = "default_pool")]
    pub pool: String,
    /// As in [`WorkerSpec::uid`].
    #[serde(default)]
    pub uid: Option<String>,
}

fn default_pool() -> String {
    DEFAULT_POOL.to_owned()
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Change {
    /// Of two wishes the one with the larger version counts.
    version: u64,
    wish: Wish,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    added: Option<Added>,
}

impl Change {
    /// A total order, so that gateways agree also on wishes of the same version.
    fn rank(&self) -> (u64, u8, &str, &str, &str) {
        let added = self.added.as_ref();
        let word = |of: fn(&Added) -> &str| added.map_or("", of);
        (self.version, self.wish as u8, word(|a| &a.url), word(|a| &a.role), word(|a| &a.pool))
    }
}

/// The latest wish for each worker, by its name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Changes(BTreeMap<String, Change>);

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

impl Changes {
    /// Nothing was changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes a wish for a worker that is known by its name.
    pub(crate) fn wish(&mut self, name: &str, wish: Wish) {
        let version = self.next_version();
        let added = self.0.get(name).and_then(|change| change.added.clone());
        self.put(name.to_owned(), Change { version, wish, added });
    }

    /// Adds a worker, or describes an added one anew.
    pub(crate) fn add(&mut self, added: Added) -> Result<(), SpecError> {
        check_url(&added.url)?;
        let version = self.next_version();
        let name = WorkerSpec::new(&added.url).name();
        self.put(name, Change { version, wish: Wish::Serve, added: Some(added) });
        Ok(())
    }

    /// Takes over what another gateway knows; whether that changed anything.
    pub(crate) fn merge(&mut self, other: Self) -> Result<bool, SpecError> {
        for change in other.0.values() {
            change.added.as_ref().map_or(Ok(()), |added| check_url(&added.url))?;
        }
        let mut is_changed = false;
        for (name, change) in other.0 {
            if self.0.get(&name).is_none_or(|own| own.rank() < change.rank()) {
                is_changed |= self.put(name, change);
            }
        }
        Ok(is_changed)
    }

    /// The configured workers with these wishes applied: configured ones first, in their order. Added workers of pools that
    /// this gateway has not are left out: a peer may have them.
    pub(crate) fn over(
        &self,
        configured: &[WorkerSpec],
        keys: &EngineKeys,
        has_pool: impl Fn(&str) -> bool,
    ) -> Vec<WorkerSpec> {
        let mut workers = Vec::with_capacity(configured.len());
        let mut seen = std::collections::HashSet::new();
        for spec in configured {
            let name = spec.name();
            let change = self.0.get(&name);
            seen.insert(name);
            match change.map(|change| change.wish) {
                Some(Wish::Remove) => {}
                wish => {
                    let is_draining = spec.is_draining || wish == Some(Wish::Drain);
                    workers.push(WorkerSpec { is_draining, ..spec.clone() });
                }
            }
        }
        for (_, change) in self.0.iter().filter(|(name, _)| !seen.contains(*name)) {
            let Some(added) = change.added.as_ref().filter(|added| has_pool(&added.pool)) else { continue };
            if change.wish == Wish::Remove {
                continue;
            }
            workers.push(WorkerSpec {
                url: added.url.clone(),
                uid: added.uid.clone(),
                role: Role::from_name(&added.role),
                key: keys.of(&added.url).cloned(),
                pool: added.pool.clone(),
                is_draining: change.wish == Wish::Drain,
            });
        }
        workers
    }

    fn next_version(&self) -> u64 {
        let latest = self.0.values().map(|change| change.version).max().unwrap_or(0);
        now_ns().max(latest.saturating_add(1))
    }

    /// Whether it was kept: the oldest wish makes room for a newer one.
    fn put(&mut self, name: String, change: Change) -> bool {
        if self.0.len() >= CHANGES_MAX && !self.0.contains_key(&name) {
            let oldest = self.0.iter().min_by_key(|(_, change)| change.version);
            let Some((oldest, version)) = oldest.map(|(name, change)| (name.clone(), change.version)) else {
                return false;
            };
            if version >= change.version {
                return false;
            }
            self.0.remove(&oldest);
        }
        self.0.insert(name, change);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(url: &str) -> Added {
        Added { url: url.to_owned(), role: String::new(), pool: default_pool(), uid: None }
    }

    fn names(workers: &[WorkerSpec]) -> Vec<(String, bool)> {
        workers.iter().map(|worker| (worker.name(), worker.is_draining)).collect()
    }

    fn over(changes: &Changes, configured: &[&str]) -> Vec<(String, bool)> {
        let configured: Vec<WorkerSpec> = configured.iter().map(|url| WorkerSpec::new(url)).collect();
        names(&changes.over(&configured, &EngineKeys::default(), |_| true))
    }

    #[test]
    fn wishes_change_what_is_configured() {
        let mut changes = Changes::default();
        let configured = ["http://a:1", "http://b:1"];
        changes.add(added("http://c:1")).expect("a URL");
        changes.wish("a:1", Wish::Drain);
        let (a, b, c) = ("a:1".to_owned(), "b:1".to_owned(), "c:1".to_owned());
        assert_eq!(over(&changes, &configured), [(a.clone(), true), (b.clone(), false), (c.clone(), false)]);
        changes.wish("b:1", Wish::Remove);
        changes.wish("c:1", Wish::Drain);
        assert_eq!(over(&changes, &configured), [(a.clone(), true), (c, true)]);
        changes.wish("c:1", Wish::Remove);
        changes.wish("a:1", Wish::Serve);
        assert_eq!(over(&changes, &configured), [(a, false)]);
        assert_eq!(changes.add(added("c:1")), Err(SpecError::Url("c:1".to_owned())));
    }

    /// Three gateways, wishes at each, told in any order and more than once.
    #[test]
    fn gateways_come_to_the_same_state_in_whatever_order_they_hear_of_each_other() {
        let mut random = 7_u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize
        };
        for _ in 0..200 {
            let mut gateways: [Changes; 3] = std::array::from_fn(|_| Changes::default());
            for _ in 0..next() % 12 {
                let (which, name) = (next() % 3, format!("w{}:1", next() % 4));
                match next() % 4 {
                    0 => gateways[which].add(added(&format!("http://{name}"))).expect("a URL"),
                    1 => gateways[which].wish(&name, Wish::Serve),
                    2 => gateways[which].wish(&name, Wish::Drain),
                    _ => gateways[which].wish(&name, Wish::Remove),
                }
                if next() % 2 == 0 {
                    let (from, to) = (next() % 3, next() % 3);
                    let told = gateways[from].clone();
                    gateways[to].merge(told).expect("URLs");
                }
            }
            for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 1), (2, 1), (1, 0)] {
                let told = gateways[from].clone();
                gateways[to].merge(told).expect("URLs");
            }
            assert_eq!(gateways[0], gateways[1]);
            assert_eq!(gateways[1], gateways[2]);
            let again = gateways[1].clone();
            assert!(!gateways[0].merge(again).expect("URLs"), "nothing new");
        }
    }

    #[test]
    fn ten_thousand_names_are_bounded_and_the_newest_stay() {
        let mut changes = Changes::default();
        for number in 0..10_000 {
            changes.add(added(&format!("http://w{number}:1"))).expect("a URL");
            changes.wish(&format!("w{number}:1"), Wish::Remove);
        }
        assert_eq!(changes.0.len(), CHANGES_MAX);
        assert!(changes.0.contains_key("w9999:1") && !changes.0.contains_key("w0:1"));
    }

    #[test]
    fn what_peers_tell_comes_back_as_it_was() {
        let mut changes = Changes::default();
        changes.add(Added { role: "prefill".to_owned(), ..added("http://a:1") }).expect("a URL");
        changes.wish("b:1", Wish::Drain);
        let text = serde_json::to_string(&changes).expect("JSON");
        assert_eq!(serde_json::from_str::<Changes>(&text).expect("the same"), changes);
    }
}
