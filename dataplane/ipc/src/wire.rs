//! Messages between two nodes in the rings. The last byte of a message is its kind, so that removing it costs
//! no copy.

use dataplane_fabric::Priority;
use dataplane_memory::{EXPORT_BYTES_MAX, SlabLayout};

const MAGIC: [u8; 8] = *b"KVSRIPC\0";
/// Largest number of slots of a slab that is attached: each slot takes some bytes here.
const SLOTS_MAX: u32 = 1 << 22;
/// Longest reason, in bytes.
const REASON_BYTES_MAX: usize = 512;
/// Magic, slot bytes, slot count.
const HELLO_BYTES_MIN: usize = 8 + 8 + 4;

/// Kind of a message of the node's user.
const USER: u8 = 0;
const HELLO: u8 = 1;
const READY: u8 = 2;
/// Kinds of goodbyes, by lane.
const GOODBYES: [u8; Priority::ALL.len()] = [3, 4];

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    User(Box<[u8]>),
    Hello(Hello),
    /// The sender has attached the receiver's slab.
    Ready,
    /// Last message of a lane, with the reason of the end. No copy of the sender is in flight, and none will
    /// be started.
    Goodbye(Priority, String),
}

/// The slab that a node exports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) layout: SlabLayout,
    /// The driver's handle of the slab; empty when the node exports none.
    pub(crate) exported: Vec<u8>,
}

impl Message {
    pub(crate) fn encode(self) -> Box<[u8]> {
        let (mut bytes, kind) = match self {
            Self::User(message) => (message.into_vec(), USER),
            Self::Hello(hello) => (hello.encode(), HELLO),
            Self::Ready => (Vec::new(), READY),
            Self::Goodbye(lane, reason) => {
                let mut bytes = reason.into_bytes();
                bytes.truncate(REASON_BYTES_MAX);
                (bytes, GOODBYES[lane.index()])
            }
        };
        bytes.push(kind);
        bytes.into_boxed_slice()
    }

    pub(crate) fn decode(message: Box<[u8]>) -> Result<Self, &'static str> {
        let mut bytes = message.into_vec();
        match bytes.pop() {
            Some(USER) => Ok(Self::User(bytes.into_boxed_slice())),
            Some(HELLO) => Hello::decode(&bytes).map(Self::Hello),
            Some(READY) if bytes.is_empty() => Ok(Self::Ready),
            Some(kind) if bytes.len() <= REASON_BYTES_MAX => {
                let lane = Priority::ALL.into_iter().find(|lane| GOODBYES[lane.index()] == kind);
                // The reason is a text for an operator, so invalid UTF-8 is replaced.
                let reason = String::from_utf8_lossy(&bytes).into_owned();
                lane.map(|lane| Self::Goodbye(lane, reason)).ok_or("a message of an unknown kind")
            }
            _ => Err("a message of an unknown kind"),
        }
    }
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.layout.slot_bytes as u64).to_le_bytes());
        bytes.extend(self.layout.slot_count.to_le_bytes());
        bytes.extend(&self.exported);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        if !(HELLO_BYTES_MIN..=HELLO_BYTES_MIN + EXPORT_BYTES_MAX).contains(&bytes.len())
            || !bytes.starts_with(&MAGIC)
        {
            return Err("not a peer of ours");
        }
        let number = |at: usize, len: usize| {
            bytes[at..at + len].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        let slot_bytes = usize::try_from(number(8, 8)).map_err(|_| "a slot of too many bytes")?;
        let layout = SlabLayout { slot_bytes, slot_count: number(16, 4) as u32 };
        let exported = bytes[HELLO_BYTES_MIN..].to_vec();
        if !exported.is_empty() && (layout.mapped_bytes().is_none() || layout.slot_count > SLOTS_MAX) {
            return Err("a slab of an unusable layout");
        }
        Ok(Self { layout, exported })
    }
}

/// Fuzzing: a message that decodes must encode to the same bytes.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz(bytes: &[u8]) {
    match Message::decode(bytes.into()) {
        // An invalid reason is replaced by valid text, so it does not encode to the same bytes.
        Ok(Message::Goodbye(..)) | Err(_) => {}
        Ok(message) => assert_eq!(&*message.encode(), bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_nonsense_is_refused() {
        let layout = SlabLayout { slot_bytes: 70_000, slot_count: 900 };
        let hello = Hello { layout, exported: vec![7; EXPORT_BYTES_MAX] };
        let nothing = Hello { layout: SlabLayout { slot_bytes: 0, slot_count: 0 }, exported: Vec::new() };
        let user = |bytes: &[u8]| Message::User(bytes.into());
        for message in [
            user(b""),
            user(b"abc\0"),
            Message::Hello(hello.clone()),
            Message::Hello(nothing),
            Message::Ready,
            Message::Goodbye(Priority::Urgent, String::new()),
            Message::Goodbye(Priority::Background, "its memory is out of reach".to_owned()),
        ] {
            fuzz(&message.clone().encode());
            assert_eq!(Message::decode(message.clone().encode()), Ok(message));
        }
        let good = Message::Hello(hello.clone()).encode();
        for (at, value) in [(0, b'X'), (15, 0xFF)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(Message::decode(bad).is_err(), "byte {at}");
        }
        let long = Message::Hello(Hello { exported: vec![7; EXPORT_BYTES_MAX + 1], ..hello }).encode();
        let endless = [&[b'x'; REASON_BYTES_MAX + 1][..], &GOODBYES[..1]].concat();
        for bad in [&b""[..], b"\x05", b"x\x02", b"KVSRIPC\0\x01", &long, &endless] {
            assert!(Message::decode(bad.into()).is_err(), "{bad:?}");
            fuzz(bad);
        }
    }
}
