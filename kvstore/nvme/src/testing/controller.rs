//! The device as the driver sees it: registers, mappings, and a thread that does the work.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use super::machine::Machine;
use super::{Faults, SoftwareCounters, SoftwareDevice};
use crate::registers::{ALL_ONES, CAP, CC, CSTS};
use crate::{Bus, NvmeError};

/// Bytes of the register space: room for the doorbells of 16 pairs at a stride of 32 bytes.
const REGISTER_BYTES: usize = 8192;
/// Interval at which the thread polls if no doorbell wakes it.
const IDLE_PAUSE: Duration = Duration::from_millis(1);
/// First device address; it differs from the process's addresses.
const FIRST_ADDRESS: u64 = 0x4000_0000;

/// Memory that the device may access.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mapping {
    pub(super) address: u64,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) registers: Box<[AtomicU32]>,
    pub(super) mappings: Mutex<Vec<Mapping>>,
    pub(super) contents: Mutex<Vec<u8>>,
    pub(super) faults: Mutex<Faults>,
    pub(super) counters: Mutex<SoftwareCounters>,
    pub(super) is_removed: AtomicBool,
    pub(super) is_isolated: AtomicBool,
    /// A reset from outside that the thread has not carried out yet.
    pub(super) reset_wanted: AtomicBool,
    next_address: AtomicU64,
    is_over: AtomicBool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn register(&self, offset: usize) -> u32 {
        self.registers[offset / 4].load(Ordering::Acquire)
    }

    pub(super) fn set_register(&self, offset: usize, value: u32) {
        self.registers[offset / 4].store(value, Ordering::Release);
    }

    /// Runs `access` on the process address of device memory, if all of it is mapped. The lock keeps the
    /// mapping from being removed meanwhile.
    pub(super) fn with_memory<T>(
        &self,
        address: u64,
        bytes: usize,
        access: impl FnOnce(*mut u8) -> T,
    ) -> Option<T> {
        let mappings = lock(&self.mappings);
        let found = mappings.iter().find(|mapping| {
            address >= mapping.address && address + bytes as u64 <= mapping.address + mapping.bytes as u64
        });
        let Some(mapping) = found.filter(|_| !self.is_isolated.load(Ordering::Acquire)) else {
            lock(&self.counters).unmapped_accesses += 1;
            return None;
        };
        let start = mapping.start + (address - mapping.address) as usize;
        Some(access(std::ptr::with_exposed_provenance_mut(start)))
    }
}

/// A device whose contents outlive the engines that use it.
#[derive(Debug)]
pub struct SoftwareController {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl SoftwareController {
    /// Starts the device.
    #[must_use]
    pub fn start(device: SoftwareDevice, faults: Faults) -> Self {
        let capabilities = u64::from(device.queue_entries_max - 1)
            | 1 << 24
            | u64::from(device.doorbell_stride) << 32
            | 1 << 37;
        let shared = Shared {
            registers: (0..REGISTER_BYTES / 4).map(|_| AtomicU32::new(0)).collect(),
            mappings: Mutex::default(),
            contents: Mutex::new(vec![0; device.blocks as usize * device.block_bytes]),
            faults: Mutex::new(faults),
            counters: Mutex::default(),
            is_removed: AtomicBool::new(false),
            is_isolated: AtomicBool::new(false),
            reset_wanted: AtomicBool::new(false),
            next_address: AtomicU64::new(FIRST_ADDRESS),
            is_over: AtomicBool::new(false),
        };
        shared.set_register(CAP, capabilities as u32);
        shared.set_register(CAP + 4, (capabilities >> 32) as u32);
        let shared = Arc::new(shared);
        let mut machine = Machine::new(Arc::clone(&shared), device);
        let own = Arc::clone(&shared);
        let run = move || {
            while !own.is_over.load(Ordering::Acquire) {
                if !machine.step() {
                    std::thread::park_timeout(IDLE_PAUSE);
                }
            }
        };
        Self { shared, thread: Some(std::thread::spawn(run)) }
    }

    /// Returns the driver's end of the device. At most one at a time.
    #[must_use]
    pub fn bus(&self) -> SoftwareBus {
        self.shared.is_isolated.store(false, Ordering::Release);
        let thread = self.thread.as_ref().map(|thread| thread.thread().clone());
        SoftwareBus { shared: Arc::clone(&self.shared), thread }
    }

    /// Replaces the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        *lock(&self.shared.faults) = faults;
    }

    /// Counters of the device.
    #[must_use]
    pub fn counters(&self) -> SoftwareCounters {
        *lock(&self.shared.counters)
    }

    /// Number of mappings that exist.
    #[must_use]
    pub fn mapping_count(&self) -> usize {
        lock(&self.shared.mappings).len()
    }

    /// Pulls the device out: registers read as all ones, and it no longer accesses memory.
    pub fn remove(&self) {
        self.shared.is_removed.store(true, Ordering::Release);
    }
}

impl Drop for SoftwareController {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the software controller panicked");
        }
    }
}

/// The driver's end of a [`SoftwareController`].
#[derive(Debug)]
pub struct SoftwareBus {
    shared: Arc<Shared>,
    thread: Option<Thread>,
}

impl SoftwareBus {
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

impl Bus for SoftwareBus {
    fn device(&self) -> &str {
        "software"
    }

    fn register_bytes(&self) -> usize {
        REGISTER_BYTES
    }

    fn read(&self, offset: usize) -> u32 {
        assert!(offset.is_multiple_of(4), "register {offset:#x}");
        if self.shared.is_removed.load(Ordering::Acquire) { ALL_ONES } else { self.shared.register(offset) }
    }

    fn write(&self, offset: usize, value: u32) {
        assert!(offset.is_multiple_of(4) && offset != CSTS && offset > CAP + 4, "register {offset:#x}");
        self.shared.set_register(offset, value);
        self.wake();
    }

    unsafe fn map(&mut self, start: NonNull<u8>, bytes: usize) -> Result<u64, NvmeError> {
        let start = start.as_ptr().expose_provenance();
        assert!(
            start.is_multiple_of(4096) && bytes.is_multiple_of(4096) && bytes > 0,
            "{bytes} at {start:#x}"
        );
        // Leave a gap behind each mapping, so that an access beyond its end is detected.
        let address = self.shared.next_address.fetch_add(bytes as u64 + 4096, Ordering::Relaxed);
        lock(&self.shared.mappings).push(Mapping { address, start, bytes });
        Ok(address)
    }

    fn unmap(&mut self, address: u64, bytes: usize) -> Result<(), NvmeError> {
        let mut mappings = lock(&self.shared.mappings);
        let before = mappings.len();
        mappings.retain(|mapping| (mapping.address, mapping.bytes) != (address, bytes));
        assert_eq!(mappings.len() + 1, before, "unmapped what was mapped");
        Ok(())
    }

    fn reset(&mut self) -> Result<(), NvmeError> {
        if lock(&self.shared.faults).has_no_reset {
            let what = "no reset".to_owned();
            return Err(NvmeError::Unsupported { device: "software".to_owned(), what });
        }
        self.shared.set_register(CC, 0);
        self.shared.reset_wanted.store(true, Ordering::Release);
        while self.shared.reset_wanted.load(Ordering::Acquire) {
            self.wake();
            std::thread::yield_now();
        }
        Ok(())
    }

    fn isolate(&mut self) {
        // Taking the lock waits for an access in progress.
        let _mappings = lock(&self.shared.mappings);
        self.shared.is_isolated.store(true, Ordering::Release);
    }
}
