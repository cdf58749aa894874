//! Sums of memory that other threads may write at the same time, and copies that are summed on the way.
//!
//! Each chunk is loaded once, so that the sum is that of the stored bytes. A compiler is free to load it
//! again for the second use, and did, so each chunk of a copy passes through an empty assembly block
//! ([`black_box`] without vectors), behind which the compiler does not know that the value is that of the
//! memory. `a_writer_beside_the_copy_is_no_danger` checks this. The checksum then costs almost nothing where
//! the copy is bound by memory (one Zen 4, 256 MiB, one thread, GB/s: `memcpy` 10 to 12, through the caches
//! 12 to 13, past them 17).

#![allow(unsafe_code)]

use std::hint::black_box;
use std::sync::atomic::Ordering;

use crate::{CHECKSUMMED_BYTES, LANE_BYTES, POSITION_STEP, Stores, WIDTH, mix_at, position};

/// Bytes that are processed side by side: two cache lines.
const CHUNK_BYTES: usize = WIDTH * LANE_BYTES;

type Chunk = [u64; WIDTH];

/// A function that copies and sums: first lane, source, target, bytes.
type Copy = unsafe fn(u64, *const u8, *mut u8, usize) -> u64;

/// Returns the sum of `bytes` bytes at `source`.
///
/// # Safety
/// The bytes can be read.
#[inline]
pub(crate) unsafe fn sum(first_lane: u64, source: *const u8, bytes: usize) -> u64 {
    CHECKSUMMED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the machine has AVX-512; the bytes can be read (the caller).
            return unsafe { x86::sum_avx512(first_lane, source, bytes) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the same with AVX2.
            return unsafe { x86::sum_avx2(first_lane, source, bytes) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { walk(first_lane, source, bytes, load_to_sum, |_, _| {}) }
}

/// Copies `bytes` bytes and returns the sum of the copied bytes.
///
/// # Safety
/// The bytes can be read at `source` and written at `target`; the ranges do not overlap.
pub(crate) unsafe fn copy(
    first_lane: u64,
    source: *const u8,
    target: *mut u8,
    bytes: usize,
    stores: Stores,
) -> u64 {
    CHECKSUMMED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
    #[cfg(target_arch = "x86_64")]
    {
        let streams = stores == Stores::Streaming && target.addr().is_multiple_of(x86::LINE_BYTES);
        let way: Option<Copy> = match (x86::has_avx512(), std::arch::is_x86_feature_detected!("avx2")) {
            (true, _) => Some(if streams { x86::stream_avx512 } else { x86::copy_avx512 }),
            (false, true) => Some(if streams { x86::stream_avx2 } else { x86::copy_avx2 }),
            (false, false) => None,
        };
        if let Some(way) = way {
            // SAFETY: the machine has the instructions; the ranges are valid and do not overlap (the caller),
            // and the target begins at a cache line if it is streamed to.
            return unsafe { way(first_lane, source, target, bytes) };
        }
    }
    let _only_x86_streams = stores;
    // SAFETY: the caller's promise.
    unsafe { copy_chunks(first_lane, source, target, bytes, load) }
}

/// Loads a chunk that is only summed. For use by [`walk`].
#[inline(always)]
fn load_to_sum(from: *const u8) -> Chunk {
    // SAFETY: `walk` gives chunks that can be read; no alignment is needed.
    unsafe { from.cast::<Chunk>().read_unaligned() }
}

/// Loads a chunk exactly once. For use by [`walk`], which passes positions of the source.
#[inline(always)]
fn load(from: *const u8) -> Chunk {
    // SAFETY: `walk` gives chunks that can be read; no alignment is needed.
    black_box(unsafe { from.cast::<Chunk>().read_unaligned() })
}

/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn copy_chunks(
    first_lane: u64,
    source: *const u8,
    target: *mut u8,
    bytes: usize,
    load: impl Fn(*const u8) -> Chunk,
) -> u64 {
    let store = |at: usize, chunk: &[u8]| {
        // SAFETY: inside the target, which has room for all bytes (the caller).
        let to = unsafe { target.add(at) };
        // SAFETY: as above, for a chunk that is apart from it; `walk` gives each part of the range once.
        unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), to, chunk.len()) };
    };
    // SAFETY: the source can be read (the caller).
    unsafe { walk(first_lane, source, bytes, load, store) }
}

