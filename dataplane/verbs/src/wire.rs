//! Frames of the handshake and the header of messages: encoding, decoding and validation.
//!
//! * The handshake over TCP, after the openings: frames of [`HANDSHAKE_BYTES`], little-endian, with a magic, each
//!   followed by its proof (`dataplane_fabric::auth`). A [`Hello`] holds the addresses of the sender's queue pairs
//!   and slots; `ready` reports that its queue pairs can receive; `refused` gives the reason of a refusal.
//! * The header in front of every message piece that travels as an RDMA SEND.
//!
//! Every byte that a peer sends is validated here; no input makes this file panic.

use dataplane_memory::SlabKind;

use crate::config::PathMtu;
use crate::device::LinkLayer;

/// Bytes of every handshake frame.
pub(crate) const HANDSHAKE_BYTES: usize = 128;
/// `b"KVSRRDMA"`.
const MAGIC: u64 = u64::from_le_bytes(*b"KVSRRDMA");
/// Bytes of the header of a message piece.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 16;
/// Offsets in a hello of the slots of each kind of slab, 32 bytes each. Between them lie the longest
/// operation, at 88, and 4 bytes of zero.
const SLOTS_AT: [usize; SlabKind::COUNT] = [56, 96];
const NUMBER_BITS: u32 = 24;

/// One lane's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneAddress {
    /// Queue pair number, 24 bits.
    pub(crate) queue_pair: u32,
    /// First packet sequence number that the sender uses, 24 bits.
    pub(crate) psn: u32,
}

/// The slots that a peer may read and write; all zero when there are none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RemoteSlots {
    /// Address of slot 0.
    pub(crate) address: u64,
    /// Bytes from the start of one slot to the next.
    pub(crate) slot_stride: u64,
    /// Usable bytes of a slot.
    pub(crate) slot_bytes: u64,
    /// Number of slots.
    pub(crate) slot_count: u32,
    /// Remote key of the region that covers the slots.
    pub(crate) key: u32,
}

impl RemoteSlots {
    /// Checks the geometry of slots that a peer announced.
    fn check(&self) -> Result<(), &'static str> {
        let is_shapeless = self.slot_bytes == 0 || self.slot_count == 0 || self.slot_stride < self.slot_bytes;
        if is_shapeless && *self != Self::default() {
            return Err("slots of an impossible shape");
        }
        let bytes = self.slot_stride.checked_mul(self.slot_count.into());
        let end = bytes.and_then(|bytes| bytes.checked_add(self.address));
        end.map(|_| ()).ok_or("slots beyond the end of the address space")
    }

    /// Returns the address of `length` bytes at `offset` of `slot`, if they lie inside the slot.
    pub(crate) fn locate(&self, slot: u32, offset: u32, length: u32) -> Option<u64> {
        let inside = slot < self.slot_count && u64::from(offset) + u64::from(length) <= self.slot_bytes;
        inside.then(|| self.address + u64::from(slot) * self.slot_stride + u64::from(offset))
    }
}

/// The parameters by which a peer reaches the sender's queue pairs and slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Largest packet of the sender's port.
    pub(crate) mtu: PathMtu,
    /// Link layer of the sender's port.
    pub(crate) link_layer: LinkLayer,
    /// RDMA reads that the sender answers at a time on one lane.
    pub(crate) reads_as_target: u8,
    /// GID of the sender's port.
    pub(crate) gid: [u8; 16],
    /// LID of the sender's port.
    pub(crate) lid: u16,
    /// Receives of the sender that the peer may use up on one lane before the sender returns them.
    pub(crate) receive_credits: u16,
    /// Bytes of one of the sender's receives.
    pub(crate) receive_buffer_bytes: u32,
    /// Queue pairs of the urgent and the background lane.
    pub(crate) lanes: [LaneAddress; 2],
    /// The sender's slots that the peer may read and write, of each kind of slab.
    pub(crate) slots: [RemoteSlots; SlabKind::COUNT],
    /// Longest RDMA operation that the sender's port accepts, bytes.
    pub(crate) message_bytes_max: u32,
}

