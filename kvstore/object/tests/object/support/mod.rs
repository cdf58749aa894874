//! Chains, blocks whose contents follow from their identity (so that every error is noticed), and tiers.

pub(crate) mod faults;
pub(crate) mod server;
pub(crate) mod sigv4;
pub(crate) mod time;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_object::{Block, Clock, ObjectConfig, SystemClock, VerifiedBlock};
use tokio::time::Instant;

pub(crate) const FINGERPRINT: u64 = 0xfeed;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut state = self.0;
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// The chain of a conversation.
pub(crate) fn chain(conversation: u32, blocks: usize) -> Vec<BlockIdentity> {
    let mut chain = IdentityChain::new(FINGERPRINT, &[]);
    (0..blocks as u32).map(|block| chain.next(&[conversation, block])).collect()
}

/// Returns the block with the contents that follow from its identity.
pub(crate) fn block(identity: BlockIdentity, payload_bytes: usize) -> Block {
    let mut random = Random(identity.short());
    let payload: Vec<u8> =
        std::iter::repeat_with(|| random.next().to_le_bytes()).flatten().take(payload_bytes).collect();
    Block { identity, meta: Bytes::copy_from_slice(&identity.0[..5]), payload: payload.into() }
}

pub(crate) fn blocks(chain: &[BlockIdentity], payload_bytes: usize) -> Vec<Block> {
    chain.iter().map(|identity| block(*identity, payload_bytes)).collect()
}

/// Fails unless these are the first blocks of the chain, bit for bit.
#[track_caller]
pub(crate) fn assert_true(read: &[VerifiedBlock], chain: &[BlockIdentity], payload_bytes: usize) {
    assert!(read.len() <= chain.len());
    for (number, (read, identity)) in read.iter().zip(chain).enumerate() {
        let truth = block(*identity, payload_bytes);
        assert_eq!(read.identity, truth.identity, "block {number}");
        assert_eq!(read.meta, truth.meta, "meta of block {number}");
        assert!(read.payload == truth.payload, "wrong KV served for block {number}");
    }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// The system's clock, set forward.
#[derive(Debug, Default)]
pub(crate) struct LaterClock(AtomicU64);

impl LaterClock {
    pub(crate) fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as u64, Ordering::Relaxed);
    }
}

impl Clock for LaterClock {
    fn unix_ms(&self) -> u64 {
        SystemClock.unix_ms() + self.0.load(Ordering::Relaxed)
    }
}

/// An empty directory, removed on drop.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvstore-object-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("temporary directory");
        Self(path)
    }

    /// Lists every file of the directory.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let (mut files, mut folders) = (Vec::new(), vec![self.0.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("readable") {
                let path = entry.expect("entry").path();
                if path.is_dir() { folders.push(path) } else { files.push(path) }
            }
        }
        files.sort();
        files
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Settings with small runs and quick retries.
pub(crate) fn quick(mut config: ObjectConfig) -> ObjectConfig {
    config.run_blocks = 4;
    config.payload_alignment = 64;
    config.backoff = Duration::from_millis(1);
    config.backoff_max = Duration::from_millis(4);
    config
}

pub(crate) fn later_clock() -> Arc<LaterClock> {
    Arc::default()
}
