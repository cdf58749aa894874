//! The messages between nodes: a kind byte, then little-endian fields. A length that does not fit, an unknown
//! kind or left-over bytes make the whole message invalid; the connection is then closed.

use dataplane_fabric::auth::Versions;
use dataplane_memory::SlabKind;

use crate::config::{BLOCKS_MAX, MESSAGE_BLOCKS_MAX};
use crate::negotiation::{Greeting, ProtocolError};
use crate::shard::{HeadRange, PieceLayout};

/// The message versions that this node speaks. The newest is raised when a message changes its meaning; the
/// oldest, when releases that speak no newer version are no longer supported.
pub(crate) const VERSIONS: Versions = Versions { oldest: 7, newest: 7 };

/// Name of a slot at its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotName {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// First message of each side.
    Hello(Greeting),
    /// Receiver to sender: `blocks` blocks from `first_block` on are wanted, and block
    /// `first_block + offset + i` goes into `slots[i]` of the receiver's slab of the kind `slab`. A
    /// reservation of more slots than fit takes several messages, in the order of their offsets, and is
    /// valid once all have arrived. Immediates carry `tag`. `content` names the whole content; a sender
    /// whose content differs sends nothing.
    Reserve {
        transfer: u64,
        tag: u16,
        content: [u8; 16],
        first_block: u32,
        blocks: u32,
        offset: u32,
        slab: SlabKind,
        slots: Vec<SlotName>,
    },
    /// Sender to receiver: the blocks that the writes up to immediate `sequence` carry, with a checksum per
    /// block.
    Announce { transfer: u64, sequence: u16, first_layer: u16, layers: u16, first_block: u32, sums: Vec<u64> },
    /// Sender to receiver: no further message or write follows.
    Finished { transfer: u64 },
    /// Receiver to sender: stop.
    Cancel { transfer: u64 },
    /// Sender to receiver: stopped; no write of this transfer is in flight.
    CancelAck { transfer: u64 },
}

const HELLO: u8 = 1;
const RESERVE: u8 = 2;
const ANNOUNCE: u8 = 3;
const FINISHED: u8 = 4;
const CANCEL: u8 = 5;
const CANCEL_ACK: u8 = 6;

impl Message {
    /// Encodes the message. Of a `Reserve` with more slots than fit, the first ones are encoded;
    /// [`Message::advance`] moves to the rest.
    pub(crate) fn encode(&self) -> Box<[u8]> {
        let mut out = Vec::with_capacity(64);
        match self {
            Self::Hello(Greeting { versions, layout, checksums, wanted }) => {
                out.push(HELLO);
                out.extend(versions.oldest.to_le_bytes());
                out.extend(versions.newest.to_le_bytes());
                out.extend(layout.layers.to_le_bytes());
                out.extend(layout.rows.to_le_bytes());
                out.extend(layout.heads.first.to_le_bytes());
                out.extend(layout.heads.count.to_le_bytes());
                out.extend(layout.head_bytes.to_le_bytes());
                out.extend(layout.fingerprint.to_le_bytes());
                out.extend([*checksums, *wanted]);
            }
            Self::Reserve { transfer, tag, content, first_block, blocks, offset, slab, slots } => {
                let slots = &slots[..slots.len().min(MESSAGE_BLOCKS_MAX)];
                out.push(RESERVE);
                out.extend(transfer.to_le_bytes());
                out.extend(tag.to_le_bytes());
                out.extend(content);
                out.extend(first_block.to_le_bytes());
                out.extend(blocks.to_le_bytes());
                out.extend(offset.to_le_bytes());
                out.push(slab.index() as u8);
                out.extend((slots.len() as u32).to_le_bytes());
                for name in slots {
                    out.extend(name.slot.to_le_bytes());
                    out.extend(name.generation.to_le_bytes());
                }
            }
            Self::Announce { transfer, sequence, first_layer, layers, first_block, sums } => {
                out.push(ANNOUNCE);
                out.extend(transfer.to_le_bytes());
                out.extend(sequence.to_le_bytes());
                out.extend(first_layer.to_le_bytes());
                out.extend(layers.to_le_bytes());
                out.extend(first_block.to_le_bytes());
                out.extend((sums.len() as u32).to_le_bytes());
                sums.iter().for_each(|sum| out.extend(sum.to_le_bytes()));
            }
            Self::Finished { transfer } => encode_plain(&mut out, FINISHED, *transfer),
            Self::Cancel { transfer } => encode_plain(&mut out, CANCEL, *transfer),
            Self::CancelAck { transfer } => encode_plain(&mut out, CANCEL_ACK, *transfer),
        }
        out.into_boxed_slice()
    }

