//! Layouts of a block's elements: in the engine's tensors (strides, so that every layout is data) and in
//! a transfer slot (one canonical order).

use crate::error::PlanError;

/// Order of tokens and heads inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InnerOrder {
    /// `[tokens, heads, head_dim]`, the order of a slot.
    Nhd,
    /// `[heads, tokens, head_dim]`.
    Hnd,
}

/// Position of a layer's keys and values relative to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyValueLayout {
    /// A tensor each: `[blocks, …]` twice.
    Separate,
    /// `[2, blocks, …]`: all keys first (vLLM with flash-attention).
    BeforeBlocks,
    /// `[blocks, 2, …]`: keys of a block before its values (FlashInfer).
    WithinBlock,
    /// One part only: `[blocks, tokens, head_dim]` (a latent layout, as DeepSeek's 576 elements).
    Latent,
}

/// An engine's tensors for one layer, in the engine's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EngineTensors {
    /// Order of tokens and heads inside a block.
    pub order: InnerOrder,
    /// Position of keys and values.
    pub parts: KeyValueLayout,
    /// Number of blocks of the pool.
    pub blocks: u64,
    /// Number of tokens of a block.
    pub tokens: u32,
    /// Number of heads; 1 for a latent layout.
    pub heads: u32,
    /// Bytes of one head of one token.
    pub head_bytes: u32,
}

impl EngineTensors {
    /// Returns the strides of a plane.
    #[must_use]
    pub fn layout(&self) -> PagedLayout {
        let (head, tokens, heads) =
            (u64::from(self.head_bytes), u64::from(self.tokens), u64::from(self.heads));
        let piece = head * tokens * heads;
        let (token_stride, head_stride) = match self.order {
            InnerOrder::Nhd => (head * heads, head),
            InnerOrder::Hnd => (head, head * tokens),
        };
        let block_stride = if self.parts == KeyValueLayout::WithinBlock { 2 * piece } else { piece };
        PagedLayout {
            blocks: self.blocks,
            tokens: self.tokens,
            heads: self.heads,
            head_bytes: self.head_bytes,
            block_stride,
            token_stride,
            head_stride,
        }
    }

    /// Returns the address of each plane's first block, in the order of the slot: for each layer keys, then
    /// values. A layer has one address, or with [`KeyValueLayout::Separate`] two (keys, values), which are
    /// returned unchanged.
    #[must_use]
    pub fn planes(&self, tensors: &[u64]) -> Vec<u64> {
        let piece = self.layout().piece_bytes();
        let values = match self.parts {
            KeyValueLayout::Separate | KeyValueLayout::Latent => return tensors.to_vec(),
            KeyValueLayout::BeforeBlocks => self.blocks * piece,
            KeyValueLayout::WithinBlock => piece,
        };
        tensors.iter().flat_map(|layer| [*layer, layer + values]).collect()
    }
}

/// A block's part of one plane (one layer's keys or values) in the engine, in bytes. The elements of a head
/// are contiguous. Other orders are expressed by other numbers: keys of `[blocks, heads, dim / x, tokens, x]`
/// are `heads × dim / x` heads of `x` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PagedLayout {
    /// Number of blocks of the pool; a launch refuses other blocks.
    pub blocks: u64,
    /// Number of tokens of a block.
    pub tokens: u32,
    /// Number of heads.
    pub heads: u32,
    /// Bytes of one head of one token.
    pub head_bytes: u32,
    /// Distance between blocks of one plane, in bytes.
    pub block_stride: u64,
    /// Distance between tokens of one head, in bytes.
    pub token_stride: u64,
    /// Distance between heads of one token, in bytes.
    pub head_stride: u64,
}

impl PagedLayout {
    /// Returns the bytes of a block in one plane, without gaps.
    #[must_use]
    pub fn piece_bytes(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.heads) * u64::from(self.head_bytes)
    }
}

/// Layout of a slot: `[planes][tokens][heads][head]`, where planes are layers × (keys, values).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotLayout {
    /// Number of planes: layers × parts.
    pub planes: u32,
    /// Number of tokens of a block.
    pub tokens: u32,
    /// Number of heads in the slot; may differ from the engine's.
    pub heads: u32,
    /// Bytes of one head of one token.
    pub head_bytes: u32,
    /// Distance between planes in bytes; [`plane_bytes`](Self::plane_bytes) without gaps.
    pub plane_stride: u64,
    /// Offset of the launch's first plane in the slot, in bytes.
    pub first_byte: u64,
}

impl SlotLayout {
    /// Creates the layout of a slot without gaps.
    #[must_use]
    pub fn new(planes: u32, tokens: u32, heads: u32, head_bytes: u32) -> Self {
        let plane_stride = u64::from(tokens) * u64::from(heads) * u64::from(head_bytes);
        Self { planes, tokens, heads, head_bytes, plane_stride, first_byte: 0 }
    }

    /// Returns the layout of a range of planes in this slot, for a launch over a few layers.
    #[must_use]
    pub fn planes(self, first: u32, count: u32) -> Self {
        let first_byte = self.first_byte + u64::from(first) * self.plane_stride;
        Self { planes: count, first_byte, ..self }
    }

    /// Returns the bytes of a plane.
    #[must_use]
    pub fn plane_bytes(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.heads) * u64::from(self.head_bytes)
    }

    /// Returns the bytes of all planes, without gaps between them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.planes) * self.plane_bytes()
    }
}

/// The heads that a launch moves: all heads, or those that two ranks with different tensor parallelism share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadRange {
    /// First head in the engine's tensors.
    pub paged_first: u32,
    /// First head in the slot.
    pub slot_first: u32,
    /// Number of heads.
    pub count: u32,
}

impl HeadRange {
    /// Returns the range of all heads, for a slot that has as many heads as the engine.
    #[must_use]
    pub fn all(heads: u32) -> Self {
        Self { paged_first: 0, slot_first: 0, count: heads }
    }

    /// Checks the range against both sides.
    pub(crate) fn validate(self, paged: u32, slot: u32) -> Result<Self, PlanError> {
        if self.count == 0 {
            return Err(PlanError::Zero("the count of heads"));
        }
        for (side, first, heads) in [("engine", self.paged_first, paged), ("slot", self.slot_first, slot)] {
            let end = u64::from(first) + u64::from(self.count);
            if end > u64::from(heads) {
                return Err(PlanError::Heads { side, first: first.into(), end, heads });
            }
        }
        Ok(self)
    }
}

/// Checks that both sides have the same number of tokens and the same head size.
pub(crate) fn agree(paged: &PagedLayout, tokens: u32, head_bytes: u32) -> Result<(), PlanError> {
    let pairs =
        [("the count of tokens", tokens, paged.tokens), ("a head's size", head_bytes, paged.head_bytes)];
    for (what, slot, paged) in pairs {
        if slot == 0 {
            return Err(PlanError::Zero(what));
        }
        if slot != paged {
            return Err(PlanError::Mismatch { what, slot: slot.into(), paged: paged.into() });
        }
    }
    Ok(())
}

/// Returns the greatest power of two, at most 16, that divides all numbers; 0 is divisible by all.
#[must_use]
pub fn alignment_of(numbers: impl IntoIterator<Item = u64>) -> u64 {
    let bits = numbers.into_iter().fold(16, |bits, number| bits | number);
    1 << bits.trailing_zeros()
}
