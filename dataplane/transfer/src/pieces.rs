//! Cutting a range into pieces of bounded size, between rows when it has rows.

use dataplane_fabric::{Operation, Rows, Source};

/// How much the front of a range takes, and how far the rest begins behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) bytes: u32,
    pub(crate) local: u32,
    pub(crate) remote: u32,
}

/// At most about `bytes_max` off the front of `len` bytes, at least a row; `None` when that is all.
pub(crate) fn front_of(len: u32, rows: Option<Rows>, bytes_max: u32) -> Option<Step> {
    if len <= bytes_max {
        return None;
    }
    match rows {
        None => Some(Step { bytes: bytes_max, local: bytes_max, remote: bytes_max }),
        Some(rows) => {
            let count = (bytes_max / rows.bytes).max(1);
            if count >= rows.count(len) {
                return None;
            }
            Some(Step {
                bytes: count * rows.bytes,
                local: count.checked_mul(rows.local_stride)?,
                remote: count.checked_mul(rows.remote_stride)?,
            })
        }
    }
}

/// Takes the front of a write or read as an operation of its own; `None` when it is no larger than that. An
/// immediate stays with the rest.
pub(crate) fn split_front(operation: &mut Operation, bytes_max: u32) -> Option<Operation> {
    match operation {
        Operation::Write { source: Source::Slot { slot, offset, len }, target, rows, .. } => {
            let step = front_of(*len, *rows, bytes_max)?;
            let front = Operation::Write {
                source: Source::Slot { slot: slot.clone(), offset: *offset, len: step.bytes },
                target: *target,
                rows: *rows,
                immediate: None,
            };
            // Both ranges were checked when the request was made, or are refused by the transport.
            *offset = offset.saturating_add(step.local);
            *len -= step.bytes;
            target.offset = target.offset.saturating_add(step.remote);
            Some(front)
        }
        Operation::Read { into, from, rows } => {
            let step = front_of(into.len, *rows, bytes_max)?;
            let mut front = into.clone();
            front.len = step.bytes;
            let front = Operation::Read { into: front, from: *from, rows: *rows };
            into.offset = into.offset.saturating_add(step.local);
            into.len -= step.bytes;
            from.offset = from.offset.saturating_add(step.remote);
            Some(front)
        }
        Operation::Write { .. } | Operation::Send { .. } => None,
    }
}

/// Bytes that an operation moves.
pub(crate) fn bytes_of(operation: &Operation) -> u32 {
    match operation {
        Operation::Write { source, .. } => source.len() as u32,
        Operation::Read { into, .. } => into.len,
        Operation::Send { message } => message.len() as u32,
    }
}
