//! Objects that the library allocates, up to the last field that is read here.

use std::ffi::{c_int, c_void};

use super::{ReceiveWorkRequest, SendWorkRequest, WorkCompletion};

/// `ibv_context_ops.poll_cq`, verbs.h:1970.
pub type PollCq = unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int;
/// `ibv_context_ops.req_notify_cq`, verbs.h:1971.
pub type RequestNotify = unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int;
/// `ibv_context_ops.post_srq_recv`, verbs.h:1979.
pub type PostSharedReceive = unsafe extern "C" fn(
    *mut SharedReceiveQueue,
    *mut ReceiveWorkRequest,
    *mut *mut ReceiveWorkRequest,
) -> c_int;
/// `ibv_context_ops.post_send`, verbs.h:1986.
pub type PostSend =
    unsafe extern "C" fn(*mut QueuePair, *mut SendWorkRequest, *mut *mut SendWorkRequest) -> c_int;

/// `struct ibv_device`, verbs.h:1940.
#[repr(C)]
pub struct Device {
    /// Obsolete.
    pub operations: [*mut c_void; 2],
    /// `enum ibv_node_type`.
    pub node_type: i32,
    /// `enum ibv_transport_type`.
    pub transport_type: i32,
    /// Name of the kernel's device, such as `mlx5_0`, ended by a zero.
    pub name: [u8; 64],
}

/// `struct ibv_context_ops`, verbs.h:1955: the calls of the data path are taken from here, as the header's
/// inline functions do. Entries that are not called through the table are plain pointers.
#[repr(C)]
pub struct ContextOperations {
    /// `_compat_query_device` to `_compat_create_cq`.
    pub before_poll: [*mut c_void; 11],
    /// `poll_cq`.
    pub poll_cq: Option<PollCq>,
    /// `req_notify_cq`.
    pub request_notify: Option<RequestNotify>,
    /// `_compat_cq_event` to `_compat_destroy_srq`.
    pub before_post_shared_receive: [*mut c_void; 7],
    /// `post_srq_recv`.
    pub post_shared_receive: Option<PostSharedReceive>,
    /// `_compat_create_qp` to `_compat_destroy_qp`.
    pub before_post_send: [*mut c_void; 4],
    /// `post_send`.
    pub post_send: Option<PostSend>,
    /// `post_recv`: unused, every queue pair here has a shared receive queue.
    pub post_receive: *mut c_void,
    /// `_compat_create_ah` to `_compat_async_event`.
    pub rest: [*mut c_void; 5],
}

/// `struct ibv_context`, verbs.h:1998.
#[repr(C)]
pub struct Context {
    /// The device that was opened.
    pub device: *mut Device,
    /// The calls of the data path.
    pub operations: ContextOperations,
    /// Descriptor of the uverbs device.
    pub command_descriptor: c_int,
    /// Descriptor that is readable when an asynchronous event is pending.
    pub async_descriptor: c_int,
    /// Interrupt vectors that a completion channel can use.
    pub completion_vectors: c_int,
}

/// `struct ibv_pd`, verbs.h:627.
#[repr(C)]
pub struct ProtectionDomain {
    /// Context of the device.
    pub context: *mut Context,
    /// The kernel's handle.
    pub handle: u32,
}

/// `struct ibv_mr`, verbs.h:663.
#[repr(C)]
pub struct MemoryRegion {
    /// Context of the device.
    pub context: *mut Context,
    /// Protection domain of the region.
    pub domain: *mut ProtectionDomain,
    /// Address of the first byte.
    pub address: *mut c_void,
    /// Bytes.
    pub length: usize,
    /// The kernel's handle.
    pub handle: u32,
    /// Key by which local work requests name the region.
    pub local_key: u32,
    /// Key by which a peer's work requests name the region.
    pub remote_key: u32,
}

/// `struct ibv_comp_channel`, verbs.h:1464.
#[repr(C)]
pub struct CompletionChannel {
    /// Context of the device.
    pub context: *mut Context,
    /// Descriptor that is readable when an event is pending.
    pub descriptor: c_int,
    /// Number of completion queues that use the channel.
    pub references: c_int,
}

/// `struct ibv_cq`, verbs.h:1470.
#[repr(C)]
pub struct CompletionQueue {
    /// Context of the device.
    pub context: *mut Context,
    /// Channel of the queue's completion events.
    pub channel: *mut CompletionChannel,
    /// User context (`cq_context`).
    pub user: *mut c_void,
    /// The kernel's handle.
    pub handle: u32,
    /// Entries that the queue has, which may be more than asked for.
    pub entries: c_int,
}

/// `struct ibv_srq`, verbs.h:1215.
#[repr(C)]
pub struct SharedReceiveQueue {
    /// Context of the device.
    pub context: *mut Context,
    /// User context (`srq_context`).
    pub user: *mut c_void,
    /// Protection domain of the queue.
    pub domain: *mut ProtectionDomain,
    /// The kernel's handle.
    pub handle: u32,
}

/// `struct ibv_qp`, verbs.h:1255.
#[repr(C)]
pub struct QueuePair {
    /// Context of the device.
    pub context: *mut Context,
    /// User context (`qp_context`).
    pub user: *mut c_void,
    /// Protection domain of the pair.
    pub domain: *mut ProtectionDomain,
    /// Completion queue of sends.
    pub send_completions: *mut CompletionQueue,
    /// Completion queue of receives.
    pub receive_completions: *mut CompletionQueue,
    /// Shared receive queue of the pair.
    pub shared_receives: *mut SharedReceiveQueue,
    /// The kernel's handle.
    pub handle: u32,
    /// Queue pair number on the wire, 24 bits.
    pub number: u32,
    /// `enum ibv_qp_state`, as of the library's last call.
    pub state: u32,
    /// `enum ibv_qp_type`.
    pub kind: u32,
}

/// `struct ibv_async_event`, verbs.h:472.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    /// The queue pair, queue or (in the low 32 bits) port that the event concerns.
    pub element: *mut c_void,
    /// `enum ibv_event_type`.
    pub kind: u32,
}
