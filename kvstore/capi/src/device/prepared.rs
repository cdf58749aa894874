//! Device resources created before the store starts: staging memory, kernels, and the copier for the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use dataplane_cuda::{CopyQueueConfig, Cuda, Device, DeviceSlab, Pinned, Priority, SlotCopier, Stream};
use dataplane_gpu::{KernelQueue, KernelQueueConfig, KernelsError, LayoutKernels};
use dataplane_memory::SlabLayout;
use dataplane_rails::Place;
use kvstore_store::{Medium, StoreBuilder, StoreEvent};

use super::places::{GROUPS_MAX, ITEMS_MAX};
use super::{LOAD, SAVE, failed};
use crate::config::{DeviceSettings, PAGE_BYTES, Size};
use crate::status::Failure;

/// Loads the layout kernels for a device.
pub(crate) type MakeKernels<'a> = &'a dyn Fn(&Device) -> Result<LayoutKernels, KernelsError>;

/// Resources from which [`CopyThreads`](super::CopyThreads) are started.
pub(crate) struct Prepared {
    pub(crate) device: Device,
    pub(crate) kernels: Arc<LayoutKernels>,
    /// Device memory for hand-offs.
    pub(crate) handoff_capacity: Size,
    /// Whether hand-offs bypass host memory.
    pub(crate) is_direct: bool,
    pub(crate) copy_threads: [CopyThreadResources; 2],
    pub(super) listening: StoredReportFlag,
}

pub(crate) struct CopyThreadResources {
    pub(crate) queue: KernelQueue,
    pub(crate) staging: Arc<DeviceSlab>,
    /// Reports of the store's thread for this thread.
    pub(crate) moved: Receiver<StoreEvent>,
}

/// Sends the store's reports to the threads.
pub(crate) struct Reports {
    copy_threads: [Sender<StoreEvent>; 2],
    listening: StoredReportFlag,
}

/// Whether the save thread wants `StoreEvent::Stored` reports, which the store sends for every block.
#[derive(Debug, Clone, Default)]
pub(super) struct StoredReportFlag(Arc<AtomicBool>);

impl StoredReportFlag {
    /// Requests `StoreEvent::Stored` reports until the returned guard is dropped. Relaxed is enough: the store
    /// learns of the thread's blocks through a channel afterwards.
    pub(super) fn begin(&self) -> impl Drop {
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
            }
        }
        self.0.store(true, Ordering::Relaxed);
        End(&self.0)
    }
}

/// Returns the device's PCI address, if the driver reports it.
pub(crate) fn place_of(device: &Device) -> Option<Place> {
    device.description().pci_address.map(|address| address.to_string())?.parse().ok()
}

impl Reports {
    /// Sends a report to the thread that waits for it, if any.
    pub(crate) fn send(&self, moved: StoreEvent) {
        let copy_thread = match moved {
            StoreEvent::Offloaded { .. } => SAVE,
            StoreEvent::Onboarded { .. } => LOAD,
            StoreEvent::Stored { medium: Medium::Host, .. } if self.listening.0.load(Ordering::Relaxed) => {
                SAVE
            }
            StoreEvent::Stored { .. } | StoreEvent::Removed { .. } | StoreEvent::Prepared { .. } => return,
        };
        // A thread that has ended expects no reports.
        let _ended = self.copy_threads[copy_thread].send(moved);
    }
}

fn ordinal_key(settings: &DeviceSettings) -> String {
    format!("open: device.ordinal = {}", settings.ordinal)
}

/// Opens the device that the settings name.
pub(crate) fn open_device(settings: &DeviceSettings) -> Result<Device, Failure> {
    let cuda = Cuda::open().map_err(|error| failed("open: [device]", &error))?;
    cuda.device(settings.ordinal as u32).map_err(|error| failed(&ordinal_key(settings), &error))
}

impl Prepared {
    /// Allocates the staging memory, and gives the store's copier access to it and to the host tier.
    pub(crate) fn new(
        settings: &DeviceSettings,
        device: Device,
        kernels: MakeKernels<'_>,
        builder: StoreBuilder,
    ) -> Result<(Self, Reports, StoreBuilder), Failure> {
        let name = ordinal_key(settings);
        let kernels = Arc::new(kernels(&device).map_err(|error| failed(&name, &error))?);
        let bytes = (settings.staging.0 / 2 / PAGE_BYTES * PAGE_BYTES) as usize;
        let one = |slot_bytes| SlabLayout { slot_bytes, slot_count: 1 };
        let staging = DeviceSlab::allocate(&device, one(2 * bytes))
            .map_err(|error| failed(&format!("open: device.staging = {}", settings.staging), &error))?;
        let staging = Arc::new(staging);
        let pinned = Pinned::register(&device, Arc::clone(builder.slab()))
            .map_err(|error| failed("open: host_tier.capacity", &error))?;
        let mut copier = SlotCopier::new(&device, Priority::Urgent, CopyQueueConfig::default())
            .map_err(|error| failed(&name, &error))?;
        copier
            .add_host(&Arc::new(pinned))
            .and_then(|()| copier.add_memory(&staging))
            .ok_or_else(|| failed(&name, &"the copier takes no memory"))?;
        let (save, saved) = channel();
        let (load, loaded) = channel();
        let copy_thread = |offset, priority, moved| -> Result<CopyThreadResources, Failure> {
            let failed = |error: &dyn std::fmt::Display| failed(&name, error);
            let stream = Stream::new(&device, priority).map_err(|error| failed(&error))?;
            // One launch for each group of planes, and one for the checksums.
            let config =
                KernelQueueConfig { items_max: ITEMS_MAX as u32, batches_max: GROUPS_MAX as u32 + 1 };
            let queue =
                KernelQueue::new(Arc::clone(&kernels), stream, config).map_err(|error| failed(&error))?;
            let staging = DeviceSlab::part(&staging, offset, one(bytes)).map_err(|error| failed(&error))?;
            Ok(CopyThreadResources { queue, staging: Arc::new(staging), moved })
        };
        let copy_threads =
            [copy_thread(0, Priority::Background, saved)?, copy_thread(bytes, Priority::Urgent, loaded)?];
        let listening = StoredReportFlag::default();
        let reports = Reports { copy_threads: [save, load], listening: listening.clone() };
        let (handoff_capacity, is_direct) = (settings.handoff_capacity, settings.direct);
        Ok((
            Self { device, kernels, handoff_capacity, is_direct, copy_threads, listening },
            reports,
            builder.copier(Box::new(copier)),
        ))
    }
}
