//! The store's thread: it copies blocks, decides where each block goes, and keeps the slower tiers busy.
//!
//! Work that a request waits for (loads, results of reads) comes before work without a waiter (offloads), one
//! block at a time, so that a load waits for little more than the copies of `COPY_BYTES_MAX` and the
//! checksums of blocks that have just arrived, which are bounded as well ([`Tiers::hashing`]): a round is a
//! few of those bounds long. Under loads that never pause, a new block has its turn in every
//! [`OFFLOAD_EVERY`]th round. The slower tiers have threads of their own; this one hands them commands and
//! gets their results through its inbox, and never waits for one of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};

use crate::background::Background;
use crate::device::DeviceCopies;
use crate::disk::{DiskResult, Read};
use crate::far::{SecondaryTierEvent, SecondaryTiers};
use crate::job::{Job, RetentionRequest};
use crate::load::Loads;
use crate::offload::Offloads;
use crate::tiers::Tiers;

/// The longest sleep when nothing has a deadline.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Interval of the retries of work that waits for slots, when no event reports a free one.
const ROOM_RECHECK: Duration = Duration::from_millis(1);
/// Messages taken in before the rest of a round has its turn.
const MESSAGES_MAX: usize = 256;
/// A new block has its turn after so many rounds with copies for loads: it may wait long, but not for ever.
const OFFLOAD_EVERY: u32 = 16;

/// Messages of the thread's inbox. New blocks have a queue of their own.
pub(crate) enum Message {
    Job(Job),
    Disk(DiskResult),
    Far(SecondaryTierEvent),
    Stop,
}

/// The parts, each with a state of its own, and the loop that gives them their turns. Work that concerns one
/// part is a method of that part, which gets the other parts that it needs as arguments; work that concerns
/// all of them is a method here.
pub(crate) struct StoreThread {
    pub(crate) inbox: Receiver<Message>,
    pub(crate) offloads: Offloads,
    pub(crate) tiers: Tiers,
    pub(crate) loads: Loads,
    pub(crate) far: SecondaryTiers,
    pub(crate) background: Background,
    /// Copies to and from a pool in a device's memory.
    pub(crate) device: DeviceCopies,
    /// Rounds in a row that copied blocks for loads.
    pub(crate) busy_rounds: u32,
}

/// Outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    /// There may be more to do at once.
    Busy,
    /// Nothing is to be done before a message or a deadline.
    Idle,
    /// The store is closed.
    Stopped,
}

impl StoreThread {
    pub(crate) fn run(mut self) {
        self.serve();
        self.tiers.send_all_tombstones();
    }

    fn serve(&mut self) {
        loop {
            let round = self.round(Instant::now());
            if round == Round::Stopped {
                return;
            }
            if self.device.is_busy() {
                self.device.wait();
            } else if round == Round::Idle && !self.sleep() {
                return;
            }
        }
    }

    /// Takes in messages and goes on with all work as far as its budgets allow. Never waits.
    pub(crate) fn round(&mut self, now: Instant) -> Round {
        self.tiers.now = now;
        let mut is_idle = true;
        self.tiers.hashing.refill();
        for _ in 0..MESSAGES_MAX {
            if self.tiers.hashing.is_spent() {
                // The rest is hashed after the loaded blocks were copied to the requests that wait for them.
                break;
            }
            let Ok(message) = self.inbox.try_recv() else { break };
            is_idle = false;
            if !self.take(message) {
                return Round::Stopped;
            }
        }
        self.tiers.hashing.refill();
        if self.advance_copies() {
            is_idle = false;
        }
        self.tiers.hashing.refill();
        if self.far.advance(&mut self.tiers) {
            is_idle = false;
        }
        if self.loads.advance(&mut self.tiers, &mut self.device) {
            is_idle = false;
            self.busy_rounds = self.busy_rounds.wrapping_add(1);
        } else {
            self.busy_rounds = 0;
        }
        if self.busy_rounds.is_multiple_of(OFFLOAD_EVERY)
            && let Some(block) = self.next_offload()
        {
            is_idle = false;
            self.offload(block);
        }
        self.tiers.evict_ahead();
        if self.tiers.tell_evicted_elsewhere() {
            is_idle = false;
        }
        self.tiers.shared.loads.store(self.loads.len(), Ordering::Relaxed);
        self.loads.expire(now, &mut self.tiers);
        self.far.expire(now, &mut self.tiers);
        if self.far.advance_offers(now, &mut self.tiers) {
            is_idle = false;
        }
        self.tiers.expire_mapped();
        self.tiers.send_tombstones();
        if self.tiers.resume_writes(now) {
            is_idle = false;
        }
        self.tiers.shared.unwritten.store(self.tiers.unwritten(), Ordering::Relaxed);
        self.hold_ahead(now);
        if self.tiers.advance_retained() {
            is_idle = false;
        }
        self.far.check_guards();
        self.tiers.check_guards();
        if is_idle {
            self.work_ahead(now);
        }
        if is_idle { Round::Idle } else { Round::Busy }
    }

