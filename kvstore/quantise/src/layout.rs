//! Bytes and places of a quantised block.

use kvstore_block::{BlockLayout, ElementType};

use crate::error::QuantiseError;
use crate::format::Format;
use crate::header::HEADER_BYTES;
use crate::scale::ScaleType;

/// Which elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// A channel (one dimension of one head) over all tokens of the block.
    Channel,
    /// This many neighbouring dimensions of one head of one token; divides the head dimension.
    Token(u32),
}

/// How a block is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// The codes.
    pub format: Format,
    /// How scales are stored.
    pub scale: ScaleType,
    /// Groups of keys.
    pub keys: Grouping,
    /// Groups of values, and of the single part of a latent layout.
    pub values: Grouping,
}

impl Scheme {
    /// Keys by channel, values by token with a scale for each head: the more exact choice.
    #[must_use]
    pub fn recommended(format: Format, layout: &BlockLayout) -> Self {
        Self {
            format,
            scale: ScaleType::Bf16,
            keys: Grouping::Channel,
            values: Grouping::Token(layout.head_dim),
        }
    }
}

/// The shape of a quantised block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantisedLayout {
    layout: BlockLayout,
    scheme: Scheme,
}

impl QuantisedLayout {
    /// Checks shape and groups.
    pub fn new(layout: BlockLayout, scheme: Scheme) -> Result<Self, QuantiseError> {
        let layout = layout.validate()?;
        for grouping in [scheme.keys, scheme.values] {
            if let Grouping::Token(group) = grouping
                && (group == 0 || layout.head_dim % group != 0)
            {
                return Err(QuantiseError::Group { group, head_dim: layout.head_dim });
            }
        }
        Ok(Self { layout, scheme })
    }

    /// The shape of the blocks.
    #[must_use]
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// How they are quantised.
    #[must_use]
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// Groups of a part (0: keys, or the single part of a latent layout; 1: values).
    #[must_use]
    pub fn grouping(&self, part: usize) -> Grouping {
        if part == 0 && self.layout.parts > 1 { self.scheme.keys } else { self.scheme.values }
    }

    /// Elements of a plane.
    #[must_use]
    pub fn plane_elements(&self) -> usize {
        self.layout.tokens as usize * self.layout.token_elements()
    }

    /// Bytes of the scales of a plane; they come before its codes.
    #[must_use]
    pub fn scale_bytes(&self, part: usize) -> usize {
        let scales = match self.grouping(part) {
            Grouping::Channel => self.layout.token_elements(),
            Grouping::Token(group) => self.plane_elements() / group as usize,
        };
        scales * self.scheme.scale.bytes()
    }

    /// Bytes of a plane.
    #[must_use]
    pub fn plane_bytes(&self, part: usize) -> usize {
        self.scale_bytes(part) + self.plane_elements()
    }

    /// Where a plane starts.
    #[must_use]
    pub fn plane_offset(&self, layer: usize, part: usize) -> usize {
        let before: usize = (0..part).map(|part| self.plane_bytes(part)).sum();
        HEADER_BYTES + layer * self.layer_bytes() + before
    }

    /// Bytes of a quantised block.
    #[must_use]
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + usize::from(self.layout.layers) * self.layer_bytes()
    }

    fn layer_bytes(&self) -> usize {
        (0..usize::from(self.layout.parts)).map(|part| self.plane_bytes(part)).sum()
    }

    /// A bound of the absolute error of one element that was restored to the element type, in a group whose
    /// greatest magnitude is `magnitude`.
    #[must_use]
    pub fn error_bound(&self, magnitude: f64, value: f64) -> f64 {
        let rounded_up = match self.scheme.scale {
            ScaleType::F32 => 1.0 + 2_f64.powi(-23),
            ScaleType::Bf16 => 1.0 + 2_f64.powi(-7),
        };
        let least = f64::from(f32::MIN_POSITIVE);
        let scale = (magnitude / f64::from(self.scheme.format.code_max())).max(least) * rounded_up;
        let codes = self.scheme.format.error_bound(scale, value);
        let element = match self.layout.element {
            ElementType::Bf16 => 2_f64.powi(-8),
            ElementType::F32 => 2_f64.powi(-24),
        };
        codes + element * (value.abs() + codes) + least * element
    }
}
