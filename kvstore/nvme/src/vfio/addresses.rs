//! Allocation of device addresses.
//!
//! First fit over a handful of mappings that live as long as the engine. An address is congruent to the process's
//! address modulo 2 MiB, so that memory in 2 MiB pages gets 2 MiB entries in the IOMMU.

/// The IOMMU's next larger page.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Lowest address that is handed out: a command with a forgotten pointer must fault instead of writing to
/// memory.
const LOWEST: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Addresses {
    /// First and last address of each range that the IOMMU can map.
    ranges: Vec<(u64, u64)>,
    /// Allocations: first address and bytes, sorted.
    taken: Vec<(u64, u64)>,
}

impl Addresses {
    pub(super) fn new(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        Self { ranges, taken: Vec::new() }
    }

    /// Allocates `bytes` of device addresses for memory at `process_address`.
    pub(super) fn take(&mut self, process_address: u64, bytes: u64) -> Option<u64> {
        let place = self.ranges.iter().find_map(|&(first, last)| {
            let mut candidate = congruent(first.max(LOWEST), process_address)?;
            for &(start, length) in &self.taken {
                if candidate.checked_add(bytes)? <= start {
                    break;
                }
                if start + length > candidate {
                    candidate = congruent(start + length, process_address)?;
                }
            }
            (candidate.checked_add(bytes)? - 1 <= last).then_some(candidate)
        })?;
        let index = self.taken.partition_point(|&(start, _)| start < place);
        self.taken.insert(index, (place, bytes));
        Some(place)
    }

    pub(super) fn give_back(&mut self, address: u64) {
        self.taken.retain(|&(start, _)| start != address);
    }
}

/// First address from `at` on that is congruent to `process_address`.
fn congruent(at: u64, process_address: u64) -> Option<u64> {
    at.checked_add(process_address.wrapping_sub(at) % HUGE_PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_mappings_are_inside_and_disjoint() {
        let ranges = [(0x1_0000_0000, 0x1_3fff_ffff), (0, 0xfff_ffff)];
        let mut addresses = Addresses::new(ranges.to_vec());
        let (mut held, mut state, mut refused) = (Vec::<(u64, u64)>::new(), 3_u64, 0);
        for _ in 0..5000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let draw = state >> 33;
            if draw.is_multiple_of(3) && !held.is_empty() {
                let (address, _) = held.swap_remove(draw as usize % held.len());
                addresses.give_back(address);
                continue;
            }
            let (process_address, bytes) = (draw << 12, (draw % 20_000 + 1) << 12);
            let Some(address) = addresses.take(process_address, bytes) else {
                refused += 1;
                continue;
            };
            assert_eq!((address ^ process_address) % HUGE_PAGE_BYTES, 0);
            assert!(address >= LOWEST);
            assert!(ranges.iter().any(|&(first, last)| address >= first && address + bytes - 1 <= last));
            assert!(
                held.iter().all(|&(start, length)| address + bytes <= start || start + length <= address)
            );
            held.push((address, bytes));
        }
        assert!(refused > 0, "the space was full at times");
        assert_eq!(addresses.taken.len(), held.len());
    }

    #[test]
    fn what_can_never_fit_is_refused() {
        let mut addresses = Addresses::new(vec![(0, u64::MAX)]);
        assert_eq!(addresses.take(0, u64::MAX), None);
        let address = addresses.take(0x7f00_0000_3000, 4096).expect("fits");
        assert_eq!(address % HUGE_PAGE_BYTES, 0x3000);
    }
}
