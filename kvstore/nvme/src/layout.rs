//! Layout of the one [`DmaMemory`] of a controller, in whole pages:
//! admin queue pair, page for identify; then for each pair its two queues and a page for each command id, for its
//! list of pages; then the bounce buffers.

use crate::NvmeConfig;
use crate::dma::PAGE_BYTES;
use crate::queue_pair::{COMPLETION_BYTES, SUBMISSION_BYTES};

/// Entries of the admin queues: one submission page.
pub(crate) const ADMIN_ENTRIES: u16 = 64;
pub(crate) const ADMIN_SUBMISSION: usize = 0;
pub(crate) const ADMIN_COMPLETION: usize = PAGE_BYTES;
pub(crate) const IDENTIFY: usize = 2 * PAGE_BYTES;
const PAIRS: usize = 3 * PAGE_BYTES;

/// Page addresses in a list of one page. Longer lists need chaining: the length of commands is bounded to one
/// list instead.
pub(crate) const PAGE_LIST_ENTRIES: usize = PAGE_BYTES / 8;

/// Offsets of the parts whose size depends on the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) entries: u16,
    submission_bytes: usize,
    pair_bytes: usize,
    bounce: usize,
    bounce_bytes: usize,
    /// Bytes of the whole layout.
    pub(crate) bytes: usize,
}

impl Layout {
    pub(crate) fn new(config: &NvmeConfig, entries: u16) -> Self {
        let pages = |bytes: usize| bytes.next_multiple_of(PAGE_BYTES);
        let submission_bytes = pages(usize::from(entries) * SUBMISSION_BYTES);
        let completion_bytes = pages(usize::from(entries) * COMPLETION_BYTES);
        let pair_bytes = submission_bytes + completion_bytes + usize::from(entries) * PAGE_BYTES;
        let bounce = PAIRS + usize::from(config.queue_pairs) * pair_bytes;
        let bytes = bounce + usize::from(config.bounce_buffers) * config.bounce_bytes;
        Self { entries, submission_bytes, pair_bytes, bounce, bounce_bytes: config.bounce_bytes, bytes }
    }

    /// Offsets of the submission and the completion queue of the pair with this index.
    pub(crate) fn queues(&self, pair: usize) -> (usize, usize) {
        let submission = PAIRS + pair * self.pair_bytes;
        (submission, submission + self.submission_bytes)
    }

    /// Offset of the page for the page list of a command.
    #[inline]
    pub(crate) fn page_list(&self, pair: usize, id: u16) -> usize {
        let lists = PAIRS + (pair + 1) * self.pair_bytes - usize::from(self.entries) * PAGE_BYTES;
        lists + usize::from(id) * PAGE_BYTES
    }

    #[inline]
    pub(crate) fn bounce_buffer(&self, index: u16) -> usize {
        self.bounce + usize::from(index) * self.bounce_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        let config =
            NvmeConfig { queue_pairs: 3, bounce_buffers: 2, bounce_bytes: 8192, ..NvmeConfig::default() };
        let layout = Layout::new(&config, 70);
        let mut ranges = vec![(0, PAIRS)];
        for pair in 0..3 {
            let (submission, completion) = layout.queues(pair);
            ranges.push((submission, 70 * 64));
            ranges.push((completion, 70 * 16));
            ranges.extend((0..70).map(|id| (layout.page_list(pair, id), PAGE_BYTES)));
        }
        ranges.extend((0..2).map(|index| (layout.bounce_buffer(index), 8192)));
        ranges.push((layout.bytes, 0));
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0 && pair[1].0 % PAGE_BYTES == 0, "{pair:x?}");
        }
    }
}
