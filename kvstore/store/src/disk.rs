//! The thread that drives the disk's log, and opens it: an engine belongs to the thread that uses it first.
//!
//! The store's thread hands it commands through a bounded queue and gets results through its own inbox. What a command
//! needs to stay as it is (the slot of the disk, the block in host memory) travels with it as a guard and comes back
//! with the result, so that nothing can be reused while the device works on it.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};
use dataplane_memory::{Slab, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Evicting, Filling, Lease, TenantId};
use kvstore_disk::{
    Block, DiskCounters, DiskLog, Done, MissReason, Moment, ReadOutcome, Recovered, Usage, WriteOutcome,
};
use kvstore_io::Waker;

use crate::error::StoreError;

/// The longest sleep: a wake-up that was lost would cost no more than that.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// Completed operations that are looked at in one go.
const BATCH: usize = 256;
/// How long a log may take to put its records on stable storage at the end.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// What the disk keeps as the parent of a chain's first block.
pub(crate) const NO_PARENT: BlockIdentity = BlockIdentity([0; 16]);

/// What keeps a block in host memory while it is written.
#[derive(Debug)]
pub(crate) enum Hold {
    /// It stays there afterwards.
    Lease(Lease),
    /// It leaves once it is written.
    Evicting(Evicting),
}

impl Hold {
    /// The block's checksum from when it came.
    pub(crate) fn checksum(&self) -> u64 {
        match self {
            Self::Lease(lease) => lease.checksum(),
            Self::Evicting(evicting) => evicting.checksum(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) identity: BlockIdentity,
    pub(crate) parent: Option<BlockIdentity>,
    pub(crate) tenant: TenantId,
    pub(crate) position: u32,
    pub(crate) meta: Vec<u8>,
    pub(crate) payload: SlotRef,
    pub(crate) bytes: u32,
    pub(crate) hold: Hold,
    /// The slot on the disk.
    pub(crate) filling: Filling,
}

#[derive(Debug)]
pub(crate) struct Read {
    /// The store's number of the read.
    pub(crate) number: u64,
    pub(crate) identity: BlockIdentity,
    /// The slot on the disk.
    pub(crate) lease: Lease,
    /// The slot in host memory.
    pub(crate) filling: Filling,
    pub(crate) target: SlotRef,
}

pub(crate) enum DiskCommand {
    Write(Box<Write>),
    Read(Box<Read>),
    /// The slot's block has been evicted.
    Forget(u32),
}

pub(crate) enum DiskResult {
    Written {
        write: Box<Write>,
        is_written: bool,
        usage: Usage,
    },
    /// `is_gone`: the disk will not have it later either.
    Read {
        read: Box<Read>,
        bytes: Option<u32>,
        is_gone: bool,
    },
    /// The device does not answer. What it may still touch stays held; `Written` or `Read` follows if it ever lets go.
    Stuck {
        identity: BlockIdentity,
        is_write: bool,
    },
}

/// Opens the log, on the thread that will drive it; gives what it has kept from an earlier process, too.
pub type OpenDisk =
    Box<dyn FnOnce() -> Result<(DiskLog, Vec<Recovered>), Box<dyn std::error::Error + Send + Sync>> + Send>;

/// What was found.
pub(crate) struct Opened {
    pub(crate) slots: u32,
    pub(crate) recovered: Vec<Recovered>,
    pub(crate) usage: Usage,
    pub(crate) counters: Arc<DiskCounters>,
    waker: Arc<dyn Waker>,
}

/// The way to the thread.
pub(crate) struct DiskLink {
    commands: Option<Sender<DiskCommand>>,
    waker: Arc<dyn Waker>,
    thread: Option<JoinHandle<()>>,
}

impl DiskLink {
    /// Starts the thread and waits until it has opened the log over `slab`. `report` is called on it and must not block.
    pub(crate) fn start(
        open: OpenDisk,
        slab: Arc<Slab>,
        depth: usize,
        report: impl FnMut(DiskResult) + Send + 'static,
    ) -> Result<(Self, Opened), StoreError> {
        let (commands, inbox) = bounded(depth.max(1) * 4);
        let (opened, is_open) = bounded(1);
        let work = move || {
            let (mut log, recovered) = match open() {
                Ok(found) => found,
                Err(error) => return drop(opened.send(Err(error))),
            };
            if let Err(error) = log.register(&slab) {
                tracing::info!("disk tier: memory is not registered, reads and writes take longer: {error}");
            }
            let found = Opened {
                slots: log.slot_count(),
                recovered,
                usage: log.usage(),
                counters: Arc::clone(log.counters()),
                waker: log.waker(),
            };
            // Whoever starts us waits for this.
            let _gone = opened.send(Ok(found));
            let driver = Driver {
                log,
                inbox,
                depth: depth.max(1),
                under_way: HashMap::new(),
                limbo: Vec::new(),
                next_token: 0,
                report: Box::new(report),
            };
            driver.run();
        };
        let thread = std::thread::Builder::new().name("kvasir-disk-tier".to_owned()).spawn(work)?;
        let opened =
            is_open.recv().unwrap_or_else(|_| Err("its thread has ended: its panic is above".into()));
        let opened = opened.map_err(StoreError::Disk)?;
        let link = Self { commands: Some(commands), waker: Arc::clone(&opened.waker), thread: Some(thread) };
        Ok((link, opened))
    }

    /// Commands that would be taken now.
    pub(crate) fn room(&self) -> usize {
        let room = |commands: &Sender<DiskCommand>| Some(commands.capacity()? - commands.len());
        self.commands.as_ref().and_then(room).unwrap_or(0)
    }

    /// Whether a command would be taken now.
    pub(crate) fn has_room(&self) -> bool {
        self.commands.as_ref().is_some_and(|commands| !commands.is_full())
    }

    /// Hands over a command; "full" gives it back.
    pub(crate) fn try_send(&self, command: DiskCommand) -> Result<(), DiskCommand> {
        let Some(commands) = &self.commands else { return Err(command) };
        match commands.try_send(command) {
            Ok(()) => {
                self.waker.wake();
                Ok(())
            }
            Err(TrySendError::Full(command) | TrySendError::Disconnected(command)) => Err(command),
        }
    }
}

impl Drop for DiskLink {
    fn drop(&mut self) {
        self.commands = None;
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _panicked = thread.join();
        }
    }
}

enum UnderWay {
    Write(Box<Write>),
    Read(Box<Read>),
}

struct Driver {
    log: DiskLog,
    inbox: Receiver<DiskCommand>,
    depth: usize,
    under_way: HashMap<u64, UnderWay>,
    /// What was given up and the device may still read or write: its guards stay until it cannot.
    limbo: Vec<(SlotRef, UnderWay)>,
    next_token: u64,
    report: Box<dyn FnMut(DiskResult) + Send>,
}

impl Driver {
    fn run(mut self) {
        let mut done = Vec::with_capacity(BATCH);
        let mut is_open = true;
        while is_open || !self.under_way.is_empty() {
            is_open = is_open && self.take_commands();
            self.log.poll(Moment::now(), &mut done);
            let is_full = self.under_way.len() >= self.depth;
            let is_idle = done.is_empty() && (is_full || self.inbox.is_empty());
            for done in done.drain(..) {
                self.finished(done);
            }
            self.release_limbo();
            if is_idle && (is_open || !self.under_way.is_empty()) {
                let until = Instant::now() + SLEEP_MAX;
                if let Err(error) = self.log.wait(Some(until)) {
                    tracing::warn!("disk tier: {error}");
                    std::thread::sleep(SLEEP_MAX);
                }
            }
        }
        let closed = self.log.close(CLOSE_MAX);
        if !closed.is_clean {
            tracing::warn!(
                "disk tier: closed before every record was on stable storage; the blocks of the rest are lost"
            );
        }
    }

