//! Configuration of the store and its tiers.

use std::time::Duration;

use crate::plan::{BandwidthLimit, ReturnConfig, TIERS};

/// When a block is written to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteMode {
    /// As soon as host memory has it.
    #[default]
    Through,
    /// When it has to leave host memory.
    Back,
}

/// Limits of retention ([`crate::Store::retain`]): the number of blocks, and the time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetentionConfig {
    /// Part of the disk, or of host memory without a disk, that retained blocks may fill; the blocks of one
    /// tenant may fill [`StoreConfig::tenant_share`] of that. 0: no block is retained.
    pub share: f64,
    /// The longest time for which a block is retained, even if the request asks for more.
    pub longest: Duration,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        Self { share: 0.25, longest: Duration::from_secs(24 * 3600) }
    }
}

/// Configuration of a store.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Longest block, in bytes.
    pub block_bytes: usize,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// NUMA node that the host tier's pages are taken from as far as it has some; `None`: each page is on the
    /// node of the thread that touches it first.
    pub numa_node: Option<u32>,
    /// When blocks are written to the disk.
    pub disk_write: WriteMode,
    /// Longest time that a search in the tiers of other nodes may take.
    pub others_deadline: Duration,
    /// Part of each tier of this node that the blocks of one tenant may fill; 1: all of it.
    pub tenant_share: f64,
    /// Limits of retention: the number of blocks, and the time.
    pub retention: RetentionConfig,
    /// When blocks of idle conversations are fetched ahead; `None`: never.
    pub prefetch: Option<ReturnConfig>,
    /// Bandwidth of each tier for all of its traffic, by [`crate::plan::Tier::index`]; `None`: no limit.
    /// Transfers that requests wait for come first.
    pub bandwidth: [Option<BandwidthLimit>; TIERS],
}

impl StoreConfig {
    /// Blocks of at most `block_bytes`; everything else as it is by default.
    #[must_use]
    pub fn new(block_bytes: usize, block_tokens: u32) -> Self {
        Self {
            block_bytes,
            block_tokens,
            numa_node: None,
            disk_write: WriteMode::Through,
            others_deadline: Duration::from_millis(200),
            tenant_share: 1.0,
            retention: RetentionConfig::default(),
            prefetch: Some(ReturnConfig::default()),
            bandwidth: [None; TIERS],
        }
    }
}
