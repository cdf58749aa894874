//! The I/O engine over one controller: requests in, commands out, completions back.
//!
//! A request becomes as many commands as the controller's limits ask for, in order; bytes without a free
//! command id or bounce buffer wait in `pending`. The device itself reads and writes slots of registered slabs.
//! Requests with their own memory ([`Buffer::Pages`]: headers, tables) go through bounce buffers, which are
//! mapped once, since mapping memory costs a system call and an IOMMU flush per request.
//!
//! Hot path, run by the one thread that drives the engine: no allocation, no lock, no system call; a doorbell per
//! batch. The clock is read once per batch, through the vDSO. Failures are in `recovery`.

mod io_engine;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstore_io::{Geometry, IoError};

use crate::bus::Bus;
use crate::command::Command;
use crate::commands::{Commands, InFlight, Owner};
use crate::controller::Controller;
use crate::dma::PAGE_BYTES;
use crate::identify::{ControllerIdentity, NamespaceIdentity};
use crate::layout::PAGE_LIST_ENTRIES;
use crate::recovery::Health;
use crate::request_queue::RequestQueue;
use crate::vfio::VfioBus;
use crate::volatile_cache::VolatileCache;
use crate::wake::{Backoff, WakeFlag};
use crate::{ENGINE_NAME, NvmeConfig, NvmeError, PciAddress};

/// Number of empty polls after which the clock is read.
const POLLS_PER_LOOK: u32 = 16;

/// Counters of an engine since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NvmeCounters {
    /// Commands given to I/O queues.
    pub commands: u64,
    /// Writes of submission doorbells.
    pub doorbells: u64,
    /// Commands that exceeded their timeout and that the controller was asked to abort.
    pub aborts: u64,
    /// Resets of the controller after the first.
    pub resets: u64,
}

/// State of the command that `sync` waits for.
#[derive(Debug)]
pub(crate) enum Blocking {
    None,
    Waiting,
    Done(Result<(), NvmeError>),
}

/// An NVMe namespace, driven from user space.
pub struct NvmeEngine<B: Bus = VfioBus> {
    pub(crate) controller: Controller<B>,
    pub(crate) commands: Vec<Commands>,
    pub(crate) queue: RequestQueue,
    pub(crate) bounces: Vec<u16>,
    pub(crate) blocking: Blocking,
    pub(crate) health: Health,
    pub(crate) next_check: Instant,
    pub(crate) command_timeout: Duration,
    pub(crate) admin_timeout: Duration,
    pub(crate) cache: VolatileCache,
    pub(crate) counters: NvmeCounters,
    pub(crate) command_bytes_max: usize,
    pub(crate) bounce_bytes: usize,
    pub(crate) use_sgl: bool,
    pub(crate) next_pair: usize,
    identity: ControllerIdentity,
    pub(crate) namespace: NamespaceIdentity,
    alarm: Arc<WakeFlag>,
    idle_polls: u32,
}

impl NvmeEngine<VfioBus> {
    /// Opens the controller at a PCI address. It must be bound to vfio-pci; the error says how to do that. Blocks
    /// until the controller is ready.
    pub fn open(address: PciAddress, config: &NvmeConfig) -> Result<Self, NvmeError> {
        config.check()?;
        Self::attach(VfioBus::open(address)?, config)
    }
}

impl<B: Bus> NvmeEngine<B> {
    /// Takes over the controller behind `bus`. Blocks until it is ready.
    pub fn attach(bus: B, config: &NvmeConfig) -> Result<Self, NvmeError> {
        config.check()?;
        let mut controller = Controller::new(bus, config)?;
        controller.run_to_ready()?;
        let Some(found) = controller.found().cloned() else {
            let what = "it is ready, and was not identified".to_owned();
            return Err(NvmeError::Protocol { device: controller.bus.device().to_owned(), what });
        };
        let page_list_bytes = PAGE_LIST_ENTRIES * PAGE_BYTES;
        let command_bytes_max =
            found.controller.transfer_bytes_max.unwrap_or(usize::MAX).min(page_list_bytes);
        let entries = controller.layout.entries;
        let geometry = Geometry {
            block_bytes: found.namespace.block_bytes,
            transfer_bytes_max: config.transfer_bytes_max,
            depth_max: config.requests_max,
            files: vec![found.namespace.bytes()],
        };
        Ok(Self {
            commands: controller.pairs.iter().map(|_| Commands::new(entries)).collect(),
            controller,
            queue: RequestQueue::new(ENGINE_NAME, geometry),
            bounces: (0..config.bounce_buffers).rev().collect(),
            blocking: Blocking::None,
            health: Health::Running,
            next_check: Instant::now(),
            command_timeout: config.command_timeout,
            admin_timeout: config.admin_timeout,
            cache: VolatileCache::default(),
            counters: NvmeCounters::default(),
            command_bytes_max,
            bounce_bytes: config.bounce_bytes,
            use_sgl: config.use_sgl && found.controller.takes_sgl,
            next_pair: 0,
            identity: found.controller,
            namespace: found.namespace,
            alarm: Arc::default(),
            idle_polls: 0,
        })
    }

