//! The peers of a listening socket: accepted, greeted, counted, and passed to the socket's own code, one task each.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::{AbortHandle, JoinSet};

use crate::Error;
use crate::connection::Connection;
use crate::endpoint::{Listener, Stream};
use crate::limits::{ACCEPT_RETRY_AFTER, Limits};
use crate::wire::SocketKind;

/// Counters of a socket since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SocketCounters {
    /// Connections closed because there were too many.
    pub refused: u64,
    /// Connections ended because the peer broke the protocol or a limit, or was too slow.
    pub broken: u64,
    /// Messages dropped because a peer's queue was full.
    pub dropped: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    refused: AtomicU64,
    broken: AtomicU64,
    dropped: AtomicU64,
}

impl Counters {
    pub(crate) fn get(&self) -> SocketCounters {
        SocketCounters {
            refused: self.refused.load(Ordering::Relaxed),
            broken: self.broken.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn count_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a connection, if it was the peer's fault.
    pub(crate) fn count_end(&self, ended: &Result<(), Error>) {
        if ended.as_ref().is_err_and(Error::is_misbehaviour) {
            self.broken.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// State shared by the accepting task and its peers.
#[derive(Debug)]
struct Accepting {
    kind: SocketKind,
    limits: Limits,
    counters: Arc<Counters>,
    /// One permit per peer.
    places: Semaphore,
    /// Number of peers at each address.
    addresses: Mutex<HashMap<IpAddr, usize>>,
    /// One permit per byte of `receive_bytes_max`.
    budget: Arc<Semaphore>,
}

impl Accepting {
    /// Takes a place among the peers; `None` when there are too many, or too many from this address.
    fn place(&self, address: Option<IpAddr>) -> Option<PeerPermit<'_>> {
        let permit = self.places.try_acquire().ok()?;
        if let Some(address) = address {
            let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
            let count = addresses.entry(address).or_default();
            if *count >= self.limits.peers_per_address_max {
                return None;
            }
            *count += 1;
        }
        Some(PeerPermit { accepting: self, address, _permit: permit })
    }
}

/// A peer's place, released when it is dropped.
struct PeerPermit<'a> {
    accepting: &'a Accepting,
    address: Option<IpAddr>,
    _permit: SemaphorePermit<'a>,
}

impl Drop for PeerPermit<'_> {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut addresses = self.accepting.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = addresses.entry(address) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Accepts connections and serves every peer, without end. Dropping the future ends all connections.
pub(crate) async fn accept<F, S>(
    listener: Listener,
    kind: SocketKind,
    limits: Limits,
    counters: Arc<Counters>,
    serve: F,
) where
    F: Fn(Connection) -> S + Clone + Send + Sync + 'static,
    S: Future<Output = Result<(), Error>> + Send + 'static,
{
    let shared = Arc::new(Accepting {
        kind,
        limits,
        counters,
        places: Semaphore::new(limits.peers_max),
        addresses: Mutex::default(),
        budget: Arc::new(Semaphore::new(limits.receive_bytes_max)),
    });
    let mut tasks = JoinSet::new();
    let mut handshakes: VecDeque<(Weak<()>, AbortHandle)> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_ended) = tasks.join_next() => continue,
        };
        let Ok(stream) = accepted else {
            tokio::time::sleep(ACCEPT_RETRY_AFTER).await;
            continue;
        };
        handshakes.retain(|(in_handshake, _)| in_handshake.strong_count() > 0);
        if handshakes.len() >= limits.handshakes_max
            && let Some((_, oldest)) = handshakes.pop_front()
        {
            oldest.abort();
            shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
        let in_handshake = Arc::new(());
        let watched = Arc::downgrade(&in_handshake);
        let task = tasks.spawn(run(stream, in_handshake, Arc::clone(&shared), serve.clone()));
        handshakes.push_back((watched, task));
    }
}

/// One connection, from its handshake to its end.
async fn run<F, S>(stream: Stream, in_handshake: Arc<()>, shared: Arc<Accepting>, serve: F)
where
    F: Fn(Connection) -> S,
    S: Future<Output = Result<(), Error>>,
{
    let (budget, address) = (Arc::clone(&shared.budget), stream.peer_address());
    let ended = match Connection::accept(stream, shared.kind, &shared.limits, budget).await {
        Ok(connection) => {
            drop(in_handshake);
            let Some(_place) = shared.place(address) else {
                shared.counters.refused.fetch_add(1, Ordering::Relaxed);
                return;
            };
            serve(connection).await
        }
        Err(error) => Err(error),
    };
    shared.counters.count_end(&ended);
}
