//! The KV blocks of one worker, by vLLM's rules.
//!
//! A full block is known by its sequence hash. Equal blocks that two requests computed are two copies, with
//! events for each when it is stored and removed. A block without references stays known until its memory is
//! needed, least recently freed first; within a request the last block is reused first. Memory grows with the
//! blocks used: a worker that never had a request allocates none.

use std::collections::HashMap;

use kvstore_block::{block_hash, block_hash_with_extras, chained_hash};
use router_events::wire::{KvEvent, Removed, Stored};
use router_radix::Tier;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Block {
    /// Sequence hash of the block's tokens; meaningless unless `is_known`.
    hash: u64,
    is_known: bool,
    refs: u32,
    /// Neighbours in the list of blocks without references.
    free_before: u32,
    free_after: u32,
    /// Neighbours in the ring of copies of the same block.
    copy_before: u32,
    copy_after: u32,
}

/// The pool of one worker. The worker's lock guards it.
#[derive(Debug)]
pub(crate) struct Pool {
    block_tokens: usize,
    capacity: usize,
    /// Id of the first block as reported to other components: 1 if block 0 is reserved.
    first_id: u32,
    blocks: Vec<Block>,
    /// The oldest copy of each known block.
    known: HashMap<u64, u32>,
    free_first: u32,
    free_last: u32,
    /// Number of blocks that were used and are free now.
    free_count: usize,
    known_count: usize,
    /// Events since they were last taken; stays empty unless `publishes_events`.
    pub(crate) events: Vec<KvEvent>,
    publishes_events: bool,
}

/// Sequence hashes of the blocks of a prompt and its output.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    hashes: Vec<u64>,
    adapter: Option<String>,
    extras: Vec<String>,
}

impl Chain {
    /// Starts a sequence. `extras`, the adapter among them, also enter the hashes.
    pub(crate) fn new(adapter: Option<String>, extras: Vec<String>) -> Self {
        Self { hashes: Vec::new(), adapter, extras }
    }

    /// Returns the hashes of the whole blocks of these tokens, which begin with those of the previous call.
    fn extend(&mut self, tokens: &[u32], block_tokens: usize) -> &[u64] {
        let done = self.hashes.len() * block_tokens;
        for block in tokens.get(done..).unwrap_or_default().chunks_exact(block_tokens) {
            let hash = match self.hashes.last() {
                Some(&parent) => chained_hash(Some(parent), block_hash(block)),
                None => block_hash_with_extras(block, &self.extras),
            };
            self.hashes.push(hash);
        }
        &self.hashes
    }
}

/// The blocks of one sequence.
#[derive(Debug, Default)]
pub(crate) struct Table {
    blocks: Vec<u32>,
    /// Number of leading blocks that are known.
    known: usize,
}

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }
}

/// Extra keys of blocks `first` to `complete`, each with its block's index among them, as vLLM publishes them: the adapter at
/// each block, the salt at the first block of the prompt alone.
fn extras_of(chain: &Chain, first: usize, complete: usize) -> Vec<(u32, String)> {
    let of = |block: usize| match block {
        0 => &chain.extras[..],
        _ => chain.adapter.as_slice(),
    };
    (first..complete)
        .flat_map(|block| of(block).iter().map(move |text| ((block - first) as u32, text.clone())))
        .collect()
}

impl Pool {
    pub(crate) fn new(block_tokens: usize, capacity: usize, first_id: u32, publishes_events: bool) -> Self {
        Self {
            block_tokens,
            capacity,
            first_id,
            blocks: Vec::new(),
            known: HashMap::new(),
            free_first: NONE,
            free_last: NONE,
            free_count: 0,
            known_count: 0,
            events: Vec::new(),
            publishes_events,
        }
    }

    /// Number of blocks with references.
    pub(crate) fn held(&self) -> usize {
        self.blocks.len() - self.free_count
    }

    /// Number of different blocks that are known.
    pub(crate) fn known(&self) -> usize {
        self.known.len()
    }

    /// Number of known copies, with or without references.
    pub(crate) fn cached(&self) -> usize {
        self.known_count
    }

    fn available(&self) -> usize {
        self.capacity - self.held()
    }

    /// Number of blocks for so many tokens.
    pub(crate) fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Returns the ids of a sequence's blocks as reported to other components.
    pub(crate) fn ids(&self, table: &Table) -> Vec<u32> {
        table.blocks.iter().map(|block| block + self.first_id).collect()
    }

