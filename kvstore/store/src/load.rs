//! Blocks that somebody asked for: from host memory at once, from the disk as it delivers, in the order of the chain.
//!
//! A load takes hold of its blocks in order, as far as host memory has room, and lets go of each when it is copied. So
//! the first block that a load holds can always be copied or is always on its way, and loads that share too little
//! memory take turns instead of waiting for each other.

use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, Registered};

use crate::disk::{DiskCommand, Read};
use crate::job::{Destination, Moved};
use crate::memory::HostBlock;
use crate::metrics::StoreCounters;
use crate::mover::Mover;
use crate::shared::{DISK, HOST};

/// Bytes copied for all loads together before the inbox is looked at again.
pub(crate) const COPY_BYTES_MAX: usize = 8 << 20;

enum State {
    /// Not looked at yet.
    Wanted,
    /// In host memory.
    Here(Lease),
    /// On its way there.
    Coming,
    /// Copied out, or held for whoever gets it.
    Done(Option<Lease>),
    /// It will not come.
    Failed,
}

/// How an attempt to start a read went.
enum Started {
    Coming,
    /// There is no room for it now.
    Later,
    /// The disk has not got it.
    Nowhere,
}

pub(crate) struct Load {
    chain: Vec<BlockIdentity>,
    states: Vec<State>,
    /// Blocks before this one are done.
    cursor: usize,
    /// Blocks from this one on have not been looked at.
    next: usize,
    destination: Destination,
    pub(crate) deadline: Instant,
    started: Instant,
    disk_bytes: u64,
    host_bytes: u64,
    copying: Duration,
}

impl Mover {
    pub(crate) fn start_load(
        &mut self,
        request: u64,
        chain: Vec<BlockIdentity>,
        destination: Destination,
        deadline: Instant,
    ) {
        let states = chain.iter().map(|_| State::Wanted).collect();
        let mut load = Load {
            chain,
            states,
            cursor: 0,
            next: 0,
            destination,
            deadline,
            started: Instant::now(),
            disk_bytes: 0,
            host_bytes: 0,
            copying: Duration::ZERO,
        };
        self.take_hold(request, &mut load);
        self.loads.insert(request, load);
    }

    /// Takes hold of the next blocks, as far as there is room.
    fn take_hold(&mut self, request: u64, load: &mut Load) {
        while let Some(identity) = load.chain.get(load.next) {
            let state = match self.shared.catalog.lease(HOST, identity) {
                Some(lease) => State::Here(lease),
                None => match self.read_from_disk(*identity, (request, load.next)) {
                    Started::Coming => State::Coming,
                    // Somebody who uses the room now will let go of it; if it is nobody, nothing changes any more.
                    Started::Later
                        if !self.reading.is_empty() || self.writing > 0 || !self.loads.is_empty() =>
                    {
                        return;
                    }
                    Started::Later if load.cursor < load.next => return,
                    Started::Later | Started::Nowhere => State::Failed,
                },
            };
            let is_end = matches!(state, State::Failed);
            load.states[load.next] = state;
            // Nothing after a block that is missing can be used.
            load.next = if is_end { load.chain.len() } else { load.next + 1 };
        }
    }

    /// Starts a read, or joins one that is under way.
    fn read_from_disk(&mut self, identity: BlockIdentity, waiter: (u64, usize)) -> Started {
        if let Some(waiters) = self.reading.get_mut(&identity) {
            waiters.push(waiter);
            return Started::Coming;
        }
        if self.disk.is_none() {
            return Started::Nowhere;
        }
        let Some(lease) = self.shared.catalog.lease(DISK, &identity) else { return Started::Nowhere };
        let Some(reserved) = self.host_slot() else { return Started::Later };
        let filling = reserved.fill();
        let target = self.shared.memory.slot(filling.slot()).clone();
        let read = Read { identity, lease, filling, target };
        let sent =
            self.disk.as_ref().is_some_and(|disk| disk.try_send(DiskCommand::Read(Box::new(read))).is_ok());
        if !sent {
            return Started::Later;
        }
        self.reading.insert(identity, vec![waiter]);
        Started::Coming
    }

    /// The disk has answered a read.
    pub(crate) fn read(&mut self, read: Read, bytes: Option<u32>, is_gone: bool) {
        let Read { identity, lease, filling, .. } = read;
        let waiters = self.reading.remove(&identity).unwrap_or_default();
        self.has_room = true;
        let parent = waiters.iter().find_map(|(request, index)| {
            self.loads.get(request).and_then(|load| index.checked_sub(1).map(|before| load.chain[before]))
        });
        if let Some(bytes) = bytes {
            let checksum = self.shared.memory.checksum(filling.slot(), bytes as usize);
            self.descriptions[filling.slot() as usize] = None;
            let place = waiters.first().map_or(0, |(_, index)| *index as u32);
            let cost = self.shared.recompute_cost(place);
            let complete = filling.complete(checksum, bytes);
            if let Registered::New = complete.register(identity, parent.or(lease.parent()), cost) {
                StoreCounters::add(&self.shared.counters.from_disk, 1);
                (self.notify)(Moved::Stored { identity, medium: crate::Medium::Host });
            }
            drop(lease);
        } else {
            StoreCounters::add(&self.shared.counters.disk_misses, 1);
            drop((lease, filling));
            if is_gone {
                self.drop_from_disk(identity);
            }
        }
        for (request, index) in waiters {
            let lease = self.shared.catalog.lease(HOST, &identity);
            let Some(load) = self.loads.get_mut(&request) else { continue };
            load.disk_bytes += lease.as_ref().map_or(0, |lease| u64::from(lease.bytes()));
            load.states[index] = lease.map_or(State::Failed, State::Here);
        }
    }

