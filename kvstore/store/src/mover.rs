//! The store's thread: it copies, decides what goes where, and keeps the slower tiers busy.
//!
//! What somebody waits for (loads, results of reads) comes before what nobody does (offloads), one block at a time, so
//! that a load waits for little more than the copies of [`COPY_BYTES_MAX`] and the checksums of what has just arrived. A
//! round is bounded, and loads that never pause leave a new block its turn in every [`OFFLOAD_EVERY`]th. The slower tiers
//! have threads of their own; this one hands them commands and gets their results through its inbox, and never waits for
//! one of them.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{FrequencySketch, Lease};
use kvstore_disk::{Admission, Usage};

use crate::background::Background;
use crate::bandwidth::Bandwidth;
use crate::device::DeviceCopies;
use crate::disk::{DiskLink, DiskResult};
use crate::far::{FarLinks, FarResult};
use crate::job::{Description, Job, Moved, NewBlock};
use crate::load::Load;
use crate::offload::WriteState;
use crate::shared::Shared;

/// The longest sleep when nothing has a deadline.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How soon those who wait for room are tried again when nothing tells that there is some.
const ROOM_RECHECK: Duration = Duration::from_millis(1);

/// Messages taken in before the rest of a round has its turn.
const MESSAGES_MAX: usize = 256;

/// A new block has its turn after so many rounds with copies for loads: it waits long for them, but not for ever.
const OFFLOAD_EVERY: u32 = 16;

/// What reaches the thread at once; new blocks have a queue of their own.
pub(crate) enum Message {
    Job(Job),
    Disk(DiskResult),
    Far(FarResult),
    Stop,
}

/// Somebody who waits for a block that is being read: the load's number, and which block of it.
pub(crate) type Waiter = (u64, usize);

/// A read that is under way.
pub(crate) struct Reading {
    /// Its number: one that was given up may still be answered, when there is another of the same block.
    pub(crate) number: u64,
    pub(crate) waiters: Vec<Waiter>,
}

pub(crate) struct Mover {
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Receiver<Message>,
    pub(crate) offloads: Receiver<NewBlock>,
    pub(crate) disk: Option<DiskLink>,
    pub(crate) far: FarLinks,
    pub(crate) notify: Box<dyn FnMut(Moved) + Send>,
    pub(crate) loads: HashMap<u64, Load>,
    pub(crate) next_load: u64,
    /// Blocks on their way from the disk into host memory.
    pub(crate) reading: HashMap<BlockIdentity, Reading>,
    pub(crate) next_read: u64,
    /// What the block in each slot of host memory is, for the tiers below.
    pub(crate) descriptions: Vec<Option<Description>>,
    /// New blocks that found all of host memory in use by writes to the disk, and wait for one to end.
    pub(crate) held: VecDeque<NewBlock>,
    /// Blocks on their way to the disk, which stay in host memory until they are there.
    pub(crate) in_writing: HashMap<BlockIdentity, WriteState>,
    /// Blocks that wait for room in the disk's queue. The first of them are held in host memory until they are written:
    /// what the disk has already goes before.
    pub(crate) unwritten: VecDeque<(BlockIdentity, Option<Lease>)>,
    /// How many of those are held.
    pub(crate) unwritten_held: usize,
    /// Blocks written back since children were hung on their parents last.
    pub(crate) orphans: usize,
    /// Reads whose blocks were forgotten meanwhile.
    pub(crate) forgotten: HashSet<u64>,
    /// Slots of the disk whose tombstones have not been handed to it.
    pub(crate) tombstones: BTreeSet<u32>,
    /// Something was let go of since those who wait for room were tried last.
    pub(crate) has_room: bool,
    /// The same for held blocks.
    pub(crate) has_held_room: bool,
    /// How often blocks are offered: what is seen once need not be written to the disk.
    pub(crate) seen: FrequencySketch,
    pub(crate) admission: Admission,
    /// What the disk has been written so far.
    pub(crate) usage: Usage,
    /// The block at the head of `unwritten` was admitted, and waits for bandwidth.
    pub(crate) admitted: Option<BlockIdentity>,
    pub(crate) background: Background,
    pub(crate) bandwidth: Bandwidth,
    /// Copies to and from a pool in a device's memory.
    pub(crate) device: Option<DeviceCopies>,
}

