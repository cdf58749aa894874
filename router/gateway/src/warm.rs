//! A gateway that starts is warm before it takes requests: it takes over what a peer knows, or what it knew
//! itself before, and each worker's feed goes on from there.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, Weak};
use std::time::Duration;

use router_engines::client::EngineClient;
use router_events::snapshot::{self, PublisherState};

use crate::AccessConfig;
use crate::fleet::Fleet;

const ASK_WITHIN: Duration = Duration::from_secs(5);

/// What is known of each worker, by name.
pub(crate) type Known = HashMap<String, PublisherState>;

fn known(bytes: &[u8], from: &str) -> Option<Known> {
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

/// Adds what is newer, worker by worker: of one run of a worker, more messages are newer; of another run nobody can
/// say which, and what came first stays.
fn merge(into: &mut Known, other: Known) {
    for (name, state) in other {
        match into.get(&name) {
            Some(before) if before.instance != state.instance || before.next >= state.next => {}
            _ => drop(into.insert(name, state)),
        }
    }
}

/// What peers know, since they know what has happened lately, and what the file says of the rest.
pub(crate) async fn load(peers: &[String], access: &AccessConfig, file: Option<&Path>) -> Known {
    let mut all = Known::new();
    for peer in peers {
        let client = EngineClient::new(peer, access.tls.as_ref()).with_peer_key(access.peer_key.as_deref());
        match tokio::time::timeout(ASK_WITHIN, client.get_large("/kvasir/snapshot")).await {
            Ok(Ok(bytes)) => merge(&mut all, known(&bytes, peer).unwrap_or_default()),
            _ => tracing::info!(peer, "no snapshot from this gateway"),
        }
    }
    let Some(file) = file else { return all };
    match std::fs::read(file) {
        Ok(bytes) => merge(&mut all, known(&bytes, &file.display().to_string()).unwrap_or_default()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(file = %file.display(), %error, "the snapshot cannot be read"),
    }
    all
}

/// The state of all workers with feeds, those included that were known and have not come back yet, as bytes. One at a
/// time: a worker's state is copied under the lock of the index's writer, and feeds wait meanwhile.
pub(crate) fn save(fleet: &Fleet) -> Vec<u8> {
    let _turn = fleet.saving.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = fleet.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for picked in fleet.roster.load().iter().filter(|picked| picked.live.has_feed) {
        let follower = picked.live.follower.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, instance) = (&picked.live.name, picked.live.description.instance.unwrap_or(0));
        let state = snapshot::capture(name, instance, &follower, &fleet.index.write());
        all.insert(name.clone(), state);
    }
    snapshot::encode(&all.into_values().collect::<Vec<_>>())
}

/// Writes a snapshot beside the file and puts it in its place: a crash leaves the old one.
pub(crate) fn write(fleet: &Fleet, file: &Path) -> std::io::Result<()> {
    let bytes = save(fleet);
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    std::fs::write(&beside, bytes)?;
    std::fs::rename(&beside, file)
}

/// Writes a snapshot every now and then, until the fleet is gone.
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
