//! Blocks that somebody asked for: from host memory at once, from the disk as it delivers, in the order of the chain.
//!
//! A load takes hold of its blocks in order, as far as host memory has room, and lets go of each when it is copied. So
//! the first block that a load holds can always be copied or is always on its way, and loads that share too little
//! memory take turns instead of waiting for each other.

use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, Registered};
use kvstore_plan::Tier;

use crate::device::{DeviceCopies, Purpose, Refused};
use crate::disk::{DiskCommand, Read};
use crate::job::{Destination, Moved};
use crate::memory::HostBlock;
use crate::metrics::StoreCounters;
use crate::mover::{Mover, Reading};
use crate::shared::{DISK, HOST, NOBODY};

/// Bytes copied for all loads together before the inbox is looked at again.
pub(crate) const COPY_BYTES_MAX: usize = 8 << 20;

enum State {
    /// Not looked at yet.
    Wanted,
    /// In host memory.
    Here(Lease),
    /// On its way there.
    Coming,
    /// On its way to a pool in a device's memory.
    Moving,
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
    /// Blocks of the chain before the first one of this load, for what it would cost to compute them.
    first: u32,
    /// The caller's number; the store's own is its key in the map and never used twice.
    request: u64,
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
    /// Blocks on their way to a device's memory: the load is not over before they are.
    moving: usize,
    /// When the first of them set out.
    moving_since: Option<Instant>,
    /// Its time is up.
    is_late: bool,
}

impl Load {
    /// Whether it gives each block back as soon as it is copied, and not all of them at its end.
    fn lets_go(&self) -> bool {
        !matches!(self.destination, Destination::Held(_))
    }

    /// It holds blocks that it gives back by itself.
    fn will_let_go(&self) -> bool {
        self.moving > 0 || self.lets_go() && self.cursor < self.next
    }

    /// Nobody waits for it, and its bandwidth was taken when it began.
    fn is_background(&self) -> bool {
        matches!(self.destination, Destination::Host)
    }

    /// Nothing more is to be brought for it: its time is up, or a block in its middle will not come.
    fn is_ending(&self) -> bool {
        self.is_late || matches!(self.states.get(self.cursor), Some(State::Failed))
    }

    /// Gives back what it holds and will not use.
    fn give_up_rest(&mut self) {
        let rest = self.cursor.min(self.states.len());
        for state in &mut self.states[rest..] {
            if matches!(state, State::Here(_)) {
                *state = State::Failed;
            }
        }
    }

    pub(crate) fn waits_for_room(&self) -> bool {
        matches!(self.states.get(self.cursor), Some(State::Wanted))
    }
}

impl Mover {
    pub(crate) fn start_load(
        &mut self,
        request: u64,
        chain: Vec<BlockIdentity>,
        first: u32,
        destination: Destination,
        deadline: Instant,
    ) {
        let states = chain.iter().map(|_| State::Wanted).collect();
        let number = self.next_load;
        self.next_load += 1;
        let mut load = Load {
            first,
            request,
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
            moving: 0,
            moving_since: None,
            is_late: false,
        };
        self.take_hold(number, &mut load);
        self.loads.insert(number, load);
    }

    /// Ends a load of which nobody wants to hear any more.
    pub(crate) fn cancel_load(&mut self, request: u64) {
        self.loads.retain(|_, load| load.request != request);
        self.room_came_free();
    }

    /// Those who wait for room are tried again.
    pub(crate) fn room_came_free(&mut self) {
        self.has_room = true;
        self.has_held_room = true;
    }

    /// Takes hold of the next blocks, as far as there is room.
    fn take_hold(&mut self, number: u64, load: &mut Load) {
        if load.is_ending() {
            return load.give_up_rest();
        }
        while let Some(identity) = load.chain.get(load.next) {
            let state = match self.shared.catalog.lease(HOST, identity) {
                Some(lease) => State::Here(lease),
                None => match self.read_from_disk(*identity, (number, load.next), load.is_background()) {
                    Started::Coming => State::Coming,
                    // Whoever uses the room now will let go of it; if nobody will, nothing changes any more.
                    Started::Later if load.will_let_go() => return,
                    Started::Later if self.will_make_room() => return,
                    Started::Later | Started::Nowhere => State::Failed,
                },
            };
            let is_end = matches!(state, State::Failed);
            load.states[load.next] = state;
            // Nothing after a block that is missing can be used.
            load.next = if is_end { load.chain.len() } else { load.next + 1 };
        }
    }

    /// Whether something is under way that ends by itself and leaves room.
    pub(crate) fn will_make_room(&self) -> bool {
        let goes_on = |load: &Load| {
            load.moving > 0 || load.lets_go() && !matches!(load.states.get(load.cursor), Some(State::Wanted))
        };
        !self.reading.is_empty()
            || self.writing() > 0
            || self.bandwidth.holds_writes()
            || self.device.as_ref().is_some_and(DeviceCopies::is_busy)
            || self.loads.values().any(goes_on)
    }

