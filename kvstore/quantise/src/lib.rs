//! KV blocks as 8-bit codes with a scale for each group, and back.
//!
//! * [`QuantisedLayout`]: bytes and places of a quantised block: a header, then for each layer and part
//!   (keys, values) its *plane*: scales, then one byte an element.
//! * [`QuantisedLayout::quantise`] / [`dequantise`](QuantisedLayout::dequantise) for whole blocks, and
//!   `…_plane` for one plane, so that a caller streams a block through a buffer of one plane.
//! * [`Grouping`]: a scale for each channel over the block's tokens (keys: a few channels are outliers in all
//!   tokens), or for pieces of each token (values). The choice for keys and values is that of KIVI
//!   (arXiv 2402.02750, section 3), and a test measures that it is the better one.
//! * [`Format`]: fp8 e4m3 (OCP 8-bit floating point specification 1.0) or symmetric int8, with the error bound
//!   as a function.
//!
//! Rounding is to nearest, ties to even. Results do not depend on the machine: the AVX2 path is the same
//! code compiled with that feature, tested to give equal bits. A block with a NaN or an infinity is refused:
//! it has no meaning as KV, and a finite number in its place would hide that. No thread, no allocation, no
//! system call.

mod codec;
mod error;
mod format;
mod header;
mod kernel;
mod layout;
mod scale;
pub mod testing;

pub use codec::Isa;
pub use error::QuantiseError;
pub use format::Format;
pub use header::HEADER_BYTES;
pub use layout::{Grouping, QuantisedLayout, Scheme};
pub use scale::ScaleType;
