//! Changes that administrators make to the configured and discovered roster while the gateway runs, and how gateways of
//! one fleet agree on them.
//!
//! For each worker that ever had one, the latest change counts (a last-writer-wins map): each gateway merges what its
//! peers tell, in any order and as often as it likes, and all come to the same state. Versions are times of the wall clock,
//! made larger than every version seen so far, so a clock that is behind cannot lose a later change of the same
//! administrator (a last-writer-wins element map: Shapiro et al., A comprehensive study of Convergent and Commutative
//! Replicated Data Types, 2011). At most [`CHANGES_MAX`] changes are kept. The oldest change without effect makes room for a new
//! one: that to serve a configured worker, that to remove a worker which no source names, or that to drain a pod which is
//! gone. Any other drain, an added worker and the removal of one that is named are never dropped; when there is no room but by
//! them, a further change is refused.

use std::collections::{BTreeMap, HashSet};
use std::time::{SystemTime, UNIX_EPOCH};

use router_engines::dialect::Role;
use serde::{Deserialize, Serialize};

use crate::spec::{
    AsleepRun, DEFAULT_POOL, SpecError, UID_BYTES_MAX, WORKERS_MAX, WorkerSpec, check_url, name_of,
};

/// Wishes that are kept.
pub(crate) const CHANGES_MAX: usize = WORKERS_MAX;
/// A change of a clock that is ahead by more than this is not believed: no later change could be newer.
const AHEAD_MAX_NS: u64 = 24 * 3600 * 1_000_000_000;

/// The state that an administrator wants of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DesiredState {
    /// New requests are sent to the worker.
    Serve,
    /// No new requests are sent to the worker; requests that it has continue.
    Drain,
    /// The worker is removed from the fleet.
    Remove,
    /// The worker is put to sleep or asleep. It gets no requests until it is woken.
    Sleep,
}

/// A worker added by an administrator; the configuration does not name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedWorker {
    /// As in [`WorkerSpec::url`].
    pub url: String,
    /// `prefill`, `decode` or `both`. Empty: the role that the worker reports.
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
    /// Of two changes the one with the larger version counts.
    version: u64,
    /// The key is that of the gossip between gateways.
    #[serde(rename = "wish")]
    desired: DesiredState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    added: Option<AddedWorker>,
    /// Identity of the worker that the change was made for ([`WorkerSpec::uid`]): a change to drain a pod does not concern the
    /// next pod at its address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uid: Option<String>,
    /// With [`DesiredState::Sleep`]: the run of the worker's process that sleeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    asleep: Option<AsleepRun>,
}

impl Change {
    /// A total order, so that gateways agree also on changes of the same version.
    fn rank(&self) -> (u64, u8, [&str; 4], Option<&str>) {
        let words = self.added.as_ref().map(|added| {
            [added.url.as_str(), &added.role, &added.pool, added.uid.as_deref().unwrap_or_default()]
        });
        (self.version, self.desired as u8, words.unwrap_or_default(), self.uid.as_deref())
    }

    /// The run that is put to sleep; `None` for other changes.
    fn asleep(&self) -> Option<AsleepRun> {
        (self.desired == DesiredState::Sleep).then(|| self.asleep.unwrap_or(AsleepRun(None)))
    }

    /// Whether the change was made for this worker. Without identities from the sources the address decides.
    fn concerns(&self, spec: &WorkerSpec) -> bool {
        match (&self.uid, &spec.uid) {
            (Some(uid), Some(other)) => uid == other,
            _ => true,
        }
    }

    /// Whether the change may come from a peer: its fields are within the limits that this gateway applies itself.
    fn can_be(&self, name: &str, version_max: u64) -> bool {
        let fits = |added: &AddedWorker| added.check().is_ok() && name_of(&added.url) == name;
        let is_bounded = self.uid.as_ref().is_none_or(|uid| uid.len() <= UID_BYTES_MAX);
        self.version <= version_max && is_bounded && self.added.as_ref().is_none_or(fits)
    }
}

/// The latest change for each worker, by its name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Changes(BTreeMap<String, Change>);

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

impl AddedWorker {
    fn check(&self) -> Result<(), SpecError> {
        check_url(&self.url)?;
        if !self.role.is_empty() && Role::from_name(&self.role).is_none() {
            return Err(SpecError::Role(self.role.clone()));
        }
        match self.uid.as_ref().is_some_and(|uid| uid.len() > UID_BYTES_MAX) {
            true => Err(SpecError::Uid(UID_BYTES_MAX)),
            false => Ok(()),
        }
    }
}