/// Reason for which a node refuses a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// All connections of the node are in use.
    Busy,
    /// The node could not create queue pairs.
    Exhausted,
    /// The link layers differ, or the hello was not usable.
    Incompatible,
    /// A code that this version does not know.
    Unknown(u32),
}

impl Refusal {
    fn code(self) -> u32 {
        match self {
            Self::Busy => 1,
            Self::Exhausted => 2,
            Self::Incompatible => 3,
            Self::Unknown(code) => code,
        }
    }
}

/// A handshake frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handshake {
    /// Addresses of the sender's queue pairs and slots.
    Hello(Hello),
    /// The sender's queue pairs can receive from the peer.
    Ready,
    /// The sender ends the connection.
    Refused(Refusal),
}

impl Handshake {
    /// Encodes the frame.
    pub(crate) fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let mut frame = [0; HANDSHAKE_BYTES];
        let mut put = |at: usize, bytes: &[u8]| frame[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_le_bytes());
        let kind: u16 = match self {
            Self::Hello(hello) => {
                let link_layer = if hello.link_layer == LinkLayer::Infiniband { 1 } else { 2 };
                put(12, &[hello.mtu as u8, link_layer, hello.reads_as_target, 0]);
                put(16, &hello.gid);
                put(32, &hello.lid.to_le_bytes());
                put(34, &hello.receive_credits.to_le_bytes());
                put(36, &hello.receive_buffer_bytes.to_le_bytes());
                for (lane, address) in hello.lanes.iter().enumerate() {
                    put(40 + lane * 8, &address.queue_pair.to_le_bytes());
                    put(44 + lane * 8, &address.psn.to_le_bytes());
                }
                for (slots, at) in hello.slots.iter().zip(SLOTS_AT) {
                    put(at, &slots.address.to_le_bytes());
                    put(at + 8, &slots.slot_stride.to_le_bytes());
                    put(at + 16, &slots.slot_bytes.to_le_bytes());
                    put(at + 24, &slots.slot_count.to_le_bytes());
                    put(at + 28, &slots.key.to_le_bytes());
                }
                put(88, &hello.message_bytes_max.to_le_bytes());
                1
            }
            Self::Ready => 2,
            Self::Refused(reason) => {
                put(12, &reason.code().to_le_bytes());
                3
            }
        };
        put(10, &kind.to_le_bytes());
        frame
    }

    /// Decodes a frame; the error says what is wrong with it.
    pub(crate) fn decode(frame: &[u8; HANDSHAKE_BYTES]) -> Result<Self, &'static str> {
        if long(frame, 0) != MAGIC {
            return Err("not an RDMA handshake of this program");
        }
        if short(frame, 8) != 0 {
            return Err("bytes that must be zero are not");
        }
        match short(frame, 10) {
            1 => decode_hello(frame).map(Self::Hello),
            2 if frame[12..].iter().all(|&byte| byte == 0) => Ok(Self::Ready),
            3 if frame[16..].iter().all(|&byte| byte == 0) => Ok(Self::Refused(match word(frame, 12) {
                1 => Refusal::Busy,
                2 => Refusal::Exhausted,
                3 => Refusal::Incompatible,
                code => Refusal::Unknown(code),
            })),
            2 | 3 => Err("bytes that must be zero are not"),
            _ => Err("unknown kind of handshake frame"),
        }
    }
}