    /// Finds a prompt's leading blocks and allocates the rest. Returns the number of tokens found. `None`, with
    /// no change: too few blocks. The last token is always computed, so it is never found.
    pub(crate) fn admit(&mut self, chain: &mut Chain, tokens: &[u32], table: &mut Table) -> Option<usize> {
        let findable = tokens.len().saturating_sub(1) / self.block_tokens;
        let hashes = chain.extend(tokens, self.block_tokens);
        let found =
            hashes[..findable.min(hashes.len())].iter().map_while(|hash| self.known.get(hash).copied());
        table.blocks.extend(found);
        let cached = table.blocks.len();
        let idle = table.blocks.iter().filter(|&&block| self.blocks[block as usize].refs == 0).count();
        let needed = self.blocks_for(tokens.len()) - cached;
        if needed + idle > self.available() {
            table.blocks.clear();
            return None;
        }
        for index in 0..cached {
            self.refer(table.blocks[index]);
        }
        table.known = cached;
        table.blocks.extend((0..needed).filter_map(|_| self.take()));
        Some(cached * self.block_tokens)
    }

    /// Allocates the blocks that a sequence lacks for so many tokens. `false`, with no change: too few blocks.
    pub(crate) fn grow(&mut self, table: &mut Table, tokens: usize) -> bool {
        let needed = self.blocks_for(tokens).saturating_sub(table.blocks.len());
        if needed > self.available() {
            return false;
        }
        table.blocks.extend((0..needed).filter_map(|_| self.take()));
        true
    }

    /// Registers the blocks that these computed tokens fill.
    pub(crate) fn register_blocks(&mut self, chain: &mut Chain, tokens: &[u32], table: &mut Table) {
        let complete = (tokens.len() / self.block_tokens).min(table.blocks.len());
        if complete <= table.known {
            return;
        }
        let first = table.known;
        chain.extend(tokens, self.block_tokens);
        let hashes = &chain.hashes;
        for (&block, &hash) in table.blocks[first..complete].iter().zip(&hashes[first..complete]) {
            self.insert_copy(block, hash);
        }
        table.known = complete;
        if self.publishes_events {
            let span = first * self.block_tokens..complete * self.block_tokens;
            self.events.push(KvEvent::Stored(Stored {
                hashes: hashes[first..complete].to_vec(),
                parent: first.checked_sub(1).map(|parent| hashes[parent]),
                tokens: tokens[span].to_vec(),
                block_tokens: self.block_tokens,
                tier: Tier::Device,
                extras: extras_of(chain, first, complete),
                lora: chain.adapter.clone(),
                ..Stored::default()
            }));
        }
    }

    /// Releases a sequence's blocks.
    pub(crate) fn release(&mut self, table: &mut Table) {
        for block in table.blocks.drain(..).rev() {
            let refs = &mut self.blocks[block as usize].refs;
            *refs -= 1;
            if *refs == 0 {
                self.append_free(block);
            }
        }
        table.known = 0;
    }

    /// Clears the contents of all blocks, as `/reset_prefix_cache` does. `false` while blocks are in use.
    pub(crate) fn clear(&mut self) -> bool {
        if self.held() > 0 {
            return false;
        }
        self.blocks.iter_mut().for_each(|block| block.is_known = false);
        self.known.clear();
        self.known_count = 0;
        if self.publishes_events {
            self.events.push(KvEvent::Cleared);
        }
        true
    }

    fn refer(&mut self, block: u32) {
        if self.blocks[block as usize].refs == 0 {
            self.remove_free(block);
        }
        self.blocks[block as usize].refs += 1;
    }

    fn take(&mut self) -> Option<u32> {
        if self.blocks.len() < self.capacity {
            let block = self.blocks.len() as u32;
            self.blocks.push(Block {
                hash: 0,
                is_known: false,
                refs: 1,
                free_before: NONE,
                free_after: NONE,
                copy_before: block,
                copy_after: block,
            });
            return Some(block);
        }
        let block = self.free_first;
        if block == NONE {
            return None;
        }
        self.remove_free(block);
        self.remove_copy(block);
        self.blocks[block as usize].refs = 1;
        Some(block)
    }

    fn insert_copy(&mut self, block: u32, hash: u64) {
        let at = block as usize;
        (self.blocks[at].hash, self.blocks[at].is_known) = (hash, true);
        self.known_count += 1;
        match self.known.get(&hash) {
            None => {
                self.known.insert(hash, block);
                (self.blocks[at].copy_before, self.blocks[at].copy_after) = (block, block);
            }
            Some(&oldest) => {
                let newest = self.blocks[oldest as usize].copy_before;
                self.blocks[newest as usize].copy_after = block;
                self.blocks[oldest as usize].copy_before = block;
                (self.blocks[at].copy_before, self.blocks[at].copy_after) = (newest, oldest);
            }
        }
    }

    fn remove_copy(&mut self, block: u32) {
        let Block { hash, is_known, copy_before, copy_after, .. } = self.blocks[block as usize];
        if !is_known {
            return;
        }
        self.blocks[block as usize].is_known = false;
        self.known_count -= 1;
        if copy_after == block {
            self.known.remove(&hash);
        } else {
            self.blocks[copy_before as usize].copy_after = copy_after;
            self.blocks[copy_after as usize].copy_before = copy_before;
            if self.known.get(&hash) == Some(&block) {
                self.known.insert(hash, copy_after);
            }
        }
        if self.publishes_events {
            self.events.push(KvEvent::Removed(Removed {
                hashes: vec![hash],
                tier: Tier::Device,
                group: None,
            }));
        }
    }

