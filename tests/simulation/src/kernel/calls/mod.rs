//! C library functions that this executable redefines.
//!
//! On a simulated thread, for simulated descriptors, each function answers from the simulated kernel;
//! otherwise it calls the C library's own function (`exit`, `gethostname` and `epoll_pwait2`, which no other
//! code needs, do less). Variadic functions are defined with as many arguments as any caller passes: in the
//! calling conventions of Linux these are passed like those of a variadic call.

mod clocks;
mod descriptors;
mod refused;
mod rings;
mod sockets;
mod threads;

use std::ffi::c_int;

use super::Nanos;

/// Sets errno and returns -1.
fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library has an errno for each thread.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place belongs to this thread.
    unsafe { *place = errno };
    -1
}

/// Returns the result of a call that returns a number or fails.
fn outcome(result: Result<usize, c_int>) -> isize {
    match result {
        Ok(count) => count as isize,
        Err(errno) => fail(errno) as isize,
    }
}

fn nanos(time: &libc::timespec) -> Nanos {
    time.tv_sec as u64 * super::SECOND + time.tv_nsec as u64
}

fn timespec(nanos: Nanos) -> libc::timespec {
    libc::timespec {
        tv_sec: (nanos / super::SECOND) as libc::time_t,
        tv_nsec: (nanos % super::SECOND) as libc::c_long,
    }
}

/// Returns a reference to an optional argument.
///
/// # Safety
/// The pointer is null or points to a value that lives as long as the call.
unsafe fn given<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: as the caller of this function warrants.
    unsafe { pointer.as_ref() }
}

/// Returns the memory of a list of `iovec`, without empty parts.
///
/// # Safety
/// The list has `count` entries, each of which names valid memory that is not otherwise used while the slices live.
pub(super) unsafe fn slices<'a>(parts: *const libc::iovec, count: usize) -> Vec<&'a mut [u8]> {
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: as the caller warrants.
    let parts = unsafe { std::slice::from_raw_parts(parts, count) };
    // SAFETY: as the caller warrants.
    let memory =
        |part: &libc::iovec| unsafe { std::slice::from_raw_parts_mut(part.iov_base.cast(), part.iov_len) };
    parts.iter().filter(|part| part.iov_len > 0).map(memory).collect()
}
