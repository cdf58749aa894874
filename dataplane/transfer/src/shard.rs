//! Layout of a slot, and the part of each layer that two nodes of different tensor parallelism share.
//!
//! A slot is a dense array: layers × rows × heads × head bytes. With the heads of a token side by side (NHD) a
//! row is one part (keys or values) of one token; with the tokens of a head side by side (HND) it is one part
//! of the whole block. A worker that computes only some of the heads has a narrower array. The heads that two
//! workers share are then a piece of each row: one strided descriptor for any number of layers, never one for
//! each token.
//!
//! Pure arithmetic.

use std::ops::Range;

use dataplane_fabric::Rows;

/// The attention heads of a model that one worker holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRange {
    /// Index of the first head, counted over the whole model.
    pub first: u16,
    /// Number of heads.
    pub count: u16,
}

impl HeadRange {
    /// Returns the heads of rank `rank` of `parallelism`, out of `heads` in all. With more ranks than
    /// heads, neighbouring ranks hold the same one; `None` when heads and ranks do not divide evenly.
    #[must_use]
    pub fn of_rank(heads: u16, parallelism: u16, rank: u16) -> Option<Self> {
        if rank >= parallelism || heads == 0 {
            return None;
        }
        if parallelism <= heads {
            let count = heads.is_multiple_of(parallelism).then_some(heads / parallelism)?;
            Some(Self { first: rank * count, count })
        } else {
            let copies = parallelism.is_multiple_of(heads).then_some(parallelism / heads)?;
            Some(Self { first: rank / copies, count: 1 })
        }
    }

    fn end(self) -> u32 {
        u32::from(self.first) + u32::from(self.count)
    }

    /// Returns the heads in both ranges.
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let first = self.first.max(other.first);
        let count = self.end().min(other.end()).checked_sub(u32::from(first)).filter(|&count| count > 0)?;
        Some(Self { first, count: count as u16 })
    }
}

/// Returns the indices of the senders that a worker with the heads `wanted` asks, each for the heads that
/// they share: as few as possible. `None` when the senders do not hold all wanted heads between them.
#[must_use]
pub fn senders_of(wanted: HeadRange, senders: &[HeadRange]) -> Option<Vec<usize>> {
    let mut chosen = Vec::new();
    let mut next = u32::from(wanted.first);
    while next < wanted.end() {
        let reaches = |range: &HeadRange| (u32::from(range.first) <= next).then(|| range.end());
        let (index, end) =
            senders.iter().enumerate().filter_map(|(index, range)| Some((index, reaches(range)?))).max_by(
                // Of equal senders the first: `max_by` keeps the last, so the index is compared in reverse.
                |left, right| left.1.cmp(&right.1).then(right.0.cmp(&left.0)),
            )?;
        if end <= next {
            return None;
        }
        chosen.push(index);
        next = end;
    }
    Some(chosen)
}

/// Structure of a slot: `layers` pieces, one after the other, each of `rows` rows of this worker's heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceLayout {
    /// Pieces of a slot.
    pub layers: u16,
    /// Rows of one layer: parts × tokens (NHD), or parts (HND).
    pub rows: u32,
    /// This worker's heads.
    pub heads: HeadRange,
    /// Bytes of one head in one row.
    pub head_bytes: u32,
    /// Hash of everything else that determines the meaning of the bytes; equal on both ends.
    pub fingerprint: u64,
}

impl PieceLayout {
    /// Returns the layout of a slot whose layers are `layer_bytes` each and are not divided into heads.
    #[must_use]
    pub const fn whole(layers: u16, layer_bytes: u32, fingerprint: u64) -> Self {
        let heads = HeadRange { first: 0, count: 1 };
        Self { layers, rows: 1, heads, head_bytes: layer_bytes, fingerprint }
    }

