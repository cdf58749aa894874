//! Several gateways in front of the same workers: each tells the others what it has sent where, so that they do
//! not all choose the same idle worker.
//!
//! What is told is the state and not the changes: for each worker, requests, queued tokens and decoding blocks.
//! A message that is lost is made good by the next one, and all gateways come to the same sums whatever the order.
//! It is sent when something changed, at most once a millisecond, and as a sign of life. What a peer said is
//! forgotten when it is silent for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use router_engines::client::EngineClient;
use serde_json::{Value, json};

use crate::AccessConfig;
use crate::fleet::Fleet;

/// Between two messages at least.
const PAUSE: Duration = Duration::from_millis(1);
/// A sign of life at least so often.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// A peer that was silent for so long is gone, and with it what it sent.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Gateways that one listens to.
const PEERS_MAX: usize = 64;
const SEND_WITHIN: Duration = Duration::from_secs(1);

/// What one peer said last.
#[derive(Debug)]
struct Told {
    sequence: u64,
    at: Instant,
    /// By worker's name: requests, queued tokens, decoding blocks.
    counts: HashMap<String, [u32; 3]>,
}

/// What peers said.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    told: Mutex<HashMap<u64, Told>>,
}

impl Peers {
    /// Takes a message; an error says what is wrong with it.
    pub(crate) fn receive(&self, fleet: &Fleet, body: &[u8], now: Instant) -> Result<(), String> {
        let message: Value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let number = |name: &str| message[name].as_u64().ok_or(format!("{name} is missing"));
        let (gateway, sequence) = (number("gateway")?, number("sequence")?);
        let workers = message["workers"].as_object().ok_or("workers is missing")?;
        let counts = workers.iter().map(|(name, value)| {
            let counts: [u32; 3] =
                serde_json::from_value(value.clone()).map_err(|error| format!("{name}: {error}"))?;
            Ok((name.clone(), counts))
        });
        let counts = counts.collect::<Result<HashMap<_, _>, String>>()?;
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() >= PEERS_MAX && !told.contains_key(&gateway) {
            return Err(format!("more than {PEERS_MAX} gateways"));
        }
        if told.get(&gateway).is_some_and(|before| before.sequence >= sequence) {
            return Ok(()); // A later one has overtaken it.
        }
        told.insert(gateway, Told { sequence, at: now, counts });
        add_up(fleet, &told);
        Ok(())
    }

    /// Adds up again what peers said: the workers have changed.
    pub(crate) fn add_up(&self, fleet: &Fleet) {
        add_up(fleet, &self.told.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Forgets peers that have fallen silent.
    pub(crate) fn expire(&self, fleet: &Fleet, now: Instant) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let before = told.len();
        told.retain(|_, peer| now.saturating_duration_since(peer.at) < SILENCE_MAX);
        if told.len() < before {
            add_up(fleet, &told);
        }
    }
}

fn add_up(fleet: &Fleet, told: &HashMap<u64, Told>) {
    for picked in fleet.roster.load().iter() {
        let mut sum = [0_u32; 3];
        for counts in told.values().filter_map(|peer| peer.counts.get(&picked.live.name)) {
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        }
        picked.live.load.peers.set(sum);
    }
}

/// Tells one peer what this gateway does, until the fleet is gone.
pub(crate) async fn tell(
    fleet: Weak<Fleet>,
    peer: String,
    access: AccessConfig,
    gateway: u64,
    changed: Arc<tokio::sync::Notify>,
) {
    let client = EngineClient::new(&peer, access.tls.as_ref()).with_peer_key(access.peer_key.as_deref());
    let mut sequence = 0;
    let mut complained = false;
    loop {
        let Some(fleet) = fleet.upgrade() else { return };
        sequence += 1;
        let workers: serde_json::Map<String, Value> = fleet
            .roster
            .load()
            .iter()
            .map(|picked| (picked.live.name.clone(), json!(picked.live.load.own.get())))
            .collect();
        drop(fleet);
        let message = json!({ "gateway": gateway, "sequence": sequence, "workers": workers }).to_string();
        let sent = tokio::time::timeout(SEND_WITHIN, client.post("/kvasir/loads", message.into())).await;
        let is_sent = matches!(sent, Ok(Ok(_)));
        if !is_sent && !std::mem::replace(&mut complained, true) {
            tracing::warn!(peer, "this gateway does not take our loads");
        }
        complained &= !is_sent;
        tokio::time::sleep(PAUSE).await;
        let _heartbeat = tokio::time::timeout(HEARTBEAT, changed.notified()).await;
    }
}
