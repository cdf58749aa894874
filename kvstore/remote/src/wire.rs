//! The messages between a client and a pool node.
//!
//! A version byte, a kind byte, little-endian fields, and the xxh3-64 of all that: a flipped bit in a slot's
//! position would cost a miss, one in a description could give the bytes another meaning. A wrong length, an
//! unknown kind or version, a field outside of its range or left-over bytes make the whole message invalid; the
//! connection is then closed. Nothing is allocated for a length that the bytes do not back.

mod fields;
#[cfg(test)]
mod tests;

use dataplane_fabric::Priority;
use kvstore_block::BlockIdentity;
use xxhash_rust::xxh3::xxh3_64;

use fields::{Field, get_list, put_list};

/// Version of the protocol, raised when a message is added or changes its meaning. 2: the checksum of a block
/// is that of `dataplane-checksum` with the identity in it. 3: `Retain`.
pub(crate) const VERSION: u8 = 3;
/// Maximum number of blocks that one message names: the bits of a `u64` in `Message::Commit`.
pub const BLOCKS_PER_MESSAGE_MAX: usize = 64;
const SUM_BYTES: usize = 8;

/// Description of a block, stored and returned with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// Identity of the preceding block of the chain; zero for the first.
    pub parent: BlockIdentity,
    /// Bytes of the block, from the start of its slot.
    pub bytes: u32,
    /// [`crate::checksum`] of those bytes.
    pub checksum: u64,
    /// Word of the writer, returned with the block and not interpreted.
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
    /// The client may write the block to this slot.
    Slot { slot: u32, generation: u32 },
    /// The node has the block.
    Present,
    /// The block is being written or verified already, for this client or another one.
    Pending,
    /// No slot is free, and none can be freed.
    Full,
    /// The block does not fit into a slot.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Client: looks up the leading blocks of a chain. Found blocks are leased to the client.
    LookUp { request: u64, chain: Vec<BlockIdentity> },
    /// Client: no read under this lease is in flight, and none will be posted.
    Release { lease: u64 },
    /// Client: asks for slots to store these blocks.
    Reserve { request: u64, offers: Vec<Offer> },
    /// Client: the writes of these blocks (bit `i` is offer `i`) were posted before this message, on its lane,
    /// and no others will be.
    Commit { request: u64, written: u64 },
    /// Client: the bytes read of these blocks had the wrong checksum.
    ReportDamaged { chain: Vec<BlockIdentity> },
    /// Client: asks to retain these consecutive blocks of a chain for this time, now or once they are stored.
    Retain { seconds: u32, chain: Vec<BlockIdentity> },
    /// Client: asks for the node's load; also the probe.
    Stats { request: u64 },
    /// Node: the leading blocks that are in memory, to be read within the lease. `lease` is 0 when there are
    /// none.
    Found { request: u64, lease: u64, lease_ms: u32, blocks: Vec<FoundBlock> },
    /// Node: an answer for each offer. The client may write the slots within `lease_ms`.
    Granted { request: u64, lease_ms: u32, grants: Vec<Grant> },
    /// Node: the written blocks that can be found from now on, and those that had the wrong checksum.
    Committed { request: u64, registered: u64, damaged: u64 },
    /// Node: its load.
    Load { request: u64, slots: u32, free: u32, blocks: u32, leases: u32, verifying: u32 },
    /// Node: the request is refused because a table is full.
    Busy { request: u64 },
}

const LOOK_UP: u8 = 1;
const RELEASE: u8 = 2;
const RESERVE: u8 = 3;
const COMMIT: u8 = 4;
const REPORT_DAMAGED: u8 = 5;
const STATS: u8 = 6;
const FOUND: u8 = 7;
const GRANTED: u8 = 8;
const COMMITTED: u8 = 9;
const LOAD: u8 = 10;
const BUSY: u8 = 11;
const RETAIN: u8 = 12;

impl Message {
    /// The lane of the message: a commit travels on that of the writes before it.
    pub(crate) fn priority(&self) -> Priority {
        match self {
            Self::Reserve { .. }
            | Self::Commit { .. }
            | Self::Granted { .. }
            | Self::Committed { .. }
            | Self::Retain { .. } => Priority::Background,
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

    /// Returns the protocol version of the sender if it is another one.
    pub(crate) fn other_version(bytes: &[u8]) -> Option<u8> {
        let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>()?;
        let version = *body.first()?;
        (version != VERSION && xxh3_64(body) == u64::from_le_bytes(*sum)).then_some(version)
    }

    /// Decodes a message. `None` when the bytes are not exactly one message of this version.
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
            Self::ReportDamaged { chain } => {
                out.push(REPORT_DAMAGED);
                put_list(chain, out);
            }
            Self::Retain { seconds, chain } => {
                out.push(RETAIN);
                seconds.put(out);
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
            REPORT_DAMAGED => Self::ReportDamaged { chain: get_list(from)? },
            RETAIN => Self::Retain { seconds: u32::get(from)?, chain: get_list(from)? },
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

fn put_plain(kind: u8, name: u64, out: &mut Vec<u8>) {
    out.push(kind);
    name.put(out);
}

/// See [`crate::fuzz_wire`]. Also decodes the body without its checksum, which a fuzzer would not find.
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
