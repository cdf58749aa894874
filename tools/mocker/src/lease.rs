//! The prefill side of a hand-off: leases on blocks that wait to be fetched, and their look-up by other workers
//! of this process.
//!
//! Workers are found by engine id, as NixlConnector finds them by host and port; blocks are found by the name
//! of the request. A lease that is not fetched expires; one task per worker expires leases while there are any.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use tokio::time::Instant;

use crate::pool::Table;
use crate::rendezvous::RendezvousGuard;
use crate::stats::add;
use crate::worker::{State, Worker};

/// Blocks kept for another worker.
#[derive(Debug)]
struct Lease {
    table: Table,
    block_ids: Vec<u32>,
    cached: usize,
    /// Keeps the room of the two legs open.
    _room: Option<RendezvousGuard>,
}

/// A worker's leases. Each holds at least one block, so their number is bounded by that of the blocks.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    by_name: HashMap<String, Lease>,
    /// Expiry times in order; names without a lease have been fetched.
    ends: VecDeque<(Instant, String)>,
    is_watched: bool,
}

/// Data that the prefill leg passes to the decode leg.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) block_ids: Vec<u32>,
    pub(crate) cached: usize,
}

impl Leases {
    pub(crate) fn blocks(&self) -> usize {
        self.by_name.values().map(|lease| lease.table.len()).sum()
    }

    fn take(&mut self, name: &str) -> Option<Lease> {
        let lease = self.by_name.remove(name)?;
        while self.ends.front().is_some_and(|(_, name)| !self.by_name.contains_key(name)) {
            self.ends.pop_front();
        }
        Some(lease)
    }
}

type Engines = HashMap<String, Weak<Worker>>;

/// All workers of this process from which blocks can be fetched.
fn engines() -> MutexGuard<'static, Engines> {
    static ENGINES: OnceLock<Mutex<Engines>> = OnceLock::new();
    ENGINES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a worker available for fetches.
pub(crate) fn register(worker: &Arc<Worker>) {
    engines().insert(worker.engine_id.clone(), Arc::downgrade(worker));
}

/// Makes a worker unavailable for fetches.
pub(crate) fn unregister(worker: &Worker) {
    engines().remove(&worker.engine_id);
}

/// Fetches the blocks of a request from the worker that computed them. `false`: the blocks are not there.
pub(crate) fn pull(engine_id: &str, name: &str) -> bool {
    let worker = engines().get(engine_id).and_then(Weak::upgrade);
    worker.is_some_and(|worker| worker.fetched(name))
}

impl Worker {
    /// Leases blocks to another worker.
    pub(crate) fn offer(
        self: &Arc<Self>,
        state: &mut State,
        name: String,
        table: Table,
        block_ids: Vec<u32>,
        cached: usize,
    ) {
        add(&self.counters.leases, 1);
        let room = crate::rendezvous::existing(&name);
        let leases = &mut state.leases;
        leases.ends.push_back((Instant::now() + self.config.lease, name.clone()));
        if let Some(mut twice) = leases.by_name.insert(name, Lease { table, block_ids, cached, _room: room })
        {
            state.pool.release(&mut twice.table);
        }
        if !std::mem::replace(&mut leases.is_watched, true) {
            tokio::spawn(watch(Arc::downgrade(self)));
        }
    }

    /// Returns the offer with this name.
    pub(crate) fn offered(&self, name: &str) -> Option<Offered> {
        let state = self.lock();
        let lease = state.leases.by_name.get(name)?;
        Some(Offered { block_ids: lease.block_ids.clone(), cached: lease.cached })
    }

    fn fetched(&self, name: &str) -> bool {
        let mut state = self.lock();
        let Some(mut lease) = state.leases.take(name) else { return false };
        state.pool.release(&mut lease.table);
        add(&self.counters.pulled, 1);
        true
    }

    /// Expires leases that are due. Returns the time of the next expiry.
    fn expire(&self, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        while let Some((end, _)) = state.leases.ends.front() {
            if *end > now {
                return Some(*end);
            }
            let Some((_, name)) = state.leases.ends.pop_front() else { break };
            if let Some(mut lease) = state.leases.by_name.remove(&name) {
                state.pool.release(&mut lease.table);
                add(&self.counters.leases_expired, 1);
            }
        }
        state.leases.is_watched = false;
        None
    }
}

async fn watch(worker: Weak<Worker>) {
    loop {
        let next = match worker.upgrade() {
            Some(worker) => worker.expire(Instant::now()),
            None => return,
        };
        match next {
            Some(next) => tokio::time::sleep_until(next).await,
            None => return,
        }
    }
}
