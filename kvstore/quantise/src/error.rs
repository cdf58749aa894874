//! Why a block is not quantised or a payload not taken.

/// A block or a payload is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuantiseError {
    /// A group does not divide the head dimension.
    #[error("quantised layout: groups of {group} do not divide a head of {head_dim}")]
    Group {
        /// Elements of a group.
        group: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// The shape of the block is unusable.
    #[error("quantised layout: {0}")]
    Layout(#[from] kvstore_block::LayoutError),
    /// A buffer has the wrong length.
    #[error("quantise: the {buffer} has {found} bytes, not {wanted}")]
    Length {
        /// Which one.
        buffer: &'static str,
        /// What it has.
        found: usize,
        /// What it should have.
        wanted: usize,
    },
    /// A NaN or an infinity among the elements.
    #[error("quantise: a NaN or an infinity near element {element} of a part of a layer")]
    NotFinite {
        /// First element of the group that holds it, counted within its plane.
        element: usize,
    },
    /// The payload was made for another layout, scheme or version.
    #[error("dequantise: header {found:#018x}, not {wanted:#018x}")]
    Header {
        /// What the payload says.
        found: u64,
        /// What this layout writes.
        wanted: u64,
    },
    /// A scale is not a positive finite number.
    #[error("dequantise: scale {scale} of a plane is not a positive finite number")]
    Scale {
        /// Its position in the plane.
        scale: usize,
    },
}

/// Checks a buffer's length.
pub(crate) fn exact(buffer: &'static str, found: usize, wanted: usize) -> Result<(), QuantiseError> {
    if found == wanted { Ok(()) } else { Err(QuantiseError::Length { buffer, found, wanted }) }
}