    /// Starts a read, or joins one that is under way. `is_paid`: its bandwidth has been taken.
    fn read_from_disk(&mut self, identity: BlockIdentity, waiter: (u64, usize), is_paid: bool) -> Started {
        if let Some(reading) = self.reading.get_mut(&identity) {
            reading.waiters.push(waiter);
            return Started::Coming;
        }
        if self.disk.is_none() {
            return Started::Nowhere;
        }
        if self.in_writing.get(&identity).is_some_and(|state| !state.is_stuck) {
            // It is leaving host memory: it can be read once it is there.
            return Started::Later;
        }
        let Some(lease) = self.shared.catalog.lease(DISK, &identity) else { return Started::Nowhere };
        let tenant = self.shared.catalog.tenant_of(&lease).unwrap_or(NOBODY);
        let Some(reserved) = self.host_slot(tenant) else { return Started::Later };
        let filling = reserved.fill();
        let target = self.shared.memory.slot(filling.slot()).clone();
        let bytes = u64::from(lease.bytes());
        let number = self.next_read;
        self.next_read += 1;
        let read = Read { number, identity, lease, filling, target };
        let sent =
            self.disk.as_ref().is_some_and(|disk| disk.try_send(DiskCommand::Read(Box::new(read))).is_ok());
        if !sent {
            return Started::Later;
        }
        if !is_paid {
            self.bandwidth.charge(Tier::Disk, bytes);
        }
        self.reading.insert(identity, Reading { number, waiters: vec![waiter] });
        Started::Coming
    }

    /// The disk has answered a read.
    pub(crate) fn read(&mut self, read: Read, bytes: Option<u32>, is_gone: bool) {
        let Read { number, identity, lease, filling, .. } = read;
        // One that was given up has no waiters any more, though a newer one of the block may have.
        let is_known = self.reading.get(&identity).is_some_and(|reading| reading.number == number);
        let reading = if is_known { self.reading.remove(&identity) } else { None };
        let waiters = reading.map_or_else(Vec::new, |reading| reading.waiters);
        self.room_came_free();
        let parent = waiters.iter().find_map(|(number, index)| {
            let load = self.loads.get(number)?;
            load.chain.get(index.checked_sub(1)?).copied()
        });
        let was_forgotten = self.forgotten.remove(&number);
        let checksum = bytes.map(|bytes| self.shared.memory.checksum(filling.slot(), bytes as usize));
        // The disk gave what it was given; this is about what had been stored.
        let is_damaged = checksum.is_some_and(|checksum| checksum != lease.checksum());
        if is_damaged {
            StoreCounters::add(&self.shared.counters.checksum_failures, 1);
        }
        let is_gone = is_gone || is_damaged;
        if let (Some(bytes), Some(checksum), false, false) = (bytes, checksum, was_forgotten, is_damaged) {
            self.descriptions[filling.slot() as usize] = None;
            let place = waiters.first().and_then(|(number, index)| {
                let load = self.loads.get(number)?;
                Some(load.first + *index as u32)
            });
            let cost = self.shared.recompute_cost(place.unwrap_or(0));
            let complete = filling.complete(checksum, bytes);
            if let Registered::New = complete.register(identity, parent.or(lease.parent()), cost) {
                StoreCounters::add(&self.shared.counters.from_disk, 1);
                self.tell_stored(identity);
            }
            drop(lease);
        } else {
            StoreCounters::add(&self.shared.counters.disk_misses, 1);
            drop((lease, filling));
            if is_gone {
                self.drop_from_disk(identity);
            }
        }
        for (number, index) in waiters {
            let lease = self.shared.catalog.lease(HOST, &identity);
            let Some(load) = self.loads.get_mut(&number) else { continue };
            load.disk_bytes += lease.as_ref().map_or(0, |lease| u64::from(lease.bytes()));
            load.states[index] = lease.map_or(State::Failed, State::Here);
        }
    }

