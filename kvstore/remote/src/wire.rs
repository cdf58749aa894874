//! The messages between a client and a pool node.
//!
//! A version byte, a kind byte, little-endian fields, and the xxh3-64 of all that: a flipped bit in a slot name
//! would cost a miss, one in what describes the bytes could make them mean something else. A length that lies,
//! an unknown kind or version, a field outside of its range or left-over bytes make the whole message invalid;
//! the connection is then closed. Nothing is allocated for a length that the bytes do not back.

use dataplane_fabric::Priority;
use kvstore_block::BlockIdentity;
use xxhash_rust::xxh3::xxh3_64;

/// Raised when a message changes its meaning.
const VERSION: u8 = 1;
/// Blocks that one message may name: the bits of a `u64` in `Message::Commit`.
pub const BLOCKS_PER_MESSAGE_MAX: usize = 64;
const SUM_BYTES: usize = 8;

/// What is stored with a block and comes back with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// The block before it in the chain; zero for the first.
    pub parent: BlockIdentity,
    /// Bytes of the block, from the start of its slot.
    pub bytes: u32,
    /// [`crate::checksum`] of those bytes.
    pub checksum: u64,
    /// Whatever the store needs to know to use the bytes (layout fingerprint, quantisation). Not looked at here.
    pub meta: u64,
}

/// A block that a client wants to store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) identity: BlockIdentity,
    pub(crate) description: Description,
}

/// A block that the node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoundBlock {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) description: Description,
}

/// The answer to one [`Offer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grant {
    /// Write it there.
    Slot { slot: u32, generation: u32 },
    /// It is here.
    Present,
    /// Somebody else is writing it.
    Pending,
    /// No slot is free, and none can be freed.
    Full,
    /// It does not fit into a slot.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Client: which of these, from the first on, do you have? Found blocks are leased to the client.
    LookUp { request: u64, chain: Vec<BlockIdentity> },
    /// Client: no read under this lease is in flight, and none will be posted.
    Release { lease: u64 },
    /// Client: may I store these?
    Reserve { request: u64, offers: Vec<Offer> },
    /// Client: the writes of these blocks (bit `i` is offer `i`) were posted before this message, on its lane,
    /// and no others will be.
    Commit { request: u64, written: u64 },
    /// Client: what I read of these had the wrong checksum.
    Suspect { chain: Vec<BlockIdentity> },
    /// Client: how are you?
    Stats { request: u64 },
    /// Node: the leading blocks that are here, to be read within the lease. No lease (0) when there are none.
    Found { request: u64, lease: u64, lease_ms: u32, blocks: Vec<FoundBlock> },
    /// Node: an answer for each offer. The slots are the client's to write for so long.
    Granted { request: u64, lease_ms: u32, grants: Vec<Grant> },
    /// Node: which of the written blocks can be found from now on, and which had the wrong checksum.
    Committed { request: u64, registered: u64, damaged: u64 },
    /// Node: its load.
    Load { request: u64, slots: u32, free: u32, blocks: u32, leases: u32, verifying: u32 },
    /// Node: not now; a table is full.
    Busy { request: u64 },
}

const LOOK_UP: u8 = 1;
const RELEASE: u8 = 2;
const RESERVE: u8 = 3;
const COMMIT: u8 = 4;
const SUSPECT: u8 = 5;
const STATS: u8 = 6;
const FOUND: u8 = 7;
const GRANTED: u8 = 8;
const COMMITTED: u8 = 9;
const LOAD: u8 = 10;
const BUSY: u8 = 11;

impl Message {
    /// The lane it must travel on: a commit on that of the writes before it.
    pub(crate) fn priority(&self) -> Priority {
        match self {
            Self::Reserve { .. } | Self::Commit { .. } | Self::Granted { .. } | Self::Committed { .. } => {
                Priority::Background
            }
            _ => Priority::Urgent,
        }
    }

    pub(crate) fn encode(&self) -> Box<[u8]> {
        let mut out = Vec::with_capacity(64);
        self.encode_body(&mut out);
        let sum = xxh3_64(&out);
        sum.put(&mut out);
        out.into_boxed_slice()
    }