    /// Drops the part that [`Message::encode`] wrote. Returns whether a rest remains to be encoded.
    pub(crate) fn advance(&mut self) -> bool {
        let Self::Reserve { offset, slots, .. } = self else { return false };
        let count = slots.len().min(MESSAGE_BLOCKS_MAX);
        slots.drain(..count);
        *offset += count as u32;
        !slots.is_empty()
    }

    /// Decodes a message; `None` when the bytes are not exactly one message.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Reader(bytes);
        let message = match rest.u8()? {
            HELLO => Self::Hello(Greeting {
                versions: Versions { oldest: rest.u16()?, newest: rest.u16()? },
                layout: PieceLayout {
                    layers: rest.u16()?,
                    rows: rest.u32()?,
                    heads: HeadRange { first: rest.u16()?, count: rest.u16()? },
                    head_bytes: rest.u32()?,
                    fingerprint: rest.u64()?,
                },
                checksums: rest.u8()?,
                wanted: rest.u8()?,
            }),
            RESERVE => {
                let (transfer, tag, content) = (rest.u64()?, rest.u16()?, rest.take()?);
                let (first_block, blocks, offset) = (rest.u32()?, rest.u32()?, rest.u32()?);
                let slab = SlabKind::from_index(rest.u8()?)?;
                let count = rest.count()?;
                let is_within = u64::from(offset) + count as u64 <= u64::from(blocks);
                if blocks as usize > BLOCKS_MAX || !is_within || (count == 0) != (blocks == 0) {
                    return None;
                }
                let mut slots = Vec::with_capacity(count);
                for _ in 0..count {
                    slots.push(SlotName { slot: rest.u32()?, generation: rest.u32()? });
                }
                Self::Reserve { transfer, tag, content, first_block, blocks, offset, slab, slots }
            }
            ANNOUNCE => {
                let (transfer, sequence) = (rest.u64()?, rest.u16()?);
                let (first_layer, layers, first_block) = (rest.u16()?, rest.u16()?, rest.u32()?);
                let count = rest.count()?;
                let mut sums = Vec::with_capacity(count);
                for _ in 0..count {
                    sums.push(rest.u64()?);
                }
                Self::Announce { transfer, sequence, first_layer, layers, first_block, sums }
            }
            FINISHED => Self::Finished { transfer: rest.u64()? },
            CANCEL => Self::Cancel { transfer: rest.u64()? },
            CANCEL_ACK => Self::CancelAck { transfer: rest.u64()? },
            _ => return None,
        };
        // A later version may have appended fields to its greeting, which is sent before the two nodes have
        // agreed on a version.
        let is_later = matches!(&message, Self::Hello(theirs) if theirs.versions.newest > VERSIONS.newest);
        (rest.0.is_empty() || is_later).then_some(message)
    }
}

/// Returns the reason that these bytes are no valid message. The versions of a greeting are readable
/// whatever else it holds.
pub(crate) fn decode_error(bytes: &[u8]) -> ProtocolError {
    let mut rest = Reader(bytes);
    match (rest.u8(), rest.u16(), rest.u16()) {
        (Some(HELLO), Some(oldest), Some(newest)) => {
            let theirs = Versions { oldest, newest };
            if VERSIONS.common(theirs).is_some() {
                ProtocolError::NoSense
            } else {
                ProtocolError::Version(theirs)
            }
        }
        _ => ProtocolError::NoSense,
    }
}

