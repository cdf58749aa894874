//! The functions that C calls. What they promise is written in `include/kvasir_kv.h`.
//!
//! Each one checks its pointers, looks the handle up, and runs inside a guard that turns a panic into a status. The
//! text of a thread's last failure is kept for `kvasir_kv_last_error`.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Identity, Statistics};
use crate::buffers::{BUFFERS_MAX, Buffer, Ranges};
use crate::compose;
use crate::handles::{self, Opened};
use crate::queue::{Completion, IDENTITIES_MAX, Operation, Outcome, Queue, Submitted};
use crate::status::{Failure, Status};

/// `kvasir_kv_operation` in C.
const GET: u32 = 1;
const PUT: u32 = 2;
const DELETE: u32 = 3;
const MATCH: u32 = 4;
/// Largest configuration file.
const CONFIGURATION_BYTES_MAX: u64 = 1 << 20;

/// What a handle points to, as far as C knows.
#[repr(C)]
#[derive(Debug)]
pub struct Handle {
    _private: [u8; 0],
}

/// A request to submit, `kvasir_kv_request` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Comes back in the completion.
    pub user: u64,
    /// 1 get, 2 put, 3 delete, 4 match.
    pub operation: u32,
    /// Zero.
    pub reserved: u32,
    /// The block; for a match, the first of several.
    pub identities: *const Identity,
    /// 1; for a match, how many.
    pub identity_count: usize,
    /// Where the meta goes or comes from.
    pub meta: Buffer,
    /// Where the payload goes or comes from.
    pub payload: *const Buffer,
    /// How many buffers `payload` has.
    pub payload_count: usize,
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a call; a panic is a failure.
fn caught<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // After a panic the store is asked again only under its own locks, and nothing else is shared.
    let done = catch_unwind(AssertUnwindSafe(call));
    let panicked = "a bug in libkvasir_kv; the standard error stream tells where";
    done.unwrap_or_else(|_| Err(Failure::new(Status::Panicked, panicked)))
}

/// Runs a call: failures are remembered, panics are failures.
fn guarded(call: impl FnOnce() -> Result<Status, Failure>) -> i32 {
    match caught(call) {
        Ok(status) => status as i32,
        Err(failure) => {
            remember(failure.text);
            failure.status as i32
        }
    }
}

/// Keeps the text of this thread's last failure.
fn remember(text: String) {
    // A thread that is ending has nobody to ask for it.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
}

fn invalid(what: &str) -> Failure {
    Failure::new(Status::InvalidArgument, what)
}

/// Writes to where C wants it, if it does.
///
/// # Safety
/// `to` must be null or valid for a write; it need not be aligned.
unsafe fn tell<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, so valid for a write by the contract of this function.
        unsafe { to.write_unaligned(value) };
    }
}

/// The elements of an array of C's.
///
/// # Safety
/// `start` must be null or have `count` elements that nobody writes to while the slice is used.
unsafe fn elements<'a, T>(start: *const T, count: usize, what: &str) -> Result<&'a [T], Failure> {
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
unsafe fn identity(start: *const Identity) -> Result<Identity, Failure> {
    // SAFETY: handed on to the caller.
    let identities = unsafe { elements(start, 1, "the identity is a null pointer") }?;
    Ok(identities[0])
}

/// Copies a text with its end, cut off between characters where there is no room; tells how long it is without the end.
///
/// # Safety
/// `to` must be null or have `room` bytes that may be written.
unsafe fn copy_text(text: &str, to: *mut c_char, room: usize) -> usize {
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
/// `text` must be null or a string with an end.
unsafe fn string<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(invalid(what));
    }
    // SAFETY: not null, so a string with an end by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::new(Status::Configuration, "not UTF-8"))
}

fn open(text: &str) -> Result<*mut Handle, Failure> {
    must_unwind(cfg!(panic = "abort"))?;
    let (backend, queue) = compose::open(text)?;
    let queue = Arc::new(Queue::new(Arc::clone(&backend), &queue)?);
    handles::insert(Opened { backend, queue }).map(std::ptr::without_provenance_mut)
}

/// A library that cannot catch a panic would end its caller's process.
fn must_unwind(is_aborting: bool) -> Result<(), Failure> {
    let reason = "open: libkvasir_kv was built with panic = \"abort\", so that a bug in it would end this process; \
        build it with `cargo build --profile capi -p kvstore-capi`";
    if is_aborting { Err(Failure::new(Status::Failed, reason)) } else { Ok(()) }
}

