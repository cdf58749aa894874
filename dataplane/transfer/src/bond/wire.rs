//! What bonded nodes tell each other, in messages of the rails: a kind byte, then little-endian fields.

/// Bytes that a frame adds to a message at most.
pub(crate) const FRAME_BYTES: usize = 16;
const MAGIC: u64 = u64::from_le_bytes(*b"KVSRBND1");

const HELLO: u8 = 0xB0;
const WELCOME: u8 = 0xB1;
const MESSAGE: u8 = 1;
const IMMEDIATE: u8 = 2;
const ACK: u8 = 3;
const LINK_DOWN: u8 = 4;
const FENCED: u8 = 5;

/// One link of a bond, as it was made the `epoch`-th time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkName {
    pub(crate) link: u8,
    pub(crate) epoch: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// First message on a link, from the node that connected. With one link, the only frame ever.
    Hello { session: u64, links: u8, name: LinkName },
    /// The answer to it. A session that goes on meets the same incarnation again; a node that has started anew, or has
    /// ended the session, is another one.
    Welcome { incarnation: u64 },
    /// A message of the users, number `sequence` of its lane.
    Message { lane: u8, sequence: u64, bytes: &'a [u8] },
    /// An immediate of the users, alike.
    Immediate { lane: u8, sequence: u64, value: u32 },
    /// Messages and immediates up to these numbers, by lane, were delivered.
    Ack { received: [u64; 2] },
    /// This link has failed here. Tell me when nothing that I sent over it can arrive any more.
    LinkDown { name: LinkName },
    /// It cannot.
    Fenced { name: LinkName },
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
            Self::Message { lane, sequence, bytes } => {
                out.reserve(bytes.len());
                out.extend([MESSAGE, *lane]);
                out.extend(sequence.to_le_bytes());
                out.extend(*bytes);
            }
            Self::Immediate { lane, sequence, value } => {
                out.extend([IMMEDIATE, *lane]);
                out.extend(sequence.to_le_bytes());
                out.extend(value.to_le_bytes());
            }
            Self::Ack { received } => {
                out.push(ACK);
                received.iter().for_each(|sequence| out.extend(sequence.to_le_bytes()));
            }
            Self::LinkDown { name } => {
                out.push(LINK_DOWN);
                put_name(&mut out, name);
            }
            Self::Fenced { name } => {
                out.push(FENCED);
                put_name(&mut out, name);
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
            MESSAGE | IMMEDIATE => {
                let (&lane, rest) = rest.split_first()?;
                let (sequence, rest) = u64_of(rest)?;
                if lane > 1 {
                    return None;
                }
                if kind == MESSAGE {
                    (Self::Message { lane, sequence, bytes: rest }, &rest[..0])
                } else {
                    let (value, rest) = rest.split_first_chunk()?;
                    (Self::Immediate { lane, sequence, value: u32::from_le_bytes(*value) }, rest)
                }
            }
            ACK => {
                let (urgent, rest) = u64_of(rest)?;
                let (background, rest) = u64_of(rest)?;
                (Self::Ack { received: [urgent, background] }, rest)
            }
            LINK_DOWN | FENCED => {
                let (name, rest) = name_of(rest)?;
                (if kind == FENCED { Self::Fenced { name } } else { Self::LinkDown { name } }, rest)
            }
            _ => return None,
        };
        rest.is_empty().then_some(frame)
    }
}

fn put_name(out: &mut Vec<u8>, name: &LinkName) {
    out.push(name.link);
    out.extend(name.epoch.to_le_bytes());
}

fn name_of(bytes: &[u8]) -> Option<(LinkName, &[u8])> {
    let (&link, rest) = bytes.split_first()?;
    let (epoch, rest) = rest.split_first_chunk()?;
    Some((LinkName { link, epoch: u32::from_le_bytes(*epoch) }, rest))
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
        let name = LinkName { link: 2, epoch: 77 };
        let frames = [
            Frame::Hello { session: u64::MAX, links: 3, name },
            Frame::Welcome { incarnation: 1 << 50 },
            Frame::Message { lane: 1, sequence: 9, bytes: b"bytes" },
            Frame::Message { lane: 0, sequence: 0, bytes: b"" },
            Frame::Immediate { lane: 0, sequence: 1 << 40, value: 0xABCD },
            Frame::Ack { received: [3, u64::MAX] },
            Frame::LinkDown { name },
            Frame::Fenced { name },
        ];
        for frame in frames {
            let bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes), Some(frame));
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
        let overhead = Frame::Message { lane: 0, sequence: 0, bytes: b"" }.encode().len();
        assert!(overhead <= FRAME_BYTES);
    }
}
