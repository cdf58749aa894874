//! The disk tier on the store's thread: the queue to the thread that drives its log, and the operations in
//! flight.
//!
//! Commands go through a bounded queue, and results come through the store's inbox. The slot of the disk and
//! the block in host memory that a command uses travel with it as guards and come back with the result, so
//! that nothing can be reused while the device works on it.

mod driver;
mod failed_writes;
mod gate;
mod in_flight_reads;
mod in_flight_writes;
mod open;
mod slots;
mod write_backlog;

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, TrySendError, bounded};
use dataplane_memory::{Slab, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Evicting, Filling, Lease, TenantId};
use kvstore_disk::{AdmissionConfig, DiskCounters, DiskLog, ReadCheck, Recovered, Usage};
use kvstore_io::Waker;

use crate::Description;
use crate::error::StoreError;
use crate::guarded_count::{CountGuard, GuardedCount};
use driver::Driver;
use failed_writes::FailedWrites;
pub(crate) use gate::WriteGate;
pub(crate) use in_flight_reads::{InFlightReads, Waiter};
pub(crate) use in_flight_writes::{DiskCopy, HostCopy, InFlightWrites};
pub use open::{DiskEngine, DiskTierConfig};
pub(crate) use slots::DiskSlots;
pub(crate) use write_backlog::WriteBacklog;

/// Parent that the disk records for a chain's first block.
pub(crate) const NO_PARENT: BlockIdentity = BlockIdentity([0; 16]);

/// Guard that keeps a block in host memory while it is written.
#[derive(Debug)]
pub(crate) enum Hold {
    /// The block stays in host memory after the write.
    Lease(Lease),
    /// The block leaves host memory after the write.
    Evicting(Evicting),
}

impl Hold {
    /// State of the block's copy in host memory after the write.
    pub(crate) fn host_copy(&self) -> HostCopy {
        match self {
            Self::Lease(_) => HostCopy::Stays,
            Self::Evicting(_) => HostCopy::Leaves { removal_published: false },
        }
    }

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
    pub(crate) _count: CountGuard,
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
    pub(crate) check: ReadCheck,
    /// Description of the block; the disk's thread fills it in from the metadata kept with the block.
    pub(crate) description: Option<Description>,
    pub(crate) _count: CountGuard,
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
    /// `is_gone`: the disk will not have the block later either.
    Read {
        read: Box<Read>,
        bytes: Option<u32>,
        is_gone: bool,
    },
    /// The device does not answer. Memory that it may still access stays held; `Written` or `Read` follows if
    /// the device ever releases it.
    Stuck {
        identity: BlockIdentity,
        is_write: bool,
    },
}

/// Opens the log on the thread that will drive it; also returns the blocks kept from an earlier process.
pub type OpenDisk =
    Box<dyn FnOnce() -> Result<(DiskLog, Vec<Recovered>), Box<dyn std::error::Error + Send + Sync>> + Send>;

/// Properties of the log that was opened, and the blocks recovered from it.
pub(crate) struct Opened {
    pub(crate) slots: u32,
    pub(crate) recovered: Vec<Recovered>,
    pub(crate) usage: Usage,
    pub(crate) counters: Arc<DiskCounters>,
    waker: Arc<dyn Waker>,
}

/// Connection to the disk's thread.
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
            // `DiskLink::start` waits for this message.
            let _gone = opened.send(Ok(found));
            Driver::new(log, inbox, depth.max(1), Box::new(report)).run();
        };
        let thread = std::thread::Builder::new().name("kvasir-disk-tier".to_owned()).spawn(work)?;
        let opened =
            is_open.recv().unwrap_or_else(|_| Err("its thread has ended: its panic is above".into()));
        let opened = opened.map_err(StoreError::Disk)?;
        let link = Self { commands: Some(commands), waker: Arc::clone(&opened.waker), thread: Some(thread) };
        Ok((link, opened))
    }

    /// A queue of commands without a thread: the test takes them.
    #[cfg(test)]
    pub(crate) fn without_thread(depth: usize) -> (Self, crossbeam_channel::Receiver<DiskCommand>) {
        struct NoWaker;
        impl Waker for NoWaker {
            fn wake(&self) {}
        }
        let (commands, inbox) = bounded(depth);
        (Self { commands: Some(commands), waker: Arc::new(NoWaker), thread: None }, inbox)
    }

    /// Number of commands that the queue can take now.
    pub(crate) fn room(&self) -> usize {
        let room = |commands: &Sender<DiskCommand>| Some(commands.capacity()? - commands.len());
        self.commands.as_ref().and_then(room).unwrap_or(0)
    }

    /// Whether the queue can take a command now.
    pub(crate) fn has_room(&self) -> bool {
        self.commands.as_ref().is_some_and(|commands| !commands.is_full())
    }

    /// Whether the disk's thread has ended: no command is taken any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(std::thread::JoinHandle::is_finished)
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
            // A panic of the thread has been printed already.
            let _panicked = thread.join();
        }
    }
}

/// The disk, as the store's thread has it.
pub(crate) struct LocalDisk {
    pub(crate) link: DiskLink,
    pub(crate) gate: WriteGate,
    pub(crate) unwritten: WriteBacklog,
    pub(crate) failed: FailedWrites,
    pub(crate) writes: InFlightWrites,
    pub(crate) reads: InFlightReads,
    pub(crate) slots: DiskSlots,
    /// Writes and reads that have guards: those of the queue, of the disk's thread, and of results that were not taken in.
    pub(crate) writes_out: GuardedCount,
    pub(crate) reads_out: GuardedCount,
}

impl LocalDisk {
    /// A disk that has been written `usage` so far, behind so many slots of host memory.
    pub(crate) fn new(link: DiskLink, admission: AdmissionConfig, usage: Usage, host_slots: u32) -> Self {
        Self {
            link,
            gate: WriteGate::new(admission, host_slots, usage),
            unwritten: WriteBacklog::new(host_slots as usize),
            failed: FailedWrites::new(host_slots as usize),
            writes: InFlightWrites::default(),
            reads: InFlightReads::default(),
            slots: DiskSlots::default(),
            writes_out: GuardedCount::default(),
            reads_out: GuardedCount::default(),
        }
    }

    /// Panics when more writes or reads are out than the tables know: the slots of the others would never
    /// come back.
    pub(crate) fn check_guards(&self) {
        self.writes_out.check("writes to the disk", self.writes.len());
        self.reads_out.check("reads from the disk", self.reads.len());
    }
}
