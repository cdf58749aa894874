//! Registration of memory with SPDK.
//!
//! SPDK keeps addresses by pages of 2 MiB and, since 25.09, of 4 KiB. A region that begins or ends inside a
//! page of 2 MiB and contains a whole one has entries of both kinds, and `spdk_mem_unregister` then leaves it
//! mapped and says that it is not: memory registered there later would be written elsewhere. So each registered
//! piece has pages of one kind. `spdk_mem_register` also returns success for memory that it could not map: each
//! page is looked up afterwards.
//!
//! Sources: `lib/env_dpdk/memory.c` of SPDK 24.01 to 26.05 (`vtophys_check_contiguous_entries`, `vtophys_notify`).

use std::ops::Range;

use super::library::{Library, NO_ADDRESS};

const LARGE_PAGE: usize = 2 << 20;
const SMALL_PAGE: usize = 4096;

/// A range of addresses, and the size of the pages in it.
struct Piece {
    range: Range<usize>,
    page: usize,
}

/// Splits memory into whole pages of 2 MiB, and pages of 4 KiB before and behind them.
fn pieces(start: usize, bytes: usize) -> impl Iterator<Item = Piece> {
    let end = start + bytes;
    let first = start.next_multiple_of(LARGE_PAGE).min(end);
    let last = (end / LARGE_PAGE * LARGE_PAGE).max(first);
    let of = |range: Range<usize>, page| Piece { range, page };
    // Without a whole large page, all of it has small pages.
    let all = if first == last {
        [of(start..end, SMALL_PAGE), of(end..end, LARGE_PAGE), of(end..end, SMALL_PAGE)]
    } else {
        [of(start..first, SMALL_PAGE), of(first..last, LARGE_PAGE), of(last..end, SMALL_PAGE)]
    };
    all.into_iter().filter(|piece| !piece.range.is_empty())
}

/// Reason why memory was not registered.
pub(super) struct Refused {
    pub(super) reason: String,
    /// The device may still reach a part of the memory, which must not be freed.
    pub(super) is_mapped: bool,
}

/// Registers memory, all or none of it.
///
/// # Safety
/// The memory must stay as it is until it was unregistered.
pub(super) unsafe fn register(library: &Library, start: *mut u8, bytes: usize) -> Result<(), Refused> {
    let address = start.addr();
    for (at, piece) in pieces(address, bytes).enumerate() {
        let place = start.wrapping_add(piece.range.start - address);
        // SAFETY: a part of the memory that the caller promised.
        let errno = unsafe { (library.mem_register)(place.cast(), piece.range.len()) };
        let lost = || piece.range.clone().step_by(piece.page).find(|page| !is_mapped(library, *page));
        let reason = if errno != 0 {
            let error = std::io::Error::from_raw_os_error(errno.saturating_abs());
            format!(
                "spdk_mem_register: {error}; SPDK before 25.09 takes whole pages of 2 MiB only (reserve hugepages)"
            )
        } else if let Some(page) = lost() {
            // An IOMMU with fewer bits than the process's addresses cannot map the page.
            format!(
                "spdk_vtophys: the page at {page:#x} has no address for the device (an IOMMU of 48 bits, or hugepages?)"
            )
        } else {
            continue;
        };
        let registered = pieces(address, bytes).take(at + usize::from(errno == 0));
        // SAFETY: registered above in these pieces; no command has named them.
        let is_mapped = !unsafe { take_back(library, start, registered) };
        return Err(Refused { reason, is_mapped });
    }
    Ok(())
}

/// Unregisters memory; false when the device may still reach it.
///
/// # Safety
/// The memory must be registered with these bounds, and no command may be in flight that names it.
#[must_use]
pub(super) unsafe fn unregister(library: &Library, start: *mut u8, bytes: usize) -> bool {
    // SAFETY: handed on to the caller.
    unsafe { take_back(library, start, pieces(start.addr(), bytes)) }
}

/// # Safety
/// As for [`unregister`], of these pieces of the memory at `start`.
unsafe fn take_back(library: &Library, start: *mut u8, pieces: impl Iterator<Item = Piece>) -> bool {
    let mut is_unmapped = true;
    for piece in pieces {
        let place = start.wrapping_add(piece.range.start - start.addr());
        // SAFETY: registered with these bounds, by the contract of this function.
        is_unmapped &= unsafe { (library.mem_unregister)(place.cast(), piece.range.len()) } == 0;
    }
    is_unmapped
}

fn is_mapped(library: &Library, address: usize) -> bool {
    let place = std::ptr::without_provenance(address);
    // SAFETY: only the address is looked at; no length is asked for.
    unsafe { (library.vtophys)(place, std::ptr::null_mut()) != NO_ADDRESS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_piece_has_pages_of_both_kinds() {
        let (large, small) = (LARGE_PAGE, SMALL_PAGE);
        for (start, bytes, expected) in [
            (0, 4 * large, vec![(0..4 * large, large)]),
            (small, 3 * small, vec![(small..4 * small, small)]),
            // Across the border of two large pages, neither of which is whole.
            (large - small, 2 * small, vec![(large - small..large + small, small)]),
            (large - small, large, vec![(large - small..2 * large - small, small)]),
            (large, large + small, vec![(large..2 * large, large), (2 * large..2 * large + small, small)]),
            (
                small,
                3 * large,
                vec![(small..large, small), (large..3 * large, large), (3 * large..3 * large + small, small)],
            ),
        ] {
            let found: Vec<_> = pieces(start, bytes).map(|piece| (piece.range, piece.page)).collect();
            assert_eq!(found, expected, "{bytes} bytes at {start}");
        }
    }
}
