//! Hand-offs of blocks to another process.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::boundary::{
    Handle, copy_text, elements, guarded, invalid, list, string, versioned, write_optional,
};
use crate::device::DeviceEvent;
use crate::handles::{self, Opened};
use crate::handoff::{Expect, HandOffStatistics, HandOffs, Push, RailStatistics, StageStatistics};
use crate::queue::{IDENTITIES_MAX, Submitted};
use crate::registry::TensorsGuard;
use crate::status::{Failure, Status};
use crate::tensors::Memory;

/// `kvasir_kv_operation` in C.
const PUSH: u32 = 7;
const EXPECT: u32 = 8;
/// Most processes that share one hand-off.
const TRANSFERS_MAX: usize = 64;
/// Most blocks of one expectation: the limit of a reservation of the transfer layer.
const EXPECTED_MAX: usize = 65_536;

/// A part of a hand-off, `kvasir_kv_handoff` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HandOff {
    /// Value returned in the completion.
    pub user: u64,
    /// Operation: 7 push, 8 expect.
    pub operation: u32,
    /// Index of the first block, counted from the start of the prompt.
    pub first_block: u32,
    /// Name of the whole content: equal on both sides.
    pub content: [u8; 16],
    /// The number of registered tensors.
    pub tensors: u64,
    /// Numbers of the blocks in the tensors.
    pub blocks: *const u64,
    /// Number of blocks.
    pub count: usize,
    /// Transfer numbers, one for each pair of processes: equal on both sides.
    pub transfers: *const u64,
    /// Number of transfers.
    pub transfer_count: usize,
    /// Address of the sender of each transfer, for an expectation.
    pub addresses: *const *const c_char,
    /// First computed layer, for a push.
    pub first_layer: u32,
    /// Number of computed layers, for a push.
    pub layers: u32,
    /// Longest wait in milliseconds, for an expectation.
    pub deadline_ms: u32,
    /// Bytes of this structure in the caller's version; fields are only ever appended.
    pub bytes: u32,
    /// Null, or a device event recorded behind earlier work on the blocks.
    pub event: *mut c_void,
}

fn handoffs(opened: &Opened) -> Result<&std::sync::Arc<HandOffs>, Failure> {
    opened.handoffs.as_ref().ok_or_else(|| invalid("the configuration has no section [transfer]"))
}

/// Reads a hand-off; fields that the caller's version lacks are null or zero.
///
/// # Safety
/// As in the header: null, or as long as its field `bytes` says.
unsafe fn read(handoff: *const HandOff) -> Result<HandOff, Failure> {
    // SAFETY: not null, and every version has this field.
    let bytes_of = |handoff: *const HandOff| unsafe { (*handoff).bytes } as usize;
    // SAFETY: the caller promised as many bytes; plain numbers and pointers, for which zero is a value.
    unsafe { versioned(handoff, "kvasir_kv_handoff", std::mem::offset_of!(HandOff, event), bytes_of) }
}

