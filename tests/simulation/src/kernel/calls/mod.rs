//! The functions of the C library that this executable defines in its place.
//!
//! Each answers from the simulated kernel on a simulated thread, for descriptors that are simulated, and calls the C library's
//! own function otherwise (`exit`, `gethostname` and `epoll_pwait2`, which nothing outside needs, do less). Variadic ones are defined with as many arguments as any caller passes: on the calling conventions of
//! Linux they arrive as those of a variadic call do.

mod clocks;
mod descriptors;
mod refused;
mod rings;
mod sockets;
mod threads;

use std::ffi::c_int;

use super::Nanos;

/// Fails a call.
fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library gives each thread a place for it.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is this thread's own.
    unsafe { *place = errno };
    -1
}

/// The outcome of a call that returns a number or fails.
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

/// A value that the caller may leave out.
///
/// # Safety
/// The pointer is null or points to a value that lives as long as the call.
unsafe fn given<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: as the caller of this function warrants.
    unsafe { pointer.as_ref() }
}

/// The parts of memory that a list of `iovec` names, without empty ones.
///
/// # Safety
/// The list has so many entries, and they name memory that nothing else uses as long as the slices live.
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
