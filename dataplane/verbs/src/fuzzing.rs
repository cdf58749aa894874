//! Entry points for fuzzers: any bytes, no panic.

use dataplane_fabric::MESSAGE_BYTES_MAX;

use crate::lane::{Lane, LaneParameters};
use crate::wire::{HANDSHAKE_BYTES, Handshake, SEGMENT_HEADER_BYTES, Segment};

/// Decodes a handshake frame; an accepted frame must survive another encoding and decoding.
pub fn handshake(bytes: &[u8]) {
    let Some(frame) = bytes.first_chunk::<HANDSHAKE_BYTES>() else { return };
    if let Ok(handshake) = Handshake::decode(frame) {
        assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
        if let Handshake::Hello(hello) = handshake {
            let word =
                |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            let (slot, offset, length) = (word(80).wrapping_sub(1), word(72), word(56));
            for slots in &hello.slots {
                if let Some(address) = slots.locate(slot, offset, length) {
                    let end = slots.slot_stride * u64::from(slots.slot_count);
                    assert!(address - slots.address + u64::from(length) <= end);
                }
            }
        }
    }
}

/// A stream of message pieces, each a length byte and that many bytes, as one lane receives them.
pub fn segments(mut bytes: &[u8]) {
    let mut lane = Lane::new(0);
    lane.agree(LaneParameters { send_credits: 32, receive_credits: 32, segment_bytes: 256 });
    while let Some((&length, rest)) = bytes.split_first() {
        let (piece, rest) = rest.split_at(usize::from(length).min(rest.len()));
        bytes = rest;
        let Some(header) = piece.first_chunk::<SEGMENT_HEADER_BYTES>() else { return };
        let Ok(segment) = Segment::decode(header, piece.len(), MESSAGE_BYTES_MAX) else { return };
        if lane.earn(segment.credits).is_err() || !segment.carries_message {
            continue;
        }
        let payload = &piece[SEGMENT_HEADER_BYTES..];
        match lane.assemble(&segment, payload.len(), |room| room.copy_from_slice(payload)) {
            Ok(Some(message)) => assert_eq!(message.len(), segment.message_bytes as usize),
            Ok(None) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{handshake, segments};
    use crate::wire::{HANDSHAKE_BYTES, Handshake, Refusal};

    /// Valid frames and pieces with a few bytes changed, and plain noise. The seed is fixed: equal runs.
    #[test]
    fn damaged_bytes_never_panic() {
        let mut random = fastrand::Rng::with_seed(0x5EED_0001);
        let mut next = move || random.u64(..);
        let refused = Handshake::Refused(Refusal::Busy).encode();
        let mut hello = refused;
        hello[10] = 1;
        hello[12..16].copy_from_slice(&[3, 2, 16, 0]);
        hello[32..].fill(0);
        hello[34..37].copy_from_slice(&[32, 0, 0]);
        hello[37] = 16;
        hello[40] = 17;
        hello[48] = 18;
        hello[65] = 16;
        hello[73] = 16;
        hello[80] = 4;
        hello[91] = 1;
        assert!(Handshake::decode(&hello).is_ok(), "{:?}", Handshake::decode(&hello));
        for _ in 0..200_000 {
            let mut frame = if next() % 2 == 0 { hello } else { refused };
            for _ in 0..next() % 4 {
                frame[next() as usize % HANDSHAKE_BYTES] = next() as u8;
            }
            handshake(&frame);
            let mut stream = [0; 96];
            for piece in stream.chunks_mut(24) {
                piece[..9].copy_from_slice(&[23, 1, 0, (next() % 3) as u8, 0, (next() % 3) as u8, 0, 0, 0]);
                piece[9..11].copy_from_slice(&[(next() % 32) as u8, 0]);
                piece[13] = (next() % 16) as u8;
                piece[next() as usize % 24] ^= (next() % 4) as u8;
            }
            segments(&stream);
        }
    }
}
