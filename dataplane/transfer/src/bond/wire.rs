//! Frames between bonded nodes, carried in messages of the rails: a kind byte, then little-endian fields.

/// Most links that one event may wait for: all but the link that carries it.
const BEHIND_MAX: usize = super::LINKS_MAX - 1;
/// Bytes that a frame adds to a message at most.
pub(crate) const FRAME_BYTES: usize = 11 + BEHIND_MAX * 13;
const MAGIC: u64 = u64::from_le_bytes(*b"KVSRBOND");

const HELLO: u8 = 0xB0;
const WELCOME: u8 = 0xB1;
const MESSAGE: u8 = 1;
const IMMEDIATE: u8 = 2;
const ACK: u8 = 3;
const LINK_DOWN: u8 = 4;
const FENCED: u8 = 5;
const MARKER: u8 = 6;

/// A connection of a link of a bond, by its number, which counts from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkName {
    pub(crate) link: u8,
    pub(crate) connection: u32,
}

/// A marker: the `number`-th of its lane, over one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MarkerName {
    pub(crate) over: LinkName,
    pub(crate) number: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// First message on a link, from the node that connected. With one link, the only frame.
    Hello { session: u64, links: u8, name: LinkName },
    /// Answer to `Hello`. The incarnation stays the same while the session lasts; a node that has
    /// restarted, or has ended the session, draws another.
    Welcome { incarnation: u64 },
    /// A user's message, number `sequence` of its lane. The writes before it have landed when the markers
    /// `behind`, or later ones over their links, have arrived.
    Message { lane: u8, sequence: u64, behind: Vec<MarkerName>, bytes: &'a [u8] },
    /// A user's immediate, with the same fields.
    Immediate { lane: u8, sequence: u64, behind: Vec<MarkerName>, value: u32 },
    /// Marker behind the writes of a lane that this link has carried so far. Numbers increase.
    Marker { lane: u8, number: u64 },
    /// Messages and immediates up to these numbers, by lane, were delivered.
    Ack { delivered: [u64; 2] },
    /// The link has failed at the sender, which asks for `Fenced` once nothing that it sent over the link
    /// can arrive any more.
    LinkDown { name: LinkName },
    /// Nothing can arrive over that link any more. Events up to these numbers, by lane, were delivered; no
    /// later event will be delivered because of bytes that the link carried.
    Fenced { name: LinkName, delivered: [u64; 2] },
}

impl<'a> Frame<'a> {
    pub(crate) fn encode(&self) -> Box<[u8]> {
        let mut out = Vec::with_capacity(32);
        match self {
            Self::Hello { session, links, name } => {
                out.push(HELLO);
                out.extend(MAGIC.to_le_bytes());
                out.extend(session.to_le_bytes());
                out.push(*links);
                put_name(&mut out, name);
            }
            Self::Welcome { incarnation } => {
                out.push(WELCOME);
                out.extend(MAGIC.to_le_bytes());
                out.extend(incarnation.to_le_bytes());
            }
            Self::Message { lane, sequence, behind, bytes } => {
                out.reserve(bytes.len());
                out.extend([MESSAGE, *lane]);
                out.extend(sequence.to_le_bytes());
                put_markers(&mut out, behind);
                out.extend(*bytes);
            }
            Self::Immediate { lane, sequence, behind, value } => {
                out.extend([IMMEDIATE, *lane]);
                out.extend(sequence.to_le_bytes());
                put_markers(&mut out, behind);
                out.extend(value.to_le_bytes());
            }
            Self::Marker { lane, number } => {
                out.extend([MARKER, *lane]);
                out.extend(number.to_le_bytes());
            }
            Self::Ack { delivered } => {
                out.push(ACK);
                delivered.iter().for_each(|sequence| out.extend(sequence.to_le_bytes()));
            }
            Self::LinkDown { name } => {
                out.push(LINK_DOWN);
                put_name(&mut out, name);
            }
            Self::Fenced { name, delivered } => {
                out.push(FENCED);
                put_name(&mut out, name);
                delivered.iter().for_each(|sequence| out.extend(sequence.to_le_bytes()));
            }
        }
        out.into_boxed_slice()
    }