    fn append_free(&mut self, block: u32) {
        let last = std::mem::replace(&mut self.free_last, block);
        match last {
            NONE => self.free_first = block,
            last => self.blocks[last as usize].free_after = block,
        }
        (self.blocks[block as usize].free_before, self.blocks[block as usize].free_after) = (last, NONE);
        self.free_count += 1;
    }

    fn remove_free(&mut self, block: u32) {
        let Block { free_before, free_after, .. } = self.blocks[block as usize];
        match free_before {
            NONE => self.free_first = free_after,
            before => self.blocks[before as usize].free_after = free_after,
        }
        match free_after {
            NONE => self.free_last = free_before,
            after => self.blocks[after as usize].free_before = free_before,
        }
        self.free_count -= 1;
    }

    /// Number of known copies of each block.
    #[cfg(test)]
    pub(crate) fn copies(&self) -> HashMap<u64, usize> {
        let mut copies = HashMap::new();
        for block in self.blocks.iter().filter(|block| block.is_known) {
            *copies.entry(block.hash).or_insert(0) += 1;
        }
        copies
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::split_mix;

    fn run(pool: &mut Pool, tokens: &[u32]) -> Option<usize> {
        let (mut chain, mut table) = (Chain::default(), Table::default());
        let cached = pool.admit(&mut chain, tokens, &mut table)?;
        pool.register_blocks(&mut chain, tokens, &mut table);
        pool.release(&mut table);
        Some(cached)
    }

    #[test]
    fn the_last_token_is_never_cached() {
        let mut pool = Pool::new(4, 16, 1, true);
        let tokens: Vec<u32> = (0..8).collect();
        assert_eq!(run(&mut pool, &tokens), Some(0));
        assert_eq!(run(&mut pool, &tokens), Some(4), "the second block ends with the last token");
        assert_eq!(pool.cached(), 3, "the recomputed block is a copy of its own");
        assert_eq!(run(&mut pool, &(0..9).collect::<Vec<_>>()), Some(8));
        assert_eq!(run(&mut pool, &(0..80).collect::<Vec<_>>()), None);
        assert_eq!((pool.held(), run(&mut pool, &[0, 1, 2])), (0, Some(0)));
    }

    /// The events always add up to the pool's contents, copy by copy.
    #[test]
    fn the_events_add_up_to_the_pool() {
        for seed in 0..40_u64 {
            let mut random = seed;
            let mut draw = |below: u64| split_mix(&mut random) % below;
            let mut pool = Pool::new(2, 12, 0, true);
            let mut told: HashMap<u64, usize> = HashMap::new();
            let mut open: Vec<(Chain, Vec<u32>, Table)> = Vec::new();
            for _ in 0..400 {
                match draw(4) {
                    0 | 1 => {
                        let tokens: Vec<u32> = (0..1 + draw(10)).map(|_| draw(2) as u32).collect();
                        let (mut chain, mut table) = (Chain::default(), Table::default());
                        if pool.admit(&mut chain, &tokens, &mut table).is_some() {
                            pool.register_blocks(&mut chain, &tokens, &mut table);
                            open.push((chain, tokens, table));
                        }
                    }
                    2 if !open.is_empty() => {
                        let at = draw(open.len() as u64) as usize;
                        let (chain, tokens, table) = &mut open[at];
                        if pool.grow(table, tokens.len() + 1) {
                            tokens.push(draw(2) as u32);
                            pool.register_blocks(chain, tokens, table);
                        }
                    }
                    _ if !open.is_empty() => {
                        let at = draw(open.len() as u64) as usize;
                        pool.release(&mut open.swap_remove(at).2);
                    }
                    _ => {
                        pool.clear();
                    }
                }
                for event in pool.events.drain(..) {
                    match event {
                        KvEvent::Stored(stored) => {
                            stored.hashes.iter().for_each(|&hash| *told.entry(hash).or_default() += 1);
                        }
                        KvEvent::Removed(removed) => removed.hashes.iter().for_each(|hash| {
                            let count = told.get_mut(hash).expect("was stored");
                            *count -= 1;
                            if *count == 0 {
                                told.remove(hash);
                            }
                        }),
                        _ => told.clear(),
                    }
                }
                assert_eq!(told, pool.copies(), "seed {seed}");
                let held: std::collections::HashSet<u32> =
                    open.iter().flat_map(|(_, _, table)| table.blocks.iter().copied()).collect();
                assert_eq!(held.len(), pool.held(), "seed {seed}");
            }
        }
    }
}