    /// `None` when the bytes are not exactly one message of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>()?;
        (xxh3_64(body) == u64::from_le_bytes(*sum)).then(|| Self::decode_body(body)).flatten()
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        out.push(VERSION);
        match self {
            Self::LookUp { request, chain } => {
                out.push(LOOK_UP);
                request.put(out);
                put_list(chain, out);
            }
            Self::Release { lease } => put_plain(RELEASE, *lease, out),
            Self::Reserve { request, offers } => {
                out.push(RESERVE);
                request.put(out);
                put_list(offers, out);
            }
            Self::Commit { request, written } => {
                put_plain(COMMIT, *request, out);
                written.put(out);
            }
            Self::Suspect { chain } => {
                out.push(SUSPECT);
                put_list(chain, out);
            }
            Self::Stats { request } => put_plain(STATS, *request, out),
            Self::Found { request, lease, lease_ms, blocks } => {
                put_plain(FOUND, *request, out);
                lease.put(out);
                lease_ms.put(out);
                put_list(blocks, out);
            }
            Self::Granted { request, lease_ms, grants } => {
                put_plain(GRANTED, *request, out);
                lease_ms.put(out);
                put_list(grants, out);
            }
            Self::Committed { request, registered, damaged } => {
                put_plain(COMMITTED, *request, out);
                registered.put(out);
                damaged.put(out);
            }
            Self::Load { request, slots, free, blocks, leases, verifying } => {
                put_plain(LOAD, *request, out);
                [slots, free, blocks, leases, verifying].into_iter().for_each(|level| level.put(out));
            }
            Self::Busy { request } => put_plain(BUSY, *request, out),
        }
    }

    fn decode_body(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let from = &mut rest;
        if u8::get(from)? != VERSION {
            return None;
        }
        let message = match u8::get(from)? {
            LOOK_UP => Self::LookUp { request: u64::get(from)?, chain: get_list(from)? },
            RELEASE => Self::Release { lease: u64::get(from)? },
            RESERVE => Self::Reserve { request: u64::get(from)?, offers: get_list(from)? },
            COMMIT => Self::Commit { request: u64::get(from)?, written: u64::get(from)? },
            SUSPECT => Self::Suspect { chain: get_list(from)? },
            STATS => Self::Stats { request: u64::get(from)? },
            FOUND => Self::Found {
                request: u64::get(from)?,
                lease: u64::get(from)?,
                lease_ms: u32::get(from)?,
                blocks: get_list(from)?,
            },
            GRANTED => {
                Self::Granted { request: u64::get(from)?, lease_ms: u32::get(from)?, grants: get_list(from)? }
            }
            COMMITTED => Self::Committed {
                request: u64::get(from)?,
                registered: u64::get(from)?,
                damaged: u64::get(from)?,
            },
            LOAD => Self::Load {
                request: u64::get(from)?,
                slots: u32::get(from)?,
                free: u32::get(from)?,
                blocks: u32::get(from)?,
                leases: u32::get(from)?,
                verifying: u32::get(from)?,
            },
            BUSY => Self::Busy { request: u64::get(from)? },
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

/// A value of fixed size.
trait Field: Sized {
    const BYTES: usize;
    fn put(&self, out: &mut Vec<u8>);
    fn get(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! integer_fields {
    ($($integer:ty),*) => {$(
        impl Field for $integer {
            const BYTES: usize = size_of::<Self>();
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
            fn get(from: &mut &[u8]) -> Option<Self> {
                let (head, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(Self::from_le_bytes(*head))
            }
        }
    )*};
}

integer_fields!(u8, u16, u32, u64);

impl Field for BlockIdentity {
    const BYTES: usize = 16;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.0);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let (head, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(Self(*head))
    }
}

impl Field for Description {
    const BYTES: usize = 36;

    fn put(&self, out: &mut Vec<u8>) {
        self.parent.put(out);
        self.bytes.put(out);
        self.checksum.put(out);
        self.meta.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let (parent, bytes) = (Field::get(from)?, Field::get(from)?);
        Some(Self { parent, bytes, checksum: Field::get(from)?, meta: Field::get(from)? })
    }
}

impl Field for Offer {
    const BYTES: usize = BlockIdentity::BYTES + Description::BYTES;

    fn put(&self, out: &mut Vec<u8>) {
        self.identity.put(out);
        self.description.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(Self { identity: Field::get(from)?, description: Field::get(from)? })
    }
}

impl Field for FoundBlock {
    const BYTES: usize = 8 + Description::BYTES;

    fn put(&self, out: &mut Vec<u8>) {
        self.slot.put(out);
        self.generation.put(out);
        self.description.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(Self { slot: Field::get(from)?, generation: Field::get(from)?, description: Field::get(from)? })
    }
}

impl Field for Grant {
    const BYTES: usize = 9;

    fn put(&self, out: &mut Vec<u8>) {
        let (kind, slot, generation) = match *self {
            Self::Slot { slot, generation } => (0_u8, slot, generation),
            Self::Present => (1, 0, 0),
            Self::Pending => (2, 0, 0),
            Self::Full => (3, 0, 0),
            Self::Refused => (4, 0, 0),
        };
        kind.put(out);
        slot.put(out);
        generation.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        match (u8::get(from)?, u32::get(from)?, u32::get(from)?) {
            (0, slot, generation) => Some(Self::Slot { slot, generation }),
            (1, 0, 0) => Some(Self::Present),
            (2, 0, 0) => Some(Self::Pending),
            (3, 0, 0) => Some(Self::Full),
            (4, 0, 0) => Some(Self::Refused),
            _ => None,
        }
    }
}

fn put_plain(kind: u8, name: u64, out: &mut Vec<u8>) {
    out.push(kind);
    name.put(out);
}

fn put_list<T: Field>(list: &[T], out: &mut Vec<u8>) {
    debug_assert!(list.len() <= BLOCKS_PER_MESSAGE_MAX, "a list of {} is never sent", list.len());
    (list.len() as u16).put(out);
    list.iter().for_each(|item| item.put(out));
}

/// The list that is the rest of a message.
fn get_list<T: Field>(from: &mut &[u8]) -> Option<Vec<T>> {
    let count = usize::from(u16::get(from)?);
    if count > BLOCKS_PER_MESSAGE_MAX || count * T::BYTES != from.len() {
        return None;
    }
    (0..count).map(|_| T::get(from)).collect()
}

/// See [`crate::fuzz_wire`]. The body is tried without its sum, which a fuzzer would not find.
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(message) = Message::decode(bytes) {
        assert_eq!(&*message.encode(), bytes);
    }
    if let Some(message) = Message::decode_body(bytes) {
        let mut body = Vec::new();
        message.encode_body(&mut body);
        assert_eq!(body, bytes, "what decodes must encode to the same bytes");
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Message> {
        let identity = BlockIdentity([7; 16]);
        let description = Description { parent: identity, bytes: 1, checksum: u64::MAX, meta: 3 };
        let grant = |slot| Grant::Slot { slot, generation: 9 };
        vec![
            Message::LookUp { request: 1, chain: vec![identity; BLOCKS_PER_MESSAGE_MAX] },
            Message::Release { lease: 2 },
            Message::Reserve { request: 3, offers: vec![Offer { identity, description }; 64] },
            Message::Commit { request: 4, written: u64::MAX },
            Message::Suspect { chain: vec![identity] },
            Message::Stats { request: 5 },
            Message::Found {
                request: 6,
                lease: 7,
                lease_ms: 8,
                blocks: vec![FoundBlock { slot: 1, generation: 2, description }; 64],
            },
            Message::Granted {
                request: 9,
                lease_ms: 10,
                grants: vec![grant(1), Grant::Present, Grant::Pending, Grant::Full, Grant::Refused],
            },
            Message::Committed { request: 11, registered: 12, damaged: 13 },
            Message::Load { request: 14, slots: 15, free: 16, blocks: 17, leases: 18, verifying: 19 },
            Message::Busy { request: 20 },
        ]
    }

    #[test]
    fn messages_come_back_as_they_went_and_fit() {
        for message in samples() {
            let bytes = message.encode();
            assert!(bytes.len() <= 8 << 10, "{} bytes", bytes.len());
            assert_eq!(Message::decode(&bytes), Some(message));
        }
    }

    #[test]
    fn every_flipped_bit_of_a_message_is_noticed() {
        for message in samples() {
            let bytes = message.encode();
            for bit in 0..bytes.len() * 8 {
                let mut wrong = bytes.clone();
                wrong[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Message::decode(&wrong), None, "bit {bit} of {message:?}");
            }
        }
    }

    #[test]
    fn mutated_bodies_never_panic_and_encode_to_what_they_were() {
        let mut random = 7_u64;
        let mut draw = |bound: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random as usize % bound
        };
        let samples = samples();
        let mut understood = 0;
        for round in 0..30_000 {
            let mut body = Vec::new();
            samples[round % samples.len()].encode_body(&mut body);
            if draw(3) == 0 {
                body.truncate(draw(body.len() + 1));
            }
            for _ in 0..draw(4).min(body.len()) {
                let at = draw(body.len().min(40));
                body[at] = draw(256) as u8;
            }
            understood += usize::from(Message::decode_body(&body).is_some());
            fuzz(&body);
        }
        assert!(understood > 5_000, "the mutations are too rough: {understood}");
    }
}
