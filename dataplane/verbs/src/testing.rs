//! A software RDMA device inside the process, and test support for fabrics on it.
//!
//! The device is another table of entry points behind the same [`Library`], so the rest of the crate runs
//! unchanged on a machine without RDMA. It is as strict as a card: keys, ranges, domains, states, queue
//! depths and packet numbers are checked; a bad remote key puts both pairs into their error state; an empty
//! receive queue holds a sender back; after an error everything is flushed. Two devices of one process
//! reach each other.
//!
//! `world` holds the state and its rules, `execute` carries out work requests, `accelerator` gives a device
//! access to memory that the CPU cannot reach, `calls` is the C interface.

mod accelerator;
mod calls;
mod execute;
mod world;

use std::collections::HashSet;
use std::sync::Arc;
use std::thread::ThreadId;

use dataplane_fabric::PeerId;
use dataplane_memory::{DeviceMemory, SlabKind};

pub use accelerator::{Accelerator, Reach};
pub use world::{Faults, Usage};

use crate::VerbsError;
use crate::device::Device;
use crate::fabric::VerbsFabric;
use crate::ffi;
use crate::library::Library;
use crate::wire::RemoteSlots;
use world::World;

/// One software device. Devices live as long as the process; each test makes its own.
#[derive(Debug)]
pub struct SoftwareDevice {
    index: u32,
    name: String,
}

impl Default for SoftwareDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl SoftwareDevice {
    /// Creates a device with one active port and a RoCE v2 GID.
    #[must_use]
    pub fn new() -> Self {
        let (index, name) = calls::add_device(&mut World::lock());
        Self { index, name }
    }

    /// Returns the name by which [`Device::open`] finds the device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the table of entry points of all software devices.
    #[must_use]
    pub fn library() -> Arc<Library> {
        calls::library()
    }

    /// Opens the device.
    pub fn open(&self) -> Result<Arc<Device>, VerbsError> {
        Device::open(&Self::library(), Some(&self.name))
    }

    /// Sets the faults that the device injects from now on.
    pub fn set_faults(&self, faults: Faults) {
        World::lock().set_faults(self.index, faults);
    }

    /// Cuts or restores the device's link. While it is cut, no packet leaves or arrives, and retries run out.
    pub fn cut(&self, is_cut: bool) {
        World::lock().device(self.index).is_cut = is_cut;
    }

    /// Makes the device hold work requests back, or carry them out again.
    pub fn hold(&self, is_holding: bool) {
        World::lock().hold(self.index, is_holding);
    }

    /// Makes `post_send` only write requests to memory, as a driver does, and complete them at once.
    pub fn discard(&self, is_discarding: bool) {
        World::lock().device(self.index).is_discarding = is_discarding;
    }

    /// Raises an asynchronous event of the device: 8 is "device fatal", 10 "port error".
    pub fn raise(&self, event: u32) {
        World::lock().raise_on_device(self.index, event);
    }

    /// Returns the threads that made, changed or destroyed queue pairs since the last call.
    pub fn take_command_threads(&self) -> HashSet<ThreadId> {
        std::mem::take(&mut World::lock().device(self.index).command_threads)
    }

    /// Puts an accelerator beside the device, whose memory the device reaches as `reach` says. Without one,
    /// a dma-buf is refused with EOPNOTSUPP, as on Soft-RoCE.
    pub fn put_beside(&self, memory: Arc<dyn DeviceMemory>, reach: Reach) {
        self.put_accelerator_beside(Arc::new(memory), reach);
    }

    /// [`Self::put_beside`] for memory that need not be contiguous.
    pub fn put_accelerator_beside(&self, memory: Arc<dyn Accelerator>, reach: Reach) {
        World::lock().put_beside(self.index, memory, reach);
    }

    /// Returns the numbers of objects that exist on the device.
    #[must_use]
    pub fn usage(&self) -> Usage {
        World::lock().usage(self.index)
    }
}

/// `IBV_EVENT_DEVICE_FATAL`.
pub const EVENT_DEVICE_FATAL: u32 = ffi::EVENT_DEVICE_FATAL;
/// `IBV_EVENT_PORT_ERR`.
pub const EVENT_PORT_ERROR: u32 = ffi::EVENT_PORT_ERR;

/// Makes a fabric use `key` for the host slots of a peer, so that a test can observe the peer's card refuse it.
pub fn forge_remote_key(fabric: &mut VerbsFabric, peer: PeerId, key: u32) {
    if let Some([slots, _]) = slots_of(fabric, peer) {
        slots.key = key;
    }
}

/// Sets a wrong number of host slots for a peer, so that a test can observe the peer's card refuse access
/// behind the last slot.
pub fn forge_slot_count(fabric: &mut VerbsFabric, peer: PeerId, count: u32) {
    if let Some([slots, _]) = slots_of(fabric, peer) {
        slots.slot_count = count;
    }
}

fn slots_of(fabric: &mut VerbsFabric, peer: PeerId) -> Option<&mut [RemoteSlots; SlabKind::COUNT]> {
    fabric.connections.get_mut(&peer.0)?.slots.as_mut()
}
