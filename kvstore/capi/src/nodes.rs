//! The nodes of `[remote_tier]` as this store sees them.

use std::sync::atomic::{AtomicU64, Ordering};

use kvstore_remote::{NodeCounters, RemoteCounters};

use crate::layout::text_field;

/// Bytes of a node's name in [`NodeStatistics`], the final 0 included.
pub const NODE_NAME_BYTES: usize = 128;

/// State and counters of one node, `kvasir_kv_node_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeStatistics {
    /// Name in `remote_tier.nodes`, the part before `=`, in UTF-8 with a final 0; longer names are cut.
    pub name: [u8; NODE_NAME_BYTES],
    /// 1 while the node is used; 0 until its first answer, while it cannot be reached, and while it is avoided
    /// after a failure.
    pub is_usable: u64,
    /// Moving average of the response time of a look-up in microseconds.
    pub latency_us: u64,
    /// Requests sent.
    pub requests: u64,
    /// Requests not answered in time.
    pub timeouts: u64,
    /// Requests that the node refused for lack of room.
    pub refused: u64,
    /// Number of times that the node was avoided because it failed or could not be reached.
    pub failures: u64,
    /// Blocks read and verified, or read in place in the node's memory.
    pub read_blocks: u64,
    /// Bytes read and verified.
    pub read_bytes: u64,
    /// Blocks read with a wrong checksum.
    pub damaged_blocks: u64,
    /// Blocks that the node has stored.
    pub stored_blocks: u64,
    /// Leases held on the node now.
    pub leases: u64,
}

impl NodeStatistics {
    /// Returns the statistics of each node, in the configuration's order.
    pub(crate) fn of(counters: &RemoteCounters) -> Vec<Self> {
        counters.nodes().iter().map(|(name, node)| Self::of_node(name, node)).collect()
    }

    fn of_node(name: &str, node: &NodeCounters) -> Self {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            name: text_field(name),
            is_usable: read(&node.usable),
            latency_us: read(&node.latency_us),
            requests: read(&node.requests),
            timeouts: read(&node.timeouts),
            refused: read(&node.refused),
            failures: read(&node.failures),
            read_blocks: read(&node.read_blocks),
            read_bytes: read(&node.read_bytes),
            damaged_blocks: read(&node.damaged_blocks),
            stored_blocks: read(&node.stored_blocks),
            leases: read(&node.leases),
        }
    }
}
