//! Interface for device memory that processes of one machine share: each attaches the other's slab, and
//! copies to it.

use std::fmt;
use std::sync::Arc;

use crate::{Copier, DeviceError, Slab, SlabLayout};

/// Most bytes that [`DeviceSharing::export`] returns.
pub const EXPORT_BYTES_MAX: usize = 256;

/// The slab of another process, as attached by this one.
pub struct AttachedSlab {
    /// Copies between this process's slab and the attached one. Dropped first: the drop waits for the
    /// device's remaining work.
    pub copier: Box<dyn Copier>,
    /// Slab over the other process's memory; its generations are local to this process and unknown to the other.
    pub slab: Arc<Slab>,
}

impl fmt::Debug for AttachedSlab {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AttachedSlab").field("layout", &self.slab.layout()).finish_non_exhaustive()
    }
}

/// Shares one slab in a device's memory with other processes of the machine, and attaches theirs.
///
/// A process that has the exported bytes can access all of the memory: there is no weaker permission.
pub trait DeviceSharing: Send + Sync + fmt::Debug {
    /// Returns the slab that is shared.
    fn slab(&self) -> &Arc<Slab>;

    /// Returns the bytes by which another process attaches the slab, at most [`EXPORT_BYTES_MAX`]. They are
    /// valid while the slab lives.
    ///
    /// # Errors
    /// If the driver cannot export such memory.
    fn export(&self) -> Result<Vec<u8>, DeviceError>;

    /// Whether the slots of a slab of this process are sources of writes to an attached slab, and destinations of reads.
    fn carries(&self, slab: &Arc<Slab>) -> bool;

    /// Attaches a slab of another process by its exported bytes, which the driver checks. Blocks, for
    /// milliseconds.
    ///
    /// # Errors
    /// If no memory with these bytes is reachable, it is smaller than the layout, or this process exported it.
    fn attach(&self, exported: &[u8], layout: SlabLayout) -> Result<AttachedSlab, DeviceError>;
}
