//! Settings of the driver.

use std::time::Duration;

use crate::NvmeError;

/// Settings of one engine. [`NvmeConfig::default`] is the one place of the defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeConfig {
    /// Number of the namespace that is read and written. Default 1.
    pub namespace: u32,
    /// Submission and completion queue pairs; the commands go round them. 1 to 16, default 1; a controller that grants
    /// fewer is used with fewer.
    pub queue_pairs: u16,
    /// Entries of each queue, one more than commands in flight on it. 2 to 1,024, default 128; bounded by the
    /// controller (CAP.MQES).
    pub queue_entries: u16,
    /// Requests that may be queued or in flight. 1 to 4,096, default 128.
    pub requests_max: usize,
    /// The longest request, in bytes; split into commands as the controller needs. 4 KiB to 64 MiB, a multiple of
    /// 4 KiB, default 8 MiB.
    pub transfer_bytes_max: usize,
    /// Pinned buffers for requests whose memory is their own (headers, tables), through which these are copied. 1 to
    /// 1,024, default 16.
    pub bounce_buffers: u16,
    /// Bytes of each of those. 4 KiB to 1 MiB, a multiple of 4 KiB, default 64 KiB.
    pub bounce_bytes: usize,
    /// After this time without a completion a command is aborted. 1 ms to 10 min, default 10 s.
    pub command_timeout: Duration,
    /// After this time the abort has failed and the controller is reset; also the limit of an admin command. 1 ms to
    /// 10 min, default 5 s.
    pub admin_timeout: Duration,
    /// Whether transfers of more than two pages use a scatter-gather descriptor where the controller takes it, which
    /// saves the list of pages. Default true.
    pub use_sgl: bool,
}

impl Default for NvmeConfig {
    fn default() -> Self {
        Self {
            namespace: 1,
            queue_pairs: 1,
            queue_entries: 128,
            requests_max: 128,
            transfer_bytes_max: 8 << 20,
            bounce_buffers: 16,
            bounce_bytes: 64 << 10,
            command_timeout: Duration::from_secs(10),
            admin_timeout: Duration::from_secs(5),
            use_sgl: true,
        }
    }
}

impl NvmeConfig {
    pub(crate) fn check(&self) -> Result<(), NvmeError> {
        let check = |key, value: u64, range: std::ops::RangeInclusive<u64>, step: u64, expected| {
            let possible = range.contains(&value) && value.is_multiple_of(step);
            if possible { Ok(()) } else { Err(NvmeError::Config { key, value, expected }) }
        };
        let timeouts = [("command_timeout", self.command_timeout), ("admin_timeout", self.admin_timeout)];
        check("namespace", self.namespace.into(), 1..=u64::from(u32::MAX - 1), 1, "1 to 4294967294")?;
        check("queue_pairs", self.queue_pairs.into(), 1..=16, 1, "1 to 16")?;
        check("queue_entries", self.queue_entries.into(), 2..=1024, 1, "2 to 1024")?;
        check("requests_max", self.requests_max as u64, 1..=4096, 1, "1 to 4096")?;
        let bytes = self.transfer_bytes_max as u64;
        check("transfer_bytes_max", bytes, 4096..=64 << 20, 4096, "4 KiB to 64 MiB, a multiple of 4 KiB")?;
        check("bounce_buffers", self.bounce_buffers.into(), 1..=1024, 1, "1 to 1024")?;
        let bytes = self.bounce_bytes as u64;
        check("bounce_bytes", bytes, 4096..=1 << 20, 4096, "4 KiB to 1 MiB, a multiple of 4 KiB")?;
        for (key, timeout) in timeouts {
            check(key, timeout.as_millis() as u64, 1..=600_000, 1, "1 ms to 10 min")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused() {
        let config = NvmeConfig::default();
        assert_eq!(config.check(), Ok(()));
        for (key, config) in [
            ("namespace", NvmeConfig { namespace: 0, ..config.clone() }),
            ("queue_pairs", NvmeConfig { queue_pairs: 17, ..config.clone() }),
            ("queue_entries", NvmeConfig { queue_entries: 1, ..config.clone() }),
            ("requests_max", NvmeConfig { requests_max: 0, ..config.clone() }),
            ("transfer_bytes_max", NvmeConfig { transfer_bytes_max: 5000, ..config.clone() }),
            ("bounce_buffers", NvmeConfig { bounce_buffers: 0, ..config.clone() }),
            ("bounce_bytes", NvmeConfig { bounce_bytes: 2 << 20, ..config.clone() }),
            ("command_timeout", NvmeConfig { command_timeout: Duration::ZERO, ..config.clone() }),
            ("admin_timeout", NvmeConfig { admin_timeout: Duration::from_secs(601), ..config.clone() }),
        ] {
            assert!(
                matches!(config.check(), Err(NvmeError::Config { key: found, .. }) if found == key),
                "{key}"
            );
        }
    }
}
