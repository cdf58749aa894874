//! Submission of requests, and polling of their completions.

use std::time::Duration;

use super::blocks::ranges;
use super::boundary::{Handle, check_room, elements, guarded, identity, invalid, remember, write_optional};
use crate::backend::Identity;
use crate::buffers::Buffer;
use crate::handles;
use crate::operation::Operation;
use crate::queue::{Completion, IDENTITIES_MAX, Submitted};
use crate::status::{Failure, Status};

/// `kvasir_kv_operation` in C.
const GET: u32 = 1;
const PUT: u32 = 2;
const DELETE: u32 = 3;
const MATCH: u32 = 4;

/// A request to submit, `kvasir_kv_request` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Value returned in the completion.
    pub user: u64,
    /// Operation: 1 get, 2 put, 3 delete, 4 match.
    pub operation: u32,
    /// Reserved; zero.
    pub reserved: u32,
    /// Identity of the block; for a match, the first of several.
    pub identities: *const Identity,
    /// 1; for a match, number of identities.
    pub identity_count: usize,
    /// Buffer that the meta is written to or read from.
    pub meta: Buffer,
    /// Buffers that the payload is written to or read from.
    pub payload: *const Buffer,
    /// Number of buffers in `payload`.
    pub payload_count: usize,
}

/// Returns the identities of a match.
///
/// # Safety
/// As in the header for the identities of the request.
unsafe fn identities(request: &Request) -> Result<Vec<Identity>, Failure> {
    if request.identity_count > IDENTITIES_MAX {
        return Err(invalid("more than 2^20 identities"));
    }
    // SAFETY: the caller promised as many identities.
    let all =
        unsafe { elements(request.identities, request.identity_count, "the identities are a null pointer") }?;
    let mut identities = Vec::new();
    identities.try_reserve_exact(all.len()).map_err(|_| Failure::no_memory("the identities"))?;
    identities.extend_from_slice(all);
    Ok(identities)
}

/// # Safety
/// As in the header for each pointer of the request.
unsafe fn operation(request: &Request) -> Result<Operation, Failure> {
    if request.reserved != 0 {
        return Err(invalid("reserved is not zero"));
    }
    if request.operation == MATCH {
        // SAFETY: handed on to the caller.
        let identities = unsafe { identities(request) }?;
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

/// Submits requests in order, up to the first that is invalid or finds no room.
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
    unsafe { write_optional(accepted, taken) };
    status
}

/// Takes completions. The texts of failed ones become this thread's last error, one after the other.
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
        // SAFETY: `count` is writable by this function's contract.
        unsafe { check_room(completions, capacity, count, "completions") }?;
        let opened = handles::find(handle.addr())?;
        let patience = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let polled = opened.queue.poll(capacity, patience, |at, completion, text| {
            // SAFETY: `at` is below `capacity`, for which there is room by this function's contract; aligned as checked.
            unsafe { completions.wrapping_add(at).write(completion) };
            text.into_iter().for_each(remember);
        });
        // SAFETY: as above.
        unsafe { write_optional(count, polled) };
        Ok(Status::Ok)
    })
}

/// Returns a file descriptor that is readable while completions wait; a negative value is a failure. The store
/// owns the descriptor and closes it in `kvasir_kv_close`.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_event_fd(handle: *mut Handle) -> i32 {
    let mut event = 0;
    let status = guarded(|| {
        event = handles::find(handle.addr())?.queue.event();
        Ok(Status::Ok)
    });
    if status < 0 { status } else { event }
}
