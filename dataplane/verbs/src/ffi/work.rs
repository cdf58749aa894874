//! Structs of the data path: work requests, their entries and work completions.

use std::ffi::c_int;

/// `struct ibv_sge`, verbs.h:1117.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ScatterGatherEntry {
    /// Address of the first byte, in this process.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Local key of the region that holds the bytes.
    pub local_key: u32,
}

/// `struct ibv_send_wr`, verbs.h:1123. Of its unions only the `rdma` arm is named; the rest is padding here.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SendWorkRequest {
    /// Id that the completion returns.
    pub id: u64,
    /// The next work request of the chain.
    pub next: *mut SendWorkRequest,
    /// Scatter/gather entries.
    pub entries: *mut ScatterGatherEntry,
    /// Number of entries.
    pub entry_count: c_int,
    /// `enum ibv_wr_opcode`.
    pub opcode: u32,
    /// `enum ibv_send_flags`.
    pub flags: u32,
    /// Immediate, in network byte order.
    pub immediate: u32,
    /// Address of the first byte at the peer.
    pub remote_address: u64,
    /// Key of the peer's region.
    pub remote_key: u32,
    /// The longer arms of the header's unions, unused.
    pub unused: [u32; 19],
}

impl SendWorkRequest {
    /// An empty request.
    pub const EMPTY: Self = Self {
        id: 0,
        next: std::ptr::null_mut(),
        entries: std::ptr::null_mut(),
        entry_count: 0,
        opcode: 0,
        flags: 0,
        immediate: 0,
        remote_address: 0,
        remote_key: 0,
        unused: [0; 19],
    };
}

/// `struct ibv_recv_wr`, verbs.h:1173.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ReceiveWorkRequest {
    /// Id that the completion returns.
    pub id: u64,
    /// The next work request of the chain.
    pub next: *mut ReceiveWorkRequest,
    /// Scatter/gather entries.
    pub entries: *mut ScatterGatherEntry,
    /// Number of entries.
    pub entry_count: c_int,
}

/// `struct ibv_wc`, verbs.h:586. After an error only `id`, `status`, `queue_pair_number` and `vendor_error`
/// are valid (ibv_poll_cq(3)).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct WorkCompletion {
    /// Id of the work request.
    pub id: u64,
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// `enum ibv_wc_opcode`.
    pub opcode: u32,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// Bytes received.
    pub byte_count: u32,
    /// Immediate, in network byte order.
    pub immediate: u32,
    /// Number of the local queue pair.
    pub queue_pair_number: u32,
    /// Number of the peer's queue pair, for datagrams.
    pub source_queue_pair: u32,
    /// `enum ibv_wc_flags`.
    pub flags: u32,
    /// Partition key index.
    pub partition_key_index: u16,
    /// Source lid.
    pub source_lid: u16,
    /// Service level.
    pub service_level: u8,
    /// Path bits of the destination lid.
    pub path_bits: u8,
}
