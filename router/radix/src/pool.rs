//! Pieces of the members' key tables: 4 KiB each, from large pages that all members share.

use std::collections::BTreeSet;

use crate::huge::{HUGE_BYTES, Huge, Zeroed};
use crate::keys::Bucket;

/// Buckets of a piece.
pub(crate) const PAGE_BUCKETS: usize = 64;
pub(crate) type KeyTablePage = [Bucket; PAGE_BUCKETS];

/// Bytes of a piece.
pub(crate) const PAGE_BYTES: usize = size_of::<KeyTablePage>();
const CHUNK_PAGES: usize = HUGE_BYTES / PAGE_BYTES;

#[repr(C, align(64))]
struct Chunk([KeyTablePage; CHUNK_PAGES]);

// SAFETY: integers; no drop.
unsafe impl Zeroed for Chunk {}

/// Number of a page.
pub(crate) type PageId = u32;

struct State {
    memory: Huge<Chunk>,
    free: Vec<u16>,
}

/// All pieces.
#[derive(Default)]
pub(crate) struct Pool {
    chunks: Vec<Option<State>>,
    /// Chunks with a free piece; the lowest is used first, so that the others run empty.
    non_full: BTreeSet<u32>,
    allocated: usize,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("bytes", &self.bytes()).finish()
    }
}

impl Pool {
    pub(crate) fn bytes(&self) -> usize {
        self.allocated * HUGE_BYTES
    }

    /// Pieces that can be had without more memory.
    pub(crate) fn spare(&self) -> usize {
        self.non_full
            .iter()
            .filter_map(|&at| self.chunks[at as usize].as_ref())
            .map(|state| state.free.len())
            .sum()
    }

    /// An empty piece. The process ends when the system has no memory, as for any allocation.
    pub(crate) fn allocate(&mut self) -> PageId {
        let at = match self.non_full.first() {
            Some(&at) => at as usize,
            None => self.grow(),
        };
        let Some(Some(state)) = self.chunks.get_mut(at) else { unreachable!("a roomy chunk is there") };
        let Some(within) = state.free.pop() else { unreachable!("a roomy chunk has a free piece") };
        if state.free.is_empty() {
            self.non_full.remove(&(at as u32));
        }
        state.memory.0[usize::from(within)].fill(Bucket::default());
        (at * CHUNK_PAGES) as PageId + PageId::from(within)
    }

    fn grow(&mut self) -> usize {
        let at = self.chunks.iter().position(Option::is_none).unwrap_or(self.chunks.len());
        let Some(memory) = Huge::new() else {
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<Chunk>());
        };
        let state = State { memory, free: (0..CHUNK_PAGES as u16).rev().collect() };
        if at == self.chunks.len() {
            self.chunks.push(Some(state));
        } else {
            self.chunks[at] = Some(state);
        }
        self.non_full.insert(at as u32);
        self.allocated += 1;
        at
    }

    pub(crate) fn free(&mut self, id: PageId) {
        let at = id as usize / CHUNK_PAGES;
        let Some(Some(state)) = self.chunks.get_mut(at) else { return };
        state.free.push((id as usize % CHUNK_PAGES) as u16);
        self.non_full.insert(at as u32);
        if state.free.len() == CHUNK_PAGES {
            self.chunks[at] = None;
            self.non_full.remove(&(at as u32));
            self.allocated -= 1;
        }
    }

    #[inline]
    pub(crate) fn page(&self, id: PageId) -> &KeyTablePage {
        let Some(Some(state)) = self.chunks.get(id as usize / CHUNK_PAGES) else {
            unreachable!("piece {id} is in use")
        };
        &state.memory.0[id as usize % CHUNK_PAGES]
    }

    #[inline]
    pub(crate) fn piece_mut(&mut self, id: PageId) -> &mut KeyTablePage {
        let Some(Some(state)) = self.chunks.get_mut(id as usize / CHUNK_PAGES) else {
            unreachable!("piece {id} is in use")
        };
        &mut state.memory.0[id as usize % CHUNK_PAGES]
    }
}
