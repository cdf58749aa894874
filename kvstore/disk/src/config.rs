//! Areas and settings of a store. The defaults exist here only.

use std::time::{Duration, Instant, SystemTime};

use crate::DiskError;
use crate::format::PAGE_BYTES;

/// Maximum number of areas of a row.
pub const STRIPES_MAX: u32 = 64;

/// One contiguous range that becomes one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// The engine's number of the file or device.
    pub file: u32,
    /// First byte, a multiple of 4 KiB.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A point in time on both clocks: the monotonic one for deadlines, the wall clock for what is written to disk.
#[derive(Debug, Clone, Copy)]
pub struct ClockReading {
    /// For deadlines and rates.
    pub instant: Instant,
    /// Seconds since 1970, for records and for the endurance budget.
    pub unix_s: u64,
}

impl ClockReading {
    /// Returns the present time of both clocks.
    #[must_use]
    pub fn now() -> Self {
        let unix_s =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |past| past.as_secs());
        Self { instant: Instant::now(), unix_s }
    }
}

/// Settings of a [`crate::DiskLog`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// Fingerprint of model, weights and block layout; a store with another one is not used.
    pub fingerprint: u64,
    /// Bytes of one slot, a multiple of 4 KiB, 4 KiB to 1 GiB.
    pub slot_bytes: u32,
    /// Longest opaque bytes (token ids) kept beside a block, 0 to 1024.
    pub meta_bytes_max: u16,
    /// Number of areas that form a row: slot n of a row lies in its area n mod `stripes`, so that consecutive
    /// slots are on different devices. 1 to [`STRIPES_MAX`], and a divisor of the number of areas. Only the
    /// numbering of slots depends on it, so it may change between starts.
    pub stripes: u32,
    /// Whether areas with other contents are formatted anew. Blank areas always are.
    pub reformat: bool,
    /// Maximum number of reads and writes of blocks in flight, 1 to 65536.
    pub operations_max: u32,
    /// Maximum time that a record waits for more records to share its table write, 0 to 10 s.
    pub table_delay: Duration,
    /// Maximum number of table writes in flight, 1 to 1024.
    pub table_writes_max: u32,
    /// A request without an answer for this long makes the log unavailable, 10 ms to 10 min.
    pub operation_timeout: Duration,
    /// First pause before an unavailable device is tried again; doubles up to 32 times itself.
    pub probe_interval: Duration,
    /// Maximum number of bytes that one `poll` checksums, at least 64 KiB.
    pub checksum_bytes_per_poll: usize,
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self {
            fingerprint: 0,
            slot_bytes: 1 << 20,
            meta_bytes_max: 128,
            stripes: 1,
            reformat: false,
            operations_max: 128,
            table_delay: Duration::from_millis(50),
            table_writes_max: 16,
            operation_timeout: Duration::from_secs(10),
            probe_interval: Duration::from_secs(1),
            checksum_bytes_per_poll: 1 << 20,
        }
    }
}

impl DiskConfig {
    /// Checks the ranges of the settings. The error names the first one that is out of range, and its value.
    pub fn validate(&self) -> Result<(), DiskError> {
        let check = |object: &str, valid: bool, value: String, range: &str| {
            if valid {
                return Ok(());
            }
            Err(DiskError::Configuration {
                object: object.to_owned(),
                reason: format!("{value} is not in the range {range}"),
            })
        };
        let slot = self.slot_bytes as usize;
        let slot_fits = slot.is_multiple_of(PAGE_BYTES) && (PAGE_BYTES..=1 << 30).contains(&slot);
        check("slot_bytes", slot_fits, slot.to_string(), "4 KiB to 1 GiB in steps of 4 KiB")?;
        check("meta_bytes_max", self.meta_bytes_max <= 1024, self.meta_bytes_max.to_string(), "0 to 1024")?;
        check("stripes", (1..=STRIPES_MAX).contains(&self.stripes), self.stripes.to_string(), "1 to 64")?;
        let operations = (1..=65_536).contains(&self.operations_max);
        check("operations_max", operations, self.operations_max.to_string(), "1 to 65536")?;
        let tables = (1..=1024).contains(&self.table_writes_max);
        check("table_writes_max", tables, self.table_writes_max.to_string(), "1 to 1024")?;
        let delay = self.table_delay <= Duration::from_secs(10);
        check("table_delay", delay, format!("{:?}", self.table_delay), "0 to 10 s")?;
        let timeout = (Duration::from_millis(10)..=Duration::from_mins(10)).contains(&self.operation_timeout);
        check("operation_timeout", timeout, format!("{:?}", self.operation_timeout), "10 ms to 10 min")?;
        let probe = (Duration::from_millis(1)..=Duration::from_mins(1)).contains(&self.probe_interval);
        check("probe_interval", probe, format!("{:?}", self.probe_interval), "1 ms to 1 min")?;
        let checksum = self.checksum_bytes_per_poll;
        check("checksum_bytes_per_poll", checksum >= 64 << 10, checksum.to_string(), "64 KiB and more")
    }
}
