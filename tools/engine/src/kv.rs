//! Paged keys and values: typed access to the slots of the worker's pool.
//!
//! Values pass through the slab as bytes (peers may write other slots of it at any time, so there are no
//! slices into it); one layer's part of one block is copied at a time and converted on the way.

use std::sync::Arc;

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use half::bf16;
use kvstore_block::{BlockLayout, ElementType};

use crate::EngineError;
use crate::model::ModelConfig;

/// Keys are part 0 of a layer, values part 1.
pub(crate) const KEYS: usize = 0;
pub(crate) const VALUES: usize = 1;

/// The worker's own blocks.
#[derive(Debug, Clone)]
pub struct KvPool {
    pool: Arc<SlotPool>,
    layout: BlockLayout,
}

impl KvPool {
    /// The layout of a model's blocks.
    pub fn layout_of(config: &ModelConfig, block_tokens: usize) -> Result<BlockLayout, EngineError> {
        let layout = BlockLayout {
            layers: config.layers as u16,
            parts: 2,
            tokens: block_tokens as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            element: if config.kv_f32 { ElementType::F32 } else { ElementType::Bf16 },
        };
        Ok(layout.validate()?)
    }

    /// A pool of `blocks` blocks.
    pub fn new(layout: BlockLayout, blocks: usize, pages: PageSize) -> Result<Self, EngineError> {
        let slots = SlabLayout { slot_bytes: layout.block_bytes(), slot_count: blocks as u32 };
        let slab = Slab::create("kvasir-kv", slots, pages)?;
        Ok(Self { pool: SlotPool::new(Arc::new(slab)), layout })
    }

    /// The slots.
    #[must_use]
    pub fn slots(&self) -> &Arc<SlotPool> {
        &self.pool
    }

    /// Shape of a block.
    #[must_use]
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.layout.tokens as usize
    }

    /// Stores one token's elements of one part of one layer.
    pub(crate) fn store(&self, table: &[u32], position: usize, layer: usize, part: usize, values: &[f32]) {
        let (slot, token) = (table[position / self.block_tokens()], position % self.block_tokens());
        let offset = self.layout.offset(layer, part, token);
        let slab = self.pool.slab();
        let mut bytes = [0; 512];
        let per_chunk = bytes.len() / self.layout.element.bytes();
        let mut at = offset;
        for chunk in values.chunks(per_chunk) {
            let used = chunk.len() * self.layout.element.bytes();
            match self.layout.element {
                ElementType::Bf16 => {
                    for (value, out) in chunk.iter().zip(bytes.chunks_exact_mut(2)) {
                        out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
                    }
                }
                ElementType::F32 => {
                    for (value, out) in chunk.iter().zip(bytes.chunks_exact_mut(4)) {
                        out.copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
            slab.write(slot, at, &bytes[..used]);
            at += used;
        }
    }

    /// Loads one part of one layer for the first `tokens` positions: `out[position * width + element]`.
    pub(crate) fn load(&self, table: &[u32], tokens: usize, layer: usize, part: usize, out: &mut Vec<f32>) {
        let width = self.layout.token_elements();
        out.clear();
        out.reserve(tokens * width);
        let slab = self.pool.slab();
        let mut bytes = vec![0; self.layout.part_bytes()];
        let offset = self.layout.offset(layer, part, 0);
        for (block, &slot) in table.iter().enumerate() {
            let here = tokens.saturating_sub(block * self.block_tokens()).min(self.block_tokens());
            if here == 0 {
                break;
            }
            let used = here * width * self.layout.element.bytes();
            slab.read(slot, offset, &mut bytes[..used]);
            match self.layout.element {
                ElementType::Bf16 => out.extend(
                    bytes[..used]
                        .chunks_exact(2)
                        .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32()),
                ),
                ElementType::F32 => out.extend(
                    bytes[..used]
                        .chunks_exact(4)
                        .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])),
                ),
            }
        }
    }
}
