//! The engine over SPDK: its state, its limits, and the blocking calls.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use kvstore_io::{Geometry, IoError, IoErrorKind};

use super::SpdkConfig;
use super::flow::WAITING;
use super::library::{Controller, Library, Namespace, Pair};
use super::open::{connect, initialise};
use super::registration;
use crate::NvmeError;
use crate::commands::{Commands, Owner};
use crate::engine::Blocking;
use crate::request_queue::RequestQueue;
use crate::volatile_cache::VolatileCache;
use crate::wake::{Backoff, WakeFlag};

pub(super) const NAME: &str = "spdk";
/// Maximum number of commands in flight: half of SPDK's default queue, so that a command which SPDK splits
/// finds room.
const COMMANDS_MAX: u16 = 128;
pub(super) const PAGE_BYTES: usize = 4096;
/// Number of empty polls after which the clock is read.
const POLLS_PER_LOOK: u32 = 16;

/// Bounce buffers in SPDK's memory.
pub(super) struct BounceMemory(*mut u8);

impl BounceMemory {
    /// Returns the buffer with this index, which is below the configured count.
    pub(super) fn buffer(&self, index: u16, bytes: usize) -> *mut u8 {
        // SAFETY: the allocation has as many buffers of this size as indexes were given out.
        unsafe { self.0.add(usize::from(index) * bytes) }
    }
}

/// A namespace, driven by SPDK.
pub struct SpdkEngine {
    pub(super) library: Arc<Library>,
    pub(super) controller: Controller,
    pub(super) namespace: Namespace,
    pub(super) pair: Pair,
    pub(super) device: String,
    pub(super) commands: Commands,
    /// One for each command id; see `flow::completed`.
    pub(super) words: Box<[AtomicU32]>,
    pub(super) queue: RequestQueue,
    pub(super) bounces: Vec<u16>,
    pub(super) memory: BounceMemory,
    pub(super) bounce_bytes: usize,
    pub(super) block_bytes: usize,
    pub(super) command_bytes_max: usize,
    pub(super) command_timeout: Duration,
    pub(super) blocking: Blocking,
    pub(super) dead: Option<NvmeError>,
    pub(super) resets: u64,
    pub(super) abandoned_commands: u64,
    pub(super) cache: VolatileCache,
    pub(super) namespace_id: u32,
    pub(super) flags: u32,
    pub(super) alarm: Arc<WakeFlag>,
    idle_polls: u32,
}

// SAFETY: SPDK's objects are bound to no thread, only to one thread at a time, and `&mut self` is that.
unsafe impl Send for SpdkEngine {}

pub(super) fn into_io(error: NvmeError, operation: impl Into<String>) -> IoError {
    IoError { engine: NAME, ..error.into_io(operation) }
}

/// The error of every call after the engine has failed permanently with `error`.
pub(super) fn dead(error: &NvmeError, operation: impl Into<String>) -> IoError {
    IoError { kind: IoErrorKind::Device, ..into_io(error.clone(), operation) }
}

impl SpdkEngine {
    /// Loads SPDK, starts its environment and connects to the device. Blocks.
    pub fn open(config: &SpdkConfig) -> Result<Self, NvmeError> {
        config.check()?;
        let library = Arc::new(Library::load(&config.libraries)?);
        initialise(&library)?;
        let controller = connect(&library, &config.transport)?;
        let bounce_bytes = usize::from(config.bounce_buffers) * config.bounce_bytes;
        // SAFETY: the environment is initialised; the physical address is not asked for.
        let memory = unsafe { (library.dma_zmalloc)(bounce_bytes, PAGE_BYTES, std::ptr::null_mut()) };
        let geometry = Geometry {
            block_bytes: 0,
            transfer_bytes_max: config.transfer_bytes_max,
            depth_max: config.requests_max,
            files: Vec::new(),
        };
        let mut engine = Self {
            library,
            controller,
            namespace: std::ptr::null_mut(),
            pair: std::ptr::null_mut(),
            device: config.transport.clone(),
            commands: Commands::new(COMMANDS_MAX + 1),
            words: (0..COMMANDS_MAX).map(|_| AtomicU32::new(WAITING)).collect(),
            queue: RequestQueue::new(NAME, geometry),
            bounces: (0..config.bounce_buffers).rev().collect(),
            memory: BounceMemory(memory.cast()),
            bounce_bytes: config.bounce_bytes,
            block_bytes: 0,
            command_bytes_max: 0,
            command_timeout: config.command_timeout,
            blocking: Blocking::None,
            dead: None,
            resets: 0,
            abandoned_commands: 0,
            cache: VolatileCache::default(),
            namespace_id: config.namespace,
            flags: 0,
            alarm: Arc::default(),
            idle_polls: 0,
        };
        // From here on dropping the engine frees everything.
        if engine.memory.0.is_null() {
            let device = config.transport.clone();
            return Err(NvmeError::NoRoom {
                device,
                bytes: bounce_bytes,
                limit: "SPDK's memory (hugepages)",
            });
        }
        engine.identify()?;
        if !engine.reopen() {
            return Err(engine.failed("spdk_nvme_ctrlr_alloc_io_qpair", 0));
        }
        Ok(engine)
    }

