//! Plain structs that describe devices, ports and queue pairs.

use std::ffi::{c_int, c_void};

use super::{CompletionQueue, SharedReceiveQueue};

/// `union ibv_gid`, verbs.h:65. The header aligns it for its 64-bit arm.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gid {
    /// The GID in network order: an IPv6 address in form.
    pub raw: [u8; 16],
}

/// `struct ibv_device_attr`, verbs.h:182.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DeviceAttributes {
    /// Firmware version, ended by a zero.
    pub firmware: [u8; 64],
    /// In network byte order.
    pub node_guid: u64,
    /// In network byte order.
    pub system_image_guid: u64,
    /// Largest region, bytes.
    pub region_bytes_max: u64,
    /// Supported page sizes.
    pub page_sizes: u64,
    /// PCI vendor.
    pub vendor_id: u32,
    /// PCI device.
    pub vendor_part_id: u32,
    /// Hardware revision.
    pub hardware_version: u32,
    /// Queue pairs.
    pub queue_pairs_max: c_int,
    /// Work requests of one queue.
    pub work_requests_max: c_int,
    /// `enum ibv_device_cap_flags`.
    pub capabilities: u32,
    /// Entries of one work request.
    pub entries_max: c_int,
    /// Entries of one read.
    pub read_entries_max: c_int,
    /// Completion queues.
    pub completion_queues_max: c_int,
    /// Entries of one completion queue.
    pub completion_entries_max: c_int,
    /// Memory regions.
    pub regions_max: c_int,
    /// Protection domains.
    pub domains_max: c_int,
    /// Reads and atomics that one queue pair answers at a time.
    pub reads_as_target_max: c_int,
    /// `max_ee_rd_atom`.
    pub ee_reads_max: c_int,
    /// `max_res_rd_atom`.
    pub reads_total_max: c_int,
    /// Reads and atomics that one queue pair asks for at a time.
    pub reads_as_initiator_max: c_int,
    /// `max_ee_init_rd_atom` to `max_map_per_fmr`.
    pub unused: [c_int; 13],
    /// Shared receive queues.
    pub shared_receives_max: c_int,
    /// Work requests of one shared receive queue.
    pub shared_receive_requests_max: c_int,
    /// Entries of one work request of a shared receive queue.
    pub shared_receive_entries_max: c_int,
    /// Partition keys.
    pub partition_keys_max: u16,
    /// Delay of an acknowledgement, as the exponent of a time.
    pub acknowledge_delay: u8,
    /// Ports.
    pub port_count: u8,
}

/// `struct ibv_port_attr`, verbs.h:424.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PortAttributes {
    /// `enum ibv_port_state`.
    pub state: u32,
    /// `enum ibv_mtu`.
    pub mtu_max: u32,
    /// `enum ibv_mtu`.
    pub mtu_active: u32,
    /// Rows of the GID table.
    pub gid_count: c_int,
    /// `enum ibv_port_cap_flags`.
    pub capabilities: u32,
    /// Longest message, bytes.
    pub message_bytes_max: u32,
    /// `bad_pkey_cntr`.
    pub bad_partition_keys: u32,
    /// `qkey_viol_cntr`.
    pub queue_key_violations: u32,
    /// Rows of the partition key table.
    pub partition_key_count: u16,
    /// LID of the port; zero on Ethernet.
    pub lid: u16,
    /// LID of the subnet manager.
    pub manager_lid: u16,
    /// `lmc`.
    pub lid_mask: u8,
    /// `max_vl_num`.
    pub virtual_lanes: u8,
    /// `sm_sl`.
    pub manager_service_level: u8,
    /// `subnet_timeout`.
    pub subnet_timeout: u8,
    /// `init_type_reply`.
    pub init_type_reply: u8,
    /// Lanes of the link, as a bit: 1, 2 (4x), 4 (8x), 8 (12x), 16 (2x).
    pub active_width: u8,
    /// Speed of one lane, as a code.
    pub active_speed: u8,
    /// `phys_state`.
    pub physical_state: u8,
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// `IBV_QPF_*`.
    pub flags: u8,
    /// `port_cap_flags2`.
    pub capabilities2: u16,
}