    /// `None` when the bytes are no frame.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let (frame, rest) = match kind {
            HELLO => {
                let (magic, rest) = u64_of(rest)?;
                let (session, rest) = u64_of(rest)?;
                let (&links, rest) = rest.split_first()?;
                let (name, rest) = name_of(rest)?;
                let is_sensible = magic == MAGIC && name.link < links;
                (is_sensible.then_some(Self::Hello { session, links, name })?, rest)
            }
            WELCOME => {
                let (magic, rest) = u64_of(rest)?;
                let (incarnation, rest) = u64_of(rest)?;
                ((magic == MAGIC).then_some(Self::Welcome { incarnation })?, rest)
            }
            MESSAGE | IMMEDIATE | MARKER => {
                let (&lane, rest) = rest.split_first()?;
                let (number, rest) = u64_of(rest)?;
                if lane > 1 {
                    return None;
                }
                if kind == MARKER {
                    (Self::Marker { lane, number }, rest)
                } else {
                    let sequence = number;
                    let (behind, rest) = markers_of(rest)?;
                    if kind == MESSAGE {
                        (Self::Message { lane, sequence, behind, bytes: rest }, &rest[..0])
                    } else {
                        let (value, rest) = rest.split_first_chunk()?;
                        (Self::Immediate { lane, sequence, behind, value: u32::from_le_bytes(*value) }, rest)
                    }
                }
            }
            ACK => {
                let (delivered, rest) = lanes_of(rest)?;
                (Self::Ack { delivered }, rest)
            }
            LINK_DOWN => {
                let (name, rest) = name_of(rest)?;
                (Self::LinkDown { name }, rest)
            }
            FENCED => {
                let (name, rest) = name_of(rest)?;
                let (delivered, rest) = lanes_of(rest)?;
                (Self::Fenced { name, delivered }, rest)
            }
            _ => return None,
        };
        rest.is_empty().then_some(frame)
    }
}

fn put_name(out: &mut Vec<u8>, name: &LinkName) {
    out.push(name.link);
    out.extend(name.connection.to_le_bytes());
}

fn name_of(bytes: &[u8]) -> Option<(LinkName, &[u8])> {
    let (&link, rest) = bytes.split_first()?;
    let (connection, rest) = rest.split_first_chunk()?;
    Some((LinkName { link, connection: u32::from_le_bytes(*connection) }, rest))
}

fn put_markers(out: &mut Vec<u8>, markers: &[MarkerName]) {
    out.push(markers.len() as u8);
    for MarkerName { over, number } in markers {
        put_name(out, over);
        out.extend(number.to_le_bytes());
    }
}

fn markers_of(bytes: &[u8]) -> Option<(Vec<MarkerName>, &[u8])> {
    let (&count, mut rest) = bytes.split_first()?;
    if usize::from(count) > BEHIND_MAX {
        return None;
    }
    let mut markers = Vec::with_capacity(count.into());
    for _ in 0..count {
        let (over, behind) = name_of(rest)?;
        let (number, behind) = u64_of(behind)?;
        markers.push(MarkerName { over, number });
        rest = behind;
    }
    Some((markers, rest))
}

fn lanes_of(bytes: &[u8]) -> Option<([u64; 2], &[u8])> {
    let (urgent, rest) = u64_of(bytes)?;
    let (background, rest) = u64_of(rest)?;
    Some(([urgent, background], rest))
}

fn u64_of(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (word, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*word), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went_and_nonsense_does_not() {
        let name = LinkName { link: 2, connection: 77 };
        let marker = MarkerName { over: name, number: 1 << 60 };
        let frames = [
            Frame::Hello { session: u64::MAX, links: 3, name },
            Frame::Welcome { incarnation: 1 << 50 },
            Frame::Message { lane: 1, sequence: 9, behind: vec![marker; BEHIND_MAX], bytes: b"bytes" },
            Frame::Message { lane: 0, sequence: 0, behind: Vec::new(), bytes: b"" },
            Frame::Immediate { lane: 0, sequence: 1 << 40, behind: vec![marker], value: 0xABCD },
            Frame::Marker { lane: 1, number: 5 },
            Frame::Ack { delivered: [3, u64::MAX] },
            Frame::LinkDown { name },
            Frame::Fenced { name, delivered: [7, 1 << 33] },
        ];
        for frame in frames {
            let bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes).as_ref(), Some(&frame));
            let is_message = matches!(frame, Frame::Message { .. });
            assert!(is_message || Frame::decode(&bytes[..bytes.len() - 1]).is_none(), "cut: {frame:?}");
            let longer = [&bytes[..], b"x"].concat();
            assert!(is_message || Frame::decode(&longer).is_none(), "too long: {frame:?}");
        }
        assert!(Frame::decode(&[]).is_none());
        assert!(
            Frame::decode(&Frame::Hello { session: 1, links: 2, name }.encode()).is_none(),
            "link 2 of 2"
        );
        let behind = vec![marker; BEHIND_MAX];
        assert_eq!(Frame::Message { lane: 0, sequence: 0, behind, bytes: b"" }.encode().len(), FRAME_BYTES);
        let behind = vec![marker; BEHIND_MAX + 1];
        let crowded = Frame::Immediate { lane: 0, sequence: 0, behind, value: 1 }.encode();
        assert!(Frame::decode(&crowded).is_none(), "more links than there are");
    }
}
