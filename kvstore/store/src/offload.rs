//! New blocks: into host memory, and from there to the tiers below.

use std::collections::VecDeque;
use std::time::Instant;

use crossbeam_channel::Receiver;
use dataplane_memory::SlotRef;
use kvstore_catalog::Filling;

use crate::config::WriteMode;
use crate::device::{Ended, Purpose, UnstartedCopy};
use crate::job::{NewBlock, Source, StoreEvent};
use crate::metrics::StoreCounters;
use crate::shared::HOST;
use crate::store_thread::StoreThread;
use crate::tiers::{Arrival, Origin};

/// New blocks that wait to be copied into host memory.
pub(crate) struct Offloads {
    pub(crate) incoming: Receiver<NewBlock>,
    /// Blocks that wait for a slot of host memory, within their tenant's quota, or for room in the device's
    /// copier: operations in flight will free some.
    held: VecDeque<NewBlock>,
}

impl Offloads {
    pub(crate) fn new(incoming: Receiver<NewBlock>) -> Self {
        Self { incoming, held: VecDeque::new() }
    }

    /// Whether a block waits for a slot of host memory or for room in the device's copier.
    pub(crate) fn wait_for_room(&self) -> bool {
        !self.held.is_empty()
    }
}

impl StoreThread {
    /// Returns the block whose turn it is.
    pub(crate) fn next_offload(&mut self) -> Option<NewBlock> {
        if self.offloads.wait_for_room() {
            // Further blocks would only queue up behind it.
            let has_room = self.tiers.room.take_for_new_blocks();
            return has_room.then(|| self.offloads.held.pop_front()).flatten();
        }
        let block = self.offloads.incoming.try_recv().ok()?;
        self.tiers.count_offer(&block.identity);
        Some(block)
    }

    pub(crate) fn offload(&mut self, mut block: NewBlock) {
        if self.tiers.shared.holds(HOST, &block.identity) {
            return self.over(block, true);
        }
        let source = std::mem::replace(&mut block.source, Source::Bytes(Vec::new()));
        if let Source::Filled { filling, bytes, checksum } = source {
            return self.take_in(block, filling, bytes, checksum);
        }
        block.source = source;
        let Some(reserved) = self.tiers.host_slot(block.description.tenant) else {
            // Other tenants wait behind one that is at its quota for the end of a write that makes room, and for nothing else.
            let is_written_back = self.tiers.shared.config.disk_write == WriteMode::Back;
            let waits_for_write = is_written_back && !self.tiers.bandwidth.holds_writes();
            let is_short = self.tiers.shared.free(HOST) == 0 || waits_for_write;
            if is_short && self.loads.will_make_room(&self.tiers, &self.device) {
                self.offloads.held.push_front(block);
            } else {
                StoreCounters::add(&self.tiers.shared.counters.throttled, 1);
                self.over(block, false);
            }
            return;
        };
        let filling = reserved.fill();
        let slot = filling.slot();
        if let Source::Slot(source) = &block.source
            && source.slab().device().is_some()
        {
            let source = source.clone();
            return self.offload_from_device(block, source, filling);
        }
        let shared = &self.tiers.shared;
        let copied = match &block.source {
            Source::Slot(source) => {
                let started = Instant::now();
                let copied = shared.memory.copy_in(slot, source);
                shared.observe_copy(shared.config.block_bytes, started.elapsed());
                copied
            }
            Source::Bytes(pieces) => {
                Some((pieces.iter().map(bytes::Bytes::len).sum(), shared.memory.write(slot, pieces)))
            }
            Source::Filled { .. } => unreachable!("it has a slot of its own"),
        };
        match copied {
            Some((bytes, checksum)) => self.take_in(block, filling, bytes, checksum),
            None => self.unfit(block, filling),
        }
    }

    /// Starts the copy of a block out of a device's memory.
    fn offload_from_device(&mut self, block: NewBlock, source: SlotRef, filling: Filling) {
        let (bytes, shared) = (source.slab().layout().slot_bytes, &self.tiers.shared);
        if bytes > shared.config.block_bytes {
            return self.unfit(block, filling);
        }
        let target = shared.memory.slot(filling.slot()).clone();
        let refused = self.device.start(source, target, bytes, Purpose::In { block, filling, bytes });
        let Err(UnstartedCopy { purpose: Purpose::In { block, filling, .. }, is_full }) = refused else {
            return;
        };
        if is_full {
            // One of the copies in flight will make room.
            drop(filling);
            self.offloads.held.push_front(block);
        } else {
            self.unfit(block, filling);
        }
    }

    /// Takes in copies to and from a device's memory that have ended, as far as their checksums may be taken in this part of
    /// the round; false when there were none.
    pub(crate) fn advance_copies(&mut self) -> bool {
        self.device.poll();
        let mut has_ended = false;
        while !self.tiers.hashing.is_spent()
            && let Some(Ended { purpose, is_good, took }) = self.device.next_ended()
        {
            has_ended = true;
            let shared = &self.tiers.shared;
            if !is_good {
                StoreCounters::add(&shared.counters.device_failures, 1);
            }
            match purpose {
                Purpose::In { block, filling, bytes } if is_good => {
                    if let Some(took) = took {
                        shared.observe_copy(bytes, took);
                    }
                    let taken = block.checksum;
                    let checksum = taken.unwrap_or_else(|| self.tiers.checksum(filling.slot(), bytes));
                    self.take_in(block, filling, bytes, checksum);
                }
                Purpose::In { block, filling, .. } => {
                    drop(filling);
                    self.over(block, false);
                }
                Purpose::Out { load, index, lease } => self.loads.moved_out(load, index, lease, is_good),
            }
        }
        if has_ended {
            self.tiers.room.mark_released();
        }
        has_ended
    }

    /// Registers a block whose bytes are in host memory.
    fn take_in(&mut self, mut block: NewBlock, filling: Filling, bytes: usize, checksum: u64) {
        // The pool can have its slot back now; the rest concerns the store alone.
        block.source = Source::Bytes(Vec::new());
        let (identity, description) = (block.identity, block.description.clone());
        let arrival = Arrival {
            identity,
            parent: description.parent,
            position: description.position,
            bytes: bytes as u32,
            checksum,
            origin: Origin::Pool,
            description: Some(description),
        };
        if self.tiers.register(filling, arrival) {
            if self.tiers.shared.config.disk_write == WriteMode::Through {
                self.tiers.write_through(identity);
            }
            self.far.offer(identity, &self.tiers);
        }
        self.over(block, true);
    }

    /// Counts a block that cannot be kept, and ends its offload.
    fn unfit(&mut self, block: NewBlock, filling: Filling) {
        StoreCounters::add(&self.tiers.shared.counters.unfit, 1);
        drop(filling);
        self.over(block, false);
    }

    fn over(&mut self, block: NewBlock, is_stored: bool) {
        let NewBlock { identity, source, done, .. } = block;
        drop(source);
        match done {
            Some(done) => done(is_stored),
            None => self.tiers.tell(StoreEvent::Offloaded { identity }),
        }
    }
}
