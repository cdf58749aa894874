//! A software RDMA device inside of the process, and what tests need besides.
//!
//! It is another table of entry points behind the same [`Library`], so everything above it runs unchanged on
//! a machine without RDMA. It is as strict as a card: keys, ranges, domains, states, queue depths and packet
//! numbers are checked; a bad remote key puts both pairs into their error state; an empty receive queue holds
//! a sender back; after an error everything is flushed. Two devices of one process reach each other.
//!
//! `world` holds the state and its rules, `execute` carries out work requests, `accelerator` lets it reach memory that
//! the CPU cannot, `calls` is the C interface.

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

/// One device. Devices live as long as the process; each test makes its own.
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
    /// A new device with one active port and a RoCE v2 GID.
    #[must_use]
    pub fn new() -> Self {
        let (index, name) = calls::add_device(&mut World::lock());
        Self { index, name }
    }

    /// Its name, by which [`Device::open`] finds it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The table of entry points of all software devices.
    #[must_use]
    pub fn library() -> Arc<Library> {
        calls::library()
    }

    /// Opens it.
    pub fn open(&self) -> Result<Arc<Device>, VerbsError> {
        Device::open(&Self::library(), Some(&self.name))
    }

    /// Sets what shall go wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        World::lock().set_faults(self.index, faults);
    }

    /// Whether its link is cut: nothing leaves, nothing arrives, and retries run out.
    pub fn cut(&self, is_cut: bool) {
        World::lock().device(self.index).is_cut = is_cut;
    }

    /// Whether it holds work requests back instead of carrying them out.
    pub fn hold(&self, is_holding: bool) {
        World::lock().hold(self.index, is_holding);
    }

    /// Whether its `post_send` only writes requests to memory, as a driver does, and completes them at once.
    pub fn discard(&self, is_discarding: bool) {
        World::lock().device(self.index).is_discarding = is_discarding;
    }

    /// Raises an asynchronous event of the device: 8 is "device fatal", 10 "port error".
    pub fn raise(&self, event: u32) {
        World::lock().raise_on_device(self.index, event);
    }

    /// The threads that made, changed or destroyed queue pairs since the last call of this.
    pub fn take_command_threads(&self) -> HashSet<ThreadId> {
        std::mem::take(&mut World::lock().device(self.index).command_threads)
    }

    /// Puts an accelerator beside it, whose memory it reaches as `reach` says. Without this, a dma-buf is refused with
    /// EOPNOTSUPP, as on Soft-RoCE.
    pub fn put_beside(&self, memory: Arc<dyn DeviceMemory>, reach: Reach) {
        self.put_accelerator_beside(Arc::new(memory), reach);
    }

    /// The same with memory that need not be one piece.
    pub fn put_accelerator_beside(&self, memory: Arc<dyn Accelerator>, reach: Reach) {
        World::lock().put_beside(self.index, memory, reach);
    }

    /// What exists on it.
    #[must_use]
    pub fn usage(&self) -> Usage {
        World::lock().usage(self.index)
    }
}

/// `IBV_EVENT_DEVICE_FATAL`.
pub const EVENT_DEVICE_FATAL: u32 = ffi::EVENT_DEVICE_FATAL;
/// `IBV_EVENT_PORT_ERR`.
pub const EVENT_PORT_ERROR: u32 = ffi::EVENT_PORT_ERR;

/// Makes a fabric use `key` for the host slots of a peer, so that a test can see the peer's card refuse it.
pub fn forge_remote_key(fabric: &mut VerbsFabric, peer: PeerId, key: u32) {
    if let Some([slots, _]) = slots_of(fabric, peer) {
        slots.key = key;
    }
}

/// Makes a fabric believe that a peer has more host slots than it has, so that a test can see the peer's card
/// refuse what lies behind them.
pub fn forge_slot_count(fabric: &mut VerbsFabric, peer: PeerId, count: u32) {
    if let Some([slots, _]) = slots_of(fabric, peer) {
        slots.slot_count = count;
    }
}

fn slots_of(fabric: &mut VerbsFabric, peer: PeerId) -> Option<&mut [RemoteSlots; SlabKind::COUNT]> {
    fabric.connections.get_mut(&peer.0)?.slots.as_mut()
}