/// # Safety
/// As in the header for the blocks of the hand-off.
unsafe fn parts(opened: &Opened, handoff: &HandOff) -> Result<(TensorsGuard, Vec<u64>, Vec<u64>), Failure> {
    let most = if handoff.operation == EXPECT { EXPECTED_MAX } else { IDENTITIES_MAX };
    if handoff.count == 0 || handoff.count > most {
        return Err(invalid(&format!("count is not in 1 to {most}")));
    }
    let unused = match handoff.operation {
        PUSH => [("deadline_ms", handoff.deadline_ms > 0), ("addresses", !handoff.addresses.is_null())],
        EXPECT => [("first_layer", handoff.first_layer > 0), ("layers", handoff.layers > 0)],
        other => {
            let text = format!("operation {other} is neither KVASIR_KV_PUSH nor KVASIR_KV_EXPECT");
            return Err(invalid(&text));
        }
    };
    if let Some((field, _)) = unused.into_iter().find(|(_, is_set)| *is_set) {
        return Err(invalid(&format!("{field} is not zero, and this operation has none")));
    }
    if u64::from(handoff.first_block) + handoff.count as u64 > u64::from(u32::MAX) {
        return Err(invalid("first_block and count end above 2^32 - 1"));
    }
    if handoff.transfer_count == 0 || handoff.transfer_count > TRANSFERS_MAX {
        return Err(invalid(&format!("transfer_count is not in 1 to {TRANSFERS_MAX}")));
    }
    let tensors = opened.tensors.find(handoff.tensors)?;
    handoffs(opened)?.shape().check(&tensors)?;
    if tensors.memory() == Memory::Host && !handoff.event.is_null() {
        return Err(invalid("event is not null, and the tensors lie in host memory"));
    }
    // SAFETY: the caller promised as many numbers.
    let blocks =
        unsafe { elements(handoff.blocks, handoff.count, "blocks is a null pointer or not aligned") }?;
    if let Some(at) = blocks.iter().position(|block| *block >= tensors.blocks()) {
        let text = format!("blocks[{at}] is {}, and the tensors have {}", blocks[at], tensors.blocks());
        return Err(invalid(&text));
    }
    let mut copy = Vec::new();
    copy.try_reserve_exact(blocks.len()).map_err(|_| Failure::no_memory("the hand-off"))?;
    copy.extend_from_slice(blocks);
    let what = "transfers is a null pointer or not aligned";
    // SAFETY: as above.
    let transfers = unsafe { elements(handoff.transfers, handoff.transfer_count, what) }?;
    let is_repeated = |at: usize| transfers[..at].contains(&transfers[at]);
    if let Some(at) = (0..transfers.len()).find(|&at| is_repeated(at)) {
        return Err(invalid(&format!("transfers[{at}] is the same as one before")));
    }
    Ok((tensors, copy, transfers.to_vec()))
}

/// # Safety
/// As in the header for the addresses of an expectation.
unsafe fn addresses(handoff: &HandOff) -> Result<Vec<String>, Failure> {
    let what = "addresses is a null pointer or not aligned";
    // SAFETY: the caller promised as many strings as there are transfers.
    let addresses = unsafe { elements(handoff.addresses, handoff.transfer_count, what) }?;
    let text = |(at, &address): (usize, &*const c_char)| {
        // SAFETY: as above.
        unsafe { string(address, &format!("addresses[{at}] is a null pointer")) }.map(str::to_owned)
    };
    addresses.iter().enumerate().map(text).collect()
}

fn push(
    opened: &Opened,
    handoff: &HandOff,
    (tensors, blocks, transfers): (TensorsGuard, Vec<u64>, Vec<u64>),
) -> Result<Push, Failure> {
    let layers_of_block = u32::from(handoffs(opened)?.shape().layers);
    let end = handoff.first_layer.checked_add(handoff.layers);
    let Some(end) = end.filter(|&end| handoff.layers > 0 && end <= layers_of_block) else {
        let text = format!(
            "first_layer = {} and layers = {} are not in transfer.layers = {layers_of_block}",
            handoff.first_layer, handoff.layers
        );
        return Err(invalid(&text));
    };
    Ok(Push {
        transfers,
        content: handoff.content,
        first_block: handoff.first_block,
        layers: handoff.first_layer as u16..end as u16,
        tensors,
        blocks,
        event: DeviceEvent(handoff.event),
    })
}

/// Submits a part of a hand-off, if there is room for it.
///
/// # Safety
/// As in the header: one hand-off with its array and its address; the memory of its blocks stays usable until its completion
/// was polled or `kvasir_kv_close` returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_submit_handoff(handle: *mut Handle, handoff: *const HandOff) -> i32 {
    guarded(|| {
        // SAFETY: handed on from the caller.
        let handoff = unsafe { read(handoff) }?;
        let opened = handles::find(handle.addr())?;
        let handoffs = handoffs(&opened)?;
        // SAFETY: the caller promised the array.
        let parts = unsafe { parts(&opened, &handoff) }?;
        let submitted = match handoff.operation {
            PUSH => {
                let push = push(&opened, &handoff, parts)?;
                // SAFETY: the caller promised that the blocks stay as they are until the completion was polled.
                unsafe { handoffs.push(handoff.user, push) }
            }
            _ => {
                // SAFETY: the caller promised strings with an end.
                let addresses = unsafe { addresses(&handoff) }?;
                let (tensors, blocks, transfers) = parts;
                let expect = Expect {
                    senders: transfers.into_iter().zip(addresses).collect(),
                    content: handoff.content,
                    first_block: handoff.first_block,
                    patience: Duration::from_millis(handoff.deadline_ms.into()),
                    tensors,
                    blocks,
                    event: DeviceEvent(handoff.event),
                };
                // SAFETY: as above, and no other code uses them.
                unsafe { handoffs.expect(handoff.user, expect) }
            }
        };
        match submitted? {
            Submitted::Taken => Ok(Status::Ok),
            Submitted::Full => Ok(Status::Throttled),
            Submitted::Closed => Err(handles::unknown()),
        }
    })
}

