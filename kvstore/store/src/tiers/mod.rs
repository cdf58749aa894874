//! The tiers of this node on the store's thread: host memory, the disk behind it, and the transfers between
//! the two.
//!
//! [`Tiers`] joins parts with a state of their own that know nothing of each other: the descriptions of the
//! blocks in host memory, the disk with its queues ([`LocalDisk`]), bandwidth. New blocks, loads and searches
//! come here for slots and reads; this module knows nothing of them, but for the numbers of the loads that
//! wait for a read.

mod budget;
mod forget;
mod host;
mod mapped;
mod read;
mod retained;
#[cfg(test)]
pub(crate) mod testing;
mod write;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;

use crate::bandwidth::Bandwidth;
use crate::disk::LocalDisk;
use crate::far::{Delivered, DeliveredSum};
use crate::held::HeldBlock;
use crate::job::{Description, StoreEvent};
use crate::shared::Shared;
use budget::HashBudget;
pub(crate) use host::{Arrival, Origin};
use mapped::MappedBlocks;
pub(crate) use read::{ChainPosition, ReadStart};
use retained::RetainedBlocks;
pub(crate) use write::{META_FIXED, parse_meta};

/// Longest wait for room in the disk's queue at the end, and the interval of its checks.
const TOMBSTONES_WITHIN: Duration = Duration::from_secs(5);
const TOMBSTONES_RECHECK: Duration = Duration::from_millis(1);

/// Bytes whose hashing takes about as long as making a block known that is not hashed: some thousand blocks a round.
const REGISTER_BYTES: usize = 4 << 10;

pub(crate) struct Tiers {
    pub(crate) shared: Arc<Shared>,
    notify: Box<dyn FnMut(StoreEvent) + Send>,
    /// When the round of the thread began.
    pub(crate) now: Instant,
    /// Description of the block in each slot of host memory, for the tiers below.
    descriptions: Vec<Option<Description>>,
    pub(crate) disk: Option<LocalDisk>,
    pub(crate) bandwidth: Bandwidth,
    pub(crate) hashing: HashBudget,
    pub(crate) room: RoomSignal,
    /// Blocks of pools on this host.
    pub(crate) mapped: MappedBlocks,
    /// Blocks that were brought up for idle conversations, by their last blocks.
    pub(crate) fetched_ahead: Vec<(BlockIdentity, Vec<HeldBlock>)>,
    /// Blocks that requests want kept for a time.
    pub(crate) retained: RetainedBlocks,
}

/// Whether room was released since the work that waits for it was last tried.
#[derive(Debug, Default)]
pub(crate) struct RoomSignal {
    for_loads: bool,
    for_new_blocks: bool,
}

impl RoomSignal {
    /// Records that room came free: the work that waits for it is tried again.
    pub(crate) fn mark_released(&mut self) {
        *self = Self { for_loads: true, for_new_blocks: true };
    }

    /// Whether loads are to be tried again; clears the mark.
    pub(crate) fn take_for_loads(&mut self) -> bool {
        std::mem::take(&mut self.for_loads)
    }

    /// The same for new blocks.
    pub(crate) fn take_for_new_blocks(&mut self) -> bool {
        std::mem::take(&mut self.for_new_blocks)
    }
}

impl Tiers {
    pub(crate) fn new(
        shared: Arc<Shared>,
        notify: Box<dyn FnMut(StoreEvent) + Send>,
        disk: Option<LocalDisk>,
        bandwidth: Bandwidth,
    ) -> Self {
        let descriptions = vec![None; shared.memory.slot_count()];
        let (hashing, room) = (HashBudget::new(), RoomSignal::default());
        let now = Instant::now();
        let (mapped, fetched_ahead) = (MappedBlocks::default(), Vec::new());
        let retained = RetainedBlocks::new(&shared);
        Self {
            shared,
            notify,
            now,
            descriptions,
            disk,
            bandwidth,
            hashing,
            room,
            mapped,
            fetched_ahead,
            retained,
        }
    }

    /// Slots of host memory.
    pub(crate) fn host_slots(&self) -> usize {
        self.descriptions.len()
    }

    /// Description of the block in a slot of host memory; `None`: the block's source did not know it.
    pub(crate) fn description(&self, slot: u32) -> Option<&Description> {
        self.descriptions[slot as usize].as_ref()
    }

    /// The checksum of a slot of host memory; takes its bytes off what this part of the round may hash.
    pub(crate) fn checksum(&mut self, slot: u32, bytes: usize) -> u64 {
        self.hashing.spend(bytes);
        self.shared.memory.checksum(slot, bytes)
    }

    /// Returns the checksum of a block that a tier of other nodes has delivered. `None`: its bytes are not
    /// those that the tier verified.
    pub(crate) fn checksum_of(&mut self, slot: u32, delivered: &Delivered) -> Option<u64> {
        match delivered.sum {
            DeliveredSum::Block(checksum) => {
                self.hashing.spend(REGISTER_BYTES);
                Some(checksum)
            }
            DeliveredSum::Xxh3(expected) => {
                let bytes = delivered.bytes as usize;
                self.hashing.spend(bytes);
                self.shared.memory.checksum_if(slot, bytes, expected)
            }
        }
    }

    /// Publishes an event.
    pub(crate) fn tell(&mut self, moved: StoreEvent) {
        (self.notify)(moved);
    }

    /// Whether a read or write is under way, or waits for bandwidth: it ends by itself and leaves room.
    pub(crate) fn will_make_room(&self) -> bool {
        let is_busy = |disk: &LocalDisk| !disk.reads.is_empty() || disk.writes.answering() > 0;
        self.disk.as_ref().is_some_and(is_busy) || self.bandwidth.holds_writes()
    }

    /// Hands tombstones to the disk, as far as its queue has room.
    pub(crate) fn send_tombstones(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.slots.send_tombstones(&disk.link);
        }
    }

    /// Shutdown: sends tombstones for all blocks that were forgotten, also for those that are still being
    /// written, whose completions will not be read.
    pub(crate) fn send_all_tombstones(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        for slot in disk.writes.forgotten_slots() {
            disk.slots.forget(slot);
        }
        let deadline = Instant::now() + TOMBSTONES_WITHIN;
        self.send_tombstones();
        while self.has_tombstones() {
            if Instant::now() >= deadline || self.disk.as_ref().is_none_or(|disk| disk.link.has_ended()) {
                return tracing::warn!(
                    "blocks that were forgotten may come back: the disk took no more tombstones"
                );
            }
            std::thread::sleep(TOMBSTONES_RECHECK);
            self.send_tombstones();
        }
    }

    /// Blocks of host memory that wait to be written to a disk that answers.
    pub(crate) fn unwritten(&self) -> usize {
        let answers = |disk: &&LocalDisk| {
            (disk.writes.answering() > 0 || disk.writes.len() == 0) && !disk.link.has_ended()
        };
        self.disk.as_ref().filter(answers).map_or(0, |disk| disk.unwritten.len())
    }

    /// Panics when more reads or writes are out than the tables know.
    pub(crate) fn check_guards(&self) {
        if let Some(disk) = &self.disk {
            disk.check_guards();
        }
    }

    /// Whether tombstones wait for room in the disk's queue.
    pub(crate) fn has_tombstones(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.slots.has_tombstones())
    }

    fn disk_has_room(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.link.has_room())
    }
}
