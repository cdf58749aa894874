//! Warm start of a gateway: before it takes requests it loads the state of a peer, or its own from the last snapshot, and each
//! worker's subscription continues from there.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use router_engines::client::EngineClient;
use router_events::snapshot::{self, PublisherState};

use crate::config::FleetConfig;
use crate::fleet::Fleet;

const ASK_WITHIN: Duration = Duration::from_secs(5);
/// Time after the start during which a worker's state is kept for it.
const EXPECTED_FOR: Duration = Duration::from_secs(600);

/// States of publishers by name.
type States = HashMap<String, PublisherState>;

/// Publisher states of a snapshot. Entries are only removed: each when its worker joins or is removed, and all, those of stores
/// included, after [`EXPECTED_FOR`].
#[derive(Debug, Default)]
pub(crate) struct SnapshotCache {
    states: Mutex<Option<(States, Instant)>>,
    loaded: tokio::sync::watch::Sender<bool>,
}

impl SnapshotCache {
    /// Sets the states read from snapshots.
    pub(crate) fn set(&self, states: States) {
        *self.states.lock().unwrap_or_else(PoisonError::into_inner) = Some((states, Instant::now()));
        self.loaded.send_replace(true);
    }

    /// Completes when snapshots have been loaded.
    pub(crate) async fn loaded(&self) {
        // The sender lives as long as this cache.
        let mut loaded = self.loaded.subscribe();
        let _loaded = loaded.wait_for(|loaded| *loaded).await;
    }

    /// Removes and returns the state of a publisher.
    pub(crate) fn take(&self, name: &str) -> Option<PublisherState> {
        let mut known = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_mut()?.0.remove(name)
    }

    /// Returns the state of stores, which outlives workers; it stays until [`EXPECTED_FOR`] has passed.
    pub(crate) fn peek(&self, name: &str) -> Option<PublisherState> {
        let known = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref()?.0.get(name).cloned()
    }

    /// Removes the states of workers with all of their ranks.
    pub(crate) fn forget(&self, workers: &[&str]) {
        let mut known = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((states, _)) = known.as_mut().filter(|(states, _)| !states.is_empty()) else { return };
        let worker_of = |name: &str| name.split_once('@').map_or(name, |(worker, _)| worker).to_owned();
        states.retain(|name, _| !workers.contains(&worker_of(name).as_str()));
    }

    /// Removes all states after [`EXPECTED_FOR`].
    pub(crate) fn expire(&self, now: Instant) {
        let mut known = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_some_and(|(_, since)| now.saturating_duration_since(*since) >= EXPECTED_FOR) {
            *known = None;
        }
    }

    /// States whose workers may still join; none once [`EXPECTED_FOR`] is over.
    fn expected(&self, now: Instant) -> States {
        self.expire(now);
        let known = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().map(|(states, _)| states.clone()).unwrap_or_default()
    }
}

fn known(bytes: &[u8], from: &str) -> Option<States> {
    match snapshot::decode(bytes) {
        Ok(states) => {
            let blocks: usize = states.iter().map(|state| state.held.len()).sum();
            tracing::info!(from, workers = states.len(), blocks, "snapshot taken over");
            Some(states.into_iter().map(|state| (state.name.clone(), state)).collect())
        }
        Err(error) => {
            tracing::warn!(from, %error, "the snapshot cannot be used");
            None
        }
    }
}

/// Adds newer states, by worker and by group of stores. Within one run of a worker the state with more messages is newer; between
/// two runs this is unknown, and the first one stays.
fn merge(into: &mut States, other: States) {
    for (name, state) in other {
        match into.get(&name) {
            Some(before) if before.instance != state.instance || before.next >= state.next => {}
            _ => drop(into.insert(name, state)),
        }
    }
}

