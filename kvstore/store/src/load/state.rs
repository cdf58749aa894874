//! One load: its blocks, and how far each has come.

use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, Lease};

use crate::job::{Destination, LoadRequest};
use crate::shared::{HOST, MAPPED};

pub(super) enum State {
    /// Not looked at yet.
    Queued,
    /// In host memory.
    Resident(Lease),
    /// On its way there.
    ReadingDisk,
    /// On its way to a pool in a device's memory.
    CopyingToDevice,
    /// Copied out, or held for the caller.
    Done(Option<Lease>),
    /// The block will not come.
    Failed,
}

pub(super) struct Load {
    /// Blocks of the chain before the first one of this load, for what it would cost to compute them.
    pub(super) first: u32,
    /// The caller's number; the store's own is its key in the table and never used twice.
    pub(super) request: u64,
    pub(super) chain: Vec<BlockIdentity>,
    pub(super) states: Vec<State>,
    /// Index of the first block that has not been passed to its destination. Copies of blocks before it to a
    /// device may still be in flight (`moving`).
    pub(super) cursor: usize,
    /// Blocks from this one on have not been looked at.
    pub(super) next: usize,
    pub(super) destination: Destination,
    pub(super) verified_by_caller: bool,
    pub(super) deadline: Instant,
    pub(super) started: Instant,
    pub(super) disk_bytes: u64,
    pub(super) host_bytes: u64,
    pub(super) copying: Duration,
    /// Blocks on their way to a device's memory: the load is not over before they are.
    pub(super) moving: usize,
    /// When the first of the blocks in `moving` was started.
    pub(super) moving_since: Option<Instant>,
    /// Whether the load's time is up.
    pub(super) is_late: bool,
}

impl Load {
    pub(super) fn new(wanted: LoadRequest) -> Self {
        let LoadRequest { request, chain, first, destination, verified_by_caller, deadline } = wanted;
        Self {
            first,
            request,
            states: chain.iter().map(|_| State::Queued).collect(),
            chain,
            cursor: 0,
            next: 0,
            destination,
            verified_by_caller,
            deadline,
            started: Instant::now(),
            disk_bytes: 0,
            host_bytes: 0,
            copying: Duration::ZERO,
            moving: 0,
            moving_since: None,
            is_late: false,
        }
    }

    /// Whether the load releases each block as soon as it is copied, and not all of them at its end.
    fn releases_after_copy(&self) -> bool {
        !matches!(self.destination, Destination::Held(_) | Destination::Ahead(_))
    }

    /// Whether the load holds blocks that it will release by itself.
    pub(super) fn will_release(&self) -> bool {
        self.moving > 0 || self.releases_after_copy() && self.cursor < self.next
    }

    /// Whether the load can continue with the slots that it has, and will release some of them.
    pub(super) fn can_progress(&self) -> bool {
        self.moving > 0 || self.releases_after_copy() && !self.waits_for_room()
    }

    /// Leases the block in host memory, if it is there. A request's load uses it; a block that is read ahead
    /// is not used yet.
    pub(super) fn hold(&self, catalog: &Catalog, identity: &BlockIdentity) -> Option<Lease> {
        if self.is_background() {
            // Blocks of pools cannot be held for long.
            return catalog.pin(HOST, identity);
        }
        catalog.lease(HOST, identity).or_else(|| catalog.lease(MAPPED, identity))
    }

    /// Whether no request waits for the load; its bandwidth was charged when it began.
    pub(super) fn is_background(&self) -> bool {
        matches!(self.destination, Destination::Host | Destination::Ahead(_))
    }

    /// Whether no further block is to be brought for the load: its time is up, or a block in its middle will
    /// not come.
    pub(super) fn is_ending(&self) -> bool {
        self.is_late || matches!(self.states.get(self.cursor), Some(State::Failed))
    }

    pub(super) fn waits_for_room(&self) -> bool {
        matches!(self.states.get(self.cursor), Some(State::Queued))
    }

    /// Whether the load may have work to do; `has_room`: slots or leases were released.
    pub(super) fn is_due(&self, has_room: bool) -> bool {
        match self.states.get(self.cursor) {
            Some(State::ReadingDisk) => has_room && self.next < self.chain.len(),
            Some(State::Queued) => has_room,
            _ => true,
        }
    }

    /// Releases the blocks that the load holds and will not use.
    pub(super) fn give_up_rest(&mut self) {
        let rest = self.cursor.min(self.states.len());
        for state in &mut self.states[rest..] {
            if matches!(state, State::Resident(_)) {
                *state = State::Failed;
            }
        }
    }
}
