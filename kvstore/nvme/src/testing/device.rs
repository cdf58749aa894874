//! Properties and counters of the software controller.

/// Properties of the device that a software controller emulates.
#[derive(Debug, Clone)]
pub struct SoftwareDevice {
    /// Bytes of a block: 512 or 4096.
    pub block_bytes: usize,
    /// Blocks of namespace 1.
    pub blocks: u64,
    /// The longest transfer as a power of two of 4 KiB pages; 0 is no limit.
    pub transfer_exponent: u8,
    /// Entries of the longest queue.
    pub queue_entries_max: u16,
    /// Number of queue pairs that the device grants.
    pub queue_pairs: u16,
    /// Distance of doorbells as an exponent: `4 << doorbell_stride` bytes.
    pub doorbell_stride: u8,
    /// Whether the device takes scatter-gather descriptors.
    pub takes_sgl: bool,
    /// Whether the device has a volatile cache.
    pub has_volatile_cache: bool,
}

impl Default for SoftwareDevice {
    fn default() -> Self {
        Self {
            block_bytes: 512,
            blocks: 64 << 11,
            transfer_exponent: 7,
            queue_entries_max: 256,
            queue_pairs: 4,
            doorbell_stride: 0,
            takes_sgl: true,
            has_volatile_cache: true,
        }
    }
}

/// Counters of a software controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SoftwareCounters {
    /// I/O commands executed.
    pub commands: u64,
    /// Reads and writes with a list of pages.
    pub page_lists: u64,
    /// Reads and writes with a scatter-gather descriptor.
    pub sgl: u64,
    /// FLUSH commands.
    pub flushes: u64,
    /// Number of times that the controller was enabled.
    pub enables: u64,
    /// Number of orderly shutdowns.
    pub shutdowns: u64,
    /// Resets from outside.
    pub resets: u64,
    /// Accesses to memory that was not mapped.
    pub unmapped_accesses: u64,
    /// Commands or registers that break the specification.
    pub violations: u64,
}