impl Mover {
    pub(crate) fn run(mut self) {
        let mut busy_rounds = 0_u32;
        loop {
            let mut is_idle = true;
            for _ in 0..MESSAGES_MAX {
                let Ok(message) = self.inbox.try_recv() else { break };
                is_idle = false;
                if !self.take(message) {
                    return;
                }
            }
            if self.advance_copies() {
                is_idle = false;
            }
            if self.advance_loads() {
                is_idle = false;
                busy_rounds = busy_rounds.wrapping_add(1);
            } else {
                busy_rounds = 0;
            }
            if busy_rounds.is_multiple_of(OFFLOAD_EVERY)
                && let Some(block) = self.next_offload()
            {
                is_idle = false;
                self.offload(block);
            }
            self.shared.loads.store(self.loads.len(), Ordering::Relaxed);
            let now = Instant::now();
            self.expire_loads(now);
            self.expire_searches(now);
            self.bury();
            if self.resume_writes(now) {
                is_idle = false;
            }
            if is_idle {
                self.work_ahead(now);
            }
            if let Some(device) = self.device.as_ref().filter(|device| device.is_busy()) {
                device.wait();
            } else if is_idle && !self.sleep(now) {
                return;
            }
        }
    }

    fn next_offload(&mut self) -> Option<NewBlock> {
        if !self.held.is_empty() {
            // The others would only queue up behind it.
            return std::mem::take(&mut self.has_held_room).then(|| self.held.pop_front()).flatten();
        }
        let block = self.offloads.try_recv().ok()?;
        self.seen.increment(&block.identity);
        Some(block)
    }

    /// Sleeps until there is something to do; false when everything is over.
    fn sleep(&mut self, now: Instant) -> bool {
        let deadline = self
            .loads
            .values()
            .map(|load| load.deadline)
            .chain(self.far.next_deadline())
            .chain(self.background.next_deadline(!self.loads.is_empty()))
            .chain(self.bandwidth.next_deadline())
            .min();
        let mut timeout =
            deadline.map_or(SLEEP_MAX, |deadline| deadline.saturating_duration_since(now)).min(SLEEP_MAX);
        let waits_for_room = !self.held.is_empty() || self.loads.values().any(Load::waits_for_room);
        if waits_for_room || !self.tombstones.is_empty() {
            // Those outside who let go of host memory tell nobody.
            timeout = timeout.min(ROOM_RECHECK);
            self.room_came_free();
        }
        if !self.held.is_empty() {
            // Only a result can make room.
            return match self.inbox.recv_timeout(timeout) {
                Ok(message) => self.take(message),
                Err(error) => error.is_timeout(),
            };
        }
        select! {
            recv(self.inbox) -> message => message.is_ok_and(|message| self.take(message)),
            recv(self.offloads) -> block => match block {
                Ok(block) => {
                    self.seen.increment(&block.identity);
                    self.offload(block);
                    true
                }
                Err(_) => false,
            },
            default(timeout) => true,
        }
    }

    /// False when it was the last one.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Job(Job::Load { request, chain, first, destination, deadline }) => {
                self.start_load(request, chain, first, destination, deadline);
            }
            Message::Job(Job::Prepare(prepare)) => self.prepare(prepare),
            Message::Job(Job::Cancel(request)) => {
                self.cancel_load(request);
                self.far.cancel(request);
            }
            Message::Job(Job::Came(chain)) => self.conversation_came(&chain),
            Message::Job(Job::WentIdle(chain)) => self.conversation_went_idle(chain),
            Message::Job(Job::Probe(probe)) => self.probe(probe),
            Message::Job(Job::Forget(chain)) => self.forget(&chain),
            Message::Job(Job::ForgetOnHost(chain)) => self.forget_on_host(&chain),
            Message::Disk(DiskResult::Written { write, is_written, usage }) => {
                self.written(*write, is_written, usage);
            }
            Message::Disk(DiskResult::Read { read, bytes, is_gone }) => self.read(*read, bytes, is_gone),
            Message::Disk(DiskResult::Stuck { identity, is_write }) => self.stuck(identity, is_write),
            Message::Far(result) => self.far_result(result),
            Message::Stop => return false,
        }
        true
    }
}
