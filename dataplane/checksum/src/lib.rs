//! A checksum that processors and GPUs compute alike, made for thousands of threads in any order.
//!
//! The GPU's code is in `dataplane-kernels`, whose tests prove that it gives the same values. The definition
//! and the processor's code are here, in a crate of their own, so that a program that only verifies in host
//! memory depends on no kernels.
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
//! Rationale. A sum does not depend on the order, so each thread adds its lanes and memory adds the threads;
//! sums of disjoint ranges add up ([`Sum`]). `mix` is a bijection of the lane's value, so *any* change within
//! one lane changes the checksum with certainty. The position enters before three folds, and none can be left
//! out: sums of products are linear, so without the first fold, lanes that differ in their highest bits only
//! and change places were told apart by half of the sum's bits (measured on orders of ten such lanes; the
//! test for it is in `tests/definition.rs`). The factors of `mix` have 32 bits: on a GPU and in vector
//! registers a product costs two multiplications, not three. xxh3 is faster on a processor, but is a chain.
//!
//! Not cryptographic: anyone who knows the definition can construct collisions.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a lane.
pub const LANE_BYTES: usize = 8;

const POSITION_STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const FIRST_FACTOR: u64 = 0x9e37_79b1;
const SECOND_FACTOR: u64 = 0x85eb_ca77;
const LENGTH_FACTOR: u64 = 0xc2b2_ae3d_27d4_eb4f;

/// Number of lanes that are processed side by side.
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

/// Store instructions with which a copy writes its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Stores through the caches, for a target that is read soon.
    Cached,
    /// Stores past the caches, if the target lies on a cache line: the target is not read from memory before
    /// it is written, which saves a third or more of the memory bandwidth for data larger than the caches.
    Streaming,
}

/// The sum over lanes, before the length is mixed in. Parts of a slot may be added in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes that begin with lane `first_lane` of the slot. Only the slot's last part may end within a
    /// lane.
    pub fn add(&mut self, first_lane: u64, bytes: &[u8]) {
        self.0 = self.0.wrapping_add(sum_of(first_lane, bytes));
    }

    /// Like [`Self::add`], for bytes that other threads may write at the same time: each byte is read once.
    ///
    /// # Safety
    /// `bytes` bytes at `source` can be read.
    #[allow(unsafe_code)]
    pub unsafe fn add_shared(&mut self, first_lane: u64, source: *const u8, bytes: usize) {
        // SAFETY: the caller's promise.
        self.0 = self.0.wrapping_add(unsafe { shared::sum(first_lane, source, bytes) });
    }

    /// Copies bytes that other threads may write at the same time and adds them. Each byte is read once, so
    /// the sum is that of the copy.
    ///
    /// # Safety
    /// `bytes` bytes at `source` can be read and as many at `target` written; the ranges do not overlap, and
    /// no other code uses the target.
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

    /// Returns the checksum of a slot of `bytes` bytes.
    #[must_use]
    pub fn seal(self, bytes: u64) -> u64 {
        let mixed = self.0.wrapping_add(bytes.wrapping_add(1).wrapping_mul(LENGTH_FACTOR));
        let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

/// Bytes whose checksums were computed by processors in this process. Relaxed: guards no other memory.
static CHECKSUMMED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns the number of bytes whose checksums were computed by processors in this process. Shows how often
/// each byte is read for its checksum.
#[must_use]
pub fn checksummed_bytes() -> u64 {
    CHECKSUMMED_BYTES.load(Ordering::Relaxed)
}

/// Returns the checksum of a slot.
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
