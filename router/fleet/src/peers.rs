//! Several gateways in front of the same workers: each reports its outstanding work to its peers, so that they do not all
//! choose the same idle worker, and the changes that administrators made to the roster.
//!
//! Messages carry state, not differences: for each worker, requests, queued tokens and decoding blocks. The next message
//! repairs the loss of one, and all gateways reach the same sums whatever the order. A message is sent after a change, at most
//! once a millisecond, and as a heartbeat. A peer's state is forgotten when it has been silent for a while. The changes of the
//! roster are included whenever the peer may not have them: after each change, and when the peer's number shows that it has
//! restarted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use router_engines::client::EngineClient;
use router_radix::MEMBERS_MAX;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::changes::Changes;
use crate::fleet::Fleet;

/// Least time between two messages.
const PAUSE: Duration = Duration::from_millis(1);
/// Largest number of bytes of shared state in a message, and bytes of an entry in addition to its name.
const SHARED_BYTES_MAX: usize = 1 << 20;
const SHARED_ENTRY_BYTES: usize = 160;
/// Interval at which the shared state is checked for changes.
const SHARE_EVERY: Duration = Duration::from_millis(100);
/// Longest time between two messages.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Time of silence after which a peer and its reported loads are removed.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Largest number of peers.
const PEERS_MAX: usize = 64;
const SEND_WITHIN: Duration = Duration::from_secs(1);

/// Message between gateways.
#[derive(Debug, Serialize, Deserialize)]
struct Message {
    /// Run number of the sending gateway.
    gateway: u64,
    sequence: u64,
    /// Requests, queued tokens and decoding blocks, by name of a worker's rank.
    workers: HashMap<String, [u32; 3]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    roster: Option<Changes>,
    /// Changed entries of the state that gateways share, by name.
    #[serde(default, skip_serializing_if = "SharedState::is_empty")]
    shared: SharedState,
}

/// State that gateways share, by name. The fleet carries it without interpreting it.
pub type SharedState = HashMap<String, Value>;

/// A source and receiver of data in the messages between gateways.
pub trait PeerMessageSource: std::fmt::Debug + Send + Sync {
    /// The present state, each entry with its version. A peer is sent the entries whose version it has not confirmed.
    fn state(&self) -> HashMap<String, (u64, Value)>;

    /// Handles a peer's state, which may arrive twice.
    fn receive(&self, peer: u64, state: SharedState);

    /// Removes the state of a peer that has fallen silent.
    fn forget(&self, peer: u64);
}

/// Last message of one peer.
#[derive(Debug)]
struct Told {
    sequence: u64,
    at: Instant,
    counts: HashMap<String, [u32; 3]>,
}

/// Last messages of all peers.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    told: Mutex<HashMap<u64, Told>>,
}

