//! Sizes and offsets as `layout.c` printed them with gcc on x86-64 and rdma-core 44.

use std::mem::offset_of;

use super::{
    AddressAttributes, AsyncEvent, CompletionChannel, CompletionQueue, Context, ContextOperations, Device,
    DeviceAttributes, GlobalRoute, MemoryRegion, PortAttributes, ProtectionDomain, QueuePair,
    QueuePairAttributes, QueuePairCapacity, QueuePairInit, ReceiveWorkRequest, ScatterGatherEntry,
    SendWorkRequest, SharedReceiveAttributes, SharedReceiveInit, SharedReceiveQueue, WorkCompletion,
};

macro_rules! layout {
    ($type:ident $(= $size:literal)? $(, $field:ident $offset:literal)*) => {
        const _: () = {
            $(assert!(size_of::<$type>() == $size);)?
            $(assert!(offset_of!($type, $field) == $offset);)*
        };
    };
}

layout!(ScatterGatherEntry = 16, address 0, length 8, local_key 12);
layout!(SendWorkRequest = 128, id 0, next 8, entries 16, entry_count 24, opcode 28, flags 32, immediate 36,
    remote_address 40, remote_key 48);
layout!(ReceiveWorkRequest = 32, id 0, next 8, entries 16, entry_count 24);
layout!(WorkCompletion = 48, id 0, status 8, opcode 12, vendor_error 16, byte_count 20, immediate 24,
    queue_pair_number 28, source_queue_pair 32, flags 36, partition_key_index 40, source_lid 42,
    service_level 44, path_bits 45);
layout!(MemoryRegion = 48, address 16, length 24, handle 32, local_key 36, remote_key 40);
layout!(ProtectionDomain = 16, handle 8);
// The library's own objects continue behind the last declared field.
layout!(QueuePair, user 8, domain 16, send_completions 24, receive_completions 32, shared_receives 40,
    handle 48, number 52, state 56, kind 60);
layout!(CompletionQueue, channel 8, user 16, handle 24, entries 28);
layout!(SharedReceiveQueue, user 8, domain 16, handle 24);
layout!(Context, device 0, operations 8, command_descriptor 264, async_descriptor 268, completion_vectors 272);
layout!(ContextOperations = 256, poll_cq 88, request_notify 96, post_shared_receive 160, post_send 200,
    post_receive 208);
layout!(Device, node_type 16, transport_type 20, name 24);
layout!(DeviceAttributes = 232, node_guid 64, region_bytes_max 80, vendor_id 96, queue_pairs_max 108,
    work_requests_max 112, entries_max 120, read_entries_max 124, completion_queues_max 128,
    completion_entries_max 132, regions_max 136, reads_as_target_max 144, reads_as_initiator_max 156,
    shared_receives_max 212, shared_receive_requests_max 216, shared_receive_entries_max 220,
    partition_keys_max 224, acknowledge_delay 226, port_count 227);
layout!(PortAttributes = 52, state 0, mtu_max 4, mtu_active 8, gid_count 12, capabilities 16,
    message_bytes_max 20, partition_key_count 32, lid 34, active_width 43, active_speed 44, physical_state 45,
    link_layer 46, flags 47);
layout!(QueuePairCapacity = 20);
layout!(QueuePairInit = 64, send_completions 8, receive_completions 16, shared_receives 24, capacity 32,
    kind 52, signal_all 56);
layout!(AddressAttributes = 32, destination_lid 24, service_level 26, source_path_bits 27, static_rate 28,
    is_global 29, port 30);
layout!(GlobalRoute = 24, flow_label 16, source_gid_index 20, hop_limit 21, traffic_class 22);
layout!(QueuePairAttributes = 144, path_mtu 8, queue_key 16, receive_psn 20, send_psn 24, destination 28,
    access 32, capacity 36, address 56, alternative 88, partition_key_index 120, reads_as_initiator 126,
    reads_as_target 127, receiver_not_ready_timer 128, port 129, timeout 130, retry_count 131,
    receiver_not_ready_retry 132, rate_limit 136);
layout!(SharedReceiveAttributes = 12);
layout!(SharedReceiveInit = 24, attributes 8);
layout!(CompletionChannel = 16, descriptor 8, references 12);
layout!(AsyncEvent = 16, kind 8);
