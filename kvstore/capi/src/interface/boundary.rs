//! Checks at the boundary to C: pointers are checked, panics are caught, and the text of a failure is kept.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::backend::Identity;
use crate::status::{Failure, Status};

/// Opaque type behind the handles that C holds.
#[repr(C)]
#[derive(Debug)]
pub struct Handle {
    _private: [u8; 0],
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a call; a panic becomes a failure.
pub(super) fn caught<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // After a panic the store is used only under its own locks; nothing else is shared.
    let done = catch_unwind(AssertUnwindSafe(call));
    let panicked = "a bug in libkvasir_kv; the standard error stream tells where";
    done.unwrap_or_else(|_| Err(Failure::new(Status::Panicked, panicked)))
}

/// Runs a call. Failures are remembered as the thread's last error, and panics become failures.
pub(super) fn guarded(call: impl FnOnce() -> Result<Status, Failure>) -> i32 {
    match caught(call) {
        Ok(status) => status as i32,
        Err(failure) => {
            remember(failure.text);
            failure.status as i32
        }
    }
}

/// Keeps the text of this thread's last failure.
pub(super) fn remember(text: String) {
    // A thread that is ending cannot ask for its last error any more.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
}

pub(super) fn invalid(what: &str) -> Failure {
    Failure::new(Status::InvalidArgument, what)
}

/// Reads a C structure that has grown since its first version and has a field with the caller's length: fields
/// that the caller does not know are null or zero. `name` is the structure's, `least` the length of its first
/// version.
///
/// # Safety
/// `from` must be null, or valid for reads of as many bytes as `bytes_of` returns; `bytes_of` may read the
/// length field. Zero must be a value of every field.
pub(super) unsafe fn versioned<T: Copy>(
    from: *const T,
    name: &str,
    least: usize,
    bytes_of: impl FnOnce(*const T) -> usize,
) -> Result<T, Failure> {
    if from.is_null() || !from.is_aligned() {
        return Err(invalid(&format!("the {name} is a null pointer or not aligned")));
    }
    let bytes = bytes_of(from);
    if bytes < least {
        return Err(invalid(&format!("bytes is {bytes}, and a {name} has at least {least}")));
    }
    let mut read = std::mem::MaybeUninit::<T>::zeroed();
    let known = bytes.min(size_of::<T>());
    // SAFETY: valid for as many bytes by the contract of this function; both are of this type, and `read` is
    // not aliased.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), read.as_mut_ptr().cast::<u8>(), known) };
    // SAFETY: bytes that were not copied are zero, which is a value by the contract of this function.
    Ok(unsafe { read.assume_init() })
}

/// Checks the pointers for an array of answers and for their number, and sets the number to 0. `what` names the
/// answers.
///
/// # Safety
/// `count` must be null or valid for a write.
pub(super) unsafe fn check_room<T>(
    to: *const T,
    capacity: usize,
    count: *mut usize,
    what: &str,
) -> Result<(), Failure> {
    if count.is_null() {
        return Err(invalid("the place for the count is a null pointer"));
    }
    // SAFETY: writable by this function's contract.
    unsafe { write_optional(count, 0) };
    if to.is_null() || !to.is_aligned() || capacity == 0 {
        return Err(invalid(&format!("no room for {what}")));
    }
    Ok(())
}

/// Writes structures, of which the caller knows the first `bytes` each, as far as there is room, and their
/// total number.
///
/// # Safety
/// `items` null or writable for `room` times `bytes`, `count` null or writable. `T` has no padding.
pub(super) unsafe fn list<T>(
    found: &[T],
    items: *mut T,
    (bytes, room): (usize, usize),
    count: *mut usize,
) -> Result<Status, Failure> {
    if count.is_null() || (items.is_null() && room > 0) {
        return Err(invalid("the place for the list, or for its length, is a null pointer"));
    }
    let written = bytes.min(size_of::<T>());
    for (index, item) in found.iter().take(room).enumerate() {
        // The caller's structure may be shorter or longer than this one, so its offset is counted in the
        // caller's bytes.
        let place = items.cast::<u8>().wrapping_add(index * bytes);
        // SAFETY: `item` has `written` bytes, and the caller promised room for `room` structures of `bytes`.
        unsafe { std::ptr::copy_nonoverlapping((&raw const *item).cast::<u8>(), place, written) };
    }
    // SAFETY: not null, and the caller promised that it is writable.
    unsafe { write_optional(count, found.len()) };
    Ok(Status::Ok)
}

/// Writes a value to `to`, unless it is null.
///
/// # Safety
/// `to` must be null or valid for a write; it need not be aligned.
pub(super) unsafe fn write_optional<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, so valid for a write by the contract of this function.
        unsafe { to.write_unaligned(value) };
    }
}

/// Returns the elements of an array in C.
///
/// # Safety
/// `start` must be null or have `count` elements that are not written to while the slice is used.
pub(super) unsafe fn elements<'a, T>(start: *const T, count: usize, what: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if start.is_null() || !start.is_aligned() || count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(invalid(what));
    }
    // SAFETY: not null, aligned and no longer than memory as checked; the elements are there by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(start, count) })
}

/// # Safety
/// As for [`elements`], with one identity.
pub(super) unsafe fn identity(start: *const Identity) -> Result<Identity, Failure> {
    // SAFETY: handed on to the caller.
    let identities = unsafe { elements(start, 1, "the identity is a null pointer") }?;
    Ok(identities[0])
}

/// Copies a text with a terminating 0, cut between characters if there is no room. Returns the length without the 0.
///
/// # Safety
/// `to` must be null or have `room` bytes that may be written.
pub(super) unsafe fn copy_text(text: &str, to: *mut c_char, room: usize) -> usize {
    if !to.is_null() && room > 0 {
        let count = text.floor_char_boundary(room - 1);
        // SAFETY: `text` has `count` bytes, `to` has room for them by this function's contract, and C's buffer is not
        // ours.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), count) };
        // SAFETY: `count` is less than `room`.
        unsafe { to.cast::<u8>().wrapping_add(count).write(0) };
    }
    text.len()
}

/// # Safety
/// `text` must be null or a string with a terminating 0.
pub(super) unsafe fn string<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(invalid(what));
    }
    // SAFETY: not null, so a string with an end by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::new(Status::Configuration, "not UTF-8"))
}

/// Returns the English text of a status. Never null; must not be freed.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_strerror(status: i32) -> *const c_char {
    Status::text(status).as_ptr()
}

/// Copies the text of this thread's last failure. Returns its length.
///
/// # Safety
/// As in the header: `text` null or writable for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_last_error(text: *mut c_char, bytes: usize) -> usize {
    let last = LAST_ERROR.try_with(|last| last.borrow().clone()).unwrap_or_default();
    // SAFETY: handed on from the caller.
    unsafe { copy_text(&last, text, bytes) }
}

/// Version of this library: major · 1,000,000 + minor · 1,000 + patch.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_version() -> u32 {
    let part = |text: &str| text.parse::<u32>().unwrap_or(0);
    part(env!("CARGO_PKG_VERSION_MAJOR")) * 1_000_000
        + part(env!("CARGO_PKG_VERSION_MINOR")) * 1000
        + part(env!("CARGO_PKG_VERSION_PATCH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_need_not_be_aligned() {
        let mut place = [0_u64; 2];
        // SAFETY: nine bytes of sixteen, which no other code reads meanwhile.
        unsafe { write_optional(place.as_mut_ptr().cast::<u8>().wrapping_add(1).cast::<u64>(), u64::MAX) };
        assert_eq!(place.map(u64::to_le), [u64::MAX << 8, 0xFF]);
    }
}
