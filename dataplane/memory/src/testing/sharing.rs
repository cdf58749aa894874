//! Test double of shared device memory: nodes of one process share it as processes share a device's.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{CopierDouble, CopyFaults, DeviceDouble};
use crate::{
    AttachedSlab, Copier, CopyDone, CopyRefused, DeviceError, DeviceMemory, DeviceSharing, Slab, SlabLayout,
    SlotCopy,
};

/// Exported memory, by number.
static EXPORTED: Mutex<Option<HashMap<u64, Arc<DeviceDouble>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Test double of [`DeviceSharing`]. Its copiers are [`CopierDouble`]s.
#[derive(Debug)]
pub struct SharingDouble {
    slab: Arc<Slab>,
    memory: Arc<DeviceDouble>,
    number: u64,
    faults: CopyFaults,
    is_lost: Arc<AtomicBool>,
}

/// A copier that fails when its device is lost.
#[derive(Debug)]
struct Losable {
    copier: CopierDouble,
    is_lost: Arc<AtomicBool>,
}

impl Copier for Losable {
    fn submit(&mut self, copy: SlotCopy) -> Result<(), CopyRefused> {
        self.copier.submit(copy)
    }

    fn flush(&mut self) {
        self.copier.flush();
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) -> usize {
        if self.is_lost.load(Ordering::Relaxed) {
            self.copier.kill();
        }
        self.copier.poll(done)
    }

    fn in_flight(&self) -> usize {
        self.copier.in_flight()
    }

    fn is_lost(&self) -> bool {
        self.copier.is_lost()
    }
}

impl SharingDouble {
    /// Makes a slab in memory of its own. Panics when there is none: this is for tests.
    #[must_use]
    pub fn new(layout: SlabLayout, memory: &Arc<DeviceDouble>, faults: CopyFaults) -> Self {
        let shared: Arc<dyn DeviceMemory> = memory.clone();
        let slab = Slab::on_device("shared", layout, shared).expect("a slab");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let is_lost = Arc::default();
        Self { slab: Arc::new(slab), memory: Arc::clone(memory), number, faults, is_lost }
    }

    /// Loses the device: every copier of this node reports it.
    pub fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }
}

impl DeviceSharing for SharingDouble {
    fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    fn export(&self) -> Result<Vec<u8>, DeviceError> {
        let mut exported = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        exported.get_or_insert_default().insert(self.number, Arc::clone(&self.memory));
        Ok(self.number.to_le_bytes().to_vec())
    }

    fn carries(&self, _slab: &Arc<Slab>) -> bool {
        true
    }

    fn attach(&self, exported: &[u8], layout: SlabLayout) -> Result<AttachedSlab, DeviceError> {
        let failed = |reason: &str| DeviceError { operation: "attach", reason: reason.to_owned() };
        let number = exported.try_into().map(u64::from_le_bytes).map_err(|_| failed("not a name"))?;
        let known = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = known.as_ref().and_then(|known| known.get(&number)).cloned();
        let memory: Arc<dyn DeviceMemory> = memory.ok_or_else(|| failed("nobody exported it"))?;
        let slab = Slab::on_device("attached", layout, memory).map_err(|error| failed(&error.to_string()))?;
        let copier = CopierDouble::new(self.number, 64, self.faults);
        let copier = Box::new(Losable { copier, is_lost: Arc::clone(&self.is_lost) });
        Ok(AttachedSlab { copier, slab: Arc::new(slab) })
    }
}

impl Drop for SharingDouble {
    fn drop(&mut self) {
        let mut exported = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        exported.as_mut().and_then(|exported| exported.remove(&self.number));
    }
}
