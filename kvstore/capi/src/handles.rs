//! Handles are numbers that look like pointers.
//!
//! C may use a handle after closing it, or a handle that it never received. A handle is therefore never
//! dereferenced but looked up, and no number is used twice. A call in progress keeps the store alive until it
//! ends.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use kvstore_remote::RemoteCounters;

use crate::device::CopyThreads;
use crate::events::Events;
use crate::fetch::Fetches;
use crate::handoff::HandOffs;
use crate::queue::Queue;
use crate::registry::Registry;
use crate::status::{Failure, Status};
use crate::store::StoreBackend;

/// An open store.
#[derive(Clone)]
pub(crate) struct Opened {
    pub(crate) backend: Arc<StoreBackend>,
    pub(crate) fetches: Arc<Fetches>,
    pub(crate) events: Arc<Events>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) tensors: Arc<Registry>,
    pub(crate) device: Option<Arc<CopyThreads>>,
    pub(crate) handoffs: Option<Arc<HandOffs>>,
    /// Counters of the remote tier; `None` without `[remote_tier]`.
    pub(crate) remote_counters: Option<Arc<RemoteCounters>>,
}

struct Handles {
    next: usize,
    opened: Option<HashMap<usize, Opened>>,
}

/// Step between handles, so that they do not look like small numbers or indices.
const STEP: usize = 16;
/// Most stores that may be open at a time.
const OPENED_MAX: usize = 1024;

static HANDLES: RwLock<Handles> = RwLock::new(Handles { next: STEP, opened: None });

pub(crate) fn insert(opened: Opened) -> Result<usize, Failure> {
    let mut handles = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    let handle = handles.next;
    let all = handles.opened.get_or_insert_default();
    if all.len() == OPENED_MAX {
        return Err(Failure::new(Status::Failed, format!("open: {OPENED_MAX} stores are open")));
    }
    all.insert(handle, opened);
    // Overflow would need 2^60 opened stores.
    handles.next = handle + STEP;
    Ok(handle)
}

pub(crate) fn find(handle: usize) -> Result<Opened, Failure> {
    let handles = HANDLES.read().unwrap_or_else(PoisonError::into_inner);
    let found = handles.opened.as_ref().and_then(|all| all.get(&handle)).cloned();
    found.ok_or_else(unknown)
}

pub(crate) fn unknown() -> Failure {
    Failure::new(Status::InvalidHandle, "no open store has this handle")
}

pub(crate) fn remove(handle: usize) -> Result<Opened, Failure> {
    let mut handles = HANDLES.write().unwrap_or_else(PoisonError::into_inner);
    let found = handles.opened.as_mut().and_then(|all| all.remove(&handle));
    found.ok_or_else(unknown)
}