/// `struct ibv_global_route`, verbs.h:686.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct GlobalRoute {
    /// The peer's GID.
    pub destination: Gid,
    /// Flow label.
    pub flow_label: u32,
    /// Row of the local port's GID table.
    pub source_gid_index: u8,
    /// Routers that a packet may pass.
    pub hop_limit: u8,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`, verbs.h:757.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct AddressAttributes {
    /// Global route, when `is_global`.
    pub route: GlobalRoute,
    /// LID of the peer, on InfiniBand.
    pub destination_lid: u16,
    /// Service level.
    pub service_level: u8,
    /// Path bits of the local LID.
    pub source_path_bits: u8,
    /// `enum ibv_rate`.
    pub static_rate: u8,
    /// Nonzero: the global route is used.
    pub is_global: u8,
    /// Local port.
    pub port: u8,
}

/// `struct ibv_qp_cap`, verbs.h:906.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct QueuePairCapacity {
    /// Send work requests.
    pub send_requests: u32,
    /// Receive work requests; none with a shared receive queue.
    pub receive_requests: u32,
    /// Entries of a send.
    pub send_entries: u32,
    /// Entries of a receive.
    pub receive_entries: u32,
    /// Inline bytes of a work request.
    pub inline_bytes: u32,
}

/// `struct ibv_qp_init_attr`, verbs.h:914.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QueuePairInit {
    /// User context (`qp_context`).
    pub user: *mut c_void,
    /// Completion queue of sends.
    pub send_completions: *mut CompletionQueue,
    /// Completion queue of receives.
    pub receive_completions: *mut CompletionQueue,
    /// Shared receive queue of the pair.
    pub shared_receives: *mut SharedReceiveQueue,
    /// On entry the sizes asked for, on return the sizes of the pair.
    pub capacity: QueuePairCapacity,
    /// `enum ibv_qp_type`.
    pub kind: u32,
    /// Nonzero: every send completes.
    pub signal_all: c_int,
}

/// `struct ibv_qp_attr`, verbs.h:1052.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct QueuePairAttributes {
    /// `enum ibv_qp_state`.
    pub state: u32,
    /// `enum ibv_qp_state`.
    pub current_state: u32,
    /// `enum ibv_mtu`.
    pub path_mtu: u32,
    /// `enum ibv_mig_state`.
    pub migration_state: u32,
    /// `qkey`, used by datagram pairs only.
    pub queue_key: u32,
    /// First packet sequence number expected from the peer.
    pub receive_psn: u32,
    /// First packet sequence number of this side.
    pub send_psn: u32,
    /// Number of the peer's queue pair.
    pub destination: u32,
    /// Access that the peer has, `enum ibv_access_flags`.
    pub access: u32,
    /// Queue sizes of the pair.
    pub capacity: QueuePairCapacity,
    /// Address of the peer.
    pub address: AddressAttributes,
    /// Address of the alternate path, unused.
    pub alternative: AddressAttributes,
    /// Row of the partition key table.
    pub partition_key_index: u16,
    /// Partition key row of the alternate path, unused.
    pub alternative_partition_key_index: u16,
    /// `en_sqd_async_notify`.
    pub notify_drained: u8,
    /// `sq_draining`.
    pub draining: u8,
    /// RDMA reads that this side has in flight.
    pub reads_as_initiator: u8,
    /// RDMA reads in flight that this side answers.
    pub reads_as_target: u8,
    /// Code of the delay that is requested of a peer for which no receive was posted.
    pub receiver_not_ready_timer: u8,
    /// Local port.
    pub port: u8,
    /// Exponent t of the acknowledgement timeout of 4.096 us × 2^t.
    pub timeout: u8,
    /// Retries after a timeout.
    pub retry_count: u8,
    /// Retries after "receiver not ready"; 7 retries without limit.
    pub receiver_not_ready_retry: u8,
    /// Port of the alternate path, unused.
    pub alternative_port: u8,
    /// Timeout of the alternate path, unused.
    pub alternative_timeout: u8,
    /// Rate limit in kbit/s, for packet pacing.
    pub rate_limit: u32,
}

/// `struct ibv_srq_attr`, verbs.h:772.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedReceiveAttributes {
    /// Work requests.
    pub requests: u32,
    /// Entries of each work request.
    pub entries: u32,
    /// Number of posted receives below which an event is raised.
    pub limit: u32,
}

/// `struct ibv_srq_init_attr`, verbs.h:778.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SharedReceiveInit {
    /// User context (`srq_context`).
    pub user: *mut c_void,
    /// Sizes of the queue.
    pub attributes: SharedReceiveAttributes,
}
