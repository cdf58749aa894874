//! Locks of this library's own lists.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex under which no code panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