fn encode_plain(out: &mut Vec<u8>, kind: u8, transfer: u64) {
    out.push(kind);
    out.extend(transfer.to_le_bytes());
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Reads the number of 8-byte items, if that many follow: no memory is reserved for a false count.
    fn count(&mut self) -> Option<usize> {
        let count = self.u32()? as usize;
        (count <= MESSAGE_BLOCKS_MAX && count * 8 == self.0.len()).then_some(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Checksum;

    fn samples() -> Vec<Message> {
        let heads = HeadRange { first: 8, count: 4 };
        let layout = PieceLayout { layers: 80, rows: 32, heads, head_bytes: 256, fingerprint: u64::MAX };
        vec![
            Message::Hello(Greeting::new(layout, Checksum::Lanes)),
            Message::Reserve {
                transfer: 1,
                tag: 2,
                content: [9; 16],
                first_block: 3,
                blocks: 9,
                offset: 2,
                slab: SlabKind::Device,
                slots: vec![SlotName { slot: 4, generation: 5 }; 7],
            },
            Message::Announce {
                transfer: u64::MAX,
                sequence: 1,
                first_layer: 2,
                layers: 3,
                first_block: 4,
                sums: vec![9; MESSAGE_BLOCKS_MAX],
            },
            Message::Finished { transfer: 8 },
            Message::Cancel { transfer: 9 },
            Message::CancelAck { transfer: 10 },
        ]
    }

    #[test]
    fn messages_come_back_as_they_went_and_fit() {
        for message in samples() {
            let bytes = message.encode();
            assert!(bytes.len() <= dataplane_fabric::MESSAGE_BYTES_MAX);
            assert_eq!(Message::decode(&bytes), Some(message));
        }
    }

    /// Also with the frame of a bond around it.
    #[test]
    fn a_long_reservation_travels_in_messages_that_fit() {
        for blocks in [0, 1, MESSAGE_BLOCKS_MAX, MESSAGE_BLOCKS_MAX + 1, 8192, BLOCKS_MAX] {
            let names: Vec<SlotName> =
                (0..blocks as u32).map(|slot| SlotName { slot, generation: slot ^ 5 }).collect();
            let (transfer, tag, content, first_block) = (1, 2, [3; 16], 4);
            let mut message = Message::Reserve {
                transfer,
                tag,
                content,
                first_block,
                blocks: blocks as u32,
                offset: 0,
                slab: SlabKind::Host,
                slots: names.clone(),
            };
            let mut seen = Vec::new();
            loop {
                let bytes = message.encode();
                assert!(bytes.len() <= dataplane_fabric::MESSAGE_BYTES_MAX - 1024, "{} bytes", bytes.len());
                let Some(Message::Reserve { blocks: whole, offset, slots, .. }) = Message::decode(&bytes)
                else {
                    panic!("not a message");
                };
                assert_eq!((whole as usize, offset as usize), (blocks, seen.len()));
                seen.extend(slots);
                if !message.advance() {
                    break;
                }
            }
            assert_eq!(seen, names);
        }
    }

    #[test]
    fn a_reservation_beyond_its_bounds_is_no_message() {
        let slots = [SlotName { slot: 4, generation: 5 }; 7];
        for (blocks, offset, count, is_message) in [
            (BLOCKS_MAX, BLOCKS_MAX - 7, 7, true),
            (BLOCKS_MAX + 1, 0, 7, false),
            (6, 0, 7, false),
            (9, 3, 7, false),
            (7, u32::MAX as usize, 7, false),
            (7, 0, 0, false),
            (0, 0, 0, true),
        ] {
            let message = Message::Reserve {
                transfer: 1,
                tag: 2,
                content: [9; 16],
                first_block: 3,
                blocks: blocks as u32,
                offset: offset as u32,
                slab: SlabKind::Host,
                slots: slots[..count].to_vec(),
            };
            let found = Message::decode(&message.encode());
            assert_eq!(found, is_message.then_some(message), "{blocks} {offset} {count}");
        }
    }

    #[test]
    fn a_greeting_of_another_version_is_told_from_nonsense() {
        let hello = samples()[0].encode();
        let older = [&[HELLO][..], &[3, 0, 5, 0], &hello[5..hello.len() - 2]].concat();
        assert_eq!(Message::decode(&older), None);
        assert_eq!(decode_error(&older), ProtocolError::Version(Versions { oldest: 3, newest: 5 }));
        // A greeting of a later release that still speaks this version, with bytes appended.
        let later = [&[HELLO][..], &[7, 0, 9, 0], &hello[5..], &[1, 2, 3]].concat();
        let Some(Message::Hello(theirs)) = Message::decode(&later) else { panic!("a greeting") };
        assert_eq!(theirs.versions, Versions { oldest: 7, newest: 9 });
        let longer = [&hello[..], &[1]].concat();
        assert_eq!(
            (Message::decode(&longer), decode_error(&longer)),
            (None, ProtocolError::NoSense),
            "of this version"
        );
        assert_eq!(
            decode_error(&hello[..hello.len() - 2]),
            ProtocolError::NoSense,
            "of this version, and too short"
        );
        assert_eq!(
            (decode_error(&[CANCEL, 3, 0, 0, 0]), decode_error(&[])),
            (ProtocolError::NoSense, ProtocolError::NoSense)
        );
    }

    /// Mutations of valid messages: never a panic, and never an allocation that the bytes do not back.
    #[test]
    fn mutated_messages_never_panic() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut draw = |bound: usize| random.usize(..bound);
        for round in 0..20_000 {
            let mut bytes = samples()[round % 6].encode().into_vec();
            bytes.truncate(draw(bytes.len() + 1).max(1));
            for _ in 0..draw(4) {
                let at = draw(bytes.len().min(40));
                bytes[at] = draw(256) as u8;
            }
            if let Some(message) = Message::decode(&bytes) {
                let is_greeting = matches!(message, Message::Hello(_));
                let known = if is_greeting { message.encode().len().min(bytes.len()) } else { bytes.len() };
                assert_eq!(&*message.encode(), &bytes[..known], "what decodes must encode to the same bytes");
            }
        }
    }
}
