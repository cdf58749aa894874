//! Hand-offs of tensors in CUDA memory: kernels copy blocks between them and slots in the device's own memory.
//!
//! ```text
//! engine's planes ── gather kernel ──▶ device slot ── DMA ──▶ host slot ══════▶ peer     a push
//! engine's planes ◀─ scatter kernel ── device slot ◀── DMA ── host slot ◀══════ peer     an arrival
//! ```
//!
//! Blocks are copied between device and host slots by [`dataplane_transfer::Staging`], layer by layer. With
//! `device.direct` this step is skipped if network cards, or copy engines of devices of this host, reach both
//! sides: they read and write the device's slots, and the devices compute the checksums. A push releases the
//! engine's blocks when its kernel ends, before any transfer over the bus. Pushes and arrivals have a thread
//! and a stream each, which run one task after the other.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use dataplane_cuda::{
    CopyQueueConfig, Device, DeviceMemory, DeviceSlab, IpcSharing, Pinned, Priority, SlotCopier, Stream,
};
use dataplane_gpu::{
    BlockCopy, CopyRoute, KernelQueue, KernelQueueConfig, LayoutKernels, SlotChecksummer, Sums,
};
use dataplane_memory::{DeviceSharing, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_rails::Place;
use dataplane_transfer::{Staging, StagingLimits};

use super::copy::BlockCopier;
use super::{CopyTask, Shape};
use crate::config::Size;
use crate::device::{DeviceEvent, GROUPS_MAX, Group, ITEMS_MAX, failed, launch, place_of, wait_after_panic};
use crate::lock::lock;
use crate::queue::Completions;
use crate::registry::TensorsGuard;
use crate::status::{Failure, Status};
use crate::tensors::PagedTensors;

const PUSHES: usize = 0;
const ARRIVALS: usize = 1;
/// Most checksums that the device computes at a time.
const SUMS_MAX: usize = 4096;

/// A device and the resources that its hand-offs use.
pub(crate) struct DeviceParts {
    pub(crate) device: Device,
    pub(crate) kernels: Arc<LayoutKernels>,
    /// Bytes of device memory for slots.
    pub(crate) capacity: Size,
    /// Whether the device's slots are exposed to peers.
    pub(crate) is_direct: bool,
}

impl DeviceParts {
    /// Returns the device's PCI address, if the driver reports it.
    pub(super) fn place(&self) -> Option<Place> {
        place_of(&self.device)
    }
}

/// Resources for direct hand-offs, besides slots in the device's memory.
pub(super) struct DirectParts {
    pub(super) checksummer: SlotChecksummer,
    /// Gives processes of this host access to the slots.
    pub(super) sharing: Arc<dyn DeviceSharing>,
}

/// The slots of hand-offs in a device's memory, and the threads that copy to and from them.
#[derive(Debug)]
pub(super) struct DeviceCopyThreads {
    device: Device,
    memory: Arc<DeviceSlab>,
    jobs: Mutex<Option<[Sender<CopyJob>; 2]>>,
    is_closing: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct CopyJob {
    user: u64,
    task: CopyTask,
}

/// Routes between registered tensors and the slots: of each layer, and of a whole block.
#[derive(Debug)]
pub(crate) struct HandOffRoutes {
    layers: Vec<Vec<CopyRoute>>,
    whole: Vec<CopyRoute>,
}

/// The threads, slots and copiers that [`DeviceCopyThreads::open`] makes.
pub(super) struct OpenedDevice {
    pub(super) threads: DeviceCopyThreads,
    pub(super) pool: Arc<SlotPool>,
    pub(super) staging: Staging<SlotCopier>,
    /// `None`: hand-offs are staged through host memory.
    pub(super) direct: Option<DirectParts>,
}

impl DeviceCopyThreads {
    /// Takes the device's memory, pins the staging slots, and starts the threads.
    pub(super) fn open(
        parts: DeviceParts,
        slot_bytes: usize,
        staging: &Arc<SlotPool>,
        completions: &Completions,
    ) -> Result<OpenedDevice, Failure> {
        let DeviceParts { device, kernels, capacity, is_direct } = parts;
        let setting = format!("open: device.handoff_capacity = {capacity}");
        let failed = |error: &dyn std::fmt::Display| failed(&setting, error);
        let one = SlabLayout { slot_bytes, slot_count: 1 };
        // `Settings::parse` has checked that there is at least one slot, and that their number fits.
        let layout = SlabLayout { slot_count: (capacity.0 / one.stride() as u64).max(1) as u32, ..one };
        let memory = Arc::new(DeviceSlab::allocate(&device, layout).map_err(|error| failed(&error))?);
        let shared: Arc<dyn DeviceMemory> = memory.clone();
        let slab = Slab::on_device("kvasir-handoff-device", layout, shared);
        let slab = Arc::new(slab.map_err(|error| failed(&error))?);
        let pinned = Pinned::register(&device, Arc::clone(staging.slab()))
            .map_err(|error| super::open::failed(&format!("transfer.capacity: {error}")))?;
        let mut copier = SlotCopier::new(&device, Priority::Urgent, CopyQueueConfig::default())
            .map_err(|error| failed(&error))?;
        let pinned = Arc::new(pinned);
        copier
            .add_host(&pinned)
            .and_then(|()| copier.add_device(&slab, &memory))
            .ok_or_else(|| failed(&"too many memories for one copier"))?;
        let threads = Self {
            device,
            memory,
            jobs: Mutex::default(),
            is_closing: Arc::default(),
            threads: Mutex::default(),
        };
        // The threads that were started end when `threads` is dropped.
        let pushes = threads.start("kvasir-kv-push", &kernels, completions)?;
        let arrivals = threads.start("kvasir-kv-arrive", &kernels, completions)?;
        *lock(&threads.jobs) = Some([pushes, arrivals]);
        let limits = StagingLimits::of(staging);
        let staging = Staging::new(copier, Arc::clone(staging), limits);
        let mut direct = None;
        if is_direct {
            let mut checksummer = SlotChecksummer::new(threads.queue(&kernels)?, SUMS_MAX);
            checksummer
                .add_device(&slab, &threads.memory)
                .ok_or_else(|| failed(&"too many memories for one checksummer"))?;
            let ipc = IpcSharing::new(Arc::clone(&slab), Arc::clone(&threads.memory), vec![pinned]);
            direct = Some(DirectParts { checksummer, sharing: Arc::new(ipc) });
        }
        Ok(OpenedDevice { threads, pool: SlotPool::new(slab), staging, direct })
    }

    fn start(
        &self,
        name: &str,
        kernels: &Arc<LayoutKernels>,
        completions: &Completions,
    ) -> Result<Sender<CopyJob>, Failure> {
        let queue = self.queue(kernels)?;
        let (sender, jobs) = channel();
        let (completions, is_closing) = (completions.clone(), Arc::clone(&self.is_closing));
        let run = move || work(DeviceCopier { queue, is_broken: false }, &jobs, &completions, &is_closing);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        lock(&self.threads).push(thread.map_err(|error| failed("open: start a thread", &error))?);
        Ok(sender)
    }

    /// Creates a kernel queue with its own stream.
    fn queue(&self, kernels: &Arc<LayoutKernels>) -> Result<KernelQueue, Failure> {
        let failed = |error: &dyn std::fmt::Display| failed("open: hand-offs of [device]", error);
        // An engine waits for every copy: a decode engine for its blocks, a prefill engine for blocks to
        // compute into.
        let stream = Stream::new(&self.device, Priority::Urgent).map_err(|error| failed(&error))?;
        let config = KernelQueueConfig { items_max: ITEMS_MAX as u32, batches_max: GROUPS_MAX as u32 };
        KernelQueue::new(Arc::clone(kernels), stream, config).map_err(|error| failed(&error))
    }

    /// Returns the routes between these tensors and the slots. The tensors have passed [`Shape::check`].
    ///
    /// # Safety
    /// The planes must be memory that the device's primary context may use, mapped until the routes are dropped.
    pub(super) unsafe fn routes(
        &self,
        shape: &Shape,
        tensors: &PagedTensors,
    ) -> Result<HandOffRoutes, Failure> {
        // SAFETY: handed on to the caller.
        let groups = unsafe { Group::all(&self.device, tensors, 0) }?;
        let whole = groups.iter().map(|group| group.route(&self.memory)).collect::<Result<_, _>>()?;
        let each = tensors.planes().len() / usize::from(shape.layers);
        let of_layer = |layer: usize| {
            let planes = layer * each..(layer + 1) * each;
            let parts = groups.iter().filter_map(|group| group.part(&planes));
            parts.map(|part| part.route(&self.memory)).collect::<Result<Vec<_>, _>>()
        };
        let layers = (0..usize::from(shape.layers)).map(of_layer).collect::<Result<_, _>>()?;
        Ok(HandOffRoutes { layers, whole })
    }

    /// Submits a task. Its completion follows, unless the threads are closed before.
    pub(super) fn submit(&self, user: u64, task: CopyTask) {
        let thread = if task.is_push() { PUSHES } else { ARRIVALS };
        if let Some(jobs) = &*lock(&self.jobs) {
            // A thread ends only when the threads are closed.
            let _closed = jobs[thread].send(CopyJob { user, task });
        }
    }

    /// Drops tasks that have not begun, and waits for those that have.
    pub(super) fn close(&self) {
        // Pairs with no other operation: the threads only have to see the flag eventually.
        self.is_closing.store(true, Ordering::Relaxed);
        drop(lock(&self.jobs).take());
        for thread in lock(&self.threads).drain(..) {
            // Panics are caught inside the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for DeviceCopyThreads {
    fn drop(&mut self) {
        self.close();
    }
}

fn work(
    mut copier: DeviceCopier,
    jobs: &Receiver<CopyJob>,
    completions: &Completions,
    is_closing: &AtomicBool,
) {
    while let Ok(CopyJob { user, task }) = jobs.recv() {
        if is_closing.load(Ordering::Relaxed) {
            continue;
        }
        let (blocks, given_up) = (task.blocks(), task.given_up());
        // SAFETY: the submitter promised that the blocks and the event of the task stay usable until the completion.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { task.carry_out(&mut copier) }));
        let outcome = done.unwrap_or_else(|_| {
            copier.is_broken = true;
            // The bug that caused the panic may be in this call too.
            let _panicked = catch_unwind(AssertUnwindSafe(given_up));
            Err(panicked())
        });
        completions.complete(user, blocks, outcome);
    }
}

/// Stream and kernels of one thread.
struct DeviceCopier {
    queue: KernelQueue,
    /// Whether a panic may have left work on the stream.
    is_broken: bool,
}

impl DeviceCopier {
    /// # Safety
    /// The event, if there is one, must live for the time of the call.
    unsafe fn run<'a>(
        &mut self,
        routes: impl Iterator<Item = &'a CopyRoute>,
        (blocks, slots): (&[u64], &[SlotRef]),
        event: DeviceEvent,
        is_gather: bool,
    ) -> Result<(), Failure> {
        if self.is_broken {
            return Err(Failure::new(Status::Failed, "an earlier hand-off has broken off in its middle"));
        }
        // SAFETY: handed on to the caller.
        unsafe { event.wait_on(self.queue.stream()) }?;
        let pairs: Vec<BlockCopy> =
            (blocks.iter().zip(slots)).map(|(&block, slot)| BlockCopy { block, slot: slot.slot() }).collect();
        let routes: Vec<&CopyRoute> = routes.collect();
        let queue = &mut self.queue;
        let launched = catch_unwind(AssertUnwindSafe(|| {
            for pairs in pairs.chunks(ITEMS_MAX) {
                for routes in routes.chunks(GROUPS_MAX) {
                    let start = |queue: &mut KernelQueue| {
                        routes.iter().try_for_each(|route| match is_gather {
                            true => queue.gather(route, pairs, Sums::None, 0),
                            false => queue.scatter(route, pairs, Sums::None, 0),
                        })
                    };
                    launch(queue, start, |_| {})?;
                }
            }
            Ok(())
        }));
        launched.unwrap_or_else(|_| {
            // Done while slots and tensors are still held: kernels may be on the stream.
            self.is_broken = true;
            wait_after_panic(&mut self.queue);
            Err(panicked())
        })
    }
}

fn panicked() -> Failure {
    Failure::new(Status::Panicked, "a bug in a hand-off of a device's tensors")
}

fn routes(tensors: &TensorsGuard) -> Result<&HandOffRoutes, Failure> {
    let routes = tensors.handoff_routes();
    routes.ok_or_else(|| Failure::new(Status::Panicked, "tensors without a way to the slots of hand-offs"))
}

impl BlockCopier for DeviceCopier {
    unsafe fn gather(
        &mut self,
        tensors: &TensorsGuard,
        places: (&[u64], &[SlotRef]),
        layers: Range<u16>,
        event: DeviceEvent,
    ) -> Result<(), Failure> {
        let routes = routes(tensors)?;
        let is_whole = usize::from(layers.end - layers.start) == routes.layers.len();
        let (whole, some) = if is_whole {
            (&routes.whole[..], &[][..])
        } else {
            (&[][..], &routes.layers[usize::from(layers.start)..usize::from(layers.end)])
        };
        // SAFETY: handed on to the caller.
        unsafe { self.run(whole.iter().chain(some.iter().flatten()), places, event, true) }
    }

    unsafe fn scatter(
        &mut self,
        tensors: &TensorsGuard,
        places: (&[u64], &[SlotRef]),
        event: DeviceEvent,
    ) -> Result<(), Failure> {
        // SAFETY: handed on to the caller.
        unsafe { self.run(routes(tensors)?.whole.iter(), places, event, false) }
    }
}
