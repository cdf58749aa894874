//! Cutting a range into pieces of bounded size, between rows when it has rows.

use dataplane_fabric::{Operation, Rows, Source};

/// Size of the front of a range, and the distances to the start of the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    bytes: u32,
    local: u32,
    remote: u32,
}

/// Returns the front of `len` bytes, about `bytes_max` at most but at least a row; `None` when no rest remains.
fn front_of(len: u32, rows: Option<Rows>, bytes_max: u32) -> Option<Step> {
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

/// Splits the front off a write or read as an operation of its own; `None` when the operation is no larger
/// than that. An immediate stays with the rest.
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

/// Undoes [`split_front`] of a write.
pub(crate) fn join_rest(front: &mut Operation, rest: &Operation) {
    let (
        Operation::Write { source: Source::Slot { len, .. }, immediate, .. },
        Operation::Write { source, immediate: last, .. },
    ) = (front, rest)
    else {
        unreachable!("split_front made both from one write");
    };
    *len += source.len() as u32;
    *immediate = *last;
}

/// Returns the bytes that an operation moves.
pub(crate) fn bytes_of(operation: &Operation) -> u32 {
    match operation {
        Operation::Write { source, .. } => source.len() as u32,
        Operation::Read { into, .. } => into.len,
        Operation::Send { message } => message.len() as u32,
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::Target;
    use dataplane_fabric::testing::pool;
    use dataplane_memory::SlabKind;

    use super::*;

    fn parts(operation: &Operation) -> (u32, u32, Target, Option<Rows>, Option<u32>) {
        match operation {
            Operation::Write { source: Source::Slot { offset, len, .. }, target, rows, immediate } => {
                (*offset, *len, *target, *rows, *immediate)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_front_that_is_refused_goes_back() {
        let pool = pool("pieces");
        let slot = pool.acquire().expect("a slot");
        let rows = Rows { bytes: 100, local_stride: 130, remote_stride: 170 };
        for (len, rows, fronts) in
            [(1000, None, 3), (250, None, 0), (1000, Some(rows), 4), (200, Some(rows), 0)]
        {
            let source = Source::Slot { slot: slot.clone(), offset: 7, len };
            let target = Target { slab: SlabKind::Host, slot: 3, generation: 1, offset: 9 };
            let mut rest = Operation::Write { source, target, rows, immediate: Some(5) };
            let mut split = 0;
            loop {
                let before = parts(&rest);
                let Some(mut front) = split_front(&mut rest, 250) else { break };
                split += 1;
                assert!(bytes_of(&front) <= 250 && parts(&front).4.is_none(), "{front:?}");
                join_rest(&mut front, &rest);
                assert_eq!(parts(&front), before);
            }
            assert_eq!((split, parts(&rest).4), (fronts, Some(5)), "{len} bytes");
        }
    }
}
