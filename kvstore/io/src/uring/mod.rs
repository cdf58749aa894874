//! io_uring on files and block devices: READ_FIXED and WRITE_FIXED for registered memory, READ and WRITE for
//! other memory.
//!
//! Files are registered, so that no request looks up a descriptor. See `ring` for the queues and the hot path.

mod commands;
#[cfg(test)]
mod tests;

pub use commands::FileCommands;

use crate::IoError;
use crate::files::Files;
pub use crate::ring::RingConfig;
use crate::ring::RingEngine;

/// Name in errors, metrics and benchmarks.
pub(crate) const NAME: &str = "io_uring";

/// An engine on files over io_uring.
pub type UringEngine = RingEngine<FileCommands>;

/// Opens the engine. Fails where io_uring is forbidden or missing; `PreadEngine` works there.
pub fn open(files: Files, config: &RingConfig) -> Result<UringEngine, IoError> {
    if config.io_poll {
        files.require_poll_queues(NAME)?;
    }
    let ring = UringEngine::ring(NAME, config)?;
    let geometry = files.geometry(config.transfer_bytes_max, config.depth);
    // A request that the block layer splits is not polled for, and never completes in a ring that polls (seen on 6.1).
    let part_bytes_max = if config.io_poll { files.device_bytes_max() } else { usize::MAX };
    let commands = FileCommands::new(files, &ring.submitter(), part_bytes_max)?;
    Ok(RingEngine::assemble(ring, commands, geometry))
}
