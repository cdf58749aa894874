//! [`DeviceSharing`] over the driver's IPC handles: exports a slab of this process and attaches those of
//! peers.
//!
//! The driver opens a handle only for memory on a device that this process sees too (`CUDA_VISIBLE_DEVICES`),
//! and that this device can access: over NVLink, or over PCIe where the machine supports access between
//! devices (cuda.h, `cuIpcOpenMemHandle`, `cuDeviceCanAccessPeer`).

use std::sync::Arc;

use dataplane_memory::{AttachedSlab, DeviceError, DeviceMemory, DeviceSharing, Slab, SlabLayout};

use crate::Pinned;
use crate::copier::SlotCopier;
use crate::device::Device;
use crate::ipc::IpcHandle;
use crate::slab::{DeviceSlab, failed};
use crate::stream::Priority;
use crate::submission::CopyQueueConfig;

/// Limits for the copies of one peer.
const COPIES: CopyQueueConfig = CopyQueueConfig { copies_max: 1024, tokens_max: 1024, flushes_max: 64 };

/// Shares a slab of device memory with other processes by IPC handles.
#[derive(Debug)]
pub struct IpcSharing {
    device: Device,
    slab: Arc<Slab>,
    memory: Arc<DeviceSlab>,
    /// Host slabs whose slots may be sources of writes too.
    sources: Vec<Arc<Pinned>>,
}

impl IpcSharing {
    /// Shares `slab`, whose slots lie in `memory` from its byte 0 on and which this process has allocated.
    #[must_use]
    pub fn new(slab: Arc<Slab>, memory: Arc<DeviceSlab>, sources: Vec<Arc<Pinned>>) -> Self {
        Self { device: memory.device().clone(), slab, memory, sources }
    }
}

impl DeviceSharing for IpcSharing {
    fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    fn export(&self) -> Result<Vec<u8>, DeviceError> {
        self.memory.export_ipc().map(|handle| handle.to_bytes().to_vec())
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        let mut known = self.sources.iter().map(|source| source.slab()).chain([&self.slab]);
        known.any(|known| Arc::ptr_eq(known, slab))
    }

    fn attach(&self, exported: &[u8], layout: SlabLayout) -> Result<AttachedSlab, DeviceError> {
        let wrong =
            |operation, reason: &dyn std::fmt::Display| DeviceError { operation, reason: reason.to_string() };
        let handle = exported.try_into().map(IpcHandle::from_bytes);
        let handle = handle.map_err(|_| wrong("cuIpcOpenMemHandle", &"a handle has 64 bytes"))?;
        let memory = Arc::new(DeviceSlab::attach(&self.device, handle, layout)?);
        let shared: Arc<dyn DeviceMemory> = memory.clone();
        let slab = Slab::on_device("kvasir-peer-device", layout, shared);
        let slab = Arc::new(slab.map_err(|error| wrong("attach", &error))?);
        let mut copier = SlotCopier::new(&self.device, Priority::Urgent, COPIES).map_err(failed)?;
        self.sources
            .iter()
            .try_for_each(|source| copier.add_host(source))
            .and_then(|()| copier.add_device(&self.slab, &self.memory))
            .and_then(|()| copier.add_device(&slab, &memory))
            .ok_or_else(|| wrong("attach", &"too many memories for one copier"))?;
        Ok(AttachedSlab { copier: Box::new(copier), slab })
    }
}