    /// Copies what has come, and ends what is complete; false when there was nothing to do.
    pub(crate) fn advance_loads(&mut self) -> bool {
        let mut budget = COPY_BYTES_MAX;
        let has_room = std::mem::take(&mut self.has_room);
        let is_due = |load: &Load| match load.states.get(load.cursor) {
            Some(State::Coming) => has_room && load.next < load.chain.len(),
            Some(State::Wanted) => has_room,
            _ => true,
        };
        let mut requests: Vec<u64> =
            self.loads.iter().filter(|(_, load)| is_due(load)).map(|(&request, _)| request).collect();
        // First come, first served.
        requests.sort_unstable_by_key(|request| self.loads.get(request).map(|load| load.started));
        let mut worked = false;
        for request in requests {
            let Some(mut load) = self.loads.remove(&request) else { continue };
            let before = load.cursor;
            let is_over = self.advance(request, &mut load, &mut budget);
            worked |= is_over || load.cursor > before;
            if is_over {
                self.finish(request, load, false);
            } else {
                self.take_hold(request, &mut load);
                self.loads.insert(request, load);
            }
        }
        if worked {
            // What was let go of is room for others.
            self.has_room = true;
        }
        worked
    }

    /// Whether the load is over.
    fn advance(&mut self, request: u64, load: &mut Load, budget: &mut usize) -> bool {
        loop {
            let Some(state) = load.states.get_mut(load.cursor) else { return true };
            match state {
                State::Coming | State::Wanted => return false,
                State::Failed => return true,
                State::Done(_) => load.cursor += 1,
                State::Here(_) if *budget == 0 => return false,
                State::Here(_) => {
                    let State::Here(lease) = std::mem::replace(state, State::Done(None)) else { continue };
                    let bytes = lease.bytes() as usize;
                    *budget = budget.saturating_sub(bytes);
                    match &load.destination {
                        Destination::Held(_) => *state = State::Done(Some(lease)),
                        Destination::Slots(targets) => {
                            let started = Instant::now();
                            let is_good = self.shared.memory.copy_out(&lease, &targets[load.cursor]);
                            load.copying += started.elapsed();
                            load.host_bytes += bytes as u64;
                            drop(lease);
                            if !is_good {
                                load.states[load.cursor] =
                                    self.damaged(load.chain[load.cursor], request, load.cursor);
                            }
                        }
                    }
                }
            }
        }
    }

    /// A block of host memory is not what had been stored. The disk may still have it.
    fn damaged(&mut self, identity: BlockIdentity, request: u64, index: usize) -> State {
        tracing::warn!(block = identity.short(), "host tier: a block is damaged and is thrown away");
        StoreCounters::add(&self.shared.counters.checksum_failures, 1);
        self.drop_from_host(identity);
        match self.read_from_disk(identity, (request, index)) {
            Started::Coming => State::Coming,
            Started::Later | Started::Nowhere => State::Failed,
        }
    }

    pub(crate) fn expire_loads(&mut self, now: Instant) {
        let late: Vec<u64> =
            self.loads.iter().filter(|(_, load)| load.deadline <= now).map(|(&request, _)| request).collect();
        for request in late {
            if let Some(load) = self.loads.remove(&request) {
                StoreCounters::add(&self.shared.counters.late, load.chain.len() - load.cursor);
                self.finish(request, load, true);
            }
        }
    }

    fn finish(&mut self, request: u64, load: Load, is_late: bool) {
        let Load { states, cursor, destination, .. } = load;
        self.shared.observe_load(
            load.started.elapsed(),
            load.disk_bytes,
            load.copying,
            load.host_bytes,
            is_late,
        );
        StoreCounters::add(&self.shared.counters.onboarded, cursor);
        match destination {
            Destination::Slots(slots) => {
                (self.notify)(Moved::Onboarded { request, slots, verified: cursor });
            }
            Destination::Held(reply) => {
                let memory = &self.shared.memory;
                let held = states.into_iter().take(cursor).filter_map(|state| match state {
                    State::Done(Some(lease)) => Some(HostBlock { lease, memory: memory.clone() }),
                    _ => None,
                });
                reply(held.collect());
            }
        }
    }
}
