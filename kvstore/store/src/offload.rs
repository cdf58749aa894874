//! New blocks: into host memory, and from there to the tiers below.

use std::time::Instant;

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Evicting, Registered, Reserved};
use kvstore_disk::{Moment, Usage, Verdict};

use crate::config::WriteMode;
use crate::disk::{DiskCommand, Hold, Write};
use crate::job::{Medium, Moved, NewBlock, Source};
use crate::metrics::StoreCounters;
use crate::mover::Mover;
use crate::shared::{DISK, HOST, TENANT};

/// Blocks written back to the disk at a time, so that their slots come free while new blocks arrive.
const LEAVING_MAX: usize = 16;

impl Mover {
    pub(crate) fn offload(&mut self, mut block: NewBlock) {
        self.seen.increment(&block.identity);
        if self.shared.holds(HOST, &block.identity) {
            return self.over(block, true);
        }
        let Some(reserved) = self.host_slot() else {
            if self.writing > 0 {
                self.held.push_front(block);
            } else {
                StoreCounters::add(&self.shared.counters.throttled, 1);
                self.over(block, false);
            }
            return;
        };
        let filling = reserved.fill();
        let slot = filling.slot();
        let (bytes, checksum) = match &block.source {
            Source::Slot(source) => {
                let bytes = source.slab().layout().slot_bytes;
                let started = Instant::now();
                let checksum = self.shared.memory.copy_in(slot, source, bytes);
                self.shared.observe_copy(bytes, started.elapsed());
                (bytes, checksum)
            }
            Source::Bytes(pieces) => {
                (pieces.iter().map(bytes::Bytes::len).sum(), self.shared.memory.write(slot, pieces))
            }
        };
        // The pool can have its slot back now; the rest concerns the store alone.
        block.source = Source::Bytes(Vec::new());
        let description = block.description.clone();
        let cost = self.shared.recompute_cost(description.position);
        let complete = filling.complete(checksum, bytes as u32);
        if let Registered::New = complete.register(block.identity, description.parent, cost) {
            self.descriptions[slot as usize] = Some(description);
            StoreCounters::add(&self.shared.counters.offloaded, 1);
            (self.notify)(Moved::Stored { identity: block.identity, medium: Medium::Host });
            if self.shared.config.disk_write == WriteMode::Through {
                self.write_through(block.identity);
            }
            self.offer_far(block.identity);
        }
        self.over(block, true);
    }

    fn over(&mut self, block: NewBlock, is_stored: bool) {
        let NewBlock { identity, source, done, .. } = block;
        drop(source);
        match done {
            Some(done) => done(is_stored),
            None => (self.notify)(Moved::Offloaded { identity }),
        }
    }

    /// A slot of host memory, made by evicting if need be.
    pub(crate) fn host_slot(&mut self) -> Option<Reserved> {
        let writes_back = self.disk.is_some() && self.shared.config.disk_write == WriteMode::Back;
        if writes_back && self.shared.free(HOST) == 0 {
            self.write_back();
            if self.shared.free(HOST) == 0 && self.writing > 0 {
                return None;
            }
        }
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        self.shared.catalog.reserve(HOST, 1, TENANT, &mut evicted, &mut reserved);
        for evicted in evicted {
            self.left_host(evicted.identity, evicted.slot);
        }
        reserved.pop()
    }

    fn left_host(&mut self, identity: BlockIdentity, slot: u32) {
        self.descriptions[slot as usize] = None;
        StoreCounters::add(&self.shared.counters.evicted, 1);
        (self.notify)(Moved::Removed { identity, medium: Medium::Host });
    }

    fn write_through(&mut self, identity: BlockIdentity) {
        if let Some(lease) = self.shared.catalog.lease(HOST, &identity) {
            let slot = lease.slot();
            let bytes = lease.bytes();
            // A block that is not written stays in host memory all the same.
            let _not_written = self.write_to_disk(identity, slot, bytes, Hold::Lease { _held: lease });
        }
    }

    /// Starts the way out of host memory for the blocks that go next. Those that the disk has, or does not take, go at
    /// once.
    fn write_back(&mut self) {
        let mut evicting = Vec::new();
        self.shared.catalog.evict(HOST, LEAVING_MAX.saturating_sub(self.writing), &mut evicting);
        for evicting in evicting {
            let (identity, slot, bytes) = (evicting.identity(), evicting.slot(), evicting.bytes());
            match self.write_to_disk(identity, slot, bytes, Hold::Evicting(evicting)) {
                Ok(()) => {}
                Err(Hold::Evicting(evicting)) => self.finish_eviction(evicting),
                Err(Hold::Lease { .. }) => {}
            }
        }
    }

