//! The copy between slots.
//!
//! `memcpy` of the C library is a call through a table and, from one or two KiB on, a string instruction that takes a
//! while to start. A plain loop over 32-byte vectors was 1.2 to 1.9 times as fast from 512 bytes to 2 KiB in one
//! piece, 1.0 to 1.3 times at 4 and 8 KiB and slower from 32 KiB on (one Zen 5, data in the second level
//! cache, in one run). Rows with gaps between them: 1.3 times at 256 bytes, no faster from 1 KiB on, slower at
//! 4 KiB. So the loop copies the small pieces and `memcpy` the others.
//!
//! Non-temporal stores lost: 1.3 to 1.8 times as fast for pieces of 1 to 32 MiB, but the next reader of the
//! piece then takes up to three times as long (1.2 times for 32 MiB), and here there is one: a checksum, or
//! a model.

/// Lengths that the loop copies.
#[cfg(target_arch = "x86_64")]
const LOOP_BYTES: std::ops::RangeInclusive<usize> = CHUNK_BYTES..=8 << 10;
/// Rows from this length on are left to `memcpy`: with gaps between them it was faster than the loop.
#[cfg(target_arch = "x86_64")]
const ROW_LOOP_BYTES_END: usize = 4 << 10;
/// Bytes of one iteration of the loop: four vectors.
#[cfg(target_arch = "x86_64")]
const CHUNK_BYTES: usize = 128;
#[cfg(target_arch = "x86_64")]
type Chunk = [u64; CHUNK_BYTES / 8];

/// Copies `len` bytes; the ranges may overlap.
///
/// # Safety
/// `len` bytes at `from` can be read and `len` bytes at `to` written.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if LOOP_BYTES.contains(&len) && is_apart(from, to, len) && std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the ranges are valid (the caller), apart and at least one chunk long.
        return unsafe { copy_chunks(from, to, len) };
    }
    // SAFETY: the caller vouches for both ranges.
    unsafe { std::ptr::copy(from, to, len) };
}

/// Copies `count` rows whose starts lie `strides.0` apart at the source and `strides.1` apart at the target.
///
/// # Safety
/// As for [`copy`], for `bytes` bytes at each row's start.
pub(crate) unsafe fn copy_rows(
    from: *const u8,
    to: *mut u8,
    strides: (usize, usize),
    bytes: usize,
    count: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if (CHUNK_BYTES..ROW_LOOP_BYTES_END).contains(&bytes) && std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; rows are valid (the caller) and at least one chunk long.
        return unsafe { copy_rows_in_chunks(from, to, strides, bytes, count) };
    }
    for row in 0..count {
        // SAFETY: the caller vouches for each row.
        let from = unsafe { from.add(row * strides.0) };
        // SAFETY: as above.
        let to = unsafe { to.add(row * strides.1) };
        // SAFETY: as above.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}

/// Copies the rows of [`copy_rows`] by the loop, with one check of the processor for all of them.
///
/// # Safety
/// As for [`copy_rows`]; `bytes` is at least [`CHUNK_BYTES`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_rows_in_chunks(
    from: *const u8,
    to: *mut u8,
    strides: (usize, usize),
    bytes: usize,
    count: usize,
) {
    for row in 0..count {
        // SAFETY: the caller vouches for each row.
        let from = unsafe { from.add(row * strides.0) };
        // SAFETY: as above.
        let to = unsafe { to.add(row * strides.1) };
        if is_apart(from, to, bytes) {
            // SAFETY: as above, and the row is at least one chunk long.
            unsafe { copy_chunks(from, to, bytes) };
        } else {
            // SAFETY: as above; overlap is allowed.
            unsafe { std::ptr::copy(from, to, bytes) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn is_apart(from: *const u8, to: *mut u8, len: usize) -> bool {
    let (from, to) = (from.addr(), to.addr());
    from.abs_diff(to) >= len
}

/// # Safety
/// As for [`copy`]; the ranges are apart, `len` is at least [`CHUNK_BYTES`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn copy_chunks(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while at + CHUNK_BYTES <= len {
        // SAFETY: the chunk ends at or before `len`.
        unsafe { copy_chunk(from, to, at) };
        at += CHUNK_BYTES;
    }
    if at < len {
        // The rest is covered by a last chunk that ends at `len` and repeats some bytes.
        // SAFETY: `len` is at least one chunk.
        unsafe { copy_chunk(from, to, len - CHUNK_BYTES) };
    }
}

/// # Safety
/// One chunk at `at` lies inside both ranges, and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn copy_chunk(from: *const u8, to: *mut u8, at: usize) {
    // SAFETY: the caller vouches that the chunk lies inside the range.
    let from = unsafe { from.add(at) };
    // SAFETY: as above.
    let to = unsafe { to.add(at) };
    // SAFETY: readable, and any bytes are a chunk; no alignment is needed.
    let chunk = unsafe { from.cast::<Chunk>().read_unaligned() };
    // SAFETY: writable; no alignment is needed.
    unsafe { to.cast::<Chunk>().write_unaligned(chunk) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_distance_arrives() {
        let source: Vec<u8> = (0..40_000_u32).map(|at| (at * 31 + at / 251) as u8).collect();
        for len in (0..700).chain([1023, 1024, 4096, 4097, 16_383, 16_384, 16_385, 30_000]) {
            for (from, to) in [(0, 0), (3, 64), (64, 5)] {
                let mut target = vec![0xEE; len + 200];
                // SAFETY: both ranges lie inside their vectors.
                unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
                assert_eq!(target[to..to + len], source[from..from + len], "{len} bytes");
                assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xEE), "{len}");
            }
        }
    }

    #[test]
    fn overlapping_ranges_are_moved() {
        for (from, to) in [(0, 1), (1, 0), (0, 127), (300, 0), (0, 300)] {
            let mut bytes: Vec<u8> = (0..2000_u32).map(|at| (at * 7) as u8).collect();
            let expected = bytes[from..from + 1000].to_vec();
            let start = bytes.as_mut_ptr();
            // SAFETY: both ranges lie inside the vector.
            unsafe { copy(start.wrapping_add(from), start.wrapping_add(to), 1000) };
            assert_eq!(bytes[to..to + 1000], expected);
        }
    }
}