/// # Safety
/// As in the header: `handle` and `error` null or writable.
unsafe fn open_into(
    made: impl FnOnce() -> Result<*mut Handle, Failure>,
    handle: *mut *mut Handle,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    guarded(|| {
        // SAFETY: null or writable by this function's contract.
        unsafe { tell(handle, std::ptr::null_mut()) };
        let made = if handle.is_null() {
            Err(invalid("the place for the handle is a null pointer"))
        } else {
            caught(made)
        };
        let reason = made.as_ref().err().map_or("", |failure| &failure.text);
        // SAFETY: null or writable for `error_bytes` by this function's contract.
        unsafe { copy_text(reason, error, error_bytes) };
        // SAFETY: as above.
        unsafe { tell(handle, made?) };
        Ok(Status::Ok)
    })
}

/// Opens the store that a configuration says.
///
/// # Safety
/// As in the header: `configuration` a string, `handle` writable, `error` null or writable for `error_bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_open(
    configuration: *const c_char,
    handle: *mut *mut Handle,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    // SAFETY: the caller promised a string with an end.
    let made = || unsafe { string(configuration, "the configuration is a null pointer") }.and_then(open);
    // SAFETY: handed on from the caller.
    unsafe { open_into(made, handle, error, error_bytes) }
}

/// Opens the store that a configuration file says.
///
/// # Safety
/// As for [`kvasir_kv_open`], with a path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_open_file(
    path: *const c_char,
    handle: *mut *mut Handle,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let made = || {
        // SAFETY: the caller promised a string with an end.
        let path = unsafe { string(path, "the path is a null pointer") }?;
        let refuse = |error: std::io::Error| Failure::new(Status::Configuration, format!("{path}: {error}"));
        if std::fs::metadata(path).map_err(refuse)?.len() > CONFIGURATION_BYTES_MAX {
            return Err(Failure::new(Status::Configuration, format!("{path}: larger than 1 MiB")));
        }
        open(&std::fs::read_to_string(path).map_err(refuse)?)
    };
    // SAFETY: handed on from the caller.
    unsafe { open_into(made, handle, error, error_bytes) }
}

/// Closes a store: forgets requests that have not begun, waits for those that have, and lets go of its files.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_close(handle: *mut Handle) -> i32 {
    guarded(|| {
        let opened = handles::remove(handle.addr())?;
        opened.queue.close();
        opened.backend.close();
        Ok(Status::Ok)
    })
}

/// How many of these blocks, from the first on, are there.
///
/// # Safety
/// As in the header: `count` identities, `matched` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_match(
    handle: *mut Handle,
    identities: *const Identity,
    count: usize,
    matched: *mut usize,
) -> i32 {
    guarded(|| {
        if matched.is_null() {
            return Err(invalid("the place for the count is a null pointer"));
        }
        // SAFETY: writable by this function's contract.
        unsafe { tell(matched, 0) };
        // SAFETY: the caller promised `count` identities.
        let identities = unsafe { elements(identities, count, "the identities are a null pointer") }?;
        let count = handles::find(handle.addr())?.backend.matched(identities)?;
        // SAFETY: as above.
        unsafe { tell(matched, count) };
        Ok(Status::Ok)
    })
}

/// # Safety
/// `meta` null or a buffer, `payload` with `count` buffers; the memory of none of them is looked at here.
unsafe fn ranges(
    meta: *const Buffer,
    payload: *const Buffer,
    count: usize,
) -> Result<(Ranges, Ranges), Failure> {
    if count > BUFFERS_MAX {
        return Err(Failure::new(Status::InvalidArgument, format!("more than {BUFFERS_MAX} buffers")));
    }
    // SAFETY: null or one buffer, by this function's contract.
    let meta = unsafe { elements(meta, usize::from(!meta.is_null()), "the meta buffer is not aligned") }?;
    // SAFETY: `count` buffers, by this function's contract.
    let payload = unsafe { elements(payload, count, "the payload buffers are a null pointer") }?;
    Ok((Ranges::check(meta)?, Ranges::check(payload)?))
}

/// Reads a block into buffers of the caller's.
///
/// # Safety
/// As in the header: the buffers writable and used by nobody else during the call, the sizes null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_get(
    handle: *mut Handle,
    identity_of: *const Identity,
    meta: *const Buffer,
    payload: *const Buffer,
    payload_count: usize,
    meta_bytes: *mut usize,
    payload_bytes: *mut usize,
) -> i32 {
    let mut sizes = (0, 0);
    let status = guarded(|| {
        // SAFETY: the caller promised an identity.
        let identity = unsafe { identity(identity_of) }?;
        // SAFETY: the caller promised these buffers.
        let (meta, payload) = unsafe { ranges(meta, payload, payload_count) }?;
        let opened = handles::find(handle.addr())?;
        let operation = Operation::Get { identity, meta, payload };
        // SAFETY: the caller promised that the buffers are writable and nobody else's during this call.
        let carried = unsafe { operation.carry_out(&*opened.backend) };
        let Outcome { status, meta_bytes, payload_bytes } =
            carried.inspect_err(|failure| sizes = failure.needed.unwrap_or_default())?;
        sizes = (meta_bytes, payload_bytes);
        Ok(status)
    });
    // SAFETY: null or writable by this function's contract.
    unsafe { tell(meta_bytes, sizes.0) };
    // SAFETY: as above.
    unsafe { tell(payload_bytes, sizes.1) };
    status
}

