//! Wire format. A connection begins with one opening each way (`dataplane_fabric::auth`), then one hello of
//! 32 bytes and its proof of 32 bytes each way. Then come batches: one to [`BATCH_FRAMES_MAX`] headers of 32
//! bytes, then the payloads of those headers in the same order. Because the headers come first, the receiver
//! knows the place of every payload byte of a batch before the first arrives.
//!
//! | byte | header | hello |
//! | --- | --- | --- |
//! | 0 | kind | magic (8 bytes) |
//! | 1 | in the first header of a batch: how many follow it; else zero | |
//! | 2–3 | flags | |
//! | 4–7 | payload length | |
//! | 8–11 | slot | zero (2), lane (1), index (1) |
//! | 12–15 | generation | connections per lane (1), zero (3) |
//! | 16–19 | offset | reads served at once per lane |
//! | 20–23 | immediate, or number of the read | zero |
//! | 24–27 | bytes of a row at the target, zero without rows | session (8 bytes) |
//! | 28–31 | stride of the rows | |
//!
//! The receiver answers signalled frames, on the same connection, with a count of the frames that have
//! landed. A fence carries seven counts in bytes 4–31. All numbers are little-endian.

use dataplane_fabric::{MESSAGE_BYTES_MAX, Target};
use dataplane_memory::SlabKind;

pub(crate) const HEADER_BYTES: usize = 32;
/// Frames gathered into one batch, and so into one `sendmsg` unless their bytes exceed a send's limit.
pub const BATCH_FRAMES_MAX: usize = 64;
/// Connections of one lane beside connection 0.
pub(crate) const SIBLINGS_MAX: usize = 7;

const KIND_MESSAGE: u8 = 2;
const KIND_WRITE: u8 = 3;
const KIND_IMMEDIATE: u8 = 4;
const KIND_READ: u8 = 5;
const KIND_RESPONSE: u8 = 6;
const KIND_VERIFIED: u8 = 7;
const KIND_FENCE: u8 = 8;
const KIND_LANDED: u8 = 9;

/// On a write: bytes 20–23 are an immediate. On a response: its generation was checked after the bytes were
/// gathered.
const FLAG: u8 = 1;
/// The sender asks for an acknowledgement when this frame has landed.
const SIGNALLED: u8 = 2;

/// Row layout of an operation's bytes at one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowShape {
    pub(crate) bytes: u32,
    pub(crate) stride: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    /// A message; its `len` bytes follow.
    Message { len: u32 },
    /// A write to a slot; its `len` bytes follow.
    Write { len: u32, target: Target, rows: Option<RowShape>, immediate: Option<u32> },
    /// The immediate of a write that was spread over several connections.
    Immediate { value: u32 },
    /// A read request. The responses carry its `number`.
    Read { number: u32, len: u32, from: Target, rows: Option<RowShape> },
    /// Bytes `at..at + len` of the read `number`, which follow.
    Response { number: u32, at: u32, len: u32, is_verified: bool },
    /// `len` more bytes of the responses to `number` were gathered while their slot kept its generation.
    Verified { number: u32, len: u32 },
    /// `count` more signalled frames of this connection have landed.
    Landed { count: u32 },
    /// The frames behind the fence wait until these numbers of writes have landed on the siblings since the
    /// session began.
    Fence { counts: [u32; SIBLINGS_MAX] },
}

/// A decoded header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decoded {
    pub(crate) header: Header,
    /// Number of headers that follow this one in its batch.
    pub(crate) followers: u8,
    pub(crate) is_signalled: bool,
}

