//! Calls on single blocks that wait for their result, and the counters.

use super::boundary::{Handle, elements, guarded, identity, invalid, list, write_optional};
use crate::backend::{Backend, Identity, Statistics};
use crate::buffers::{BUFFERS_MAX, Buffer, Ranges};
use crate::handles;
use crate::nodes::NodeStatistics;
use crate::operation::{Operation, Outcome};
use crate::status::{Failure, Status};

/// Writes the number of leading blocks that are in the store.
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
        unsafe { write_optional(matched, 0) };
        // SAFETY: the caller promised `count` identities.
        let identities = unsafe { elements(identities, count, "the identities are a null pointer") }?;
        let count = handles::find(handle.addr())?.backend.matched(identities)?;
        // SAFETY: as above.
        unsafe { write_optional(matched, count) };
        Ok(Status::Ok)
    })
}

/// # Safety
/// `meta` must be null or a buffer, `payload` must have `count` buffers; their memory is not accessed here.
pub(super) unsafe fn ranges(
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

/// Reads a block into the caller's buffers.
///
/// # Safety
/// As in the header: the buffers must be writable and used by no other code during the call, the sizes null or
/// writable.
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
        // SAFETY: the caller promised that the buffers are writable and used by no other code during this call.
        let carried = unsafe { operation.carry_out(&*opened.backend) };
        let Outcome { status, meta_bytes, payload_bytes } =
            carried.inspect_err(|failure| sizes = failure.needed.unwrap_or_default())?;
        sizes = (meta_bytes, payload_bytes);
        Ok(status)
    });
    // SAFETY: null or writable by this function's contract.
    unsafe { write_optional(meta_bytes, sizes.0) };
    // SAFETY: as above.
    unsafe { write_optional(payload_bytes, sizes.1) };
    status
}

/// Stores a block from the caller's buffers.
///
/// # Safety
/// As in the header: the buffers must be readable and not written to during the call.
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

/// Deletes a block.
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

/// Writes the counters, up to the bytes that both the caller's header and this library know.
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
        let opened = handles::find(handle.addr())?;
        let told = Statistics { events_lost: opened.events.lost(), ..opened.backend.statistics() };
        let known = bytes.min(size_of::<Statistics>());
        // SAFETY: `told` has `known` bytes, all of them initialised because a structure of u64 has no padding;
        // `statistics` has room for `bytes`, which is no less, by this function's contract; the caller's memory
        // does not overlap this library's.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const told).cast::<u8>(), statistics.cast::<u8>(), known)
        };
        Ok(Status::Ok)
    })
}

/// Writes the state and counters of each node of the remote tier.
///
/// # Safety
/// As in the header: `nodes` null or writable for `room` times `node_bytes`, `count` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_nodes(
    handle: *mut Handle,
    nodes: *mut NodeStatistics,
    node_bytes: usize,
    room: usize,
    count: *mut usize,
) -> i32 {
    guarded(|| {
        let counters = handles::find(handle.addr())?.remote_counters;
        let found = counters.map_or_else(Vec::new, |counters| NodeStatistics::of(&counters));
        // SAFETY: handed on from the caller.
        unsafe { list(&found, nodes, (node_bytes, room), count) }
    })
}