/// States of all peers, merged with the file; a peer's state is newer.
pub(crate) async fn load(config: &FleetConfig) -> States {
    let mut all = States::new();
    for peer in &config.peers {
        let client = EngineClient::new(peer, config.tls.as_ref()).with_peer_key(config.peer_key.as_deref());
        match tokio::time::timeout(ASK_WITHIN, client.get_large("/kvasir/snapshot")).await {
            Ok(Ok(bytes)) => merge(&mut all, known(&bytes, peer).unwrap_or_default()),
            _ => tracing::info!(peer, "no snapshot from this gateway"),
        }
    }
    let Some(file) = &config.snapshot_file else { return all };
    match std::fs::read(file) {
        Ok(bytes) => merge(&mut all, known(&bytes, &file.display().to_string()).unwrap_or_default()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(file = %file.display(), %error, "the snapshot cannot be read"),
    }
    all
}

/// Serializes the states of all workers of the roster with events, including known ones that have not joined again. Runs one at a
/// time: a worker's state is copied under the lock of the index's writer, while events wait.
pub(crate) fn save(fleet: &Fleet) -> Vec<u8> {
    let _turn = fleet.saving.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = fleet.known.expected(Instant::now());
    for rank in fleet.ranks().iter().filter(|rank| rank.run.has_feed && !rank.worker.is_removed()) {
        let follower = rank.run.follower.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, instance) = (&rank.run.name, rank.run.description.instance.unwrap_or(0));
        let state = snapshot::capture(name, instance, &follower, &fleet.index.write());
        all.insert(name.clone(), state);
    }
    all.extend(fleet.stores.capture(&fleet.index).into_iter().map(|state| (state.name.clone(), state)));
    snapshot::encode(&all.into_values().collect::<Vec<_>>())
}

/// Writes a snapshot to a temporary file and renames it: a crash leaves the old one.
pub(crate) fn write(fleet: &Fleet, file: &Path) -> std::io::Result<()> {
    let bytes = save(fleet);
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    std::fs::write(&beside, bytes)?;
    std::fs::rename(&beside, file)
}

/// Writes a snapshot periodically, until the fleet is gone.
pub(crate) async fn keep(fleet: Weak<Fleet>, file: PathBuf, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(fleet) = fleet.upgrade() else { return };
        let path = file.clone();
        let written = tokio::task::spawn_blocking(move || write(&fleet, &path)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(file = %file.display(), %error, "the snapshot cannot be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(name: &str) -> (String, PublisherState) {
        let state = PublisherState {
            name: name.to_owned(),
            instance: 1,
            block_tokens: 16,
            next: 1,
            last: 0,
            non_prefix_groups: Vec::new(),
            held: Vec::new(),
        };
        (name.to_owned(), state)
    }

    #[test]
    fn of_two_states_of_stores_the_larger_one_counts() {
        let name = snapshot::stores_name(&["n0".to_owned()], 7);
        let of = |blocks: u64| {
            let held = |key| router_radix::Held { key, parent: None, block: key, copies: [0, 0, 0, 1] };
            let state = snapshot::capture_stores(name.clone(), (1..=blocks).map(held).collect());
            States::from([(name.clone(), state)])
        };
        for order in [[0, 3, 2], [3, 0, 2], [2, 0, 3]] {
            let mut all = States::new();
            order.into_iter().for_each(|blocks| merge(&mut all, of(blocks)));
            assert_eq!(all[&name].held.len(), 3, "{order:?}");
        }
    }

    #[test]
    fn what_a_snapshot_said_is_forgotten_with_its_worker_and_after_a_time() {
        let cache = SnapshotCache::default();
        cache.set(["a:1", "b:1@0", "b:1@1", "b:10"].map(state).into());
        cache.forget(&["b:1"]);
        let now = Instant::now();
        let mut left: Vec<String> = cache.expected(now).into_keys().collect();
        left.sort();
        assert_eq!(left, ["a:1", "b:10"]);
        assert!(cache.take("a:1").is_some() && cache.take("a:1").is_none());
        assert_eq!(cache.expected(now + EXPECTED_FOR / 2).len(), 1);
        assert_eq!(cache.expected(now + EXPECTED_FOR).len(), 0);
    }
}
