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

/// Bytes of a lane.
pub const LANE_BYTES: usize = 8;

const POSITION_STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const FIRST_FACTOR: u64 = 0x9e37_79b1;
const SECOND_FACTOR: u64 = 0x85eb_ca77;
const LENGTH_FACTOR: u64 = 0xc2b2_ae3d_27d4_eb4f;

/// Lanes that are worked on side by side.
const WIDTH: usize = 16;

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

/// The sum over lanes, before the length is mixed in: parts of a slot may be added in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes that begin with lane `first_lane` of the slot. Only the slot's last part may end within a
    /// lane.
    pub fn add(&mut self, first_lane: u64, bytes: &[u8]) {
        self.0 = self.0.wrapping_add(sum_of(first_lane, bytes));
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

/// The checksum of a slot.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Sum::default();
    sum.add(0, bytes);
    sum.seal(bytes.len() as u64)
}

fn sum_of(first_lane: u64, bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512dq") {
        // SAFETY: the only precondition is that the machine has AVX-512, which was just asked.
        #[allow(unsafe_code)]
        return unsafe { sum_avx512(first_lane, bytes) };
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the only precondition is that the machine has AVX2, which was just asked.
        #[allow(unsafe_code)]
        return unsafe { sum_avx2(first_lane, bytes) };
    }
    sum_lanes(first_lane, bytes)
}

/// The same code, compiled with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn sum_avx512(first_lane: u64, bytes: &[u8]) -> u64 {
    sum_lanes(first_lane, bytes)
}

/// The same code, compiled with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(first_lane: u64, bytes: &[u8]) -> u64 {
    sum_lanes(first_lane, bytes)
}

#[inline(always)]
fn sum_lanes(first_lane: u64, bytes: &[u8]) -> u64 {
    let (lanes, tail) = bytes.as_chunks::<LANE_BYTES>();
    let (wide, rest) = lanes.as_chunks::<WIDTH>();
    let mut positions: [u64; WIDTH] = std::array::from_fn(|at| position(first_lane.wrapping_add(at as u64)));
    let mut sums = [0_u64; WIDTH];
    for lanes in wide {
        for at in 0..WIDTH {
            sums[at] = sums[at].wrapping_add(mix_at(u64::from_le_bytes(lanes[at]), positions[at]));
            positions[at] = positions[at].wrapping_add(POSITION_STEP.wrapping_mul(WIDTH as u64));
        }
    }
    let mut sum = sums.into_iter().fold(0, u64::wrapping_add);
    let mut lane = first_lane.wrapping_add((wide.len() * WIDTH) as u64);
    for value in rest {
        sum = sum.wrapping_add(mix_at(u64::from_le_bytes(*value), position(lane)));
        lane = lane.wrapping_add(1);
    }
    if !tail.is_empty() {
        let mut last = [0; LANE_BYTES];
        last[..tail.len()].copy_from_slice(tail);
        sum = sum.wrapping_add(mix_at(u64::from_le_bytes(last), position(lane)));
    }
    sum
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// What the machine lacks is passed over.
    #[test]
    #[allow(unsafe_code)]
    fn every_instruction_set_gives_the_sum_of_plain_code() {
        let bytes: Vec<u8> = (0..4099_u32).map(|at| (at * 131 + at / 7) as u8).collect();
        let has_avx2 = std::arch::is_x86_feature_detected!("avx2");
        let has_avx512 =
            std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512dq");
        println!("AVX2: {has_avx2}, AVX-512: {has_avx512}");
        for (first_lane, len) in [(0, 0), (0, 7), (5, 128), (u64::MAX - 3, 1000), (1 << 40, 4099)] {
            let plain = sum_lanes(first_lane, &bytes[..len]);
            assert_eq!(sum_of(first_lane, &bytes[..len]), plain, "lane {first_lane}, {len} bytes");
            if has_avx2 {
                // SAFETY: the machine has it.
                assert_eq!(unsafe { sum_avx2(first_lane, &bytes[..len]) }, plain);
            }
            if has_avx512 {
                // SAFETY: the machine has it.
                assert_eq!(unsafe { sum_avx512(first_lane, &bytes[..len]) }, plain);
            }
        }
    }
}