impl Changes {
    /// Whether no change is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records a change for a worker by its name. `uid`: identity from the worker's source. `asleep`: with [`DesiredState::Sleep`], the run of its process.
    pub(crate) fn set_desired(
        &mut self,
        name: &str,
        uid: Option<String>,
        desired: DesiredState,
        asleep: Option<AsleepRun>,
        is_current: impl Fn(&str, Option<&str>) -> bool,
    ) -> Result<(), SpecError> {
        let version = self.next_version();
        let added = self.0.get(name).and_then(|change| change.added.clone());
        self.put(name.to_owned(), Change { version, desired, added, uid, asleep }, is_current)
    }

    /// Adds a worker, or replaces the description of an added one.
    pub(crate) fn add(
        &mut self,
        added: AddedWorker,
        is_current: impl Fn(&str, Option<&str>) -> bool,
    ) -> Result<(), SpecError> {
        added.check()?;
        let version = self.next_version();
        self.put(
            name_of(&added.url),
            Change { version, desired: DesiredState::Serve, added: Some(added), uid: None, asleep: None },
            is_current,
        )
    }

    /// Merges the changes of another gateway and returns whether that changed anything. An invalid change is skipped and the rest
    /// merged: one bad change must not keep gateways apart.
    pub(crate) fn merge(&mut self, other: Self, is_current: impl Fn(&str, Option<&str>) -> bool) -> bool {
        let newest = now_ns().saturating_add(AHEAD_MAX_NS);
        let mut is_changed = false;
        for (name, change) in other.0 {
            if change.can_be(&name, newest) && self.0.get(&name).is_none_or(|own| own.rank() < change.rank())
            {
                is_changed |= self.put(name, change, &is_current).is_ok();
            }
        }
        is_changed
    }

