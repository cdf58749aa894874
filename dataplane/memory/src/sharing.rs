//! The seam for a device's memory that processes of one machine share: each attaches the other's slab, and copies to it.

use std::fmt;
use std::sync::Arc;

use crate::{Copier, DeviceError, Slab, SlabLayout};

/// Most bytes of a name that [`DeviceSharing::export`] gives.
pub const EXPORT_BYTES_MAX: usize = 256;

/// The slab of another process, as it is reached from here.
pub struct AttachedSlab {
    /// Copies between this process's slab and that one. Dropped first: it waits for what the device still does.
    pub copier: Box<dyn Copier>,
    /// Over the other process's memory; its generations are this process's own and mean nothing to the other.
    pub slab: Arc<Slab>,
}

impl fmt::Debug for AttachedSlab {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AttachedSlab").field("layout", &self.slab.layout()).finish_non_exhaustive()
    }
}

/// Gives one slab in a device's memory to other processes of the machine, and reaches theirs.
///
/// A process that has the exported bytes has all of the memory: there is no smaller right.
pub trait DeviceSharing: Send + Sync + fmt::Debug {
    /// The slab that is given.
    fn slab(&self) -> &Arc<Slab>;

    /// The bytes by which another process attaches it, at most [`EXPORT_BYTES_MAX`]. They are good while the slab lives.
    ///
    /// # Errors
    /// When the driver exports no such memory.
    fn export(&self) -> Result<Vec<u8>, DeviceError>;

    /// Whether the slots of a slab of this process are sources of writes to an attached slab, and destinations of reads.
    fn carries(&self, slab: &Arc<Slab>) -> bool;

    /// Attaches a slab of another process. The bytes come from it, and are checked by the driver. Blocks, for milliseconds.
    ///
    /// # Errors
    /// When no memory of this name is reached from here, it is smaller than the layout, or this process exported it.
    fn attach(&self, exported: &[u8], layout: SlabLayout) -> Result<AttachedSlab, DeviceError>;
}
