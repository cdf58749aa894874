//! Shapes of requests: an engine accepts every shape that its geometry allows, and no other.

use super::rig::Rig;
use super::{Conformance, Open, Random};
use crate::{Buffer, IoErrorKind, Operation, PageBuffer};

/// The geometry is plausible.
pub fn geometry_is_usable(open: &mut Open<'_>, _options: &Conformance) {
    let engine = open();
    let geometry = engine.geometry();
    assert!(geometry.block_bytes.is_power_of_two(), "{geometry:?}");
    assert!(geometry.transfer_bytes_max >= geometry.block_bytes, "{geometry:?}");
    assert!(geometry.transfer_bytes_max.is_multiple_of(geometry.block_bytes), "{geometry:?}");
    assert!(geometry.depth_max > 0 && !geometry.files.is_empty(), "{geometry:?}");
    assert!(geometry.files.iter().all(|&bytes| bytes >= 1 << 20), "the suite needs 1 MiB: {geometry:?}");
    assert!(!engine.name().is_empty());
    assert_eq!(engine.in_flight(), 0);
}

/// Every length from one block to the longest, at the file's start, at odd places and at its end, from slots
/// and from separate memory.
pub fn sizes_and_alignments(open: &mut Open<'_>, options: &Conformance) {
    let transfer_max = open().geometry().transfer_bytes_max;
    let file_max = options.bytes_max as usize;
    let longest = transfer_max.min(file_max / 2);
    let mut rig = Rig::new(open, options, longest + transfer_max.min(64 << 10), 2);
    let block = rig.block;
    let mut random = Random(options.seed);
    let mut lengths: Vec<usize> = (1..=9).map(|blocks| blocks * block).collect();
    lengths.extend(
        std::iter::successors(Some(16 * block), |len| Some(len * 2)).take_while(|len| *len < longest),
    );
    lengths.extend([longest - block, longest]);
    lengths.retain(|len| (block..=longest).contains(len));
    for file in 0..rig.engine.geometry().files.len() as u32 {
        let (used, end) = (rig.file_bytes(file, options), rig.engine.geometry().files[file as usize]);
        let end = end - end % block as u64;
        for &len in lengths.iter().filter(|&&len| len as u64 <= used) {
            let middle = random.below((used - len as u64) / block as u64 + 1) * block as u64;
            for offset in [0, middle, end - len as u64] {
                let slack = (rig.slots.slab().layout().slot_bytes - len) / block;
                let inside = random.below(slack as u64 + 1) as usize * block;
                let tag = random.draw();
                let buffer = rig.buffer(inside, len);
                rig.write(file, offset, buffer, tag);
                let buffer = rig.buffer(0, len);
                rig.read(file, offset, buffer, tag);
                if options.unregistered && len.is_multiple_of(4096) {
                    rig.read(file, offset, Buffer::Pages(PageBuffer::zeroed(len)), tag);
                    rig.write(file, offset, Buffer::Pages(PageBuffer::zeroed(len)), !tag);
                    let buffer = rig.buffer(0, len);
                    rig.read(file, offset, buffer, !tag);
                }
            }
        }
    }
    if !options.unregistered {
        let completion = rig.run(Operation::Read, 0, 0, Buffer::Pages(PageBuffer::zeroed(block)));
        assert_eq!(completion.result.expect_err("not registered").kind, IoErrorKind::Unmapped);
    }
}

/// A request that violates clause 5 completes as `Invalid`, comes back with its buffer and changes nothing.
pub fn invalid_requests(open: &mut Open<'_>, options: &Conformance) {
    let geometry = open().geometry().clone();
    let (block, transfer_max) = (geometry.block_bytes, geometry.transfer_bytes_max);
    let mut rig = Rig::new(open, options, transfer_max + 2 * block, 4);
    let (files, end) = (geometry.files.len() as u32, geometry.files[0]);
    let buffer = rig.buffer(0, 2 * block);
    rig.write(0, 0, buffer, 77);
    let (step, slot_bytes) = (block as u64, rig.slots.slab().layout().slot_bytes);
    let cases = [
        ("no such file", files, 0, 0, block),
        ("no such file either", u32::MAX, 0, 0, block),
        ("offset not aligned", 0, step / 2, 0, block),
        ("offset odd", 0, 1, 0, block),
        ("length not aligned", 0, 0, 0, block + block / 2),
        ("length zero", 0, 0, 0, 0),
        ("too long", 0, 0, 0, transfer_max + block),
        ("address not aligned", 0, 0, block / 2, block),
        ("behind the end", 0, end.next_multiple_of(step), 0, block),
        ("across the end", 0, (end / step - 1) * step, 0, 2 * block),
        ("far behind the end", 0, u64::MAX - step + 1, 0, block),
        ("the sum overflows", 0, u64::MAX - step + 1, 0, 2 * block),
        ("outside of its slot", 0, 0, slot_bytes, block),
        ("far outside of its slot", 0, 0, usize::MAX - block + 1, 2 * block),
    ];
    for (what, file, offset, inside, len) in cases {
        for operation in [Operation::Write, Operation::Read] {
            let buffer = rig.buffer(inside, len);
            let completion = rig.run(operation, file, offset, buffer);
            let error = completion.result.err().unwrap_or_else(|| panic!("{what}: {operation:?} succeeded"));
            assert_eq!(error.kind, IoErrorKind::Invalid, "{what}: {error}");
            assert_eq!(completion.buffer.len(), len, "{what}: its buffer comes back");
        }
    }
    let buffer = rig.buffer(0, 2 * block);
    rig.read(0, 0, buffer, 77);
    assert!(rig.engine.sync(files).is_err_and(|error| error.kind == IoErrorKind::Invalid), "sync of no file");
}