    /// Starts what has been asked for, as far as there is room; false when nobody can ask any more.
    fn take_commands(&mut self) -> bool {
        while self.under_way.len() < self.depth {
            match self.inbox.try_recv() {
                Ok(command) => self.start(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        true
    }

    fn start(&mut self, command: DiskCommand) {
        let token = self.next_token;
        self.next_token += 1;
        match command {
            DiskCommand::Forget(slot) => {
                self.log.forget(slot);
            }
            DiskCommand::Read(read) => {
                let target = read.target.clone();
                match self.log.read(read.lease.slot(), read.identity, target, token) {
                    Ok(()) => drop(self.under_way.insert(token, UnderWay::Read(read))),
                    Err(_) => (self.report)(DiskResult::Read { read, bytes: None, is_gone: false }),
                }
            }
            DiskCommand::Write(write) => {
                let block = Block {
                    identity: write.identity,
                    parent: write.parent.unwrap_or(NO_PARENT),
                    tenant: write.tenant.0,
                    meta: &write.meta,
                };
                let started =
                    self.log.write(write.filling.slot(), block, write.payload.clone(), write.bytes, token);
                match started {
                    Ok(()) => drop(self.under_way.insert(token, UnderWay::Write(write))),
                    Err(_) => self.wrote(write, false),
                }
            }
        }
    }

    fn wrote(&mut self, write: Box<Write>, is_written: bool) {
        let usage = self.log.usage();
        (self.report)(DiskResult::Written { write, is_written, usage });
    }

    fn finished(&mut self, done: Done) {
        match done {
            Done::Written { token, memory, outcome, .. } => {
                let Some(UnderWay::Write(write)) = self.under_way.remove(&token) else { return };
                if memory.is_none() {
                    (self.report)(DiskResult::Stuck { identity: write.identity, is_write: true });
                    return self.limbo.push((write.payload.clone(), UnderWay::Write(write)));
                }
                drop(memory);
                self.wrote(write, outcome == WriteOutcome::Stored);
            }
            Done::Read { token, memory, outcome, .. } => {
                let Some(UnderWay::Read(read)) = self.under_way.remove(&token) else { return };
                if memory.is_none() {
                    (self.report)(DiskResult::Stuck { identity: read.identity, is_write: false });
                    return self.limbo.push((read.target.clone(), UnderWay::Read(read)));
                }
                drop(memory);
                let (bytes, is_gone) = match outcome {
                    ReadOutcome::Verified { bytes } => (Some(bytes), false),
                    ReadOutcome::Miss(MissReason::Device) => (None, false),
                    ReadOutcome::Miss(_) => (None, true),
                };
                (self.report)(DiskResult::Read { read, bytes, is_gone });
            }
            Done::Flushed { .. } => {}
        }
    }

    /// Reports what the device did not answer, once it cannot touch the memory any more.
    fn release_limbo(&mut self) {
        // Ours, the operation's own, and the tier's.
        const REFERENCES_WITHOUT_DEVICE: u32 = 3;
        let is_free =
            |(slot, _): &mut (SlotRef, UnderWay)| slot.reference_count() <= REFERENCES_WITHOUT_DEVICE;
        let released: Vec<_> = self.limbo.extract_if(.., is_free).collect();
        for (_, operation) in released {
            match operation {
                UnderWay::Write(write) => self.wrote(write, false),
                UnderWay::Read(read) => (self.report)(DiskResult::Read { read, bytes: None, is_gone: false }),
            }
        }
    }
}
