//! Routes: tensors, slots, and the plan between them, checked against both sides' memory. Made once, used for every batch.
//!
//! Routes differ in their plan alone, so there is one type with the plan as its parameter: each batch is
//! planned without a virtual call, and a route does not offer operations that its plan does not have.

use std::ops::Range;
use std::sync::Arc;

use dataplane_cuda::{Device, DeviceMemory, DeviceSlab};
use dataplane_kernels::{
    Batch, ChecksumPlan, CopyPlan, Device as Shape, Direction, HeadRange, Launch, PlanError, SlotLayout,
    alignment_of,
};

use crate::error::RouteError;
use crate::tensors::{PagedTensors, same_device};

/// A block and the slot that it is copied to or from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block in the engine's tensors.
    pub block: u64,
    /// The slot in the route's slab.
    pub slot: u32,
}

/// Memory of both ends of a route, which a batch in flight keeps allocated.
#[derive(Debug, Clone)]
pub(crate) struct RouteMemory {
    /// Tensors of the engine; `None`: the route has slots only.
    pub(crate) tensors: Option<Arc<PagedTensors>>,
    pub(crate) slots: Arc<DeviceSlab>,
}

impl RouteMemory {
    pub(crate) fn device(&self) -> &Device {
        self.slots.device()
    }

    /// Returns the number of blocks that an item may name.
    pub(crate) fn blocks(&self) -> u64 {
        self.tensors.as_ref().map_or(u64::MAX, |tensors| tensors.layout().blocks)
    }

    /// Returns the device address of the array of the planes' addresses; 0 without tensors.
    pub(crate) fn planes(&self) -> u64 {
        self.tensors.as_ref().map_or(0, |tensors| tensors.array())
    }

    fn new(
        tensors: Option<Arc<PagedTensors>>,
        slots: Arc<DeviceSlab>,
        needed: u64,
    ) -> Result<Self, RouteError> {
        if let Some(tensors) = &tensors {
            same_device(tensors.device(), slots.device())?;
        }
        let present = slots.layout().slot_bytes;
        if needed > present as u64 {
            return Err(RouteError::Slot { present, needed });
        }
        Ok(Self { tensors, slots })
    }

    fn agree(&self, planes: u64) -> Result<(), RouteError> {
        let tensors = self.tensors.as_ref().map_or(0, |tensors| tensors.planes());
        if planes == tensors as u64 { Ok(()) } else { Err(RouteError::Planes { slot: planes, tensors }) }
    }

    /// Returns the largest power of two, at most 16, that divides all plane and slot addresses.
    fn alignment(&self) -> u64 {
        let stride = self.slots.layout().stride() as u64;
        let slots = alignment_of([self.slots.address(), stride]);
        let planes = self.tensors.as_ref().map_or(16, |tensors| alignment_of(tensors.addresses()));
        slots.min(planes)
    }
}

/// A plan that turns a batch into one launch.
pub(crate) trait Plan {
    /// The parameter that a batch chooses: the direction, or nothing where there is only one.
    type Way;

    /// Divides a batch into the work of one launch.
    fn launch(&self, way: Self::Way, batch: &Batch, device: Shape) -> Result<Launch, PlanError>;
}

impl Plan for CopyPlan {
    type Way = Direction;

    fn launch(&self, way: Direction, batch: &Batch, device: Shape) -> Result<Launch, PlanError> {
        Self::launch(self, way, batch, device)
    }
}

impl Plan for ChecksumPlan {
    type Way = ();

    fn launch(&self, (): (), batch: &Batch, device: Shape) -> Result<Launch, PlanError> {
        Self::launch(self, batch, device)
    }
}

/// The memory of both ends and the plan between them.
#[derive(Debug, Clone)]
pub struct Route<P> {
    pub(crate) memory: RouteMemory,
    pub(crate) plan: P,
}

/// Copies blocks between tensors and slots, or some of their heads from or to a slot with more or fewer
/// heads.
pub type CopyRoute = Route<CopyPlan>;

/// Computes checksums over the first bytes of slots.
pub type SlotRoute = Route<ChecksumPlan>;

impl<P> Route<P> {
    /// Returns the plan: the width of an access, the bytes moved.
    #[must_use]
    pub fn plan(&self) -> &P {
        &self.plan
    }
}

impl CopyRoute {
    /// Creates a route for the heads of `heads`: all ([`HeadRange::all`]), or those that two ranks share
    /// ([`heads_shared`]).
    pub fn new(
        tensors: Arc<PagedTensors>,
        slots: Arc<DeviceSlab>,
        layout: SlotLayout,
        heads: HeadRange,
    ) -> Result<Self, RouteError> {
        let paged = *tensors.layout();
        let last_plane = u64::from(layout.planes).saturating_sub(1).checked_mul(layout.plane_stride);
        let needed = last_plane
            .and_then(|bytes| bytes.checked_add(layout.first_byte)?.checked_add(layout.plane_bytes()))
            .unwrap_or(u64::MAX);
        let memory = RouteMemory::new(Some(tensors), slots, needed)?;
        memory.agree(layout.planes.into())?;
        let plan = CopyPlan::new(paged, layout, heads, memory.alignment())?;
        Ok(Self { memory, plan })
    }
}

impl SlotRoute {
    /// Creates a route for the first `bytes` bytes of each slot.
    pub fn new(slots: Arc<DeviceSlab>, bytes: u64) -> Result<Self, RouteError> {
        let memory = RouteMemory::new(None, slots, bytes)?;
        let plan = ChecksumPlan::new(bytes, memory.alignment())?;
        Ok(Self { memory, plan })
    }
}

/// Returns the heads that an engine's rank and a slot share, each given by its range of the model's heads;
/// `None` when they share none. With it, ranks of any tensor parallelism can use one slot, or one rank can
/// read several slots.
#[must_use]
pub fn heads_shared(engine: Range<u32>, slot: Range<u32>) -> Option<HeadRange> {
    let (first, end) = (engine.start.max(slot.start), engine.end.min(slot.end));
    (first < end).then(|| HeadRange {
        paged_first: first - engine.start,
        slot_first: first - slot.start,
        count: end - first,
    })
}
