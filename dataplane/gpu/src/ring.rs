//! The arguments of batches in flight: a pinned host slot and a device slot for each, made with the queue.
//!
//! A device slot holds, for up to [`KernelQueueConfig::items_max`] items, the scratch of the checksums (zero between
//! launches), then what goes to the device in one copy and what comes back in one:
//!
//! ```text
//! scratch, 16 each | items, 16 each | expected checksums, 8 each | status words, 4 each | checksums, 8 each
//!                    └────────────── to the device ──────────────────────────────────┘
//!                                                                └──── back ─────────────────────────────┘
//! ```
//!
//! Each part starts at a multiple of 16 and is as long as the batch needs, so that a small batch is a small copy. The
//! host's slot is the same without the scratch.
//!
//! A batch of up to [`HOST_ITEMS_MAX`] items is not copied: the kernel reads its items in the host's slot and
//! writes its statuses and checksums there. That costs each thread block a read over the bus, some 1.5 µs,
//! and saves two copies on the stream.

use std::sync::Arc;

use dataplane_cuda::{
    CopyQueue, CopyQueueConfig, CopyRequest, DeviceMemory, DeviceSlab, Pinned, Place, Region, RegionId,
    Stream,
};
use dataplane_kernels::{Batch, ChecksumArrays, Item, Scratch};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::error::KernelsError;

/// Limits of a kernel queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelQueueConfig {
    /// Largest number of items in one batch.
    pub items_max: u32,
    /// Largest number of batches in flight.
    pub batches_max: u32,
}

impl Default for KernelQueueConfig {
    /// 4,096 items and 32 batches: 6.5 MiB on the device, 4.5 MiB of pinned host memory.
    fn default() -> Self {
        Self { items_max: 4096, batches_max: 32 }
    }
}

/// Largest number of items that a kernel reads over the bus.
pub(crate) const HOST_ITEMS_MAX: usize = 8;

/// Offsets of the parts of a batch, in bytes from the start of its items.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    count: usize,
    expected: usize,
    pub(crate) status: usize,
    pub(crate) checksums: usize,
    end: usize,
}

impl Parts {
    /// Whether the parts stay in host memory.
    pub(crate) fn fits_host_memory(&self) -> bool {
        self.count <= HOST_ITEMS_MAX
    }

    pub(crate) fn of(count: usize) -> Self {
        let after = |start: usize, bytes: usize| (start + count * bytes).next_multiple_of(16);
        let expected = after(0, size_of::<Item>());
        let status = after(expected, size_of::<u64>());
        let checksums = after(status, size_of::<u32>());
        Self { count, expected, status, checksums, end: after(checksums, size_of::<u64>()) }
    }
}

/// Host and device slots of the batches, and the copies between them.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) copies: CopyQueue,
    host: Arc<Slab>,
    pinned: Arc<Pinned>,
    device: Arc<DeviceSlab>,
    regions: [RegionId; 2],
    scratch_bytes: usize,
    /// The batch that is being built, in the layout of a slot.
    image: Vec<u8>,
}

impl Ring {
    pub(crate) fn new(stream: Stream, config: KernelQueueConfig) -> Result<Self, KernelsError> {
        let parts = Parts::of(config.items_max as usize);
        let scratch_bytes = config.items_max as usize * size_of::<Scratch>();
        let layout = |slot_bytes| SlabLayout { slot_bytes, slot_count: config.batches_max };
        let device = Arc::new(DeviceSlab::allocate(stream.device(), layout(scratch_bytes + parts.end))?);
        device.fill(0)?;
        let host = Arc::new(Slab::create("kernel arguments", layout(parts.end), PageSize::Standard)?);
        host.populate(usize::MAX)?;
        let pinned = Arc::new(Pinned::register(stream.device(), host.clone())?);
        // Two of each per batch: one to the device and one back.
        let most = 2 * config.batches_max as usize;
        let sizes = CopyQueueConfig { copies_max: 2, tokens_max: most, flushes_max: most };
        let mut copies = CopyQueue::new(stream, sizes)?;
        let regions = [Region::Host(pinned.clone()), Region::Device(device.clone())]
            .map(|region| copies.add_region(region));
        let [Some(on_device), Some(on_host)] = regions else {
            unreachable!("two regions are less than 65,536")
        };
        Ok(Self {
            copies,
            host,
            pinned,
            device,
            regions: [on_device, on_host],
            scratch_bytes,
            image: Vec::with_capacity(parts.end),
        })
    }

    /// Starts the image of a batch; items follow.
    pub(crate) fn clear(&mut self) {
        self.image.clear();
    }

    /// Adds an item; the caller adds no more than `items_max`.
    pub(crate) fn add(&mut self, item: Item) {
        self.image.extend_from_slice(bytemuck::bytes_of(&item));
    }

    /// Completes the image and writes it to the host's slot.
    pub(crate) fn seal(&mut self, slot: u32, parts: &Parts, expected: &[u64]) {
        self.image.resize(parts.expected, 0);
        self.image.extend_from_slice(bytemuck::cast_slice(expected));
        self.image.resize(parts.checksums, 0);
        self.host.write(slot, 0, &self.image);
    }

    /// Returns the addresses of a batch's parts as the device sees them.
    pub(crate) fn batch(&self, slot: u32, parts: &Parts, planes: u64, sums: Option<bool>) -> Batch {
        let scratch = self.device.address() + slot as u64 * self.device.layout().stride() as u64;
        let items = if parts.fits_host_memory() {
            let near = self.pinned.device_address(slot, 0, parts.end);
            near.unwrap_or_else(|| unreachable!("a slot of the ring has room for {} bytes", parts.end))
        } else {
            scratch + self.scratch_bytes as u64
        };
        let at = |offset: usize| items + offset as u64;
        let sums = sums.map(|are_expected| ChecksumArrays {
            checksums: at(parts.checksums),
            scratch,
            expected: if are_expected { at(parts.expected) } else { 0 },
        });
        Batch { items, count: parts.count as u32, planes, status: at(parts.status), sums }
    }

    /// Returns the copy of a batch's arguments to the device.
    pub(crate) fn copy_to_device(&self, slot: u32, parts: &Parts) -> CopyRequest {
        self.request(slot, 0..parts.checksums, false)
    }

    /// Returns the copy of a batch's results to the host.
    pub(crate) fn copy_to_host(&self, slot: u32, parts: &Parts) -> CopyRequest {
        self.request(slot, parts.status..parts.end, true)
    }

    fn request(&self, slot: u32, bytes: std::ops::Range<usize>, is_back: bool) -> CopyRequest {
        let host = Place { region: self.regions[0], slot, offset: bytes.start };
        let device = Place { region: self.regions[1], slot, offset: self.scratch_bytes + bytes.start };
        let (from, to) = if is_back { (device, host) } else { (host, device) };
        CopyRequest::contiguous(from, to, bytes.len())
    }

    /// Reads the results of a batch.
    pub(crate) fn read(&self, slot: u32, parts: &Parts, statuses: &mut [u32], checksums: &mut [u64]) {
        self.host.read(slot, parts.status, bytemuck::cast_slice_mut(statuses));
        self.host.read(slot, parts.checksums, bytemuck::cast_slice_mut(checksums));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_in_sixteens() {
        for count in 1..100 {
            let Parts { expected, status, checksums, end, .. } = Parts::of(count);
            assert!([expected, status, checksums, end].iter().all(|start| start % 16 == 0));
            assert!(expected >= count * 16 && status >= expected + count * 8);
            assert!(checksums >= status + count * 4 && end >= checksums + count * 8 && end < count * 36 + 48);
        }
    }
}