    /// Longest wait for a message after an idle round. Work that waits for slots is tried again after it.
    pub(crate) fn timeout(&mut self) -> Duration {
        let deadline = [
            self.loads.next_deadline(),
            self.far.next_deadline(),
            self.background.next_deadline(!self.loads.is_empty()),
            self.tiers.bandwidth.next_deadline(),
            self.tiers.next_retry(),
            self.tiers.mapped.next_deadline(),
            self.tiers.retained.next_deadline(),
        ];
        let deadline = deadline.into_iter().flatten().min();
        let timeout =
            deadline.map_or(SLEEP_MAX, |deadline| deadline.saturating_duration_since(self.tiers.now));
        if self.offloads.wait_for_room() || self.loads.wait_for_room() || self.tiers.has_tombstones() {
            // Callers that drop their blocks of host memory send no message.
            self.tiers.room.mark_released();
            return timeout.min(ROOM_RECHECK);
        }
        timeout.min(SLEEP_MAX)
    }

    /// Sleeps until there is work; false when the thread is to end.
    fn sleep(&mut self) -> bool {
        let timeout = self.timeout();
        // A new block that waits for room keeps further ones waiting: only a result can make room.
        let never = crossbeam_channel::never();
        let new_blocks = if self.offloads.wait_for_room() { &never } else { &self.offloads.incoming };
        let (message, block) = select! {
            recv(self.inbox) -> message => (Some(message), None),
            recv(new_blocks) -> block => (None, Some(block)),
            default(timeout) => return true,
        };
        self.tiers.now = Instant::now();
        match (message, block) {
            (Some(Ok(message)), _) => self.take(message),
            (_, Some(Ok(block))) => {
                self.tiers.count_offer(&block.identity);
                self.offload(block);
                true
            }
            // Every sender is gone.
            _ => false,
        }
    }

    /// Handles a message; false when it was the last one.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Job(job) => self.start(job),
            Message::Disk(DiskResult::Written { write, is_written, usage }) => {
                self.tiers.written(*write, is_written, usage);
            }
            Message::Disk(DiskResult::Read { read, bytes, is_gone }) => self.read(*read, bytes, is_gone),
            Message::Disk(DiskResult::Stuck { identity, is_write: true }) => {
                self.tiers.give_up_write(&identity);
            }
            Message::Disk(DiskResult::Stuck { identity, is_write: false }) => {
                self.loads.fail_waiters(self.tiers.give_up_read(&identity));
            }
            Message::Far(result) => self.far.answered(result, &mut self.tiers),
            Message::Stop => return false,
        }
        true
    }

    fn start(&mut self, job: Job) {
        match job {
            Job::Load(wanted) => {
                let returned = self.background.holds_for_load().then(|| wanted.chain.clone());
                self.loads.start(wanted, &mut self.tiers, &self.device);
                if let Some(chain) = returned {
                    self.release_for(&chain);
                }
            }
            Job::Prepare(prepare) => self.far.prepare(prepare, &mut self.tiers),
            Job::Cancel(request) => {
                self.loads.cancel(request, &mut self.tiers);
                self.far.cancel(request);
            }
            Job::PromptStarted(chain) => self.prompt_started(&chain),
            Job::ConversationIdle(chain) => self.conversation_idle(chain),
            Job::Retain { request, how_long } => self.retain(request, how_long),
            Job::Probe(probe) => self.probe(probe),
            Job::Forget(chain) => self.tiers.forget(&chain),
            Job::ForgetOnHost(chain) => self.drop_damaged(&chain),
            Job::ForgetGone(identity) => self.tiers.unmap(&identity),
        }
    }

    /// Queues a retention request for this node's tier, and hands it to the tiers of other nodes.
    fn retain(&mut self, request: Arc<RetentionRequest>, how_long: Duration) {
        let how_long = how_long.min(self.tiers.shared.config.retention.longest);
        self.far.retain(&request, how_long);
        self.tiers.retain(request, how_long);
    }

    /// Handles the disk's answer to a read.
    fn read(&mut self, read: Read, bytes: Option<u32>, is_gone: bool) {
        let identity = read.identity;
        let waiters = self.tiers.end_read(&read);
        let place = self.loads.place(&waiters);
        self.tiers.came_from_disk(read, bytes, is_gone, place);
        self.far.offer_orphans_of(&identity, &self.tiers);
        self.loads.block_arrived(&identity, waiters, &self.tiers.shared);
    }
}
