//! What a copy is, in terms of regions and slots; checked before any address is made of it.

use std::sync::Arc;

use crate::{DeviceSlab, Pinned};

/// Memory that copies go from and to.
#[derive(Debug, Clone)]
pub enum Region {
    /// Pinned host memory.
    Host(Arc<Pinned>),
    /// Memory of the queue's device, or of another one.
    Device(Arc<DeviceSlab>),
}

/// A region that a copy queue was told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionId(pub(crate) u16);

/// Where bytes start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The region.
    pub region: RegionId,
    /// The slot in it.
    pub slot: u32,
    /// The byte in the slot.
    pub offset: usize,
}

/// How the bytes lie: one or more rows, their starts equally far apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of one row.
    pub bytes: usize,
    /// Number of rows.
    pub count: usize,
    /// From one row's start to the next one's where the bytes come from; at least `bytes`.
    pub from_stride: usize,
    /// The same where they go to.
    pub to_stride: usize,
}

impl Rows {
    /// Bytes in one piece.
    #[must_use]
    pub fn contiguous(bytes: usize) -> Self {
        Self { bytes, count: 1, from_stride: bytes, to_stride: bytes }
    }

    /// Bytes from the first row's start to the last row's end, or `None` when rows overlap or there are none.
    fn span(&self, stride: usize) -> Option<usize> {
        match self.count {
            0 => None,
            1 => Some(self.bytes),
            _ if stride < self.bytes => None,
            count => stride.checked_mul(count - 1)?.checked_add(self.bytes),
        }
    }
}

/// One copy. The ranges must not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRequest {
    /// Where the bytes come from.
    pub from: Place,
    /// Where they go to.
    pub to: Place,
    /// How they lie.
    pub rows: Rows,
}

impl CopyRequest {
    /// A copy of `bytes` bytes in one piece.
    #[must_use]
    pub fn contiguous(from: Place, to: Place, bytes: usize) -> Self {
        Self { from, to, rows: Rows::contiguous(bytes) }
    }
}

/// A copy whose places are addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) rows: Rows,
    /// The regions of both addresses: what merely happens to lie side by side is not one range to the driver.
    pub(crate) regions: (u16, u16),
}

/// The regions of one queue, and which of them are another device's.
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

    /// The copy with addresses, and whether another device takes part; `None` when a place does not exist.
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