    /// Identity of the controller.
    #[must_use]
    pub fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    /// Reads the first bytes of the namespace, so that its contents can be checked before something else is
    /// written there: `bytes`, or all whole pages of 4 KiB if that is less. Blocks. Must be called before the
    /// engine is in use: while requests are queued or in flight it fails with
    /// [`IoErrorKind::Invalid`](kvstore_io::IoErrorKind::Invalid).
    pub fn first_bytes(&mut self, bytes: usize) -> Result<Vec<u8>, IoError> {
        crate::start::first_bytes(self, bytes)
    }

    /// Resets the controller. Commands in flight complete with a device error, queued requests are issued
    /// afterwards. Does not wait. Has no effect during a reset or after the engine has failed for good.
    pub fn reset(&mut self) {
        if self.health.may_issue() {
            let device = self.controller.bus.device().to_owned();
            self.begin_reset(NvmeError::ResetRequested { device }, Instant::now());
        }
    }

    /// Counters since the engine was opened.
    #[must_use]
    pub fn counters(&self) -> NvmeCounters {
        self.counters
    }

    /// Number of queue pairs that the controller granted.
    #[must_use]
    pub fn queue_pairs(&self) -> usize {
        self.controller.pairs.len()
    }

    /// Whether queues and bounce buffers lie in 2 MiB pages.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.controller.memory.has_huge_pages()
    }

    /// Number of commands that the device has not completed.
    pub(crate) fn commands_in_flight(&self) -> usize {
        self.commands.iter().map(Commands::count).sum()
    }

    /// Takes completions and issues requests into the room they left; checks timeouts when none were found.
    /// Returns whether there were completions.
    fn turn(&mut self, budget: usize) -> bool {
        if self.reap(budget) {
            self.idle_polls = 0;
            self.issue();
            return true;
        }
        self.idle_polls += 1;
        if self.idle_polls >= POLLS_PER_LOOK || !self.health.is_running() {
            self.idle_polls = 0;
            self.watch(Instant::now());
        }
        false
    }

    /// Whether `poll` would find a completion. Entries in queues that no longer exist are ignored.
    fn has_completions(&self) -> bool {
        let has_completion =
            |pair: &crate::queue_pair::QueuePair| pair.has_completion(&self.controller.memory);
        !self.queue.finished.is_empty()
            || (self.health.may_issue() && self.controller.pairs.iter().any(has_completion))
    }

    /// Issues one command while others are in flight, and waits for it.
    fn run_blocking(&mut self, operation: &str, command: Command) -> Result<(), IoError> {
        let mut pause = Backoff::new();
        while !(self.health.is_running() && self.commands.iter().any(Commands::has_room)) {
            if let Health::Failed(error) = &self.health {
                return Err(error.clone().into_io(operation));
            }
            if !self.turn(usize::MAX) {
                pause.back_off();
            }
        }
        self.blocking = Blocking::Waiting;
        self.push(&command, Owner::Blocking, Instant::now());
        self.ring();
        loop {
            if let Blocking::Done(result) = std::mem::replace(&mut self.blocking, Blocking::Waiting) {
                self.blocking = Blocking::None;
                return result.map_err(|error| error.into_io(operation));
            }
            if !self.turn(usize::MAX) {
                pause.back_off();
            }
        }
    }
}

impl<B: Bus> Drop for NvmeEngine<B> {
    fn drop(&mut self) {
        let mut pause = Backoff::new();
        // Bounded: a command that does not complete is aborted, then the controller is reset or cut off.
        while self.commands_in_flight() > 0 || self.queue.first().is_some() {
            if !self.turn(usize::MAX) {
                pause.back_off();
            }
        }
        while let Some((address, bytes, slab)) = self.queue.registrations.pop() {
            if self.controller.bus.unmap(address, bytes).is_err() {
                // The device can still reach the memory: it must never be reused.
                std::mem::forget(slab);
            }
        }
    }
}

impl InFlight {
    pub(crate) fn new(owner: Owner, now: Instant, timeout: Duration) -> Self {
        Self { owner, deadline: now + timeout }
    }
}
