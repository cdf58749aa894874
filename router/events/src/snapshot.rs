//! The state of all publishers as bytes: a gateway that restarts, or joins, has a full index before its first request.
//! File and peers use the same format.
//!
//! Stores that workers share have entries like publishers, named by [`stores_name`], without instance and messages. A store
//! reports the blocks that it holds; its entry gives their meaning, as far as their parents are in stores, too.
//!
//! `KVSNAP01`, the number of publishers, then for each: name, instance, tokens of a block, next sequence number, hash of
//! the last message, groups that do not count, blocks. A block: the engine's name, the parent's, the hash of its tokens, copies in four
//! tiers; parents before children. At the end xxh3 over everything before. Integers are little-endian.
//!
//! Events since the snapshot's sequence number are replayed, and a publisher that has restarted since is recognised by
//! its instance or by its numbers.

use router_radix::{Held, IndexWriter, Member, Tier};
use xxhash_rust::xxh3::xxh3_64;

use crate::follower::Follower;

const MAGIC: &[u8; 8] = b"KVSNAP01";
/// Longest name of a publisher.
const NAME_MAX: usize = 4096;

/// State of one publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherState {
    /// The worker's name and rank.
    pub name: String,
    /// Run number of the process; 0 for engines that report none.
    pub instance: u64,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Number of the next expected message.
    pub next: u64,
    /// Hash of the last message, to check that a replay continues from there; 0 if there is none.
    pub last: u64,
    /// Groups of layers that do not cover whole prefixes.
    pub non_prefix_groups: Vec<u32>,
    /// Blocks that the publisher holds, parents before children.
    pub held: Vec<Held>,
}

/// The bytes are not a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// The bytes do not begin with the magic number.
    #[error("not a snapshot: it does not begin with KVSNAP01")]
    Magic,
    /// The bytes end too early, or a length is too large.
    #[error("the snapshot ends too early, at byte {0}")]
    Short(usize),
    /// The checksum does not match.
    #[error("the snapshot is damaged: its checksum is {found:#x}, not {expected:#x}")]
    Checksum {
        /// Computed checksum.
        found: u64,
        /// Checksum at the end of the bytes.
        expected: u64,
    },
    /// A value is invalid.
    #[error("the snapshot has a wrong {0}")]
    Value(&'static str),
}

/// Captures the state of one publisher.
#[must_use]
pub fn capture(name: &str, instance: u64, follower: &Follower, index: &IndexWriter<'_>) -> PublisherState {
    let tracker = follower.tracker();
    PublisherState {
        name: name.to_owned(),
        instance,
        block_tokens: tracker.block_tokens(),
        next: follower.expected(),
        last: follower.last(),
        non_prefix_groups: tracker.non_prefix_groups().collect(),
        held: index.held(tracker.member()),
    }
}

/// Restores a publisher's state into a new follower. Returns false if its block size differs.
pub fn restore(state: &PublisherState, follower: &mut Follower, index: &mut IndexWriter<'_>) -> bool {
    if state.block_tokens != follower.tracker().block_tokens() {
        return false;
    }
    restore_blocks(follower.tracker().member(), &state.held, index);
    follower.tracker_mut().restore_groups(state.non_prefix_groups.iter().copied());
    follower.resume(state.next, state.last);
    true
}

/// Restores the blocks of a member, parents before children.
pub fn restore_blocks(member: Member, held: &[Held], index: &mut IndexWriter<'_>) {
    let starts_run = |a: &Held, b: &Held| b.parent == Some(a.key) && a.copies == b.copies;
    for run in held.chunk_by(starts_run) {
        let keys: Vec<u64> = run.iter().map(|held| held.key).collect();
        let blocks: Vec<u64> = run.iter().map(|held| held.block).collect();
        for (tier, copies) in Tier::ALL.into_iter().zip(run[0].copies) {
            for _ in 0..copies {
                index.stored(member, tier, run[0].parent, &keys, &blocks);
            }
        }
    }
}

/// Name of the entry of these stores, for workers whose blocks begin with this tag.
#[must_use]
pub fn stores_name(stores: &[String], tag: u16) -> String {
    format!("stores {:016x} {tag:04x}", xxh3_64(stores.join("\0").as_bytes()))
}

/// Captures the meaning of blocks in stores. Of two such states the larger one counts as the newer.
#[must_use]
pub fn capture_stores(name: String, held: Vec<Held>) -> PublisherState {
    let next = held.len() as u64;
    PublisherState { name, instance: 0, block_tokens: 0, next, last: 0, non_prefix_groups: Vec::new(), held }
}

/// Encodes the states of all publishers.
#[must_use]
pub fn encode(publishers: &[PublisherState]) -> Vec<u8> {
    let blocks: usize = publishers.iter().map(|publisher| publisher.held.len()).sum();
    let mut out = Vec::with_capacity(64 + 256 * publishers.len() + 29 * blocks);
    out.extend(MAGIC);
    out.extend((publishers.len() as u32).to_le_bytes());
    for publisher in publishers {
        let whole =
            (0..=publisher.name.len().min(NAME_MAX)).rev().find(|&len| publisher.name.is_char_boundary(len));
        let name = &publisher.name.as_bytes()[..whole.unwrap_or(0)];
        out.extend((name.len() as u32).to_le_bytes());
        out.extend(name);
        out.extend(publisher.instance.to_le_bytes());
        out.extend((publisher.block_tokens as u32).to_le_bytes());
        out.extend(publisher.next.to_le_bytes());
        out.extend(publisher.last.to_le_bytes());
        out.extend((publisher.non_prefix_groups.len() as u32).to_le_bytes());
        publisher.non_prefix_groups.iter().for_each(|group| out.extend(group.to_le_bytes()));
        out.extend((publisher.held.len() as u64).to_le_bytes());
        for held in &publisher.held {
            out.extend(held.key.to_le_bytes());
            out.push(u8::from(held.parent.is_some()));
            out.extend(held.parent.unwrap_or(0).to_le_bytes());
            out.extend(held.block.to_le_bytes());
            out.extend(held.copies.map(|copies| u8::try_from(copies).unwrap_or(u8::MAX)));
        }
    }
    let sum = xxh3_64(&out);
    out.extend(sum.to_le_bytes());
    out
}