fn decode_hello(frame: &[u8; HANDSHAKE_BYTES]) -> Result<Hello, &'static str> {
    let mtu = PathMtu::from_code(frame[12].into()).ok_or("unknown MTU")?;
    let link_layer = match frame[13] {
        1 => LinkLayer::Infiniband,
        2 => LinkLayer::Ethernet,
        _ => return Err("unknown link layer"),
    };
    if frame[15] != 0 || word(frame, 92) != 0 {
        return Err("bytes that must be zero are not");
    }
    let mut gid = [0; 16];
    gid.copy_from_slice(&frame[16..32]);
    let lane = |at| LaneAddress { queue_pair: word(frame, at), psn: word(frame, at + 4) };
    let lanes = [lane(40), lane(48)];
    if lanes.iter().any(|lane| lane.queue_pair >> NUMBER_BITS != 0 || lane.psn >> NUMBER_BITS != 0) {
        return Err("a queue pair or packet number of more than 24 bits");
    }
    if lanes[0].queue_pair == lanes[1].queue_pair || lanes.iter().any(|lane| lane.queue_pair < 2) {
        return Err("a queue pair number that no lane can have");
    }
    let slots = SLOTS_AT.map(|at| RemoteSlots {
        address: long(frame, at),
        slot_stride: long(frame, at + 8),
        slot_bytes: long(frame, at + 16),
        slot_count: word(frame, at + 24),
        key: word(frame, at + 28),
    });
    slots.iter().try_for_each(RemoteSlots::check)?;
    let hello = Hello {
        mtu,
        link_layer,
        reads_as_target: frame[14],
        gid,
        lid: short(frame, 32),
        receive_credits: short(frame, 34),
        receive_buffer_bytes: word(frame, 36),
        lanes,
        slots,
        message_bytes_max: word(frame, 88),
    };
    if hello.reads_as_target == 0 {
        return Err("the peer accepts no RDMA reads");
    }
    if !(2..=1024).contains(&hello.receive_credits) {
        return Err("a credit window out of range");
    }
    if !(256..=64 << 10).contains(&hello.receive_buffer_bytes) {
        return Err("a receive buffer size out of range");
    }
    if hello.message_bytes_max < 4096 {
        return Err("operations too short to be of use");
    }
    Ok(hello)
}

/// Header of the payload of one RDMA SEND.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Whether a piece of a message follows; otherwise the header only returns credits.
    pub(crate) carries_message: bool,
    /// Receives of the sender that are posted again, so that the peer may use them up again.
    pub(crate) credits: u16,
    /// Number of the piece on its lane, wrapping.
    pub(crate) number: u32,
    /// Bytes of the whole message.
    pub(crate) message_bytes: u32,
    /// Offset of the piece in the message.
    pub(crate) offset: u32,
}

