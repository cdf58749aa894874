//! A quantised slot: 64 bytes of header, which the caller gives, then for each layer its planes (keys, values), each its scales, then
//! a byte an element.
//!
//! [`mod@crate::reference`] gives the same bytes on a processor: every operation is one rounding to nearest even, which GPUs have,
//! and a greatest magnitude does not depend on the order. What differs is the report: a status word for the
//! item, not the place of the first number that cannot be used, and a header or scale that is refused leaves
//! the target undefined in both.

use crate::error::PlanError;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;

/// Type of the engine's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// 16-bit brain float.
    Bf16,
    /// IEEE half. The block layout of the store has none: such a slot has a header of the caller's making.
    F16,
    /// 32-bit float.
    F32,
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u32 {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// The codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// OCP fp8 e4m3.
    Fp8E4m3,
    /// Symmetric int8.
    Int8,
}

/// How scales are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// Four bytes.
    F32,
    /// Two bytes, rounded up.
    Bf16,
}

impl ScaleType {
    /// Bytes of one scale.
    #[must_use]
    pub fn bytes(self) -> u32 {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// Which elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// One dimension of one head over all tokens of the block.
    Channel,
    /// This many neighbouring dimensions of one head of one token; divides the head.
    Token(u32),
}

/// The shape of a quantised slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantisedSlot {
    /// The header of every slot of this shape.
    pub header: [u8; HEADER_BYTES],
    /// Layers.
    pub layers: u32,
    /// 2 for keys and values, 1 for a latent layout.
    pub parts: u32,
    /// Tokens of a block.
    pub tokens: u32,
    /// Heads in the slot.
    pub heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Type of the engine's elements.
    pub element: Element,
    /// The codes.
    pub format: Format,
    /// The scales.
    pub scale: ScaleType,
    /// Groups of keys.
    pub keys: Grouping,
    /// Groups of values, and of the single part of a latent layout.
    pub values: Grouping,
}

impl QuantisedSlot {
    /// Checks dimensions and groups.
    pub fn validate(self) -> Result<Self, PlanError> {
        let dimensions = [
            ("the count of layers", self.layers),
            ("the count of parts", self.parts),
            ("the count of tokens", self.tokens),
            ("the count of heads", self.heads),
            ("a head's size", self.head_dim),
        ];
        if let Some((what, _)) = dimensions.into_iter().find(|(_, value)| *value == 0) {
            return Err(PlanError::Zero(what));
        }
        if self.parts > 2 {
            return Err(PlanError::TooMany { what: "parts", count: self.parts.into(), most: 2 });
        }
        for grouping in [self.keys, self.values] {
            if let Grouping::Token(group) = grouping
                && (group == 0 || !self.head_dim.is_multiple_of(group))
            {
                return Err(PlanError::Group { group, head_dim: self.head_dim });
            }
        }
        Ok(self)
    }

    /// Groups of a part (0: keys, or the single part of a latent layout; 1: values).
    #[must_use]
    pub fn grouping(&self, part: u32) -> Grouping {
        if part == 0 && self.parts > 1 { self.keys } else { self.values }
    }

    /// Elements of one token in one part.
    #[must_use]
    pub fn channels(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_dim)
    }

    /// Elements of a plane, and bytes of its codes.
    #[must_use]
    pub fn plane_elements(&self) -> u64 {
        u64::from(self.tokens) * self.channels()
    }

    /// Bytes of a plane's scales, which come before its codes.
    #[must_use]
    pub fn scale_bytes(&self, part: u32) -> u64 {
        let scales = match self.grouping(part) {
            Grouping::Channel => self.channels(),
            Grouping::Token(group) => self.plane_elements() / u64::from(group),
        };
        scales * u64::from(self.scale.bytes())
    }

    /// Bytes of a plane.
    #[must_use]
    pub fn plane_bytes(&self, part: u32) -> u64 {
        self.scale_bytes(part) + self.plane_elements()
    }

    /// Bytes of a layer.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        (0..self.parts).map(|part| self.plane_bytes(part)).sum()
    }

    /// Where a plane starts.
    #[must_use]
    pub fn plane_offset(&self, layer: u32, part: u32) -> u64 {
        let before: u64 = (0..part).map(|part| self.plane_bytes(part)).sum();
        HEADER_BYTES as u64 + u64::from(layer) * self.layer_bytes() + before
    }

    /// Bytes of the slot.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.layers) * self.layer_bytes()
    }
}
