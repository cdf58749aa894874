//! Loads of blocks: from host memory at once, from the disk as it delivers, in the order of the chain.
//!
//! A load takes hold of its blocks in order, as far as host memory has room, and lets go of each when it is copied. So
//! the first block that a load holds can always be copied or is always on its way, and loads that share too little
//! memory take turns instead of waiting for each other.

mod advance;
mod state;

use std::collections::HashMap;
use std::time::Instant;

use kvstore_block::BlockIdentity;

use crate::device::DeviceCopies;
use crate::disk::Waiter;
use crate::job::{Destination, LoadRequest, StoreEvent};
use crate::metrics::StoreCounters;
use crate::shared::{HOST, LoadTimes, Shared};
use crate::tiers::{ChainPosition, ReadStart, Tiers};
use state::{Load, State};

/// The loads that are under way, by a number of the store's own.
#[derive(Default)]
pub(crate) struct Loads {
    table: HashMap<u64, Load>,
    next: u64,
}

impl Loads {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// When the time of some load is up.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.table.values().map(|load| load.deadline).min()
    }

    /// Whether some load waits for a slot of host memory.
    pub(crate) fn wait_for_room(&self) -> bool {
        self.table.values().any(Load::waits_for_room)
    }

    pub(crate) fn start(&mut self, wanted: LoadRequest, tiers: &mut Tiers, device: &DeviceCopies) {
        let number = self.next;
        self.next += 1;
        let mut load = Load::new(wanted);
        self.take_hold(number, &mut load, tiers, device);
        self.table.insert(number, load);
    }

    /// Ends the loads of a request that was cancelled.
    pub(crate) fn cancel(&mut self, request: u64, tiers: &mut Tiers) {
        self.table.retain(|_, load| load.request != request);
        tiers.room.mark_released();
    }

    /// Takes hold of the load's next blocks, as far as there is room. It is not in the table meanwhile.
    fn take_hold(&self, number: u64, load: &mut Load, tiers: &mut Tiers, device: &DeviceCopies) {
        if load.is_ending() {
            return load.give_up_rest();
        }
        while let Some(identity) = load.chain.get(load.next) {
            let state = match load.hold(&tiers.shared.catalog, identity) {
                Some(lease) => State::Resident(lease),
                None => match tiers.read_from_disk(*identity, (number, load.next), load.is_background()) {
                    ReadStart::InFlight => State::ReadingDisk,
                    // Waits only if this load or an operation in flight will free a slot; otherwise the block
                    // fails.
                    ReadStart::NoFreeSlot if load.will_release() => return,
                    ReadStart::NoFreeSlot if self.will_make_room(tiers, device) => return,
                    ReadStart::NoFreeSlot | ReadStart::NotOnDisk => State::Failed,
                },
            };
            let is_end = matches!(state, State::Failed);
            load.states[load.next] = state;
            // Nothing after a block that is missing can be used.
            load.next = if is_end { load.chain.len() } else { load.next + 1 };
        }
    }

    /// Whether an operation is in flight that ends by itself and leaves room.
    pub(crate) fn will_make_room(&self, tiers: &Tiers, device: &DeviceCopies) -> bool {
        tiers.will_make_room() || device.is_busy() || self.table.values().any(Load::can_progress)
    }

    /// Parent and position of the block that these waiters wait for.
    pub(crate) fn place(&self, waiters: &[Waiter]) -> ChainPosition {
        let parent = waiters.iter().find_map(|(number, index)| {
            let load = self.table.get(number)?;
            load.chain.get(index.checked_sub(1)?).copied()
        });
        let position = waiters.first().and_then(|(number, index)| {
            let load = self.table.get(number)?;
            Some(load.first + *index as u32)
        });
        ChainPosition { parent, position }
    }

    /// Handles the end of a read: the block is in host memory, or will not come.
    pub(crate) fn block_arrived(&mut self, identity: &BlockIdentity, waiters: Vec<Waiter>, shared: &Shared) {
        for (number, index) in waiters {
            let Some(load) = self.table.get_mut(&number) else { continue };
            let lease = load.hold(&shared.catalog, identity);
            load.disk_bytes += lease.as_ref().map_or(0, |lease| u64::from(lease.bytes()));
            load.states[index] = lease.map_or(State::Failed, State::Resident);
        }
    }

    /// Fails a block for these waiters, whose loads go on without it.
    pub(crate) fn fail_waiters(&mut self, waiters: Vec<Waiter>) {
        for (number, index) in waiters {
            if let Some(load) = self.table.get_mut(&number) {
                load.states[index] = State::Failed;
            }
        }
    }

    /// Ends the loads whose time is up.
    pub(crate) fn expire(&mut self, now: Instant, tiers: &mut Tiers) {
        let mut late: Vec<u64> =
            self.table.iter().filter(|(_, load)| load.deadline <= now).map(|(&number, _)| number).collect();
        late.sort_unstable();
        for number in late {
            let Some(mut load) = self.table.remove(&number) else { continue };
            if !load.is_late {
                StoreCounters::add(&tiers.shared.counters.late, load.chain.len() - load.cursor);
            }
            load.is_late = true;
            load.give_up_rest();
            if load.moving > 0 {
                // A device still writes to the load's slots: they cannot be given back yet.
                self.table.insert(number, load);
                continue;
            }
            Self::finish(load, tiers);
            tiers.room.mark_released();
        }
    }

    /// Blocks that loads wait for, each with the load's number and the block's place in it.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (BlockIdentity, Waiter)> {
        self.table.iter().flat_map(|(&number, load)| {
            let states = load.states.iter().zip(&load.chain).enumerate();
            let coming = states.filter(|(_, (state, _))| matches!(state, State::ReadingDisk));
            coming.map(move |(at, (_, identity))| (*identity, (number, at)))
        })
    }

    fn finish(load: Load, tiers: &mut Tiers) {
        let Load { request, states, destination, .. } = load;
        // A load that was late without waiting for the disk says nothing of it.
        let is_late = load.is_late
            && (load.disk_bytes > 0 || states.iter().any(|state| matches!(state, State::ReadingDisk)));
        let verified = states.iter().take_while(|state| matches!(state, State::Done(_))).count();
        // A hold asks for one block of many; its caller measures the whole load (`Store::observe_load`).
        if !matches!(destination, Destination::Held(_)) {
            let (disk_bytes, host_bytes, copying) = (load.disk_bytes, load.host_bytes, load.copying);
            let elapsed = load.started.elapsed();
            let coming = states.iter().filter(|state| matches!(state, State::ReadingDisk)).count();
            let disk_wanted_bytes = disk_bytes + (coming * tiers.shared.config.block_bytes) as u64;
            let times = LoadTimes { elapsed, disk_bytes, disk_wanted_bytes, host_bytes, copying, is_late };
            tiers.shared.observe_load(&times);
        }
        if !matches!(destination, Destination::Host | Destination::Ahead(_)) {
            StoreCounters::add(&tiers.shared.counters.onboarded, verified);
        }
        match destination {
            Destination::Host => {}
            Destination::Ahead(last) => {
                let held = states.into_iter().take(verified).filter_map(|state| match state {
                    // Blocks of the disk come into host memory.
                    State::Done(lease) => lease.filter(|lease| lease.tier() == HOST),
                    _ => None,
                });
                let held = held.map(|lease| tiers.shared.held.hold(lease)).collect();
                tiers.fetched_ahead.push((last, held));
            }
            Destination::Slots(slots) => tiers.tell(StoreEvent::Onboarded { request, slots, verified }),
            Destination::Held(reply) => {
                let memory = &tiers.shared.memory;
                // A block in a pool's memory may have gone since.
                let held = states.into_iter().take(verified).map_while(|state| match state {
                    State::Done(Some(lease)) => memory.held(lease),
                    _ => None,
                });
                reply(held.collect());
            }
        }
    }
}
