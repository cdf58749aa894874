//! Slabs that are pinned and mapped by the kernel once (io_uring_register(2), IORING_REGISTER_BUFFERS2).
//!
//! A registered buffer may have 1 GiB (`io_buffer_validate` in io_uring/rsrc.c), so that a slab becomes
//! several, cut between slots. A buffer across a cut, or outside, is read and written without registration.
//!
//! Hot path: finding an address is a binary search over the pieces; nearly always there are one to a few.

use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_memory::Slab;
use io_uring::Submitter;

use super::ring::MISDRIVEN;
use crate::{IoError, IoErrorKind};

/// Maximum number of pieces of all slabs: 1 TiB.
pub(crate) const PIECES_MAX: u32 = 1024;
const PIECE_BYTES_MAX: usize = 1 << 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: usize,
    bytes: usize,
    index: u16,
}

/// The registered slabs of a ring.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    /// Sorted by address.
    pieces: Vec<Piece>,
    /// Keeps the memory mapped, and so its addresses unique.
    slabs: Vec<Arc<Slab>>,
    has_table: bool,
}

/// Cuts a slab into pieces: offsets and lengths that cover the whole mapping, each of at most `most` bytes.
fn cuts(mapped_bytes: usize, slots_offset: usize, stride: usize, most: usize) -> Vec<(usize, usize)> {
    let mut cuts = Vec::new();
    let mut at = 0;
    while at < mapped_bytes {
        // The header belongs to the piece of the first slots.
        let head = if at == 0 { slots_offset } else { 0 };
        let whole_slots = most.saturating_sub(head) / stride * stride;
        let bytes = if whole_slots == 0 { most } else { head + whole_slots };
        let bytes = bytes.min(mapped_bytes - at);
        cuts.push((at, bytes));
        at += bytes;
    }
    cuts
}

impl Registered {
    /// Pins and maps a slab. No effect for a slab that is registered already.
    pub(crate) fn add(
        &mut self,
        engine: &'static str,
        submitter: &Submitter<'_>,
        slab: &Arc<Slab>,
    ) -> Result<(), IoError> {
        if self.slabs.iter().any(|known| Arc::ptr_eq(known, slab)) {
            return Ok(());
        }
        let bytes = slab.mapped_bytes();
        let failed = |errno: i32| {
            let mut error = IoError::from_errno(engine, format!("register {bytes} bytes of a slab"), errno);
            if errno == libc::EEXIST {
                (error.kind, error.reason) = (IoErrorKind::Device, MISDRIVEN.to_owned());
            }
            if errno == libc::ENOMEM {
                error.reason += "; RLIMIT_MEMLOCK or CAP_IPC_LOCK may be what is missing";
            }
            error
        };
        let errno_of = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        if !self.has_table {
            submitter.register_buffers_sparse(PIECES_MAX).map_err(|error| failed(errno_of(error)))?;
            self.has_table = true;
        }
        let layout = slab.layout();
        let cuts = cuts(bytes, layout.slots_offset(), layout.stride(), PIECE_BYTES_MAX);
        if self.pieces.len() + cuts.len() > PIECES_MAX as usize {
            return Err(IoError {
                engine,
                operation: format!("register {bytes} bytes of a slab"),
                kind: IoErrorKind::NoSpace,
                reason: format!("more than {PIECES_MAX} pieces of 1 GiB"),
            });
        }
        let base = slab.base().as_ptr();
        let first = self.pieces.len();
        let vectors: Vec<libc::iovec> = cuts
            .iter()
            .map(|&(at, bytes)| libc::iovec { iov_base: base.wrapping_add(at).cast(), iov_len: bytes })
            .collect();
        // SAFETY: the vectors cover the slab's mapping and nothing else, and `slabs` keeps it mapped for as long as the
        // ring lives, as the engine drops the ring first.
        unsafe { submitter.register_buffers_update(first as u32, &vectors, None) }
            .map_err(|error| failed(errno_of(error)))?;
        self.slabs.push(Arc::clone(slab));
        for (index, (at, bytes)) in (first..).zip(cuts) {
            let start = slab.base().addr().get() + at;
            self.pieces.push(Piece { start, bytes, index: index as u16 });
        }
        self.pieces.sort_by_key(|piece| piece.start);
        Ok(())
    }

    /// Returns the number of the piece that contains all these bytes, if there is one.
    pub(crate) fn find(&self, address: NonNull<u8>, len: usize) -> Option<u16> {
        let start = address.addr().get();
        let after = self.pieces.partition_point(|piece| piece.start <= start);
        let piece = self.pieces.get(after.checked_sub(1)?)?;
        (start - piece.start + len <= piece.bytes).then_some(piece.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_cover_the_slab_and_lie_between_slots() {
        for (mapped, slots_offset, stride, most) in [
            (4096 + 40 * 4096, 4096, 4096, 10 * 4096),
            (8192 + 7 * 12288, 8192, 12288, 40_000),
            (4096 + 2 * 81_920, 4096, 81_920, 8192),
            (4096, 64, 64, 1 << 30),
        ] {
            let cuts = cuts(mapped, slots_offset, stride, most);
            let mut at = 0;
            for &(start, bytes) in &cuts {
                assert!(start == at && bytes > 0 && bytes <= most, "{cuts:?}");
                let between = start == 0 || (start - slots_offset).is_multiple_of(stride) || stride > most;
                assert!(between, "{cuts:?}");
                at += bytes;
            }
            assert_eq!(at, mapped);
        }
    }

    #[test]
    fn an_address_is_found_when_all_its_bytes_are_in_one_piece() {
        let piece = |start, bytes, index| Piece { start, bytes, index };
        let registered = Registered {
            pieces: vec![piece(4096, 4096, 3), piece(8192, 4096, 1), piece(20480, 4096, 2)],
            ..Registered::default()
        };
        let find = |at, len| {
            registered.find(NonNull::new(std::ptr::without_provenance_mut(at)).expect("place"), len)
        };
        assert_eq!(find(4096, 4096), Some(3));
        assert_eq!(find(8191, 1), Some(3));
        assert_eq!(find(8191, 2), None, "across a cut");
        assert_eq!(find(8192, 1), Some(1));
        assert_eq!(find(24575, 1), Some(2));
        assert_eq!(find(24575, 2), None);
        assert_eq!(find(12288, 1), None);
        assert_eq!(find(1, 1), None);
    }
}
