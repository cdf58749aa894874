//! The checksum of bytes that a processor and a GPU take alike, made for thousands of threads in any order.
//!
//! The GPU's code is in `dataplane-kernels`, whose tests prove that it gives these values. Here is the definition and the
//! processor's code, in a crate of its own, so that whoever verifies in host memory what a GPU has summed depends on no
//! kernels.
//!
//! Definition, all arithmetic modulo 2⁶⁴. The bytes are cut into lanes of eight, least significant byte
//! first; the last lane is filled with zeros. Lane `j` (from 0) with value `v` gives
//!
//! ```text
//! a = v + (j + 1) × 0x9e3779b97f4a7c15
//! b = (a ^ a >> 32) × 0x9e3779b1
//! c = (b ^ b >> 32) × 0x85ebca77
//! mix(v, j) = c ^ c >> 32
//! ```
//!
//! and the checksum of `n` bytes is `seal(Σ mix(v, j), n)` with
//!
//! ```text
//! d = sum + (n + 1) × 0xc2b2ae3d27d4eb4f
//! e = (d ^ d >> 30) × 0xbf58476d1ce4e5b9
//! f = (e ^ e >> 27) × 0x94d049bb133111eb
//! seal(sum, n) = f ^ f >> 31
//! ```
//!
//! Why so. A sum does not depend on the order, so each thread adds its lanes and memory adds the threads;
//! sums of disjoint ranges add up ([`Sum`]). `mix` is a bijection of the lane's value, so *any* change within
//! one lane changes the checksum with certainty. The position enters before three folds, and none can go:
//! sums of products are linear, so without the first fold lanes that differ in their highest bits only and
//! change places were told apart by half of the sum's bits (measured on orders of ten such lanes; the test
//! for it is in `tests/definition.rs`). The factors of `mix` have 32 bits: on a GPU and in vector registers a
//! product costs two multiplications, not three. xxh3 is faster on a processor, but is a chain.
//!
//! Not cryptographic: who knows it can make collisions.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a lane.
pub const LANE_BYTES: usize = 8;

const POSITION_STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const FIRST_FACTOR: u64 = 0x9e37_79b1;
const SECOND_FACTOR: u64 = 0x85eb_ca77;
const LENGTH_FACTOR: u64 = 0xc2b2_ae3d_27d4_eb4f;

/// Lanes that are worked on side by side.
const WIDTH: usize = 16;

mod shared;

#[inline(always)]
fn mix_at(value: u64, position: u64) -> u64 {
    let placed = value.wrapping_add(position);
    let first = (placed ^ placed >> 32).wrapping_mul(FIRST_FACTOR);
    let second = (first ^ first >> 32).wrapping_mul(SECOND_FACTOR);
    second ^ second >> 32
}

#[inline(always)]
fn position(lane: u64) -> u64 {
    lane.wrapping_add(1).wrapping_mul(POSITION_STEP)
}

/// How a copy writes its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Through the caches, for whoever reads the target soon.
    Cached,
    /// Past them, if the target lies on a cache line: it is not read from memory before it is written, which for more than the caches
    /// hold takes a third less of the memory's bandwidth, or more.
    Streaming,
}

/// The sum over lanes, before the length is mixed in: parts of a slot may be added in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes that begin with lane `first_lane` of the slot. Only the slot's last part may end within a
    /// lane.
    pub fn add(&mut self, first_lane: u64, bytes: &[u8]) {
        self.0 = self.0.wrapping_add(sum_of(first_lane, bytes));
    }

    /// The same of bytes that others may write meanwhile: each is read once.
    ///
    /// # Safety
    /// `bytes` bytes at `source` can be read.
    #[allow(unsafe_code)]
    pub unsafe fn add_shared(&mut self, first_lane: u64, source: *const u8, bytes: usize) {
        // SAFETY: the caller's promise.
        self.0 = self.0.wrapping_add(unsafe { shared::sum(first_lane, source, bytes) });
    }

    /// Copies bytes that others may write meanwhile, and adds them: each is read once, so the sum is that of what was copied.
    ///
    /// # Safety
    /// `bytes` bytes at `source` can be read and as many at `target` written; the ranges are apart, and nobody else uses the target.
    #[allow(unsafe_code)]
    pub unsafe fn add_copied(
        &mut self,
        first_lane: u64,
        source: *const u8,
        target: *mut u8,
        bytes: usize,
        stores: Stores,
    ) {
        // SAFETY: the caller's promise.
        self.0 = self.0.wrapping_add(unsafe { shared::copy(first_lane, source, target, bytes, stores) });
    }

    /// Adds the sum of another part.
    pub fn join(&mut self, other: Self) {
        self.0 = self.0.wrapping_add(other.0);
    }

    /// The checksum of a slot of so many bytes.
    #[must_use]
    pub fn seal(self, bytes: u64) -> u64 {
        let mixed = self.0.wrapping_add(bytes.wrapping_add(1).wrapping_mul(LENGTH_FACTOR));
        let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

/// Bytes whose checksums were taken by processors in this process. Relaxed: it guards no other memory.
static CHECKSUMMED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes whose checksums were taken by processors in this process so far: how often each byte is read for its checksum can be told from it.
#[must_use]
pub fn checksummed_bytes() -> u64 {
    CHECKSUMMED_BYTES.load(Ordering::Relaxed)
}

/// The checksum of a slot.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Sum::default();
    sum.add(0, bytes);
    sum.seal(bytes.len() as u64)
}

fn sum_of(first_lane: u64, bytes: &[u8]) -> u64 {
    // SAFETY: a live slice can be read.
    #[allow(unsafe_code)]
    unsafe {
        shared::sum(first_lane, bytes.as_ptr(), bytes.len())
    }
}
