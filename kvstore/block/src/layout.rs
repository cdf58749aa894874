//! The arithmetic of a block: (layers, 2 or latent, tokens, kv heads, head dim, element type) → bytes.
//!
//! A block's slot holds its layers one after the other; a layer holds all keys, then all values (a latent
//! layout has one part only); a part is tokens × kv heads × head dim, tokens outermost. A layer's piece is
//! therefore contiguous, which is what a layer-by-layer transfer wants.

use xxhash_rust::xxh3::xxh3_64;

/// Type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 16-bit brain float.
    Bf16,
    /// 32-bit float.
    F32,
}

impl ElementType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// The shape of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    /// Transformer layers.
    pub layers: u16,
    /// 2 for keys and values, 1 for a latent layout.
    pub parts: u8,
    /// Tokens of a block.
    pub tokens: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Type of the elements.
    pub element: ElementType,
}

/// The layout is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A dimension is zero.
    #[error("block layout: {0} is zero")]
    Zero(&'static str),
    /// A layer is larger than 4 GiB.
    #[error("block layout: one layer of a block has {0} bytes, more than 4 GiB")]
    TooLarge(u64),
}

impl BlockLayout {
    /// Checks every dimension.
    pub fn validate(self) -> Result<Self, LayoutError> {
        let dimensions = [
            ("layers", u64::from(self.layers)),
            ("parts", u64::from(self.parts)),
            ("tokens", u64::from(self.tokens)),
            ("kv_heads", u64::from(self.kv_heads)),
            ("head_dim", u64::from(self.head_dim)),
        ];
        if let Some((name, _)) = dimensions.into_iter().find(|(_, value)| *value == 0) {
            return Err(LayoutError::Zero(name));
        }
        let layer = dimensions[1..]
            .iter()
            .try_fold(self.element.bytes() as u64, |bytes, (_, value)| bytes.checked_mul(*value))
            .unwrap_or(u64::MAX);
        if layer > u64::from(u32::MAX) {
            return Err(LayoutError::TooLarge(layer));
        }
        Ok(self)
    }

    /// Elements of one token in one part of one layer.
    #[must_use]
    pub fn token_elements(&self) -> usize {
        self.kv_heads as usize * self.head_dim as usize
    }

    /// Bytes of one part (all keys, or all values) of one layer.
    #[must_use]
    pub fn part_bytes(&self) -> usize {
        self.tokens as usize * self.token_elements() * self.element.bytes()
    }

    /// Bytes of one layer of one block.
    #[must_use]
    pub fn layer_bytes(&self) -> usize {
        usize::from(self.parts) * self.part_bytes()
    }

    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        usize::from(self.layers) * self.layer_bytes()
    }

    /// Bytes of KV that one token takes in all layers.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        self.block_bytes() / self.tokens as usize
    }

    /// Offset in the slot of a token's elements in a part of a layer.
    #[must_use]
    pub fn offset(&self, layer: usize, part: usize, token: usize) -> usize {
        layer * self.layer_bytes()
            + part * self.part_bytes()
            + token * self.token_elements() * self.element.bytes()
    }

    /// Returns a number that differs for different layouts.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let mut bytes = [0; 20];
        bytes[0..2].copy_from_slice(&self.layers.to_le_bytes());
        bytes[2] = self.parts;
        bytes[3] = self.element as u8;
        bytes[4..8].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.kv_heads.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.head_dim.to_le_bytes());
        xxh3_64(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama-3-70B: 80 layers, 8 kv heads of 128, bf16, 16 tokens: 320 KiB a token.
    const LLAMA_70B: BlockLayout = BlockLayout {
        layers: 80,
        parts: 2,
        tokens: 16,
        kv_heads: 8,
        head_dim: 128,
        element: ElementType::Bf16,
    };

    #[test]
    fn sizes_of_a_known_model() {
        assert_eq!(LLAMA_70B.token_bytes(), 320 << 10);
        assert_eq!(LLAMA_70B.layer_bytes(), 64 << 10);
        assert_eq!(LLAMA_70B.block_bytes(), 5 << 20);
    }

    #[test]
    fn offsets_tile_the_block() {
        let layout = BlockLayout {
            layers: 3,
            parts: 2,
            tokens: 4,
            kv_heads: 2,
            head_dim: 8,
            element: ElementType::F32,
        };
        let mut expected = 0;
        for layer in 0..3 {
            for part in 0..2 {
                for token in 0..4 {
                    assert_eq!(layout.offset(layer, part, token), expected);
                    expected += 64;
                }
            }
        }
        assert_eq!(layout.block_bytes(), expected);
    }

    #[test]
    fn fingerprints_tell_shapes_apart_and_nonsense_is_refused() {
        let mut others = vec![LLAMA_70B.fingerprint()];
        for change in 0..6 {
            let mut layout = LLAMA_70B;
            match change {
                0 => layout.layers += 1,
                1 => layout.parts = 1,
                2 => layout.tokens = 32,
                3 => layout.kv_heads = 4,
                4 => layout.head_dim = 64,
                _ => layout.element = ElementType::F32,
            }
            assert!(!others.contains(&layout.fingerprint()));
            others.push(layout.fingerprint());
        }
        assert_eq!(BlockLayout { tokens: 0, ..LLAMA_70B }.validate(), Err(LayoutError::Zero("tokens")));
        let huge = BlockLayout { tokens: u32::MAX, kv_heads: u32::MAX, ..LLAMA_70B };
        assert!(matches!(huge.validate(), Err(LayoutError::TooLarge(_))));
    }
}
