//! Bits of an item's status word. A batch goes on after an item that has one; what is in the target of such
//! an item is undefined, so look before it is used.

/// An address is 0 or no multiple of the launch's unit; what it names was not touched.
pub const MISALIGNED: u32 = 8;
/// The block does not exist; the item was not touched.
pub const BLOCK: u32 = 16;
/// The checksum is not the expected one.
pub const CHECKSUM: u32 = 32;