/// Encoded size of one block in bytes.
const HELD_BYTES: usize = 8 + 1 + 8 + 8 + 4;

struct Bytes<'a> {
    all: &'a [u8],
    at: usize,
}

impl Bytes<'_> {
    fn take<const LEN: usize>(&mut self) -> Result<[u8; LEN], SnapshotError> {
        let slice = self.slice(LEN)?;
        slice.try_into().map_err(|_| SnapshotError::Short(self.at))
    }

    fn slice(&mut self, len: usize) -> Result<&[u8], SnapshotError> {
        let taken = self.at.checked_add(len).and_then(|end| self.all.get(self.at..end));
        let taken = taken.ok_or(SnapshotError::Short(self.at))?;
        self.at += len;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, SnapshotError> {
        self.take().map(u64::from_le_bytes)
    }

    /// Checks that `count` items of `bytes` each are left.
    fn count(&mut self, count: usize, bytes: usize) -> Result<usize, SnapshotError> {
        let is_there = count.checked_mul(bytes).is_some_and(|needed| needed <= self.all.len() - self.at);
        if is_there { Ok(count) } else { Err(SnapshotError::Short(self.at)) }
    }
}

/// Decodes the output of [`encode`].
pub fn decode(bytes: &[u8]) -> Result<Vec<PublisherState>, SnapshotError> {
    if !bytes.starts_with(MAGIC) {
        return Err(SnapshotError::Magic);
    }
    let body = bytes.len().checked_sub(8).filter(|&body| body >= MAGIC.len());
    let (body, sum) = bytes.split_at(body.ok_or(SnapshotError::Short(bytes.len()))?);
    let expected = Bytes { all: sum, at: 0 }.u64()?;
    let found = xxh3_64(body);
    if found != expected {
        return Err(SnapshotError::Checksum { found, expected });
    }
    let mut bytes = Bytes { all: body, at: MAGIC.len() };
    let count = bytes.u32()? as usize;
    let count = bytes.count(count, 44)?;
    (0..count).map(|_| publisher(&mut bytes)).collect()
}

fn publisher(bytes: &mut Bytes<'_>) -> Result<PublisherState, SnapshotError> {
    let len = bytes.u32()? as usize;
    let len = if len <= NAME_MAX { len } else { return Err(SnapshotError::Value("name")) };
    let name = String::from_utf8(bytes.slice(len)?.to_vec()).map_err(|_| SnapshotError::Value("name"))?;
    let instance = bytes.u64()?;
    let block_tokens = bytes.u32()? as usize;
    let next = bytes.u64()?;
    let last = bytes.u64()?;
    let groups = bytes.u32()? as usize;
    let groups = bytes.count(groups, 4)?;
    let non_prefix_groups = (0..groups).map(|_| bytes.u32()).collect::<Result<_, _>>()?;
    let blocks = bytes.u64()? as usize;
    let blocks = bytes.count(blocks, HELD_BYTES)?;
    let held = (0..blocks).map(|_| held(bytes)).collect::<Result<_, _>>()?;
    Ok(PublisherState { name, instance, block_tokens, next, last, non_prefix_groups, held })
}

fn held(bytes: &mut Bytes<'_>) -> Result<Held, SnapshotError> {
    let key = bytes.u64()?;
    let has_parent = match bytes.take::<1>()? {
        [0] => false,
        [1] => true,
        _ => return Err(SnapshotError::Value("parent mark")),
    };
    let parent = bytes.u64()?;
    let block = bytes.u64()?;
    let copies = bytes.take::<4>()?.map(u32::from);
    Ok(Held { key, parent: has_parent.then_some(parent), block, copies })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<PublisherState> {
        let held = |key, parent| Held { key, parent, block: key * 3, copies: [1, 0, 2, 0] };
        vec![
            PublisherState {
                name: "10.0.0.1:8000/0".into(),
                instance: 7,
                block_tokens: 16,
                next: 99,
                last: 0xABCD,
                non_prefix_groups: vec![1, 4],
                held: vec![held(1, None), held(2, Some(1))],
            },
            PublisherState {
                name: String::new(),
                instance: 0,
                block_tokens: 32,
                next: 0,
                last: 0,
                non_prefix_groups: Vec::new(),
                held: Vec::new(),
            },
        ]
    }

    #[test]
    fn snapshots_come_back_and_damage_is_named() {
        let bytes = encode(&sample());
        assert_eq!(decode(&bytes), Ok(sample()));
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "cut at {len}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            assert!(decode(&damaged).is_err(), "a bit of byte {at}");
        }
        assert_eq!(decode(b"hello"), Err(SnapshotError::Magic));
    }
}
