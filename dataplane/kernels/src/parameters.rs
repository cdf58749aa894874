//! Parameters of the kernels, passed by value, in the byte layout of `kernels/*.cu`. Addresses are device
//! addresses.

use bytemuck::{Pod, Zeroable};

use crate::divider::Divider;

/// An entry of the array of items: one slot and one block of the engine.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Item {
    /// Address of the slot.
    pub slot: u64,
    /// Index of the block in the engine's tensors; not used by [`ChecksumPlan`](crate::ChecksumPlan).
    pub block: u64,
}

/// Intermediate sum of an item. All zero before the first launch and after every launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
pub struct Scratch {
    sum: u64,
    arrived: u32,
    reserved: u32,
}

/// Parameters of the engine's side. Mirrors `Paged`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct PagedParameters {
    pub(crate) planes: u64,
    pub(crate) block_count: u64,
    pub(crate) block_stride: u64,
    pub(crate) token_stride: u64,
    pub(crate) head_stride: u64,
    pub(crate) first: u64,
}

/// Addresses of the checksum arrays. Mirrors `Sums`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct SumParameters {
    pub(crate) checksums: u64,
    pub(crate) scratch: u64,
    pub(crate) expected: u64,
}

/// Parameters of `kvasir_gather_*` and `kvasir_scatter_*`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct CopyParameters {
    pub(crate) items: u64,
    pub(crate) status: u64,
    pub(crate) paged: PagedParameters,
    pub(crate) sums: SumParameters,
    pub(crate) slot_first: u64,
    pub(crate) slot_plane_stride: u64,
    pub(crate) slot_token_stride: u64,
    pub(crate) slot_head_stride: u64,
    pub(crate) slot_bytes: u64,
    pub(crate) tiles: u32,
    pub(crate) tile_units: u32,
    pub(crate) units: u32,
    pub(crate) tail_bytes: u32,
    pub(crate) item_tiles: Divider,
    pub(crate) plane_units: Divider,
    pub(crate) token_units: Divider,
    pub(crate) run_units: Divider,
}

/// Parameters of `kvasir_checksum_*`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ChecksumParameters {
    pub(crate) items: u64,
    pub(crate) status: u64,
    pub(crate) sums: SumParameters,
    pub(crate) bytes: u64,
    pub(crate) tiles: u32,
    pub(crate) tile_units: u32,
    pub(crate) units: u32,
    pub(crate) item_tiles: Divider,
}

// A launch takes at most 4,096 bytes of parameters by value.
const _: () = assert!(size_of::<CopyParameters>() == 192 && align_of::<CopyParameters>() == 8);
const _: () = assert!(size_of::<ChecksumParameters>() == 72);
const _: () = assert!(size_of::<Item>() == 16 && size_of::<Scratch>() == 16);
