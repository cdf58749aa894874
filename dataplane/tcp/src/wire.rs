//! Frames: a header of 32 bytes, little-endian, then the payload.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0 | kind: 1 hello, 2 message, 3 write, 4 write with immediate |
//! | 1–3 | zero |
//! | 4–7 | payload length |
//! | 8–11 | target slot |
//! | 12–15 | target generation |
//! | 16–19 | offset in the slot |
//! | 20–23 | immediate |
//! | 24–31 | magic in a hello, else zero |

use dataplane_fabric::{MESSAGE_BYTES_MAX, Target};

pub(crate) const HEADER_BYTES: usize = 32;
const MAGIC: u64 = u64::from_le_bytes(*b"KVSRTCP1");

const KIND_HELLO: u8 = 1;
const KIND_MESSAGE: u8 = 2;
const KIND_WRITE: u8 = 3;
const KIND_WRITE_WITH_IMMEDIATE: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    /// The first frame of each side.
    Hello,
    /// `len` bytes of message follow.
    Message { len: u32 },
    /// `len` bytes for a slot follow.
    Write { len: u32, target: Target, immediate: Option<u32> },
}

impl Header {
    pub(crate) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let kind = match self {
            Self::Hello => {
                put(24, MAGIC as u32);
                put(28, (MAGIC >> 32) as u32);
                KIND_HELLO
            }
            Self::Message { len } => {
                put(4, len);
                KIND_MESSAGE
            }
            Self::Write { len, target, immediate } => {
                put(4, len);
                put(8, target.slot);
                put(12, target.generation);
                put(16, target.offset);
                put(20, immediate.unwrap_or(0));
                if immediate.is_some() { KIND_WRITE_WITH_IMMEDIATE } else { KIND_WRITE }
            }
        };
        bytes[0] = kind;
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, &'static str> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let len = word(4);
        match bytes[0] {
            KIND_HELLO if word(24) == MAGIC as u32 && word(28) == (MAGIC >> 32) as u32 => Ok(Self::Hello),
            KIND_HELLO => Err("not a peer of this version"),
            KIND_MESSAGE if len as usize > MESSAGE_BYTES_MAX => Err("a message beyond the size limit"),
            KIND_MESSAGE => Ok(Self::Message { len }),
            kind @ (KIND_WRITE | KIND_WRITE_WITH_IMMEDIATE) => {
                let target = Target { slot: word(8), generation: word(12), offset: word(16) };
                let immediate = (kind == KIND_WRITE_WITH_IMMEDIATE).then(|| word(20));
                Ok(Self::Write { len, target, immediate })
            }
            _ => Err("an unknown kind of frame"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_as_they_went() {
        let target = Target { slot: 3, generation: u32::MAX, offset: 77 };
        for header in [
            Header::Hello,
            Header::Message { len: MESSAGE_BYTES_MAX as u32 },
            Header::Write { len: 5, target, immediate: None },
            Header::Write { len: u32::MAX, target, immediate: Some(0) },
        ] {
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn nonsense_is_an_error_and_never_a_panic() {
        let mut random = 1_u64;
        for _ in 0..100_000 {
            let mut bytes = [0; HEADER_BYTES];
            for byte in &mut bytes {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                *byte = random as u8;
            }
            bytes[0] %= 6;
            if let Ok(header) = Header::decode(&bytes) {
                assert_ne!(header, Header::Hello, "the magic does not come by chance");
            }
        }
        assert!(Header::decode(&[0; HEADER_BYTES]).is_err());
    }
}