    /// Returns the bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> u32 {
        u32::from(self.heads.count) * self.head_bytes
    }

    /// Returns the bytes of one layer.
    #[must_use]
    pub fn layer_bytes(&self) -> u32 {
        self.rows * self.row_bytes()
    }

    /// Returns the bytes of a whole slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        usize::from(self.layers) * self.layer_bytes() as usize
    }

    /// Whether every size fits into 32 bits, as descriptors require. Checked on a peer's layout before any
    /// multiplication.
    #[must_use]
    pub fn is_sensible(&self) -> bool {
        let row = u64::from(self.heads.count) * u64::from(self.head_bytes);
        let slot = row.checked_mul(u64::from(self.rows)).and_then(|l| l.checked_mul(u64::from(self.layers)));
        slot.is_some_and(|bytes| bytes > 0 && bytes <= u64::from(u32::MAX))
            && u32::from(self.heads.first) + u32::from(self.heads.count) <= u32::from(u16::MAX) + 1
    }
}

/// The bytes of every layer that two nodes share, as seen from one of them ("here").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedHeads {
    rows_per_layer: u32,
    row_bytes: u32,
    here: Side,
    there: Side,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Side {
    /// Offset in a row of the first shared head.
    first_byte: u32,
    /// Bytes of a whole row.
    stride: u32,
}

impl Side {
    fn of(layout: &PieceLayout, common: HeadRange) -> Self {
        let first_byte = u32::from(common.first - layout.heads.first) * layout.head_bytes;
        Self { first_byte, stride: layout.row_bytes() }
    }
}

impl SharedHeads {
    /// Returns the shared bytes; `None` when the layouts differ otherwise or have no head in common.
    #[must_use]
    pub fn between(here: &PieceLayout, there: &PieceLayout) -> Option<Self> {
        let alike = (here.layers, here.rows, here.head_bytes, here.fingerprint)
            == (there.layers, there.rows, there.head_bytes, there.fingerprint);
        if !alike || !here.is_sensible() || !there.is_sensible() {
            return None;
        }
        let common = here.heads.intersection(there.heads)?;
        Some(Self {
            rows_per_layer: here.rows,
            row_bytes: u32::from(common.count) * here.head_bytes,
            here: Side::of(here, common),
            there: Side::of(there, common),
        })
    }

    /// Returns the number of rows of one layer.
    #[must_use]
    pub fn rows_per_layer(&self) -> u32 {
        self.rows_per_layer
    }

    /// Returns the number of shared bytes in these layers.
    #[must_use]
    pub fn len(&self, layers: &Range<u16>) -> u32 {
        layers.len() as u32 * self.rows_per_layer * self.row_bytes
    }

    /// Returns the offset of the layer's shared bytes in a slot here.
    #[must_use]
    pub fn offset_here(&self, layer: u16) -> u32 {
        u32::from(layer) * self.rows_per_layer * self.here.stride + self.here.first_byte
    }

    /// Returns the offset of the layer's shared bytes in a slot there.
    #[must_use]
    pub fn offset_there(&self, layer: u16) -> u32 {
        u32::from(layer) * self.rows_per_layer * self.there.stride + self.there.first_byte
    }

    /// Returns the rows of the shared bytes; `None` when they are contiguous on both sides.
    #[must_use]
    pub fn rows(&self) -> Option<Rows> {
        let (local_stride, remote_stride) = (self.here.stride, self.there.stride);
        let dense = self.row_bytes == local_stride && self.row_bytes == remote_stride;
        (!dense).then_some(Rows { bytes: self.row_bytes, local_stride, remote_stride })
    }

