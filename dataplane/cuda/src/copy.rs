//! Copy requests in terms of regions and slots, checked before they are converted to addresses.

use std::sync::Arc;

use crate::{DeviceSlab, Pinned};

/// Memory that a copy reads or writes.
#[derive(Debug, Clone)]
pub enum Region {
    /// Pinned host memory.
    Host(Arc<Pinned>),
    /// Memory of the queue's device or of another device.
    Device(Arc<DeviceSlab>),
}

/// Id of a region that was added to a copy queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionId(pub(crate) u16);

/// Position of a copy's first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The region.
    pub region: RegionId,
    /// Index of the slot in the region.
    pub slot: u32,
    /// Offset in the slot, in bytes.
    pub offset: usize,
}

/// Row layout of a copy: one or more rows with equally distant starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of one row.
    pub bytes: usize,
    /// Number of rows.
    pub count: usize,
    /// Distance from the start of one row to the start of the next in the source, in bytes; at least `bytes`.
    pub from_stride: usize,
    /// Distance from the start of one row to the start of the next in the target, in bytes; at least `bytes`.
    pub to_stride: usize,
}

impl Rows {
    /// Returns the layout of contiguous bytes.
    #[must_use]
    pub fn contiguous(bytes: usize) -> Self {
        Self { bytes, count: 1, from_stride: bytes, to_stride: bytes }
    }

    /// Returns the bytes from the first row's start to the last row's end; `None` when rows overlap or there
    /// are none.
    fn span(&self, stride: usize) -> Option<usize> {
        match self.count {
            0 => None,
            1 => Some(self.bytes),
            _ if stride < self.bytes => None,
            count => stride.checked_mul(count - 1)?.checked_add(self.bytes),
        }
    }
}

/// One copy. Source and target must not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRequest {
    /// Position of the source.
    pub from: Place,
    /// Position of the target.
    pub to: Place,
    /// Row layout.
    pub rows: Rows,
}

impl CopyRequest {
    /// Returns a copy of `bytes` contiguous bytes.
    #[must_use]
    pub fn contiguous(from: Place, to: Place, bytes: usize) -> Self {
        Self { from, to, rows: Rows::contiguous(bytes) }
    }
}

/// A copy in terms of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) rows: Rows,
    /// The regions of both addresses. The driver does not treat adjacent regions as one range.
    pub(crate) regions: (u16, u16),
}

/// The regions of one queue, each with whether it is memory of another device.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    regions: Vec<(Region, bool)>,
}

impl Regions {
    pub(crate) fn add(&mut self, region: Region, is_elsewhere: bool) -> Option<RegionId> {
        let id = u16::try_from(self.regions.len()).ok()?;
        self.regions.push((region, is_elsewhere));
        Some(RegionId(id))
    }

    /// Returns the copy in terms of addresses and whether another device takes part; `None` when a position
    /// does not exist.
    #[inline]
    pub(crate) fn resolve(&self, copy: &CopyRequest) -> Option<(Resolved, bool)> {
        let (from, from_elsewhere) = self.address(copy.from, copy.rows.span(copy.rows.from_stride)?)?;
        let (to, to_elsewhere) = self.address(copy.to, copy.rows.span(copy.rows.to_stride)?)?;
        let regions = (copy.from.region.0, copy.to.region.0);
        Some((Resolved { from, to, rows: copy.rows, regions }, from_elsewhere || to_elsewhere))
    }

    #[inline]
    fn address(&self, place: Place, bytes: usize) -> Option<(u64, bool)> {
        let (region, is_elsewhere) = self.regions.get(place.region.0 as usize)?;
        let address = match region {
            Region::Host(pinned) => {
                pinned.slab().try_address(place.slot, place.offset, bytes)?.addr().get() as u64
            }
            Region::Device(slab) => slab.try_address(place.slot, place.offset, bytes)?,
        };
        Some((address, *is_elsewhere))
    }
}
