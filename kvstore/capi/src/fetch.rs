//! Fetches: look up blocks that this node lacks in the remote and object tiers, and load them into host memory.
//!
//! The threads of the store and of its tiers do the work; no thread of the queue waits for them. A fetch ends
//! within the deadlines of the tiers, whether blocks were found or not, or when the store's thread ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_store::{Prepare, TenantId, Throttled};

use crate::backend::Identity;
use crate::operation::Outcome;
use crate::queue::Completions;
use crate::status::Status;
use crate::store::StoreBackend;

/// The fetches of one store.
#[derive(Debug)]
pub(crate) struct Fetches {
    /// Longest time of a fetch. `None`: there is no tier to search.
    patience: Option<Duration>,
    completions: OnceLock<Completions>,
    under_way: Mutex<FetchTable>,
}

#[derive(Debug, Default)]
struct FetchTable {
    next: u64,
    fetches: HashMap<u64, Fetch>,
}

/// A fetch in progress.
#[derive(Debug)]
struct Fetch {
    /// The caller's number for the request.
    user: u64,
    /// Number of blocks requested, those included that the caller holds.
    blocks: usize,
}

impl Fetches {
    pub(crate) fn new(patience: Option<Duration>) -> Self {
        Self { patience, completions: OnceLock::new(), under_way: Mutex::default() }
    }

    /// Sets the queue in which fetches complete. Called before the first fetch begins.
    pub(crate) fn complete_to(&self, completions: Completions) {
        // Called once, when the store is opened.
        let _already = self.completions.set(completions);
    }

    /// Returns the receiver of the store's reports. Weak, because `Fetches` holds the queue's completions and
    /// the queue holds the store: a strong reference would be a cycle.
    pub(crate) fn reports(self: &Arc<Self>) -> FetchReports {
        FetchReports(Arc::downgrade(self))
    }

    fn under_way(&self) -> MutexGuard<'_, FetchTable> {
        // No code panics while the lock is held.
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a fetch of a prompt's blocks for this tenant. The caller holds the first `held` blocks and does
    /// not need them. The queue has admitted as many identities. `deadline` shortens the time that the tiers
    /// may take.
    pub(crate) fn begin(
        &self,
        store: &StoreBackend,
        user: u64,
        identities: &[Identity],
        (held, tenant): (usize, u32),
        deadline: Option<Duration>,
    ) {
        let chain: Vec<BlockIdentity> = identities.iter().copied().map(BlockIdentity).collect();
        let found = held + store.store().look_up(&chain[held..]);
        let Some(patience) = self.patience.filter(|_| found < chain.len()) else {
            return self.complete(user, chain.len(), found);
        };
        let mut under_way = self.under_way();
        under_way.next += 1;
        let request = under_way.next;
        under_way.fetches.insert(request, Fetch { user, blocks: chain.len() });
        drop(under_way);
        let deadline = Instant::now() + deadline.map_or(patience, |deadline| deadline.min(patience));
        let (metas, tenant) = (Vec::new(), TenantId(tenant));
        let prepare = Prepare { request, chain, device_blocks: held, metas, tenant, deadline };
        if let Err(Throttled(refused)) = store.store().prepare(prepare) {
            // The store has no room for the fetch: complete it with the blocks that are here.
            self.ended(refused.request, found);
        }
    }

    /// Completes a fetch. `blocks`: leading blocks that are on this node, or held by the caller.
    pub(crate) fn ended(&self, request: u64, blocks: usize) {
        let ended = self.under_way().fetches.remove(&request);
        if let Some(fetch) = ended {
            self.complete(fetch.user, fetch.blocks, blocks);
        }
    }

    /// Completes all fetches, since the store's thread has ended and will complete none.
    fn end_all(&self) {
        let all = std::mem::take(&mut self.under_way().fetches);
        all.into_values().for_each(|fetch| self.complete(fetch.user, fetch.blocks, 0));
    }

    fn complete(&self, user: u64, identities: usize, blocks: usize) {
        if let Some(completions) = self.completions.get() {
            let outcome = Outcome { payload_bytes: blocks, ..Outcome::of(Status::Ok) };
            completions.complete(user, identities, Ok(outcome));
        }
    }
}

/// Passes the reports of the store's thread to its fetches. Dropped when that thread ends.
pub(crate) struct FetchReports(Weak<Fetches>);

impl FetchReports {
    /// Reports that `blocks` leading blocks are on this node, or held by the caller.
    pub(crate) fn ended(&self, request: u64, blocks: usize) {
        if let Some(fetches) = self.0.upgrade() {
            fetches.ended(request, blocks);
        }
    }
}

impl Drop for FetchReports {
    fn drop(&mut self) {
        if let Some(fetches) = self.0.upgrade() {
            fetches.end_all();
        }
    }
}
