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

/// How many blocks are retained ([`crate::Store::retain`]), and for how long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetentionConfig {
    /// The part of the disk, or of host memory where there is none, that retained blocks may fill; of it those of one tenant have
    /// [`StoreConfig::tenant_share`]. 0: none is retained.
    pub share: f64,
    /// The longest time for which a block is retained, whatever the request asks for.
    pub longest: Duration,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        Self { share: 0.25, longest: Duration::from_secs(24 * 3600) }
    }
}

/// How the store behaves.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Longest block, in bytes.
    pub block_bytes: usize,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The NUMA node that the host tier's pages are taken from as far as it has some; `None`: each is on that of the thread that touches it
    /// first.
    pub numa_node: Option<u32>,
    /// When blocks are written to the disk.
    pub disk_write: WriteMode,
    /// How long the tiers of other nodes may take.
    pub others_deadline: Duration,
    /// The part of each tier of this node that the blocks of one tenant may fill; 1: all of it.
    pub tenant_share: f64,
    /// How many blocks may be retained, and for how long.
    pub retention: RetentionConfig,
    /// When blocks of idle conversations are fetched ahead; `None`: never.
    pub prefetch: Option<ReturnConfig>,
    /// What all traffic of a tier may take; what requests wait for comes first. By [`crate::plan::Tier::index`].
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