/// Loads `bytes` bytes chunk by chunk, passes each with its offset to `store` and returns the sum. All chunks
/// but the last have [`CHUNK_BYTES`].
///
/// # Safety
/// The bytes can be read.
#[inline(always)]
unsafe fn walk(
    first_lane: u64,
    source: *const u8,
    bytes: usize,
    load: impl Fn(*const u8) -> Chunk,
    store: impl Fn(usize, &[u8]),
) -> u64 {
    let mut positions: Chunk = std::array::from_fn(|at| position(first_lane.wrapping_add(at as u64)));
    let mut sums: Chunk = [0; WIDTH];
    let mut at = 0;
    while at + CHUNK_BYTES <= bytes {
        // SAFETY: the chunk ends at or before `bytes`.
        let from = unsafe { source.add(at) };
        let chunk = load(from);
        // SAFETY: any bytes of a chunk may be looked at as bytes.
        store(at, unsafe { std::slice::from_raw_parts(chunk.as_ptr().cast::<u8>(), CHUNK_BYTES) });
        for lane in 0..WIDTH {
            sums[lane] = sums[lane].wrapping_add(mix_at(u64::from_le(chunk[lane]), positions[lane]));
            positions[lane] = positions[lane].wrapping_add(POSITION_STEP.wrapping_mul(WIDTH as u64));
        }
        at += CHUNK_BYTES;
    }
    let mut sum = sums.into_iter().fold(0, u64::wrapping_add);
    if at < bytes {
        let mut rest = [0_u8; CHUNK_BYTES];
        let len = bytes - at;
        // SAFETY: the rest begins inside the source.
        let from = unsafe { source.add(at) };
        // SAFETY: it ends at `bytes` and is shorter than a chunk.
        unsafe { std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), len) };
        let rest = black_box(rest);
        store(at, &rest[..len]);
        let lanes = rest[..len.next_multiple_of(LANE_BYTES)].as_chunks::<LANE_BYTES>().0;
        for (lane, value) in lanes.iter().enumerate() {
            sum = sum.wrapping_add(mix_at(u64::from_le_bytes(*value), positions[lane]));
        }
    }
    sum
}

