//! The places of registered tensors on a device: their planes, the staging slots of each thread, and the routes between them.
//!
//! A kernel handles planes of one shape. Planes are cut into groups of neighbours of equal shape; each group
//! has its own route and launch. Most engines have one group.

use std::ops::Range;
use std::sync::Arc;

use dataplane_cuda::{BorrowError, Device, DeviceMemory, DeviceSlab};
use dataplane_gpu::{CopyRoute, Plane, RouteError, SlotRoute};
use dataplane_kernels::{HeadRange, PagedLayout, SlotLayout};
use dataplane_memory::{Slab, SlabLayout, SlotPool};

use crate::format::HEAD_BYTES_MIN;
use crate::status::{Failure, Status};
use crate::tensors::{PagedTensors, PlaneRange};

/// Most groups of planes.
pub(crate) const GROUPS_MAX: usize = 16;
/// Most blocks of a round.
pub(crate) const ITEMS_MAX: usize = 1024;

/// Staging slots of one thread for blocks of certain tensors, and the routes between tensors and slots.
#[derive(Debug)]
pub(crate) struct StagingRoutes {
    pub(crate) routes: Vec<CopyRoute>,
    /// Route for the checksum of a block in the form in which the store keeps it.
    pub(crate) sums: SlotRoute,
    pub(crate) pool: Arc<SlotPool>,
    /// Bytes of a block in the form in which the store keeps it.
    pub(crate) block_bytes: usize,
}

/// Failure of the device or its memory; the description of the planes is not at fault.
fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(Status::Failed, format!("planes: {error}"))
}

fn not_borrowed(error: BorrowError) -> Failure {
    match error {
        BorrowError::Range(_) => refused(error),
        BorrowError::Driver(_) => failed(error),
    }
}

fn no_route(error: RouteError) -> Failure {
    if matches!(error, RouteError::Memory(_)) { failed(error) } else { refused(error) }
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::new(Status::InvalidArgument, format!("planes: {error}"))
}

/// Neighbouring planes of one shape: the offset of the first piece in a slot, and the planes on the device.
pub(crate) struct Group {
    first_byte: u64,
    /// Bytes of a piece.
    bytes: u32,
    tensors: Arc<dataplane_gpu::PagedTensors>,
    /// Indices of the planes among all of the tensors' planes.
    planes: Range<usize>,
}

impl StagingRoutes {
    /// Creates the places of both threads.
    ///
    /// # Safety
    /// The planes must be memory that the device's primary context may use, mapped until the places are dropped.
    pub(crate) unsafe fn new(
        device: &Device,
        staging: [&Arc<DeviceSlab>; 2],
        tensors: &PagedTensors,
    ) -> Result<[Self; 2], Failure> {
        // SAFETY: handed on to the caller.
        let groups = unsafe { Group::all(device, tensors, HEAD_BYTES_MIN) }?;
        let end = HEAD_BYTES_MIN + tensors.planes().iter().map(|plane| plane.bytes).sum::<usize>();
        let [save, load] = staging.map(|staging| Self::within(staging, &groups, end));
        Ok([save?, load?])
    }

    fn within(staging: &Arc<DeviceSlab>, groups: &[Group], block_bytes: usize) -> Result<Self, Failure> {
        let one = SlabLayout { slot_bytes: block_bytes, slot_count: 1 };
        let slot_count = (staging.bytes() / one.stride()).min(ITEMS_MAX) as u32;
        let layout = SlabLayout { slot_count, ..one };
        let part = DeviceSlab::part(staging, 0, layout).map_err(refused)?;
        let slots = Arc::new(part);
        let memory: Arc<dyn DeviceMemory> = slots.clone();
        let slab = Slab::on_device("kvasir-staging", layout, memory)
            .map_err(|error| Failure::new(Status::Failed, format!("staging slots: {error}")))?;
        let routes = groups.iter().map(|group| group.route(&slots)).collect::<Result<Vec<_>, _>>()?;
        let sums = SlotRoute::new(slots, block_bytes as u64).map_err(no_route)?;
        Ok(Self { routes, sums, pool: SlotPool::new(Arc::new(slab)), block_bytes })
    }
}

