//! Registered tensors, by their numbers, and the number of transfers that use each.
//!
//! A submitted transfer counts until its work has ended or it is dropped. Removing tensors waits for the count
//! to fall to zero; since a removed entry cannot be looked up, the count only falls.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::device::StagingRoutes;
use crate::handoff::HandOffRoutes;
use crate::lock::lock;
use crate::status::{Failure, Status};
use crate::tensors::PagedTensors;

/// Most tensors that may be registered at a time.
pub(crate) const REGISTERED_MAX: usize = 64;

/// All tensors of an open store.
#[derive(Debug)]
pub(crate) struct Registry {
    known: Mutex<RegistryState>,
}

#[derive(Debug)]
struct RegistryState {
    next: u64,
    all: BTreeMap<u64, Arc<Registered>>,
}

#[derive(Debug)]
struct Registered {
    id: u64,
    tensors: PagedTensors,
    on_device: Option<OnDevice>,
    uses: Arc<UseCount>,
}

/// Places and routes of tensors in a device's memory.
#[derive(Debug)]
pub(crate) struct OnDevice {
    /// Places of the threads for saves and loads.
    pub(crate) places: [StagingRoutes; 2],
    /// `None`: the layers of these tensors do not fit hand-offs, or there are no hand-offs.
    pub(crate) handoff: Option<HandOffRoutes>,
}

/// Use count, stored apart from the tensors so that a use releases the tensors before it is counted down.
#[derive(Debug, Default)]
struct UseCount {
    transfers: Mutex<usize>,
    /// Signalled when no transfer uses the tensors any more.
    idle: Condvar,
}

/// Tensors in use by a transfer, for as long as this value lives.
#[derive(Debug)]
pub(crate) struct TensorsGuard {
    registered: Arc<Registered>,
    // Dropped after the tensors: fields are dropped in declaration order.
    _use: UseGuard,
}

#[derive(Debug)]
struct UseGuard(Arc<UseCount>);

fn unknown(id: u64) -> Failure {
    Failure::new(Status::InvalidArgument, format!("tensors {id} are not registered"))
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self { known: Mutex::new(RegistryState { next: 1, all: BTreeMap::new() }) }
    }

    /// Registers tensors. Returns their number, or `None` if [`REGISTERED_MAX`] are registered.
    pub(crate) fn add(&self, tensors: PagedTensors, on_device: Option<OnDevice>) -> Option<u64> {
        let mut known = lock(&self.known);
        if known.all.len() == REGISTERED_MAX {
            return None;
        }
        let id = known.next;
        known.next += 1;
        let registered = Registered { id, tensors, on_device, uses: Arc::default() };
        known.all.insert(id, Arc::new(registered));
        Some(id)
    }

    /// Returns the tensors with this number, for use by a transfer.
    pub(crate) fn find(&self, id: u64) -> Result<TensorsGuard, Failure> {
        let known = lock(&self.known);
        let registered = known.all.get(&id).ok_or_else(|| unknown(id))?;
        *lock(&registered.uses.transfers) += 1;
        let _use = UseGuard(Arc::clone(&registered.uses));
        Ok(TensorsGuard { registered: Arc::clone(registered), _use })
    }

    /// Unregisters tensors, and waits until no transfer uses them. Their places are released on return: this
    /// function holds the last reference.
    pub(crate) fn remove(&self, id: u64) -> Result<(), Failure> {
        let registered = lock(&self.known).all.remove(&id).ok_or_else(|| unknown(id))?;
        let mut transfers = lock(&registered.uses.transfers);
        while *transfers > 0 {
            transfers = registered.uses.idle.wait(transfers).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}

impl TensorsGuard {
    pub(crate) fn id(&self) -> u64 {
        self.registered.id
    }

    /// Places of the tensors in each thread of a device; `None` for tensors in host memory.
    pub(crate) fn places(&self) -> Option<&[StagingRoutes; 2]> {
        self.registered.on_device.as_ref().map(|on_device| &on_device.places)
    }

    /// Routes between the tensors and the device's hand-off slots; `None` if there are none.
    pub(crate) fn handoff_routes(&self) -> Option<&HandOffRoutes> {
        self.registered.on_device.as_ref()?.handoff.as_ref()
    }
}

impl std::ops::Deref for TensorsGuard {
    type Target = PagedTensors;

    fn deref(&self) -> &PagedTensors {
        &self.registered.tensors
    }
}

impl Drop for UseGuard {
    fn drop(&mut self) {
        let mut transfers = lock(&self.0.transfers);
        *transfers -= 1;
        if *transfers == 0 {
            self.0.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::{Plane, Tensors};

    fn tensors() -> PagedTensors {
        let plane = Plane { start: std::ptr::without_provenance_mut(4096), block_stride: 8, block_bytes: 8 };
        let said = Tensors { memory: 0, device: 0, blocks: 2, planes: &plane, plane_count: 1 };
        PagedTensors::check(&said, &[plane], 100).expect("right")
    }

    #[test]
    fn numbers_are_not_given_twice_and_not_without_end() {
        let registry = Registry::new();
        assert_eq!(registry.add(tensors(), None), Some(1));
        assert_eq!((registry.remove(1), registry.remove(1)), (Ok(()), Err(unknown(1))));
        for id in 2..2 + REGISTERED_MAX as u64 {
            assert_eq!(registry.add(tensors(), None), Some(id));
        }
        assert_eq!(registry.add(tensors(), None), None, "64 are");
        assert_eq!(registry.remove(5), Ok(()));
        assert_eq!(registry.add(tensors(), None), Some(66), "there is room again");
        assert_eq!(registry.find(1).err(), Some(unknown(1)));
    }

    #[test]
    fn nobody_has_them_when_they_are_out() {
        let registry = Registry::new();
        for round in 0..5000 {
            let id = registry.add(tensors(), None).expect("room");
            let registered = Arc::downgrade(&lock(&registry.known).all[&id]);
            let user = registry.find(id).expect("known");
            std::thread::scope(|scope| {
                scope.spawn(move || drop(user));
                assert_eq!(registry.remove(id), Ok(()));
                assert_eq!(registered.strong_count(), 0, "round {round}");
            });
        }
    }

    #[test]
    fn who_takes_them_out_waits_for_transfers_and_nobody_finds_them_meanwhile() {
        let registry = Registry::new();
        let id = registry.add(tensors(), None).expect("room");
        let users = [registry.find(id).expect("known"), registry.find(id).expect("known")];
        std::thread::scope(|scope| {
            let remover = scope.spawn(|| registry.remove(id));
            while registry.find(id).is_ok() {
                std::thread::yield_now();
            }
            for user in users {
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(!remover.is_finished());
                drop(user);
            }
            assert_eq!(remover.join().expect("no panic"), Ok(()));
        });
    }
}