/// The same code for newer instruction sets, and streaming stores.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    use std::arch::asm;

    use super::{CHUNK_BYTES, Chunk, copy_chunks, load_to_sum, walk};

    /// Alignment of the target of a streamed copy: whole lines are written.
    pub(super) const LINE_BYTES: usize = 64;

    #[inline]
    pub(super) fn has_avx512() -> bool {
        std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512dq")
    }

    /// Loads a chunk once. For the compiler, the assembly block may have changed it.
    ///
    /// # Safety
    /// The source can be read; the machine has AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load_avx512(from: *const u8) -> Chunk {
        // SAFETY: the caller's promise; no alignment is needed.
        let mut vectors = unsafe { from.cast::<[__m512i; 2]>().read_unaligned() };
        let [first, second] = &mut vectors;
        // SAFETY: the block is empty.
        unsafe {
            asm!(
                "/* {0} {1} */",
                inout(zmm_reg) * first,
                inout(zmm_reg) * second,
                options(nomem, nostack, preserves_flags)
            );
        }
        // SAFETY: lanes of 128 bytes.
        unsafe { std::mem::transmute(vectors) }
    }

    /// # Safety
    /// The source can be read; the machine has AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_avx2(from: *const u8) -> Chunk {
        // SAFETY: the caller's promise; no alignment is needed.
        let mut vectors = unsafe { from.cast::<[__m256i; 4]>().read_unaligned() };
        let [first, second, third, fourth] = &mut vectors;
        // SAFETY: the block is empty.
        unsafe {
            asm!(
                "/* {0} {1} {2} {3} */",
                inout(ymm_reg) * first,
                inout(ymm_reg) * second,
                inout(ymm_reg) * third,
                inout(ymm_reg) * fourth,
                options(nomem, nostack, preserves_flags)
            );
        }
        // SAFETY: lanes of 128 bytes.
        unsafe { std::mem::transmute(vectors) }
    }

    /// # Safety
    /// As for [`super::sum`]; the machine has AVX-512 (F, DQ).
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) unsafe fn sum_avx512(first_lane: u64, source: *const u8, bytes: usize) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { walk(first_lane, source, bytes, load_to_sum, |_, _| {}) }
    }

    /// # Safety
    /// As for [`super::sum`]; the machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sum_avx2(first_lane: u64, source: *const u8, bytes: usize) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { walk(first_lane, source, bytes, load_to_sum, |_, _| {}) }
    }

    /// # Safety
    /// As for [`super::copy`]; the machine has AVX-512 (F, DQ).
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) unsafe fn copy_avx512(
        first_lane: u64,
        source: *const u8,
        target: *mut u8,
        bytes: usize,
    ) -> u64 {
        // SAFETY: `walk` gives chunks of the source.
        let load = |from| unsafe { load_avx512(from) };
        // SAFETY: the caller's promise.
        unsafe { copy_chunks(first_lane, source, target, bytes, load) }
    }

    /// # Safety
    /// As for [`super::copy`]; the machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_avx2(first_lane: u64, source: *const u8, target: *mut u8, bytes: usize) -> u64 {
        // SAFETY: `walk` gives chunks of the source.
        let load = |from| unsafe { load_avx2(from) };
        // SAFETY: the caller's promise.
        unsafe { copy_chunks(first_lane, source, target, bytes, load) }
    }

    /// # Safety
    /// As for [`copy_avx512`]; the target begins at a cache line.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) unsafe fn stream_avx512(
        first_lane: u64,
        source: *const u8,
        target: *mut u8,
        bytes: usize,
    ) -> u64 {
        let store = |from: *const u8, to: *mut u8| {
            // SAFETY: readable (`stream`); no alignment is needed.
            let value = unsafe { _mm512_loadu_si512(from.cast()) };
            // SAFETY: writable and aligned (`stream`).
            unsafe { _mm512_stream_si512(to.cast(), value) };
        };
        // SAFETY: `walk` gives chunks of the source.
        let load = |from| unsafe { load_avx512(from) };
        // SAFETY: the caller's promise.
        unsafe { stream::<{ size_of::<__m512i>() }>(first_lane, source, target, bytes, load, store) }
    }

    /// # Safety
    /// As for [`copy_avx2`]; the target begins at a cache line.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream_avx2(
        first_lane: u64,
        source: *const u8,
        target: *mut u8,
        bytes: usize,
    ) -> u64 {
        let store = |from: *const u8, to: *mut u8| {
            // SAFETY: readable (`stream`); no alignment is needed.
            let value = unsafe { _mm256_loadu_si256(from.cast()) };
            // SAFETY: writable and aligned (`stream`).
            unsafe { _mm256_stream_si256(to.cast(), value) };
        };
        // SAFETY: `walk` gives chunks of the source.
        let load = |from| unsafe { load_avx2(from) };
        // SAFETY: the caller's promise.
        unsafe { stream::<{ size_of::<__m256i>() }>(first_lane, source, target, bytes, load, store) }
    }

    /// Copies and sums, with streaming stores of `VECTOR` bytes.
    ///
    /// # Safety
    /// As for [`super::copy`]; the target begins at a cache line.
    #[inline(always)]
    unsafe fn stream<const VECTOR: usize>(
        first_lane: u64,
        source: *const u8,
        target: *mut u8,
        bytes: usize,
        load: impl Fn(*const u8) -> Chunk,
        store_vector: impl Fn(*const u8, *mut u8),
    ) -> u64 {
        let store = |at: usize, chunk: &[u8]| {
            // SAFETY: `walk` gives each part of the range once, inside the target (the caller).
            let to = unsafe { target.add(at) };
            if chunk.len() < CHUNK_BYTES {
                // SAFETY: as above; a local chunk and the target are apart.
                return unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), to, chunk.len()) };
            }
            for offset in (0..CHUNK_BYTES).step_by(VECTOR) {
                // SAFETY: inside the chunk.
                let from = unsafe { chunk.as_ptr().add(offset) };
                // SAFETY: inside the target, which begins on a line, as each chunk of it does.
                let to = unsafe { to.add(offset) };
                store_vector(from, to);
            }
        };
        // SAFETY: the source can be read (the caller).
        let sum = unsafe { walk(first_lane, source, bytes, load, store) };
        // Other threads see these stores before later ones.
        // SAFETY: each x86-64 has it.
        unsafe { _mm_sfence() };
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Target([u8; 4200]);

    /// Returns every implementation that this machine supports; the others are skipped.
    fn ways() -> Vec<(&'static str, Copy)> {
        let mut ways: Vec<(&'static str, Copy)> = vec![("plain", |lane, source, target, bytes| {
            // SAFETY: the tests give valid ranges.
            unsafe { copy_chunks(lane, source, target, bytes, load) }
        })];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the machine has AVX2, and the tests give valid ranges.
                ways.push(("AVX2", |lane, source, target, bytes| unsafe {
                    x86::copy_avx2(lane, source, target, bytes)
                }));
                // SAFETY: as above.
                ways.push(("AVX2, streaming", |lane, source, target, bytes| unsafe {
                    x86::stream_avx2(lane, source, target, bytes)
                }));
            }
            if x86::has_avx512() {
                // SAFETY: the machine has AVX-512, and the tests give valid ranges.
                ways.push(("AVX-512", |lane, source, target, bytes| unsafe {
                    x86::copy_avx512(lane, source, target, bytes)
                }));
                // SAFETY: as above.
                ways.push(("AVX-512, streaming", |lane, source, target, bytes| unsafe {
                    x86::stream_avx512(lane, source, target, bytes)
                }));
            }
        }
        ways
    }

    fn expected(first_lane: u64, bytes: &[u8]) -> u64 {
        let lanes = bytes.chunks(LANE_BYTES).zip(0_u64..);
        lanes.fold(0, |sum: u64, (lane, at)| {
            let mut value = [0; LANE_BYTES];
            value[..lane.len()].copy_from_slice(lane);
            let place = position(first_lane.wrapping_add(at));
            sum.wrapping_add(mix_at(u64::from_le_bytes(value), place))
        })
    }

    #[test]
    fn every_way_copies_all_bytes_and_nothing_else_and_gives_one_sum() {
        let bytes: Vec<u8> = (0..4200_u32).map(|at| (at * 131 + at / 7) as u8).collect();
        let ways = ways();
        println!("{:?}", ways.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        for (first_lane, from, len) in
            [(0, 0, 0), (0, 3, 7), (5, 1, 128), (9, 0, 129), (u64::MAX - 3, 5, 1000), (1 << 40, 7, 4099)]
        {
            let source = &bytes[from..from + len];
            let sum = expected(first_lane, source);
            // SAFETY: a live slice.
            assert_eq!(unsafe { super::sum(first_lane, source.as_ptr(), len) }, sum, "{len} bytes");
            for (name, copy) in &ways {
                let mut target = Target([0xEE; 4200]);
                // SAFETY: both have `len` bytes, are apart, and the target lies on a line.
                let got = unsafe { copy(first_lane, source.as_ptr(), target.0.as_mut_ptr(), len) };
                assert_eq!(got, sum, "{name}, {len} bytes");
                assert!(target.0[..len] == *source && target.0[len..].iter().all(|byte| *byte == 0xEE));
            }
            for stores in [Stores::Cached, Stores::Streaming] {
                for to in [0, 1, 8, 63] {
                    let mut target = Target([0xEE; 4200]);
                    let place = target.0[to..].as_mut_ptr();
                    // SAFETY: both have `len` bytes and are apart.
                    let got = unsafe { super::copy(first_lane, source.as_ptr(), place, len, stores) };
                    assert_eq!((got, &target.0[to..to + len]), (sum, source), "{stores:?} at {to}");
                }
            }
        }
    }

    /// A copy sums the bytes that it stores, even if the source changes meanwhile.
    #[test]
    fn a_writer_beside_the_copy_is_no_danger() {
        use std::sync::atomic::{AtomicBool, AtomicU64};
        let source: Vec<AtomicU64> = (0..512).map(AtomicU64::new).collect();
        let (is_over, ways) = (AtomicBool::new(false), ways());
        let (mut changes, mut wrong) = (0, Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1_u64.. {
                    source.iter().for_each(|word| word.store(round, Ordering::Relaxed));
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            for round in 0..20_000 {
                let (name, copy) = ways[round % ways.len()];
                let mut target = Target([0xEE; 4200]);
                // SAFETY: both have 4096 bytes, are apart, and the target lies on a line.
                let sum = unsafe { copy(0, source.as_ptr().cast(), target.0.as_mut_ptr(), 4096) };
                if sum != expected(0, &target.0[..4096]) {
                    wrong.push(name);
                }
                changes += usize::from(target.0[..8] != target.0[4088..4096]);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        println!("{changes} of 20000 copies met a change");
        assert_eq!(wrong, [""; 0]);
    }
}