impl Segment {
    /// Encodes the header.
    pub(crate) fn encode(&self) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut header = [0; SEGMENT_HEADER_BYTES];
        header[0] = if self.carries_message { 1 } else { 2 };
        header[2..4].copy_from_slice(&self.credits.to_le_bytes());
        header[4..8].copy_from_slice(&self.number.to_le_bytes());
        header[8..12].copy_from_slice(&self.message_bytes.to_le_bytes());
        header[12..16].copy_from_slice(&self.offset.to_le_bytes());
        header
    }

    /// Decodes the header of `received` bytes (header included) and checks that the piece lies in its
    /// message, which is at most `message_bytes_max` long.
    pub(crate) fn decode(
        header: &[u8; SEGMENT_HEADER_BYTES],
        received: usize,
        message_bytes_max: usize,
    ) -> Result<Self, &'static str> {
        let payload = received.checked_sub(SEGMENT_HEADER_BYTES).ok_or("a piece without a header")?;
        let segment = Self {
            carries_message: header[0] == 1,
            credits: short(header, 2),
            number: word(header, 4),
            message_bytes: word(header, 8),
            offset: word(header, 12),
        };
        if !(1..=2).contains(&header[0]) || header[1] != 0 {
            return Err("an unknown kind of piece");
        }
        if !segment.carries_message && (payload, segment.message_bytes, segment.offset) != (0, 0, 0) {
            return Err("a credit message with bytes");
        }
        if !segment.carries_message && segment.credits == 0 {
            return Err("a credit message without credits");
        }
        if segment.message_bytes as usize > message_bytes_max {
            return Err("a message that is too long");
        }
        let end = (segment.offset as usize).checked_add(payload);
        if end.is_none_or(|end| end > segment.message_bytes as usize) {
            return Err("a piece beyond the end of its message");
        }
        if segment.carries_message && payload == 0 && segment.message_bytes > 0 {
            return Err("an empty piece");
        }
        Ok(segment)
    }
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(short(bytes, at)) | u32::from(short(bytes, at + 2)) << 16
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            mtu: PathMtu::B1024,
            link_layer: LinkLayer::Ethernet,
            reads_as_target: 16,
            gid: [3; 16],
            lid: 0,
            receive_credits: 32,
            receive_buffer_bytes: 4096,
            lanes: [LaneAddress { queue_pair: 17, psn: 5 }, LaneAddress { queue_pair: 18, psn: 0xFF_FFFF }],
            slots: [
                RemoteSlots {
                    address: 0x7000_0000_1000,
                    slot_stride: 4096,
                    slot_bytes: 4000,
                    slot_count: 9,
                    key: 0xABCD,
                },
                RemoteSlots { address: 1 << 40, slot_stride: 64, slot_bytes: 64, slot_count: 2, key: 7 },
            ],
            message_bytes_max: 1 << 30,
        }
    }

    #[test]
    fn frames_survive_the_wire() {
        for frame in [
            Handshake::Hello(hello()),
            Handshake::Hello(Hello { slots: [RemoteSlots::default(); 2], ..hello() }),
            Handshake::Ready,
            Handshake::Refused(Refusal::Busy),
            Handshake::Refused(Refusal::Unknown(77)),
        ] {
            assert_eq!(Handshake::decode(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn damaged_hellos_are_refused() {
        let good = Handshake::Hello(hello()).encode();
        // (first byte, bytes to put there, what is wrong)
        let damages: [(usize, &[u8], &str); 16] = [
            (0, &[0], "not an RDMA handshake"),
            (8, &[9], "must be zero"),
            (10, &[7], "unknown kind"),
            (12, &[0], "unknown MTU"),
            (12, &[6], "unknown MTU"),
            (13, &[3], "unknown link layer"),
            (14, &[0], "no RDMA reads"),
            (15, &[1], "must be zero"),
            (34, &[1, 0], "credit window"),
            (36, &[0, 0, 0, 1], "receive buffer size"),
            (43, &[1], "24 bits"),
            (48, &[17], "no lane can have"),
            (80, &[0, 0, 0, 0], "impossible shape"),
            (64, &[0xFF; 8], "end of the address space"),
            (120, &[0, 0, 0, 0], "impossible shape"),
            (96, &[0xFF; 8], "end of the address space"),
        ];
        for (at, bytes, expected) in damages {
            let mut bad = good;
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            let error = Handshake::decode(&bad).expect_err(expected);
            assert!(error.contains(expected), "{error} is not {expected}");
        }
    }

    #[test]
    fn slots_end_where_they_end() {
        let slots = hello().slots[0];
        assert_eq!(slots.locate(8, 0, 4000), Some(0x7000_0000_1000 + 8 * 4096));
        for (slot, offset, length) in [(9, 0, 1), (8, 1, 4000), (0, u32::MAX, u32::MAX), (0, 4001, 0)] {
            assert_eq!(slots.locate(slot, offset, length), None, "{slot} {offset} {length}");
        }
        assert_eq!(RemoteSlots::default().locate(0, 0, 0), None, "not even nothing");
    }

    #[test]
    fn pieces_lie_in_their_message() {
        let piece = Segment { carries_message: true, credits: 3, number: 9, message_bytes: 100, offset: 60 };
        assert_eq!(Segment::decode(&piece.encode(), 16 + 40, 100), Ok(piece));
        for (received, max) in [(16 + 41, 100), (15, 100), (16, 100), (16 + 40, 99)] {
            assert!(Segment::decode(&piece.encode(), received, max).is_err(), "{received} {max}");
        }
        let credit = Segment { carries_message: false, credits: 3, number: 0, message_bytes: 0, offset: 0 };
        assert_eq!(Segment::decode(&credit.encode(), 16, 100), Ok(credit));
        assert!(Segment::decode(&credit.encode(), 17, 100).is_err());
    }
}