/// Stores a block out of buffers of the caller's.
///
/// # Safety
/// As in the header: the buffers readable and written to by nobody during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_put(
    handle: *mut Handle,
    identity_of: *const Identity,
    meta: *const Buffer,
    payload: *const Buffer,
    payload_count: usize,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller promised an identity.
        let identity = unsafe { identity(identity_of) }?;
        // SAFETY: the caller promised these buffers.
        let (meta, payload) = unsafe { ranges(meta, payload, payload_count) }?;
        let opened = handles::find(handle.addr())?;
        let operation = Operation::Put { identity, meta, payload };
        // SAFETY: the caller promised that the buffers are readable and not written to during this call.
        unsafe { operation.carry_out(&*opened.backend) }.map(|outcome| outcome.status)
    })
}

/// Forgets a block.
///
/// # Safety
/// As in the header: one identity.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_delete(handle: *mut Handle, identity_of: *const Identity) -> i32 {
    guarded(|| {
        // SAFETY: the caller promised an identity.
        let identity = unsafe { identity(identity_of) }?;
        let there = handles::find(handle.addr())?.backend.delete(&identity)?;
        Ok(if there { Status::Ok } else { Status::Miss })
    })
}

/// Writes counters: as many bytes of them as the caller's header and this library both know.
///
/// # Safety
/// As in the header: `statistics` writable for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_stats(
    handle: *mut Handle,
    statistics: *mut Statistics,
    bytes: usize,
) -> i32 {
    guarded(|| {
        if statistics.is_null() || !statistics.is_aligned() {
            return Err(invalid("the statistics are a null pointer or not aligned"));
        }
        let told = handles::find(handle.addr())?.backend.statistics();
        let known = bytes.min(size_of::<Statistics>());
        // SAFETY: `told` has `known` bytes, all of them initialised because a structure of u64 has no padding; `statistics` has
        // room for `bytes`, which is no less, by this function's contract; C's memory is not ours.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const told).cast::<u8>(), statistics.cast::<u8>(), known)
        };
        Ok(Status::Ok)
    })
}

/// # Safety
/// As in the header for each pointer of the request.
unsafe fn operation(request: &Request) -> Result<Operation, Failure> {
    if request.reserved != 0 {
        return Err(invalid("the reserved field of a request is not zero"));
    }
    if request.operation == MATCH {
        if request.identity_count > IDENTITIES_MAX {
            return Err(invalid("more than 2^20 identities"));
        }
        // SAFETY: the caller promised as many identities.
        let all = unsafe {
            elements(request.identities, request.identity_count, "the identities are a null pointer")
        }?;
        let mut identities = Vec::new();
        identities.try_reserve_exact(all.len()).map_err(|_| Failure::no_memory("the identities"))?;
        identities.extend_from_slice(all);
        return Ok(Operation::Match { identities });
    }
    if request.identity_count != 1 {
        return Err(invalid("a request of this kind has one identity"));
    }
    // SAFETY: the caller promised one.
    let identity = unsafe { identity(request.identities) }?;
    // SAFETY: the request's own meta buffer is there; the caller promised the others.
    let (meta, payload) = unsafe { ranges(&request.meta, request.payload, request.payload_count) }?;
    match request.operation {
        GET => Ok(Operation::Get { identity, meta, payload }),
        PUT => Ok(Operation::Put { identity, meta, payload }),
        DELETE => Ok(Operation::Delete { identity }),
        other => Err(Failure::new(Status::InvalidArgument, format!("operation {other} is unknown"))),
    }
}

/// Takes as many requests as there is room for, in order, up to the first that is invalid.
///
/// # Safety
/// As in the header: `count` requests, `accepted` writable; the buffers of accepted ones stay usable until their
/// completions were polled or `kvasir_kv_close` returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_submit(
    handle: *mut Handle,
    requests: *const Request,
    count: usize,
    accepted: *mut usize,
) -> i32 {
    let mut taken = 0;
    let status = guarded(|| {
        if accepted.is_null() {
            return Err(invalid("the place for the count is a null pointer"));
        }
        // SAFETY: the caller promised `count` requests.
        let requests = unsafe { elements(requests, count, "the requests are a null pointer") }?;
        let opened = handles::find(handle.addr())?;
        for request in requests {
            // SAFETY: the caller promised this for each request.
            let operation = unsafe { operation(request) }?;
            // SAFETY: the caller promised that the buffers stay usable until the completion was polled.
            match unsafe { opened.queue.submit(request.user, operation) } {
                Submitted::Taken => taken += 1,
                Submitted::Full => return Ok(Status::Throttled),
                Submitted::Closed => return Err(handles::unknown()),
            }
        }
        Ok(Status::Ok)
    });
    // SAFETY: null or writable by this function's contract.
    unsafe { tell(accepted, taken) };
    status
}

