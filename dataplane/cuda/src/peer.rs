//! Access between two devices of one machine.

use cudarc::driver::sys::{CUdevice, CUdevice_P2PAttribute as Attribute};

use crate::error::CudaError;
use crate::library::Library;

/// Connection between two devices, as far as the driver reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerPath {
    /// NVLink: atomic operations are supported.
    NvLink,
    /// PCIe: memory is accessible, without atomic operations.
    Pcie,
    /// No direct access: copies go through host memory.
    Host,
}

/// Access from one device to another, as the driver reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLink {
    /// The connection.
    pub path: PeerPath,
    /// Performance rank: 0 is the fastest link of this machine; a larger number is slower.
    pub performance_rank: u32,
}

impl PeerLink {
    /// Whether one device can access the other's memory.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.path != PeerPath::Host
    }
}

pub(crate) fn link(library: &Library, from: CUdevice, to: CUdevice) -> Result<PeerLink, CudaError> {
    let mut reachable = 0;
    // SAFETY: writes one integer.
    let asked = unsafe { (library.can_access_peer)(&mut reachable, from, to) };
    library.check("cuDeviceCanAccessPeer", asked)?;
    if reachable == 0 {
        return Ok(PeerLink { path: PeerPath::Host, performance_rank: u32::MAX });
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: writes one integer.
        let asked = unsafe { (library.peer_attribute)(&mut value, which, from, to) };
        library.check("cuDeviceGetP2PAttribute", asked).map(|()| u32::try_from(value).unwrap_or(0))
    };
    let atomics = attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)?;
    Ok(PeerLink {
        path: if atomics > 0 { PeerPath::NvLink } else { PeerPath::Pcie },
        performance_rank: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
    })
}