    /// The configured and discovered workers with these changes applied, in their order, and the added ones behind them.
    /// `described` makes an added worker's description, or `None` where this gateway cannot have it.
    pub(crate) fn over<'a>(
        &self,
        configured: impl Iterator<Item = &'a WorkerSpec>,
        described: impl Fn(&AddedWorker) -> Option<WorkerSpec>,
    ) -> Vec<WorkerSpec> {
        let mut workers = Vec::new();
        let mut seen = HashSet::new();
        for spec in configured {
            let name = spec.name();
            let change = self.0.get(&name).filter(|change| change.concerns(spec));
            seen.insert(name);
            let desired = change.map(|change| change.desired);
            if desired == Some(DesiredState::Remove) {
                continue;
            }
            let asleep = change.and_then(Change::asleep);
            let is_draining = spec.is_draining || asleep.is_some() || desired == Some(DesiredState::Drain);
            let anew = change.and_then(|change| described(change.added.as_ref()?)).map(|anew| {
                let uid = anew.uid.or_else(|| spec.uid.clone());
                WorkerSpec { uid, generation: spec.generation.clone(), ..anew }
            });
            workers.push(WorkerSpec { is_draining, asleep, ..anew.unwrap_or_else(|| spec.clone()) });
        }
        for (_, change) in self.0.iter().filter(|(name, _)| !seen.contains(*name)) {
            if change.desired == DesiredState::Remove || workers.len() >= WORKERS_MAX {
                continue;
            }
            if let Some(added) = change.added.as_ref().and_then(&described) {
                let asleep = change.asleep();
                workers.push(WorkerSpec {
                    is_draining: asleep.is_some() || change.desired == DesiredState::Drain,
                    asleep,
                    ..added
                });
            }
        }
        workers
    }

    fn next_version(&self) -> u64 {
        let latest = self.0.values().map(|change| change.version).max().unwrap_or(0);
        now_ns().max(latest.saturating_add(1))
    }

    /// Stores a change. Fails when the map is full.
    fn put(
        &mut self,
        name: String,
        change: Change,
        is_current: impl Fn(&str, Option<&str>) -> bool,
    ) -> Result<(), SpecError> {
        if self.0.len() >= CHANGES_MAX && !self.0.contains_key(&name) {
            let has_no_effect = |name: &str, change: &Change| {
                let is_current = is_current(name, change.uid.as_deref());
                match change.desired {
                    DesiredState::Serve => change.added.is_none(),
                    DesiredState::Remove => !is_current,
                    // The pod was drained and is gone. Without identities from the sources it may come back.
                    DesiredState::Drain | DesiredState::Sleep => {
                        change.uid.is_some() && change.added.is_none() && !is_current
                    }
                }
            };
            let without = self.0.iter().filter(|(name, change)| has_no_effect(name, change));
            let oldest = without.min_by_key(|(_, change)| change.version).map(|(name, _)| name.clone());
            self.0.remove(&oldest.ok_or(SpecError::TooManyChanges)?);
        }
        self.0.insert(name, change);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No worker is configured.
    fn nowhere(_: &str, _: Option<&str>) -> bool {
        false
    }

    fn described(added: &AddedWorker) -> Option<WorkerSpec> {
        Some(WorkerSpec { role: Role::from_name(&added.role), ..WorkerSpec::new(&added.url) })
    }

    fn added(url: &str) -> AddedWorker {
        AddedWorker { url: url.to_owned(), role: String::new(), pool: default_pool(), uid: None }
    }

    fn names(workers: &[WorkerSpec]) -> Vec<(String, bool)> {
        workers.iter().map(|worker| (worker.name(), worker.is_draining)).collect()
    }

    fn over(changes: &Changes, configured: &[&str]) -> Vec<(String, bool)> {
        let configured: Vec<WorkerSpec> = configured.iter().map(|url| WorkerSpec::new(url)).collect();
        names(&changes.over(configured.iter(), described))
    }

    #[test]
    fn wishes_change_what_is_configured() {
        let mut changes = Changes::default();
        let configured = ["http://a:1", "http://b:1"];
        changes.add(added("http://c:1"), nowhere).expect("a URL");
        changes.set_desired("a:1", None, DesiredState::Drain, None, nowhere).expect("room");
        let (a, b, c) = ("a:1".to_owned(), "b:1".to_owned(), "c:1".to_owned());
        assert_eq!(over(&changes, &configured), [(a.clone(), true), (b.clone(), false), (c.clone(), false)]);
        changes.set_desired("b:1", None, DesiredState::Remove, None, nowhere).expect("room");
        changes.set_desired("c:1", None, DesiredState::Drain, None, nowhere).expect("room");
        assert_eq!(over(&changes, &configured), [(a.clone(), true), (c, true)]);
        changes.set_desired("c:1", None, DesiredState::Remove, None, nowhere).expect("room");
        changes.set_desired("a:1", None, DesiredState::Serve, None, nowhere).expect("room");
        assert_eq!(over(&changes, &configured), [(a, false)]);
        assert_eq!(changes.add(added("c:1"), nowhere), Err(SpecError::Url("c:1".to_owned())));
    }

    /// Three gateways with changes at each, which reach the others in any order and more than once.
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
                    0 => gateways[which].add(added(&format!("http://{name}")), nowhere),
                    1 => gateways[which].set_desired(&name, None, DesiredState::Serve, None, nowhere),
                    2 => gateways[which].set_desired(&name, None, DesiredState::Drain, None, nowhere),
                    _ => gateways[which].set_desired(&name, None, DesiredState::Remove, None, nowhere),
                }
                .expect("room");
                if next() % 2 == 0 {
                    let (from, to) = (next() % 3, next() % 3);
                    let told = gateways[from].clone();
                    gateways[to].merge(told, nowhere);
                }
            }
            for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 1), (2, 1), (1, 0)] {
                let told = gateways[from].clone();
                gateways[to].merge(told, nowhere);
            }
            assert_eq!(gateways[0], gateways[1]);
            assert_eq!(gateways[1], gateways[2]);
            let again = gateways[1].clone();
            assert!(!gateways[0].merge(again, nowhere), "nothing new");
        }
    }

    #[test]
    fn ten_thousand_names_are_bounded_and_drop_nothing_that_has_an_effect() {
        let mut changes = Changes::default();
        let is_configured = |name: &str, _: Option<&str>| name.starts_with("configured");
        changes.add(added("http://kept:1"), is_configured).expect("room");
        changes.set_desired("drained:1", None, DesiredState::Drain, None, is_configured).expect("room");
        changes.set_desired("configured:1", None, DesiredState::Remove, None, is_configured).expect("room");
        for number in 0..10_000 {
            changes.add(added(&format!("http://w{number}:1")), is_configured).expect("room");
            changes
                .set_desired(&format!("w{number}:1"), None, DesiredState::Remove, None, is_configured)
                .expect("room");
        }
        assert_eq!(changes.0.len(), CHANGES_MAX);
        for name in ["kept:1", "drained:1", "configured:1", "w9999:1"] {
            assert!(changes.0.contains_key(name), "{name}");
        }
        assert!(!changes.0.contains_key("w0:1"));
        // Pods that were drained before they went make room, too.
        let mut pods = Changes::default();
        for number in 0..2 * CHANGES_MAX {
            let uid = Some(format!("uid-{number}"));
            pods.set_desired(&format!("10.0.0.{number}:1"), uid, DesiredState::Drain, None, nowhere)
                .expect("room");
        }
        assert_eq!(pods.0.len(), CHANGES_MAX);
        let mut full = Changes::default();
        for number in 0..CHANGES_MAX {
            full.add(added(&format!("http://w{number}:1")), nowhere).expect("room");
        }
        assert_eq!(full.add(added("http://more:1"), nowhere), Err(SpecError::TooManyChanges));
        full.set_desired("w7:1", None, DesiredState::Remove, None, nowhere).expect("it is known");
        full.add(added("http://more:1"), nowhere).expect("its place is free");
    }

    #[test]
    fn wishes_of_peers_that_cannot_be_are_left_out_and_the_rest_is_taken() {
        let change = |version, url: &str| Change {
            version,
            desired: DesiredState::Serve,
            added: Some(added(url)),
            uid: None,
            asleep: None,
        };
        let now = now_ns();
        let told = [
            ("good:1", change(now, "http://good:1")),
            ("other:1", change(now, "http://name:1")),
            ("bad:1", change(now, "bad:1")),
            ("late:1", change(u64::MAX, "http://late:1")),
        ];
        let mut told = Changes(told.map(|(name, change)| (name.to_owned(), change)).into());
        told.0.insert("role:1".to_owned(), {
            let role = AddedWorker { role: "boss".to_owned(), ..added("http://role:1") };
            Change { version: now, desired: DesiredState::Serve, added: Some(role), uid: None, asleep: None }
        });
        let mut own = Changes::default();
        assert!(own.merge(told, nowhere));
        assert_eq!(own.0.keys().collect::<Vec<_>>(), ["good:1"]);
        own.set_desired("good:1", None, DesiredState::Remove, None, nowhere).expect("room");
        assert!(own.next_version() < now + AHEAD_MAX_NS);
    }

    #[test]
    fn a_wish_for_a_pod_does_not_concern_the_next_one_at_its_address() {
        let pod = |uid: &str| WorkerSpec { uid: Some(uid.to_owned()), ..WorkerSpec::new("http://a:1") };
        for (desired, workers) in [(DesiredState::Drain, 1), (DesiredState::Remove, 0)] {
            let mut changes = Changes::default();
            changes.set_desired("a:1", Some("first".to_owned()), desired, None, |_, _| true).expect("room");
            let first = changes.over([pod("first")].iter(), described);
            assert_eq!(first.iter().filter(|worker| worker.is_draining).count(), workers);
            let second = changes.over([pod("second")].iter(), described);
            assert_eq!(names(&second), [("a:1".to_owned(), false)]);
            let configured = changes.over([WorkerSpec::new("http://a:1")].iter(), described);
            assert_eq!(configured.len(), workers, "no source says which one it is");
        }
        let long = Change {
            version: 1,
            desired: DesiredState::Drain,
            added: None,
            uid: Some("u".repeat(UID_BYTES_MAX + 1)),
            asleep: None,
        };
        let told = Changes([("a:1".to_owned(), long)].into());
        assert!(!Changes::default().merge(told, nowhere), "it is too long");
    }

    #[test]
    fn a_configured_worker_may_be_described_anew() {
        let mut changes = Changes::default();
        let prefill = AddedWorker { role: "prefill".to_owned(), ..added("http://a:1") };
        changes.add(prefill, |_, _| true).expect("room");
        let configured = [WorkerSpec::new("http://a:1")];
        let workers = changes.over(configured.iter(), described);
        assert_eq!((workers.len(), workers[0].role), (1, Some(Role::Prefill)));
        let workers = changes.over(configured.iter(), |_| None);
        assert_eq!(workers[0].role, None, "its pool is a peer's alone");
    }

    #[test]
    fn what_peers_tell_comes_back_as_it_was() {
        let mut changes = Changes::default();
        changes
            .add(AddedWorker { role: "prefill".to_owned(), ..added("http://a:1") }, nowhere)
            .expect("a URL");
        changes.set_desired("b:1", None, DesiredState::Drain, None, nowhere).expect("room");
        let text = serde_json::to_string(&changes).expect("JSON");
        assert_eq!(serde_json::from_str::<Changes>(&text).expect("the same"), changes);
    }
}
