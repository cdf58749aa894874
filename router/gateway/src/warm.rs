//! A gateway that starts is warm before it takes requests: it takes over what a peer knows, or what it knew
//! itself before, and each worker's feed goes on from there.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use router_engines::client::EngineClient;
use router_events::snapshot::{self, PublisherState};

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

/// Asks peers first, since they know what has happened since; then reads the file.
pub(crate) async fn load(peers: &[String], file: Option<&Path>) -> Known {
    for peer in peers {
        let client = EngineClient::new(peer);
        match tokio::time::timeout(ASK_WITHIN, client.get_large("/kvasir/snapshot")).await {
            Ok(Ok(bytes)) => {
                if let Some(known) = known(&bytes, peer) {
                    return known;
                }
            }
            _ => tracing::info!(peer, "no snapshot from this gateway"),
        }
    }
    let Some(file) = file else { return Known::new() };
    match std::fs::read(file) {
        Ok(bytes) => known(&bytes, &file.display().to_string()).unwrap_or_default(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Known::new(),
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "the snapshot cannot be read");
            Known::new()
        }
    }
}

/// The state of all workers with feeds, as bytes.
pub(crate) fn save(fleet: &Fleet) -> Vec<u8> {
    let roster = fleet.roster.load();
    let states: Vec<PublisherState> = roster
        .iter()
        .filter(|picked| picked.live.has_feed && picked.is_ready())
        .map(|picked| {
            let follower = picked.live.follower.lock().unwrap_or_else(PoisonError::into_inner);
            let instance = picked.live.description.instance;
            snapshot::capture(&picked.worker.name, instance, &follower, &fleet.index.write())
        })
        .collect();
    snapshot::encode(&states)
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
        let fleet = Arc::clone(&fleet);
        let written = tokio::task::spawn_blocking(move || write(&fleet, &path)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(file = %file.display(), %error, "the snapshot cannot be written");
        }
    }
}
