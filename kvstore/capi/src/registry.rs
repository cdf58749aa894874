//! Tensors that are registered, by their numbers, and how many transfers work on each.
//!
//! A transfer that was submitted counts until its work is over or it was forgotten. Who takes tensors out waits for the
//! count to fall to zero; nobody finds them from then on, so it only falls.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::device::Places;
use crate::status::{Failure, Status};
use crate::tensors::PagedTensors;

/// Most tensors that may be registered at a time.
pub(crate) const REGISTERED_MAX: usize = 64;

/// All tensors of an open store.
#[derive(Debug)]
pub(crate) struct Registry {
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    next: u64,
    all: BTreeMap<u64, Arc<Registered>>,
}

#[derive(Debug)]
struct Registered {
    id: u64,
    tensors: PagedTensors,
    /// On a device: of each lane.
    places: Option<[Places; 2]>,
    transfers: Mutex<usize>,
    /// No transfer works on them any more.
    idle: Condvar,
}

/// Tensors on which a transfer works for as long as this lives.
#[derive(Debug)]
pub(crate) struct InUse(Arc<Registered>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(id: u64) -> Failure {
    Failure::new(Status::InvalidArgument, format!("tensors {id} are not registered"))
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self { known: Mutex::new(Known { next: 1, all: BTreeMap::new() }) }
    }

    /// Makes tensors known; returns their number.
    pub(crate) fn add(&self, tensors: PagedTensors, places: Option<[Places; 2]>) -> Result<u64, Failure> {
        let mut known = lock(&self.known);
        if known.all.len() == REGISTERED_MAX {
            let text = format!("{REGISTERED_MAX} tensors are registered, which is as many as may be");
            return Err(Failure::new(Status::InvalidArgument, text));
        }
        let id = known.next;
        known.next += 1;
        let registered = Registered { id, tensors, places, transfers: Mutex::new(0), idle: Condvar::new() };
        known.all.insert(id, Arc::new(registered));
        Ok(id)
    }

    /// The tensors of that number, for a transfer.
    pub(crate) fn find(&self, id: u64) -> Result<InUse, Failure> {
        let known = lock(&self.known);
        let registered = known.all.get(&id).ok_or_else(|| unknown(id))?;
        *lock(&registered.transfers) += 1;
        Ok(InUse(Arc::clone(registered)))
    }

    /// Makes tensors unknown, and waits until no transfer works on them.
    pub(crate) fn remove(&self, id: u64) -> Result<(), Failure> {
        let registered = lock(&self.known).all.remove(&id).ok_or_else(|| unknown(id))?;
        let mut transfers = lock(&registered.transfers);
        while *transfers > 0 {
            transfers = registered.idle.wait(transfers).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}

impl InUse {
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Their places in each lane of a device; `None` when they lie in host memory.
    pub(crate) fn places(&self) -> Option<&[Places; 2]> {
        self.0.places.as_ref()
    }
}

impl std::ops::Deref for InUse {
    type Target = PagedTensors;

    fn deref(&self) -> &PagedTensors {
        &self.0.tensors
    }
}

impl Drop for InUse {
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
        assert_eq!(registry.add(tensors(), None), Ok(1));
        assert_eq!((registry.remove(1), registry.remove(1)), (Ok(()), Err(unknown(1))));
        for id in 2..2 + REGISTERED_MAX as u64 {
            assert_eq!(registry.add(tensors(), None), Ok(id));
        }
        assert!(registry.add(tensors(), None).is_err_and(|failure| failure.text.contains("64 tensors")));
        assert_eq!(registry.find(1).err(), Some(unknown(1)));
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