    pub(super) fn failed(&self, operation: &'static str, errno: i32) -> NvmeError {
        NvmeError::Spdk { device: self.device.clone(), operation, errno }
    }

    /// Resets of the controller since it was opened.
    #[must_use]
    pub fn resets(&self) -> u64 {
        self.resets
    }

    /// Number of reads and writes that were in flight when a reset failed, so that the device may still access
    /// their memory. Their slots and the bounce buffers stay in use for as long as the process lives. Not zero
    /// only in a dead engine.
    #[must_use]
    pub fn abandoned_commands(&self) -> u64 {
        self.abandoned_commands
    }

    /// Like [`NvmeEngine::first_bytes`](crate::NvmeEngine::first_bytes).
    pub fn first_bytes(&mut self, bytes: usize) -> Result<Vec<u8>, IoError> {
        crate::start::first_bytes(self, bytes)
    }

    pub(super) fn turn(&mut self) -> bool {
        if self.reap() {
            self.idle_polls = 0;
            self.issue();
            return true;
        }
        self.idle_polls += 1;
        if self.idle_polls >= POLLS_PER_LOOK {
            self.idle_polls = 0;
            if self.dead.is_none() {
                // Lets SPDK notice a device that was pulled out.
                // SAFETY: the controller is attached, and no other thread uses it.
                let _ = unsafe { (self.library.admin_completions)(self.controller) };
            }
            self.watch(Instant::now());
        }
        false
    }

    pub(super) fn run_blocking(
        &mut self,
        operation: &str,
        call: impl Fn(&Library, Namespace, Pair, *mut c_void) -> i32,
    ) -> Result<(), IoError> {
        let mut pause = Backoff::new();
        loop {
            if let Some(error) = &self.dead {
                return Err(dead(error, operation));
            }
            let (library, namespace, pair) = (Arc::clone(&self.library), self.namespace, self.pair);
            let now = Instant::now();
            match self.submit_command(Owner::Blocking, now, |word| call(&library, namespace, pair, word)) {
                Ok(()) => break,
                Err(libc::ENOMEM) if self.commands.count() > 0 => {
                    if !self.turn() {
                        pause.back_off();
                    }
                }
                Err(errno) => return Err(into_io(self.failed("submit", errno), operation)),
            }
        }
        self.blocking = Blocking::Waiting;
        loop {
            if let Blocking::Done(result) = std::mem::replace(&mut self.blocking, Blocking::Waiting) {
                self.blocking = Blocking::None;
                return result.map_err(|error| into_io(error, operation));
            }
            if !self.turn() {
                pause.back_off();
            }
        }
    }
}

impl Drop for SpdkEngine {
    fn drop(&mut self) {
        let mut pause = Backoff::new();
        while self.dead.is_none() && (self.commands.count() > 0 || self.queue.first().is_some()) {
            if !self.turn() {
                pause.back_off();
            }
        }
        if !self.pair.is_null() {
            // SAFETY: alive, and not used after this.
            unsafe { (self.library.free_pair)(self.pair) };
        }
        while let Some((address, bytes, slab)) = self.queue.registrations.pop() {
            let start = std::ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: registered with these bounds; no command is in flight, and slots of abandoned ones keep their slab.
            if !unsafe { registration::unregister(&self.library, start, bytes) } {
                // The device can still reach the memory: it must never be reused.
                std::mem::forget(slab);
            }
        }
        if !self.memory.0.is_null() && self.abandoned_commands == 0 {
            // SAFETY: allocated by `dma_zmalloc`, and no command is in flight.
            unsafe { (self.library.dma_free)(self.memory.0.cast()) };
        }
        // SAFETY: attached, and not used after this.
        unsafe { (self.library.detach)(self.controller) };
    }
}
