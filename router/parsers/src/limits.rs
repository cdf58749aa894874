//! The limits on held-back text, all in one place.
//!
//! A parser holds at most one of these at a time, plus one partial marker (the longest has 27 bytes), so a
//! stream's memory is bounded by the largest of them. Whatever does not fit is given out as content or, for
//! a value inside a started call, as a string; no limit ever drops text.

/// Longest text between a call's opening marker and the first byte of its arguments: the marker, the name,
/// an id and the white space between them. A longer one is no call and comes out as content.
pub const HEADER_BYTES_MAX: usize = 4 * 1024;

/// Longest arguments that are held because the model wrote them before the name. Longer ones make the
/// whole object content.
pub const ARGUMENTS_HELD_BYTES_MAX: usize = 64 * 1024;

/// Longest value of an XML-like argument that is held until its end because its type is not string. A
/// longer value is streamed as a string.
pub const VALUE_HELD_BYTES_MAX: usize = 64 * 1024;

/// Deepest nesting of objects and lists inside arguments. A deeper one ends the call as incomplete.
pub const NESTING_MAX: usize = 128;

/// Longest text, white space included, that may still be the null of a nullable string.
pub(crate) const NULL_BYTES_MAX: usize = 64;

/// Longest number or bare word (`True`, `None`) in a pythonic call.
pub(crate) const BARE_WORD_BYTES_MAX: usize = 128;