impl Group {
    /// Returns the groups of all planes. Their pieces lie in a slot from `first_byte` on.
    ///
    /// # Safety
    /// As for [`StagingRoutes::new`].
    pub(crate) unsafe fn all(
        device: &Device,
        tensors: &PagedTensors,
        first_byte: usize,
    ) -> Result<Vec<Self>, Failure> {
        let (mut groups, mut end, mut number) = (Vec::new(), first_byte, 0);
        for planes in tensors.planes().chunk_by(|one, other| one.shape() == other.shape()) {
            if groups.len() == GROUPS_MAX {
                let text = format!("more than {} changes of block_stride or block_bytes", GROUPS_MAX - 1);
                return Err(refused(text));
            }
            // SAFETY: handed on to the caller.
            groups.push(unsafe { Self::new(device, planes, number, tensors.blocks(), end as u64) }?);
            (end, number) = (end + planes.len() * planes[0].bytes, number + planes.len());
        }
        Ok(groups)
    }

    /// Returns the part of the group that lies in `planes`; `None` if there is no such plane.
    pub(crate) fn part(&self, planes: &Range<usize>) -> Option<Self> {
        let common = self.planes.start.max(planes.start)..self.planes.end.min(planes.end);
        let first = common.start.checked_sub(self.planes.start)?;
        let tensors = self.tensors.part(first..first + common.len())?;
        let first_byte = self.first_byte + first as u64 * u64::from(self.bytes);
        Some(Self { first_byte, bytes: self.bytes, tensors: Arc::new(tensors), planes: common })
    }

    /// Returns the route between these planes and slots.
    pub(crate) fn route(&self, slots: &Arc<DeviceSlab>) -> Result<CopyRoute, Failure> {
        let packed = SlotLayout::new(self.planes.len() as u32, 1, 1, self.bytes);
        let layout = SlotLayout { first_byte: self.first_byte, ..packed };
        CopyRoute::new(self.tensors.clone(), slots.clone(), layout, HeadRange::all(1)).map_err(no_route)
    }

    /// Creates a group of `planes`, which have one shape. `number` is the index of the first.
    ///
    /// # Safety
    /// As for [`StagingRoutes::new`].
    unsafe fn new(
        device: &Device,
        planes: &[PlaneRange],
        number: usize,
        blocks: u64,
        first_byte: u64,
    ) -> Result<Self, Failure> {
        let PlaneRange { stride, bytes, .. } = planes[0];
        let head_bytes = u32::try_from(bytes).map_err(|_| refused("block_bytes is above 4 GiB"))?;
        // The last block may end without the rest of its stride. `PlaneRange::check` has excluded an overflow
        // of the product.
        let span = (blocks as usize - 1) * stride + bytes;
        let memory = planes.iter().map(|plane| {
            // SAFETY: handed on to the caller.
            let memory = unsafe { DeviceSlab::borrow(device, plane.start.addr().get() as u64, span) };
            Ok(Plane { memory: Arc::new(memory.map_err(not_borrowed)?), offset: 0 })
        });
        let memory = memory.collect::<Result<Vec<_>, Failure>>()?;
        // A piece is treated as one head of one token; its inner layout is the engine's affair.
        let inner = u64::from(head_bytes);
        let layout = PagedLayout {
            blocks,
            tokens: 1,
            heads: 1,
            head_bytes,
            block_stride: stride as u64,
            token_stride: inner,
            head_stride: inner,
        };
        let tensors = dataplane_gpu::PagedTensors::new(layout, &memory).map_err(no_route)?;
        let planes = number..number + planes.len();
        Ok(Self { first_byte, bytes: head_bytes, tensors: Arc::new(tensors), planes })
    }
}
