//! NVMe commands through the kernel, on the character device of a namespace (`/dev/ng0n1`).
//!
//! Each request is one or more NVMe READ or WRITE commands as IORING_OP_URING_CMD (NVME_URING_CMD_IO of
//! `linux/nvme_ioctl.h`): no file system, no block layer, no page cache, and the device's own status as the
//! answer. A request longer than a command may be (MDTS and the kernel's limits) is moved by commands one after
//! the other. Admin commands and FLUSH go through ioctl and block. Needs CAP_SYS_ADMIN or rights on
//! the device.
//!
//! Sources: NVM Express Base 2.0c (Identify §5.17, status §3.3.3.2), NVM Command Set 1.0c (§3.2.4 Read, §3.2.6 Write,
//! §4.1.5.1 Identify Namespace), include/uapi/linux/nvme_ioctl.h.

mod command;
mod commands;
mod device;
mod status;

pub use commands::NvmeCommands;
pub use device::{NvmeDevice, NvmeDeviceConfig};

use crate::ring::{RingConfig, RingEngine};
use crate::{Geometry, IoError};

/// Name in errors, metrics and benchmarks.
pub(crate) const NAME: &str = "nvme_passthrough";

/// An engine on one NVMe namespace, whose commands pass through the kernel.
pub type PassthroughEngine = RingEngine<NvmeCommands>;

/// Opens the engine.
pub fn open(device: NvmeDevice, config: &RingConfig) -> Result<PassthroughEngine, IoError> {
    if config.io_poll {
        device.require_poll_queues()?;
    }
    let ring = PassthroughEngine::ring(NAME, config)?;
    let geometry = Geometry {
        block_bytes: device.block_bytes(),
        transfer_bytes_max: config.transfer_bytes_max,
        depth_max: config.depth,
        files: vec![device.bytes()],
    };
    let commands = NvmeCommands::new(device, &ring.submitter())?;
    Ok(RingEngine::assemble(ring, commands, geometry))
}

#[cfg(test)]
mod tests;
