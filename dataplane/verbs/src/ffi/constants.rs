//! Values of the header's enums. Unknown ones are carried as numbers and end in errors, never in panics.

/// `IBV_ACCESS_LOCAL_WRITE`, verbs.h:608.
pub const ACCESS_LOCAL_WRITE: u32 = 1;
/// `IBV_ACCESS_REMOTE_WRITE`, verbs.h:608.
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
/// `IBV_ACCESS_REMOTE_READ`, verbs.h:608.
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
/// `IBV_ACCESS_RELAXED_ORDERING`, verbs.h:617 and ib_user_ioctl_verbs.h:44. Optional: old kernels drop it.
pub const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;

/// `IBV_PORT_ACTIVE`, verbs.h:372.
pub const PORT_ACTIVE: u32 = 4;
/// `IBV_LINK_LAYER_INFINIBAND`, verbs.h:380.
pub const LINK_LAYER_INFINIBAND: u8 = 1;
/// `IBV_LINK_LAYER_ETHERNET`, verbs.h:380.
pub const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_QPF_GRH_REQUIRED`, verbs_api.h: the port requires a global route in every address.
pub const PORT_FLAG_GRH_REQUIRED: u8 = 1;

/// `IBV_QPT_RC`, verbs.h:896.
pub const QPT_RC: u32 = 2;

/// `IBV_QPS_RESET`, verbs.h:1035.
pub const QPS_RESET: u32 = 0;
/// `IBV_QPS_INIT`.
pub const QPS_INIT: u32 = 1;
/// `IBV_QPS_RTR`.
pub const QPS_RTR: u32 = 2;
/// `IBV_QPS_RTS`.
pub const QPS_RTS: u32 = 3;
/// `IBV_QPS_ERR`.
pub const QPS_ERR: u32 = 6;

/// `IBV_QP_STATE`, verbs.h:1003.
pub const QP_STATE: u32 = 1;
/// `IBV_QP_ACCESS_FLAGS`.
pub const QP_ACCESS_FLAGS: u32 = 1 << 3;
/// `IBV_QP_PKEY_INDEX`.
pub const QP_PKEY_INDEX: u32 = 1 << 4;
/// `IBV_QP_PORT`.
pub const QP_PORT: u32 = 1 << 5;
/// `IBV_QP_AV`.
pub const QP_AV: u32 = 1 << 7;
/// `IBV_QP_PATH_MTU`.
pub const QP_PATH_MTU: u32 = 1 << 8;
/// `IBV_QP_TIMEOUT`.
pub const QP_TIMEOUT: u32 = 1 << 9;
/// `IBV_QP_RETRY_CNT`.
pub const QP_RETRY_CNT: u32 = 1 << 10;
/// `IBV_QP_RNR_RETRY`.
pub const QP_RNR_RETRY: u32 = 1 << 11;
/// `IBV_QP_RQ_PSN`.
pub const QP_RQ_PSN: u32 = 1 << 12;
/// `IBV_QP_MAX_QP_RD_ATOMIC`.
pub const QP_MAX_QP_RD_ATOMIC: u32 = 1 << 13;
/// `IBV_QP_MIN_RNR_TIMER`.
pub const QP_MIN_RNR_TIMER: u32 = 1 << 15;
/// `IBV_QP_SQ_PSN`.
pub const QP_SQ_PSN: u32 = 1 << 16;
/// `IBV_QP_MAX_DEST_RD_ATOMIC`.
pub const QP_MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
/// `IBV_QP_DEST_QPN`.
pub const QP_DEST_QPN: u32 = 1 << 20;

/// `IBV_WR_RDMA_WRITE`, verbs.h:1088.
pub const WR_RDMA_WRITE: u32 = 0;
/// `IBV_WR_RDMA_WRITE_WITH_IMM`.
pub const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
/// `IBV_WR_SEND`.
pub const WR_SEND: u32 = 2;
/// `IBV_WR_RDMA_READ`.
pub const WR_RDMA_READ: u32 = 4;

/// `IBV_SEND_SIGNALED`, verbs.h:1104.
pub const SEND_SIGNALED: u32 = 1 << 1;
/// `IBV_SEND_INLINE`.
pub const SEND_INLINE: u32 = 1 << 3;

/// `IBV_WC_SUCCESS`, verbs.h:483.
pub const WC_SUCCESS: u32 = 0;
/// `IBV_WC_LOC_LEN_ERR`.
pub const WC_LOC_LEN_ERR: u32 = 1;
/// `IBV_WC_LOC_QP_OP_ERR`.
pub const WC_LOC_QP_OP_ERR: u32 = 2;
/// `IBV_WC_LOC_PROT_ERR`.
pub const WC_LOC_PROT_ERR: u32 = 4;
/// `IBV_WC_WR_FLUSH_ERR`.
pub const WC_WR_FLUSH_ERR: u32 = 5;
/// `IBV_WC_REM_INV_REQ_ERR`.
pub const WC_REM_INV_REQ_ERR: u32 = 9;
/// `IBV_WC_REM_ACCESS_ERR`.
pub const WC_REM_ACCESS_ERR: u32 = 10;
/// `IBV_WC_RETRY_EXC_ERR`.
pub const WC_RETRY_EXC_ERR: u32 = 12;
/// `IBV_WC_RNR_RETRY_EXC_ERR`.
pub const WC_RNR_RETRY_EXC_ERR: u32 = 13;

/// `IBV_WC_SEND`, verbs.h:511.
pub const WC_SEND: u32 = 0;
/// `IBV_WC_RDMA_WRITE`.
pub const WC_RDMA_WRITE: u32 = 1;
/// `IBV_WC_RDMA_READ`.
pub const WC_RDMA_READ: u32 = 2;
/// `IBV_WC_RECV`.
pub const WC_RECV: u32 = 1 << 7;
/// `IBV_WC_RECV_RDMA_WITH_IMM`.
pub const WC_RECV_RDMA_WITH_IMM: u32 = (1 << 7) + 1;
/// `IBV_WC_WITH_IMM`, verbs.h:576.
pub const WC_WITH_IMM: u32 = 1 << 1;

/// `IBV_EVENT_CQ_ERR`, verbs.h:449.
pub const EVENT_CQ_ERR: u32 = 0;
/// `IBV_EVENT_QP_FATAL`.
pub const EVENT_QP_FATAL: u32 = 1;
/// `IBV_EVENT_QP_REQ_ERR`.
pub const EVENT_QP_REQ_ERR: u32 = 2;
/// `IBV_EVENT_QP_ACCESS_ERR`.
pub const EVENT_QP_ACCESS_ERR: u32 = 3;
/// `IBV_EVENT_DEVICE_FATAL`.
pub const EVENT_DEVICE_FATAL: u32 = 8;
/// `IBV_EVENT_PORT_ACTIVE`.
pub const EVENT_PORT_ACTIVE: u32 = 9;
/// `IBV_EVENT_PORT_ERR`.
pub const EVENT_PORT_ERR: u32 = 10;
/// `IBV_EVENT_LID_CHANGE`.
pub const EVENT_LID_CHANGE: u32 = 11;
/// `IBV_EVENT_PKEY_CHANGE`.
pub const EVENT_PKEY_CHANGE: u32 = 12;
/// `IBV_EVENT_CLIENT_REREGISTER`.
pub const EVENT_CLIENT_REREGISTER: u32 = 17;
/// `IBV_EVENT_GID_CHANGE`.
pub const EVENT_GID_CHANGE: u32 = 18;
/// `IBV_EVENT_SRQ_ERR`.
pub const EVENT_SRQ_ERR: u32 = 14;
/// `IBV_EVENT_QP_LAST_WQE_REACHED`.
pub const EVENT_QP_LAST_WQE_REACHED: u32 = 16;