    /// Returns the shared bytes of a row, and the stride from one row to the next here.
    #[must_use]
    pub fn row_here(&self) -> (usize, usize) {
        (self.row_bytes as usize, self.here.stride as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(heads: HeadRange) -> PieceLayout {
        PieceLayout { layers: 3, rows: 8, heads, head_bytes: 16, fingerprint: 7 }
    }

    /// Returns byte `at` of head `head` in row `row` of layer `layer` of the whole model's block.
    fn byte(layer: usize, row: usize, head: usize, at: usize) -> u8 {
        (layer * 83 + row * 29 + head * 7 + at) as u8
    }

    fn fill(layout: &PieceLayout) -> Vec<u8> {
        let mut bytes = Vec::new();
        for layer in 0..usize::from(layout.layers) {
            for row in 0..layout.rows as usize {
                for head in 0..usize::from(layout.heads.count) {
                    let head = head + usize::from(layout.heads.first);
                    bytes.extend((0..layout.head_bytes as usize).map(|at| byte(layer, row, head, at)));
                }
            }
        }
        bytes
    }

    /// Checks every pairing of parallelisms, replicated heads among them: the cuts of the chosen senders
    /// fill a receiver's slot with exactly its own bytes, each once.
    #[test]
    fn cuts_fill_a_receiver_of_any_parallelism() {
        for heads in [1, 2, 8, 12] {
            for (from, to) in
                [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 4), (3, 4), (4, 12), (16, 2), (2, 16)]
            {
                let ranges = |parallelism: u16| -> Option<Vec<HeadRange>> {
                    (0..parallelism).map(|rank| HeadRange::of_rank(heads, parallelism, rank)).collect()
                };
                let (Some(senders), Some(receivers)) = (ranges(from), ranges(to)) else { continue };
                for wanted in receivers {
                    let receiver = layout(wanted);
                    let mut slot = vec![0xEE; receiver.slot_bytes()];
                    let mut written = vec![0_u8; slot.len()];
                    let chosen = senders_of(wanted, &senders).expect("every head has a sender");
                    for sender in chosen.into_iter().map(|index| layout(senders[index])) {
                        let cut = SharedHeads::between(&sender, &receiver).expect("a head in common");
                        assert_eq!(cut.rows().is_none(), sender.heads == receiver.heads);
                        copy(&cut, &fill(&sender), &mut slot, &mut written);
                    }
                    assert_eq!(slot, fill(&receiver), "{heads} heads, {from} to {to}, {wanted:?}");
                    assert!(written.iter().all(|&times| times == 1 || from != to && times > 0));
                }
            }
        }
    }

    fn copy(cut: &SharedHeads, from: &[u8], to: &mut [u8], written: &mut [u8]) {
        let layers = 1..3;
        for layers in [0..1, layers] {
            let rows = cut.rows().unwrap_or(Rows { bytes: 1, local_stride: 1, remote_stride: 1 });
            for row in 0..rows.count(cut.len(&layers)) {
                let here = (cut.offset_here(layers.start) + row * rows.local_stride) as usize;
                let there = (cut.offset_there(layers.start) + row * rows.remote_stride) as usize;
                let bytes = rows.bytes as usize;
                to[there..there + bytes].copy_from_slice(&from[here..here + bytes]);
                written[there..there + bytes].iter_mut().for_each(|times| *times += 1);
            }
        }
    }

    #[test]
    fn what_differs_has_no_cut() {
        let whole = layout(HeadRange { first: 0, count: 4 });
        let other = |change: fn(&mut PieceLayout)| {
            let mut other = whole;
            change(&mut other);
            SharedHeads::between(&whole, &other)
        };
        assert!(other(|_| ()).is_some());
        assert_eq!(other(|layout| layout.fingerprint += 1), None);
        assert_eq!(other(|layout| layout.layers += 1), None);
        assert_eq!(other(|layout| layout.head_bytes += 1), None);
        assert_eq!(other(|layout| layout.heads = HeadRange { first: 4, count: 4 }), None);
        assert_eq!(other(|layout| layout.heads = HeadRange { first: 0, count: 0 }), None);
        assert_eq!(other(|layout| layout.heads = HeadRange { first: u16::MAX, count: u16::MAX }), None);
        assert_eq!(senders_of(whole.heads, &[HeadRange { first: 1, count: 3 }]), None);
        assert_eq!(senders_of(whole.heads, &[HeadRange { first: 0, count: 2 }]), None);
    }
}