impl Header {
    pub(crate) fn encode(self, followers: u8, is_signalled: bool) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let (kind, flags) = match self {
            Self::Message { len } => {
                put(4, len);
                (KIND_MESSAGE, 0)
            }
            Self::Write { len, target, rows, immediate } => {
                put_range(&mut put, len, target, rows);
                put(20, immediate.unwrap_or(0));
                (KIND_WRITE, if immediate.is_some() { FLAG } else { 0 })
            }
            Self::Immediate { value } => {
                put(20, value);
                (KIND_IMMEDIATE, 0)
            }
            Self::Read { number, len, from, rows } => {
                put_range(&mut put, len, from, rows);
                put(20, number);
                (KIND_READ, 0)
            }
            Self::Response { number, at, len, is_verified } => {
                put(4, len);
                put(16, at);
                put(20, number);
                (KIND_RESPONSE, if is_verified { FLAG } else { 0 })
            }
            Self::Verified { number, len } => {
                put(4, len);
                put(20, number);
                (KIND_VERIFIED, 0)
            }
            Self::Landed { count } => {
                put(4, count);
                (KIND_LANDED, 0)
            }
            Self::Fence { counts } => {
                counts.into_iter().enumerate().for_each(|(sibling, count)| put(4 + 4 * sibling, count));
                (KIND_FENCE, 0)
            }
        };
        bytes[0] = kind;
        bytes[1] = followers;
        bytes[2] = if is_signalled { flags | SIGNALLED } else { flags };
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Decoded, &'static str> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let followers = bytes[1];
        if usize::from(followers) >= BATCH_FRAMES_MAX {
            return Err("a batch of too many frames");
        }
        if bytes[2] & !(FLAG | SIGNALLED) != 0 || bytes[3] != 0 {
            return Err("unknown flags");
        }
        let is_flagged = bytes[2] & FLAG != 0;
        let (len, number) = (word(4), word(20));
        let target = Target { slab: SlabKind::Host, slot: word(8), generation: word(12), offset: word(16) };
        let rows = (word(24) > 0).then(|| RowShape { bytes: word(24), stride: word(28) });
        let header = match bytes[0] {
            KIND_MESSAGE if len as usize > MESSAGE_BYTES_MAX => {
                return Err("a message beyond the size limit");
            }
            KIND_MESSAGE => Self::Message { len },
            KIND_WRITE => Self::Write { len, target, rows, immediate: is_flagged.then_some(number) },
            KIND_IMMEDIATE => Self::Immediate { value: number },
            KIND_READ => Self::Read { number, len, from: target, rows },
            KIND_RESPONSE => Self::Response { number, at: word(16), len, is_verified: is_flagged },
            KIND_VERIFIED => Self::Verified { number, len },
            KIND_LANDED => Self::Landed { count: len },
            KIND_FENCE => Self::Fence { counts: std::array::from_fn(|sibling| word(4 + 4 * sibling)) },
            _ => return Err("an unknown kind of frame"),
        };
        Ok(Decoded { header, followers, is_signalled: bytes[2] & SIGNALLED != 0 })
    }
}

fn put_range(put: &mut impl FnMut(usize, u32), len: u32, target: Target, rows: Option<RowShape>) {
    put(4, len);
    put(8, target.slot);
    put(12, target.generation);
    put(16, target.offset);
    if let Some(rows) = rows {
        put(24, rows.bytes);
        put(28, rows.stride);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_as_they_went() {
        let target = Target { slab: SlabKind::Host, slot: 3, generation: u32::MAX, offset: 77 };
        let rows = Some(RowShape { bytes: 8, stride: 24 });
        for (header, followers) in [
            (Header::Message { len: MESSAGE_BYTES_MAX as u32 }, 0),
            (Header::Write { len: 5, target, rows: None, immediate: None }, 63),
            (Header::Write { len: u32::MAX, target, rows, immediate: Some(0) }, 1),
            (Header::Immediate { value: 9 }, 0),
            (Header::Read { number: 1 << 31, len: 24, from: target, rows }, 2),
            (Header::Response { number: 7, at: 1, len: 2, is_verified: true }, 0),
            (Header::Response { number: 7, at: 1, len: 2, is_verified: false }, 0),
            (Header::Verified { number: 7, len: 1 }, 0),
            (Header::Landed { count: 3 }, 0),
            (Header::Fence { counts: [1, 2, 3, 4, 5, 6, u32::MAX] }, 0),
        ] {
            for is_signalled in [false, true] {
                let decoded = Decoded { header, followers, is_signalled };
                assert_eq!(Header::decode(&header.encode(followers, is_signalled)), Ok(decoded));
            }
        }
    }

    #[test]
    fn nonsense_is_an_error_and_never_a_panic() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut decoded = 0;
        for _ in 0..100_000 {
            let mut bytes = [0; HEADER_BYTES];
            for byte in &mut bytes {
                *byte = random.u8(..);
            }
            (bytes[0], bytes[1], bytes[2], bytes[3]) = (bytes[0] % 11, bytes[1] % 65, bytes[2] % 5, 0);
            decoded += u32::from(Header::decode(&bytes).is_ok());
        }
        assert!(decoded > 1000 && decoded < 99_000, "{decoded} of the headers made sense");
    }
}