    /// The device does not answer: whoever waits for the block goes on without it.
    pub(crate) fn give_up_read(&mut self, identity: &BlockIdentity) {
        let given_up = self.reading.remove(identity).map_or_else(Vec::new, |reading| reading.waiters);
        for (number, index) in given_up {
            if let Some(load) = self.loads.get_mut(&number) {
                load.states[index] = State::Failed;
            }
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
        let mut due: Vec<u64> =
            self.loads.iter().filter(|(_, load)| is_due(load)).map(|(&number, _)| number).collect();
        // First come, first served.
        due.sort_unstable();
        let mut worked = false;
        for number in due {
            let Some(mut load) = self.loads.remove(&number) else { continue };
            let before = load.cursor;
            let is_over = self.advance(number, &mut load, &mut budget);
            worked |= is_over || load.cursor > before;
            if is_over {
                self.finish(load);
            } else {
                self.take_hold(number, &mut load);
                self.loads.insert(number, load);
            }
        }
        if worked {
            // What was let go of is room for others.
            self.room_came_free();
        }
        worked
    }

    /// Whether the load is over.
    fn advance(&mut self, number: u64, load: &mut Load, budget: &mut usize) -> bool {
        loop {
            if load.is_late {
                return load.moving == 0;
            }
            let Some(state) = load.states.get_mut(load.cursor) else { return load.moving == 0 };
            match state {
                State::Coming | State::Wanted => return false,
                State::Failed => return load.moving == 0,
                State::Done(_) | State::Moving => load.cursor += 1,
                State::Here(_) if *budget == 0 => return false,
                State::Here(_) => {
                    let State::Here(lease) = std::mem::replace(state, State::Done(None)) else { continue };
                    let bytes = lease.bytes() as usize;
                    *budget = budget.saturating_sub(bytes);
                    match &load.destination {
                        Destination::Held(_) => *state = State::Done(Some(lease)),
                        Destination::Host => drop(lease),
                        Destination::Slots(targets)
                            if !self.shared.memory.fits(&lease, &targets[load.cursor]) =>
                        {
                            *state = State::Failed;
                        }
                        Destination::Slots(targets) if targets[load.cursor].slab().device().is_some() => {
                            let target = targets[load.cursor].clone();
                            if !self.move_out(number, load, lease, target) {
                                return false;
                            }
                        }
                        Destination::Slots(targets) => {
                            let started = Instant::now();
                            let is_good = self.shared.memory.copy_out(&lease, &targets[load.cursor]);
                            load.copying += started.elapsed();
                            load.host_bytes += bytes as u64;
                            drop(lease);
                            if !is_good {
                                load.states[load.cursor] =
                                    self.damaged(load.chain[load.cursor], number, load.cursor);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Starts the copy of the load's next block to a device's memory, after it was verified here; false when there is no
    /// room for it now.
    fn move_out(&mut self, number: u64, load: &mut Load, lease: Lease, target: SlotRef) -> bool {
        let (index, bytes) = (load.cursor, lease.bytes() as usize);
        if self.shared.memory.checksum(lease.slot(), bytes) != lease.checksum() {
            drop(lease);
            load.states[index] = self.damaged(load.chain[index], number, index);
            return true;
        }
        let source = self.shared.memory.slot(lease.slot()).clone();
        let purpose = Purpose::Out { load: number, index, lease };
        match self.start_copy(source, target, bytes, purpose) {
            Ok(()) => {
                load.states[index] = State::Moving;
                load.moving += 1;
                load.host_bytes += bytes as u64;
                load.moving_since.get_or_insert_with(Instant::now);
                true
            }
            Err(Refused { purpose: Purpose::Out { lease, .. }, is_full: true }) => {
                load.states[index] = State::Here(lease);
                false
            }
            Err(_) => {
                load.states[index] = State::Failed;
                true
            }
        }
    }

    /// A block has arrived in a device's memory, or has not.
    pub(crate) fn moved_out(&mut self, number: u64, index: usize, lease: Lease, is_good: bool) {
        drop(lease);
        // A load that was cancelled is gone; its slots were held by the copy until now.
        let Some(load) = self.loads.get_mut(&number) else { return };
        load.moving -= 1;
        load.states[index] = if is_good { State::Done(None) } else { State::Failed };
        if !is_good {
            load.cursor = load.cursor.min(index);
        }
        if load.moving == 0 {
            load.copying += load.moving_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    /// A block of host memory is not what had been stored. The disk may still have it.
    fn damaged(&mut self, identity: BlockIdentity, number: u64, index: usize) -> State {
        tracing::warn!(block = identity.short(), "host tier: a block is damaged and is thrown away");
        StoreCounters::add(&self.shared.counters.checksum_failures, 1);
        self.drop_from_host(identity);
        match self.read_from_disk(identity, (number, index), false) {
            Started::Coming => State::Coming,
            Started::Later | Started::Nowhere => State::Failed,
        }
    }

    pub(crate) fn expire_loads(&mut self, now: Instant) {
        let late: Vec<u64> =
            self.loads.iter().filter(|(_, load)| load.deadline <= now).map(|(&number, _)| number).collect();
        for number in late {
            if let Some(mut load) = self.loads.remove(&number) {
                if !load.is_late {
                    StoreCounters::add(&self.shared.counters.late, load.chain.len() - load.cursor);
                }
                load.is_late = true;
                load.give_up_rest();
                if load.moving > 0 {
                    // A device writes to its slots: whoever waits cannot have them back yet.
                    self.loads.insert(number, load);
                    continue;
                }
                self.finish(load);
                self.room_came_free();
            }
        }
    }

    fn finish(&mut self, load: Load) {
        let Load { request, states, destination, .. } = load;
        // A load that was late without waiting for the disk says nothing of it.
        let is_late = load.is_late
            && (load.disk_bytes > 0 || states.iter().any(|state| matches!(state, State::Coming)));
        let cursor = states.iter().take_while(|state| matches!(state, State::Done(_))).count();
        self.shared.observe_load(
            load.started.elapsed(),
            load.disk_bytes,
            load.copying,
            load.host_bytes,
            is_late,
        );
        if !matches!(destination, Destination::Host) {
            StoreCounters::add(&self.shared.counters.onboarded, cursor);
        }
        match destination {
            Destination::Host => {}
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
