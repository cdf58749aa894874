//! System calls of io_uring, which programs make by number.

use std::ffi::{c_int, c_long, c_uint};

use super::super::objects::ObjectId;
use super::super::rings::Params;
use super::super::threads::{WakeReason, preemption_point, wait_for};
use super::super::{now, with};
use super::descriptors::object;
use super::{fail, given, nanos};

const ENTER_GETEVENTS: u32 = 1;
const ENTER_EXT_ARG: u32 = 1 << 3;
const ENTER_REGISTERED: u32 = 1 << 4;

/// `io_uring_setup(2)`.
pub(super) fn setup(entries: u32, params: usize) -> c_long {
    // SAFETY: the name ends with a zero byte.
    let descriptor = unsafe { libc::memfd_create(c"ring".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return c_long::from(fail(libc::ENOMEM));
    }
    // SAFETY: the caller gives parameters, of the layout of the kernel's interface.
    let params = unsafe { &mut *(params as *mut Params) };
    match with(|kernel| kernel.make_ring(descriptor, entries, params)) {
        Ok(descriptor) => c_long::from(descriptor),
        Err(errno) => {
            // SAFETY: the descriptor was made above.
            unsafe { libc::close(descriptor) };
            c_long::from(fail(errno))
        }
    }
}

/// `io_uring_enter(2)`.
pub(super) fn enter(descriptor: c_int, count: u32, wanted: u32, flags: u32, argument: usize) -> c_long {
    if flags & ENTER_REGISTERED != 0 {
        return c_long::from(fail(libc::EINVAL));
    }
    let Some(id) = object(descriptor) else { return c_long::from(fail(libc::EBADF)) };
    let taken = match with(|kernel| kernel.submit(id, count)) {
        Ok(taken) => taken,
        Err(errno) => return c_long::from(fail(errno)),
    };
    if flags & ENTER_GETEVENTS != 0 && wanted > 0 {
        // SAFETY: with this flag the caller gives `struct io_uring_getevents_arg`, whose last word is the address of a time.
        let words =
            (flags & ENTER_EXT_ARG != 0).then(|| unsafe { given(argument as *const [u64; 3]) }).flatten();
        // SAFETY: the caller gives a time or none.
        let limit = words.and_then(|words| unsafe { given(words[2] as *const libc::timespec) }).map(nanos);
        if !await_completions(id, wanted, limit) {
            return if taken > 0 { taken as c_long } else { c_long::from(fail(libc::ETIME)) };
        }
    } else {
        preemption_point();
    }
    taken as c_long
}

fn await_completions(id: ObjectId, wanted: u32, limit: Option<u64>) -> bool {
    let until = limit.map(|limit| now() + limit);
    while with(|kernel| kernel.completions(id)) < wanted {
        if wait_for(&[id], until) == WakeReason::TimedOut {
            return false;
        }
    }
    true
}

/// `struct io_uring_rsrc_register` of io_uring.h.
#[repr(C)]
struct Registration {
    count: u32,
    flags: u32,
    reserved: u64,
    data: u64,
    tags: u64,
}

/// `struct io_uring_rsrc_update2` and, shorter, `struct io_uring_files_update`.
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
}

/// `io_uring_register(2)`: only the registrations that the programs use.
pub(super) fn register(descriptor: c_int, operation: c_uint, argument: usize, count: u32) -> c_long {
    let Some(id) = object(descriptor) else { return c_long::from(fail(libc::EBADF)) };
    let done = match operation {
        // Buffers: operations also contain the buffers' addresses.
        0 | 1 | 15 | 16 => Ok(()),
        2 => {
            // SAFETY: the caller gives so many descriptors.
            let descriptors = unsafe { std::slice::from_raw_parts(argument as *const c_int, count as usize) };
            with(|kernel| {
                kernel.register_files(id, descriptors.len())?;
                kernel.update_files(id, 0, descriptors)
            })
        }
        3 => with(|kernel| kernel.unregister_files(id)),
        4 => {
            // SAFETY: the caller gives a descriptor.
            let event = unsafe { given(argument as *const c_int) }.and_then(|event| object(*event));
            with(|kernel| kernel.register_event(id, event))
        }
        5 => with(|kernel| kernel.register_event(id, None)),
        6 | 14 => {
            // SAFETY: the caller gives an update.
            let Some(update) = (unsafe { given(argument as *const Update) }) else {
                return c_long::from(fail(libc::EFAULT));
            };
            let count = if operation == 6 { count } else { 1 };
            // SAFETY: the update names so many descriptors.
            let descriptors =
                unsafe { std::slice::from_raw_parts(update.data as *const c_int, count as usize) };
            let first = update.offset as usize;
            return match with(|kernel| kernel.update_files(id, first, descriptors)) {
                Ok(()) => c_long::from(count),
                Err(errno) => c_long::from(fail(errno)),
            };
        }
        // Rings are enabled from the start.
        12 => Ok(()),
        13 => {
            // SAFETY: the caller gives a registration.
            let registration = unsafe { given(argument as *const Registration) };
            match registration {
                // A sparse table: no descriptors yet.
                Some(Registration { count, data: 0, .. }) => {
                    with(|kernel| kernel.register_files(id, *count as usize))
                }
                _ => Err(libc::EINVAL),
            }
        }
        _ => Err(libc::EINVAL),
    };
    match done {
        Ok(()) => 0,
        Err(errno) => c_long::from(fail(errno)),
    }
}