impl Peers {
    /// Stores the loads reported by a peer; false when a later message has arrived before.
    fn take(&self, message: Message, now: Instant) -> Result<bool, String> {
        let Message { gateway, sequence, workers: counts, .. } = message;
        if counts.len() > MEMBERS_MAX {
            return Err(format!("more than {MEMBERS_MAX} workers"));
        }
        let mut told = self.lock();
        if told.len() >= PEERS_MAX && !told.contains_key(&gateway) {
            return Err(format!("more than {PEERS_MAX} gateways"));
        }
        if told.get(&gateway).is_some_and(|before| before.sequence >= sequence) {
            return Ok(false);
        }
        told.insert(gateway, Told { sequence, at: now, counts });
        Ok(true)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes the sums of the peers' loads again, after these or the workers have changed.
    pub(crate) fn add_up(&self, fleet: &Fleet) {
        add_up(fleet, &self.lock());
    }

    /// Removes peers that have fallen silent.
    pub(crate) fn expire(&self, fleet: &Fleet, now: Instant) {
        let mut told = self.lock();
        let silent: Vec<u64> = told
            .iter()
            .filter(|(_, peer)| now.saturating_duration_since(peer.at) >= SILENCE_MAX)
            .map(|(gateway, _)| *gateway)
            .collect();
        for gateway in &silent {
            told.remove(gateway);
            if let Some(shares) = fleet.shares() {
                shares.forget(*gateway);
            }
        }
        if !silent.is_empty() {
            add_up(fleet, &told);
        }
    }
}

/// Handles a peer's message and returns the answer; an error says what is wrong with the message.
pub(crate) fn receive(fleet: &Arc<Fleet>, body: &[u8], now: Instant) -> Result<String, String> {
    let mut message: Message = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    // All gateways of a Deployment have one configuration, which also names this gateway.
    if message.gateway == fleet.gateway {
        return Ok(format!("{{\"gateway\":{}}}", fleet.gateway));
    }
    let roster = message.roster.take();
    let (gateway, shared) = (message.gateway, std::mem::take(&mut message.shared));
    if fleet.peers.take(message, now)? {
        fleet.peers.add_up(fleet);
        // An overtaken message would revert newer state.
        if let Some(shares) = fleet.shares().filter(|_| !shared.is_empty()) {
            shares.receive(gateway, shared);
        }
    }
    // Loads count even if this gateway cannot accept the peer's roster.
    if let Some(Err(error)) = roster.map(|roster| fleet.merge_peer_changes(roster)) {
        tracing::warn!(%error, "a peer's changes of the roster are not taken");
    }
    Ok(format!("{{\"gateway\":{}}}", fleet.gateway))
}

fn add_up(fleet: &Fleet, told: &HashMap<u64, Told>) {
    for rank in fleet.ranks() {
        let mut sum = [0_u32; 3];
        for counts in told.values().filter_map(|peer| peer.counts.get(&rank.run.name)) {
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        }
        rank.run.load.peers.set(sum);
        rank.run.reorder();
    }
}

/// Reports this gateway's state to one peer, until the fleet is gone.
pub(crate) async fn tell(fleet: Weak<Fleet>, peer: String, changed: Arc<tokio::sync::Notify>) {
    let client = {
        let Some(fleet) = fleet.upgrade() else { return };
        let config = &fleet.config;
        EngineClient::new(&peer, config.tls.as_ref()).with_peer_key(config.peer_key.as_deref())
    };
    let mut sequence = 0;
    let mut complained = false;
    // The changes that the peer has confirmed, and the number of its run.
    let mut known: Option<(u64, Arc<Changes>)> = None;
    // Versions of the shared state that the peer has confirmed, and the time of the last check.
    let mut confirmed = HashMap::<String, u64>::new();
    let mut peer_run: Option<u64> = None;
    let mut looked: Option<Instant> = None;
    loop {
        let Some(fleet) = fleet.upgrade() else { return };
        sequence += 1;
        let workers =
            fleet.ranks().iter().map(|rank| (rank.run.name.clone(), rank.run.load.own.get())).collect();
        let changes = fleet.changes();
        let is_news =
            known.as_ref().is_none_or(|(_, known)| !Arc::ptr_eq(known, &changes)) && !changes.is_empty();
        let mut news = HashMap::new();
        if let Some(shares) = fleet.shares()
            && looked.is_none_or(|looked| looked.elapsed() >= SHARE_EVERY)
        {
            looked = Some(Instant::now());
            news = shares.state();
            confirmed.retain(|name, _| news.contains_key(name));
            news.retain(|name, (version, _)| confirmed.get(name) != Some(version));
            // A peer accepts messages of a few MiB. The rest is sent with the next ones.
            let mut bytes = 0;
            news.retain(|name, _| {
                bytes += name.len() + SHARED_ENTRY_BYTES;
                bytes <= SHARED_BYTES_MAX
            });
        }
        let versions: Vec<(String, u64)> =
            news.iter().map(|(name, (version, _))| (name.clone(), *version)).collect();
        let shared = news.into_iter().map(|(name, (_, value))| (name, value)).collect();
        let message = Message {
            gateway: fleet.gateway,
            sequence,
            workers,
            roster: is_news.then(|| Changes::clone(&changes)),
            shared,
        };
        let own = fleet.gateway;
        drop(fleet);
        let message = serde_json::to_vec(&message).unwrap_or_default();
        let sent = tokio::time::timeout(SEND_WITHIN, client.post("/kvasir/loads", message.into())).await;
        let answer = match sent {
            Ok(Ok(answer)) => serde_json::from_slice::<Value>(&answer).ok(),
            _ => None,
        };
        let is_sent = answer.is_some();
        let number = answer.and_then(|answer| answer["gateway"].as_u64());
        if number == Some(own) {
            // The address is this gateway's own.
            return;
        }
        if number.is_some() {
            confirmed.extend(versions);
        }
        if number != peer_run {
            // The peer has restarted or did not answer: it may have no state.
            peer_run = number;
            confirmed.clear();
            looked = None;
        }
        known = match (number, known) {
            (Some(number), _) if is_news => Some((number, changes)),
            (Some(number), Some((before, known))) if number == before => Some((before, known)),
            // The peer has restarted or did not answer: it may have no state.
            _ => None,
        };
        if !is_sent && !std::mem::replace(&mut complained, true) {
            tracing::warn!(peer, "the peer gateway rejects load reports from this gateway");
        }
        complained &= !is_sent;
        tokio::time::sleep(PAUSE).await;
        let _heartbeat = tokio::time::timeout(HEARTBEAT, changed.notified()).await;
    }
}
