//! Registered buffers that outgoing messages are copied to.
//!
//! The memory of a message is not registered with the device; registering it would cost more than copying a
//! few kilobytes. The free list is a stack, so that recently used buffers, still in the cache, are used
//! first.

use std::sync::Arc;

use dataplane_fabric::PeerAccess;
use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::VerbsError;
use crate::memory_region::{Access, MemoryRegion};
use crate::protection::ProtectionDomain;

/// A fixed number of buffers of equal size.
#[derive(Debug)]
pub(crate) struct BounceBuffers {
    pub(crate) region: MemoryRegion,
    pub(crate) slab: Arc<Slab>,
    pub(crate) free: Vec<u32>,
}

impl BounceBuffers {
    pub(crate) fn new(domain: &Arc<ProtectionDomain>, count: u32, bytes: usize) -> Result<Self, VerbsError> {
        let layout = SlabLayout { slot_bytes: bytes, slot_count: count };
        let slab = Arc::new(Slab::create("kvasir-rdma-send", layout, PageSize::HugeIfAvailable)?);
        let access = Access { remote: PeerAccess::None, relaxed_ordering: false };
        let region = MemoryRegion::of_slab(domain, &slab, access)?;
        Ok(Self { region, slab, free: (0..count).rev().collect() })
    }
}