/// Gives completions. The texts of failed ones become this thread's last error, one after the other.
///
/// # Safety
/// As in the header: room for `capacity` completions, `count` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_poll(
    handle: *mut Handle,
    completions: *mut Completion,
    capacity: usize,
    timeout_ms: i32,
    count: *mut usize,
) -> i32 {
    guarded(|| {
        if count.is_null() {
            return Err(invalid("the place for the count is a null pointer"));
        }
        // SAFETY: writable by this function's contract.
        unsafe { tell(count, 0) };
        if completions.is_null() || !completions.is_aligned() || capacity == 0 {
            return Err(invalid("no room for completions"));
        }
        let opened = handles::find(handle.addr())?;
        let patience = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let polled = opened.queue.poll(capacity, patience, |at, completion, text| {
            // SAFETY: `at` is below `capacity`, for which there is room by this function's contract; aligned as checked.
            unsafe { completions.wrapping_add(at).write(completion) };
            text.into_iter().for_each(remember);
        });
        // SAFETY: as above.
        unsafe { tell(count, polled) };
        Ok(Status::Ok)
    })
}

/// A file descriptor that is readable while completions wait; below zero is a failure. It belongs to the store, and is
/// its own until `kvasir_kv_close`.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_event_fd(handle: *mut Handle) -> i32 {
    let mut event = 0;
    let status = guarded(|| {
        event = handles::find(handle.addr())?.queue.event();
        Ok(Status::Ok)
    });
    if status < 0 { status } else { event }
}

/// What a status means, in English. Never null, never freed.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_strerror(status: i32) -> *const c_char {
    Status::text(status).as_ptr()
}

/// Copies the text of this thread's last failure; tells its length.
///
/// # Safety
/// As in the header: `text` null or writable for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_last_error(text: *mut c_char, bytes: usize) -> usize {
    let last = LAST_ERROR.try_with(|last| last.borrow().clone()).unwrap_or_default();
    // SAFETY: handed on from the caller.
    unsafe { copy_text(&last, text, bytes) }
}

/// Version of this library: major, minor and patch in one number each of a thousand.
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

    /// The status, what the error buffer says, and whether there is a handle.
    fn opening(made: impl FnOnce() -> Result<*mut Handle, Failure>, room: usize) -> (i32, String, bool) {
        let mut handle = std::ptr::dangling_mut();
        let mut error = [0xEE_u8; 200];
        // SAFETY: both places are this function's own.
        let status = unsafe { open_into(made, &raw mut handle, error.as_mut_ptr().cast(), room) };
        assert!(error[room..].iter().all(|byte| *byte == 0xEE), "written past its end");
        let text = CStr::from_bytes_until_nul(&error).expect("an end").to_str().expect("whole characters");
        (status, text.to_owned(), !handle.is_null())
    }

    #[test]
    fn the_reason_of_a_refusal_is_told_whatever_it_was() {
        let panicked = opening(|| panic!("a planted bug"), 200);
        assert_eq!((panicked.0, panicked.2), (Status::Panicked as i32, false));
        assert!(panicked.1.contains("a bug in libkvasir_kv"), "{}", panicked.1);
        let refused = || Err(Failure::new(Status::Configuration, "path = \"/größe\""));
        for (room, text) in [
            (13, "path = \"/gr"),
            (14, "path = \"/grö"),
            (15, "path = \"/grö"),
            (16, "path = \"/größ"),
            (1, ""),
        ] {
            let cut = opening(refused, room);
            // The umlaut takes the bytes 11 and 12, the sharp s 13 and 14.
            assert_eq!(cut, (Status::Configuration as i32, text.to_owned(), false), "{room} bytes");
        }
        assert_eq!(opening(|| Ok(std::ptr::dangling_mut()), 200), (0, String::new(), true));
    }

    #[test]
    fn a_library_that_aborts_opens_nothing() {
        let refused = must_unwind(true).expect_err("refused");
        assert!(
            refused.status == Status::Failed && refused.text.contains("--profile capi"),
            "{}",
            refused.text
        );
        assert_eq!(must_unwind(false), Ok(()));
    }

    #[test]
    fn places_need_not_be_aligned() {
        let mut place = [0_u64; 2];
        // SAFETY: nine bytes of sixteen; nobody reads them as something else meanwhile.
        unsafe { tell(place.as_mut_ptr().cast::<u8>().wrapping_add(1).cast::<u64>(), u64::MAX) };
        assert_eq!(place.map(u64::to_le), [u64::MAX << 8, 0xFF]);
    }
}
