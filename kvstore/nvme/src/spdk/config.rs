//! Settings of an engine over SPDK.

use std::path::PathBuf;
use std::time::Duration;

use crate::NvmeError;

/// Settings of an engine over SPDK.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpdkConfig {
    /// SPDK's transport id: `trtype:PCIe traddr:0000:01:00.0`. No default.
    pub transport: String,
    /// Number of the namespace. Default 1.
    pub namespace: u32,
    /// Maximum number of requests queued or in flight. 1 to 4,096, default 128.
    pub requests_max: usize,
    /// The longest request, in bytes. 4 KiB to 64 MiB, a multiple of 4 KiB, default 8 MiB.
    pub transfer_bytes_max: usize,
    /// Number of buffers in SPDK's memory, for requests with their own memory. 1 to 1,024, default 16.
    pub bounce_buffers: u16,
    /// Bytes of each bounce buffer. 4 KiB to 1 MiB, a multiple of 4 KiB, default 64 KiB.
    pub bounce_bytes: usize,
    /// After this time without a completion the controller is reset. 1 ms to 10 min, default 10 s.
    pub command_timeout: Duration,
    /// Shared libraries, in the order of loading. Default: none, which is SPDK's environment over DPDK and its NVMe driver, after the
    /// libraries of OpenSSL and DPDK that they need, all on the loader's path (SPDK's own know `/usr/local/lib`; elsewhere `ldconfig`
    /// or `LD_LIBRARY_PATH` must name the folder). A library of one's own that is linked with all of them will do, too.
    pub libraries: Vec<PathBuf>,
}

impl SpdkConfig {
    /// Returns the default settings for a device.
    #[must_use]
    pub fn new(transport: impl Into<String>) -> Self {
        Self {
            transport: transport.into(),
            namespace: 1,
            requests_max: 128,
            transfer_bytes_max: 8 << 20,
            bounce_buffers: 16,
            bounce_bytes: 64 << 10,
            command_timeout: Duration::from_secs(10),
            libraries: Vec::new(),
        }
    }

    pub(super) fn check(&self) -> Result<(), NvmeError> {
        crate::NvmeConfig {
            namespace: self.namespace,
            requests_max: self.requests_max,
            transfer_bytes_max: self.transfer_bytes_max,
            bounce_buffers: self.bounce_buffers,
            bounce_bytes: self.bounce_bytes,
            command_timeout: self.command_timeout,
            ..crate::NvmeConfig::default()
        }
        .check()
    }
}
