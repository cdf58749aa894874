//! The hello of each side of a connection; the layout is in `wire`.

use crate::wire::{HEADER_BYTES, SIBLINGS_MAX};

const MAGIC: [u8; 8] = *b"KVSRTCP\0";

/// First frame of each side. The acceptor answers with the same session, lane and index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Session number, drawn by the connecting side; the same on all connections of a session.
    pub(crate) session: u64,
    pub(crate) lane: u8,
    /// Index of the connection within its lane.
    pub(crate) index: u8,
    /// Number of connections of the lane.
    pub(crate) connections: u8,
    /// Largest number of reads of one lane that the sender of this hello serves at a time.
    pub(crate) reads_max: u32,
}

impl Hello {
    pub(crate) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[10] = self.lane;
        bytes[11] = self.index;
        bytes[12] = self.connections;
        bytes[16..20].copy_from_slice(&self.reads_max.to_le_bytes());
        bytes[24..].copy_from_slice(&self.session.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, &'static str> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let [lane, index, connections] = [bytes[10], bytes[11], bytes[12]];
        if bytes[..8] != MAGIC {
            return Err("not a peer of ours");
        }
        let is_place = lane <= 1 && index < connections && usize::from(connections) <= SIBLINGS_MAX + 1;
        if !is_place || bytes[8..10] != [0; 2] || bytes[13..16] != [0; 3] || word(20) != 0 {
            return Err("a malformed hello");
        }
        let session = u64::from(word(24)) | u64::from(word(28)) << 32;
        Ok(Self { session, lane, index, connections, reads_max: word(16) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hellos_are_checked() {
        let hello = Hello { session: u64::MAX - 4, lane: 1, index: 7, connections: 8, reads_max: 256 };
        let good = hello.encode();
        assert_eq!(Hello::decode(&good), Ok(hello));
        for (at, value) in [(0, b'X'), (8, 1), (10, 2), (11, 8), (12, 0), (12, 9), (13, 1), (20, 1)] {
            let mut bad = good;
            bad[at] = value;
            assert!(Hello::decode(&bad).is_err(), "byte {at} = {value}");
        }
    }
}