    fn finish_eviction(&mut self, evicting: Evicting) {
        let (identity, slot) = (evicting.identity(), evicting.slot());
        // It stays when a block that hangs on it was put back meanwhile.
        if evicting.finish() {
            self.left_host(identity, slot);
        }
    }

    /// Hands a block of host memory to the disk; gives `hold` back when the disk has it, or does not get it.
    fn write_to_disk(
        &mut self,
        identity: BlockIdentity,
        slot: u32,
        bytes: u32,
        hold: Hold,
    ) -> Result<(), Hold> {
        let (Some(disk), Some(description)) = (&self.disk, &self.descriptions[slot as usize]) else {
            return Err(hold);
        };
        if self.shared.holds(DISK, &identity) || description.meta.len() > crate::META_BYTES_MAX {
            return Err(hold);
        }
        let seen = u32::from(self.seen.estimate(&identity));
        if self.admission.decide(seen, u64::from(bytes), &self.usage, Moment::now()) != Verdict::Admit {
            StoreCounters::add(&self.shared.counters.not_admitted, 1);
            return Err(hold);
        }
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        self.shared.catalog.reserve(DISK, 1, TENANT, &mut evicted, &mut reserved);
        for evicted in evicted {
            // A tombstone that is lost costs nothing: what comes back after a restart is still what it says.
            let _full = disk.try_send(DiskCommand::Forget(evicted.slot));
            StoreCounters::add(&self.shared.counters.disk_evicted, 1);
            (self.notify)(Moved::Removed { identity: evicted.identity, medium: Medium::Disk });
        }
        let Some(reserved) = reserved.pop() else { return Err(hold) };
        let mut meta = description.position.to_le_bytes().to_vec();
        meta.extend_from_slice(&description.meta);
        let write = Write {
            identity,
            parent: description.parent,
            position: description.position,
            meta,
            payload: self.shared.memory.slot(slot).clone(),
            bytes,
            hold,
            filling: reserved.fill(),
        };
        match disk.try_send(DiskCommand::Write(Box::new(write))) {
            Ok(()) => {
                self.writing += 1;
                Ok(())
            }
            Err(DiskCommand::Write(write)) => {
                StoreCounters::add(&self.shared.counters.throttled, 1);
                Err(write.hold)
            }
            Err(_) => unreachable!("a refused command comes back as it was"),
        }
    }

    /// The disk has answered a write.
    pub(crate) fn written(&mut self, write: Write, is_written: bool, usage: Usage) {
        self.usage = usage;
        self.writing -= 1;
        self.has_room = true;
        self.has_held_room = true;
        let Write { identity, parent, position, payload, bytes, hold, filling, .. } = write;
        if is_written {
            let checksum = self.shared.memory.checksum(payload.slot(), bytes as usize);
            let cost = self.shared.recompute_cost(position);
            if let Registered::New = filling.complete(checksum, bytes).register(identity, parent, cost) {
                StoreCounters::add(&self.shared.counters.to_disk, 1);
                (self.notify)(Moved::Stored { identity, medium: Medium::Disk });
            }
        }
        drop(payload);
        if let Hold::Evicting(evicting) = hold {
            self.finish_eviction(evicting);
        }
    }

    /// Takes blocks out of every tier of this node.
    pub(crate) fn forget(&mut self, chain: &[BlockIdentity]) {
        for identity in chain {
            self.drop_from_host(*identity);
            self.drop_from_disk(*identity);
        }
    }

    pub(crate) fn drop_from_host(&mut self, identity: BlockIdentity) {
        if self.shared.catalog.remove(HOST, &identity) {
            (self.notify)(Moved::Removed { identity, medium: Medium::Host });
        }
    }

    pub(crate) fn drop_from_disk(&mut self, identity: BlockIdentity) {
        let slot = self.shared.catalog.lease(DISK, &identity).map(|lease| lease.slot());
        if self.shared.catalog.remove(DISK, &identity) {
            if let (Some(disk), Some(slot)) = (&self.disk, slot) {
                let _full = disk.try_send(DiskCommand::Forget(slot));
            }
            (self.notify)(Moved::Removed { identity, medium: Medium::Disk });
        }
    }
}