/// Marks a hand-off as complete: no more layers will be pushed.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_end_handoff(handle: *mut Handle, transfer: u64) -> i32 {
    guarded(|| {
        handoffs(&handles::find(handle.addr())?)?.end(transfer);
        Ok(Status::Ok)
    })
}

/// Cancels a hand-off on the sender's or the receiver's side.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_cancel_handoff(handle: *mut Handle, transfer: u64) -> i32 {
    guarded(|| {
        handoffs(&handles::find(handle.addr())?)?.cancel(transfer);
        Ok(Status::Ok)
    })
}

/// Tells a sender that no block of a transfer is wanted.
///
/// # Safety
/// As in the header: `address` a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_decline_handoff(
    handle: *mut Handle,
    transfer: u64,
    address: *const c_char,
) -> i32 {
    guarded(|| {
        // SAFETY: the caller promised a string with an end.
        let address = unsafe { string(address, "address is a null pointer") }?.to_owned();
        handoffs(&handles::find(handle.addr())?)?.decline(transfer, address);
        Ok(Status::Ok)
    })
}

/// Copies the addresses at which peers reach this process, one line for each, best first. Writes the length.
///
/// # Safety
/// As in the header: `text` null or writable for `bytes`, `length` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_handoff_address(
    handle: *mut Handle,
    text: *mut c_char,
    bytes: usize,
    length: *mut usize,
) -> i32 {
    guarded(|| {
        let opened = handles::find(handle.addr())?;
        let ways = handoffs(&opened)?.address().notation().join("\n");
        // SAFETY: handed on from the caller.
        let whole = unsafe { copy_text(&ways, text, bytes) };
        // SAFETY: as above.
        unsafe { write_optional(length, whole) };
        Ok(Status::Ok)
    })
}

/// Writes the counters of hand-offs.
///
/// # Safety
/// As in the header: `statistics` writable for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_handoff_stats(
    handle: *mut Handle,
    statistics: *mut HandOffStatistics,
    bytes: usize,
) -> i32 {
    guarded(|| {
        if statistics.is_null() {
            return Err(invalid("statistics is a null pointer"));
        }
        let opened = handles::find(handle.addr())?;
        let handoffs = handoffs(&opened)?;
        let counted = handoffs.statistics();
        let count = bytes.min(size_of::<HandOffStatistics>());
        // SAFETY: `counted` has `count` bytes, and the caller promised room for them.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const counted).cast::<u8>(), statistics.cast::<u8>(), count);
        };
        Ok(Status::Ok)
    })
}

/// Writes the counters of each transport.
///
/// # Safety
/// As in the header: `rails` null or writable for `room` times `rail_bytes`, `count` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_handoff_rails(
    handle: *mut Handle,
    rails: *mut RailStatistics,
    rail_bytes: usize,
    room: usize,
    count: *mut usize,
) -> i32 {
    guarded(|| {
        let opened = handles::find(handle.addr())?;
        let found = handoffs(&opened)?.rails();
        // SAFETY: handed on from the caller.
        unsafe { list(&found, rails, (rail_bytes, room), count) }
    })
}

/// Writes the durations of the stages of hand-offs.
///
/// # Safety
/// As for [`kvasir_kv_handoff_rails`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_handoff_stages(
    handle: *mut Handle,
    stages: *mut StageStatistics,
    stage_bytes: usize,
    room: usize,
    count: *mut usize,
) -> i32 {
    guarded(|| {
        let opened = handles::find(handle.addr())?;
        let found = handoffs(&opened)?.stages();
        // SAFETY: handed on from the caller.
        unsafe { list(&found, stages, (stage_bytes, room), count) }
    })
}
