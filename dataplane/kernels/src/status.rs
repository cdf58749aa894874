//! Bits of an item's status word. A batch goes on after an item that has one; what is in the target of such
//! an item is undefined, so look before it is used.

/// A NaN or an infinity was to be quantised.
pub const NOT_FINITE: u32 = 1;
/// The slot's header is not the expected one; nothing was restored.
pub const HEADER: u32 = 2;
/// A scale is not a positive finite number.
pub const SCALE: u32 = 4;
/// An address is 0 or no multiple of the launch's unit; what it names was not touched.
pub const MISALIGNED: u32 = 8;
/// The block does not exist; the item was not touched.
pub const BLOCK: u32 = 16;
/// The checksum is not the expected one.
pub const CHECKSUM: u32 = 32;
