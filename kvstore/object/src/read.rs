//! Look-ups and gets.
//!
//! A look-up reads the index of each run rather than requesting its head: the same round trip, and the answer
//! proves that the run is whole, of this layout, young enough and of this chain. It starts with one run and
//! doubles the number requested concurrently, so a chain that is not stored costs one request. A chain's end
//! that fills no run is looked up only with `store_partial`: log2(`run_blocks`) more requests, made
//! concurrently.
//!
//! Damage is confirmed by a second read: the first may have been corrupted on its way. Only then the object is
//! deleted, or avoided for a while if it may not be. An object of another run length under the same key is a
//! miss and is left alone.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use kvstore_block::BlockIdentity;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{FailureCause, ObjectError, Operation};
use crate::format::{FormatError, RunIndex};
use crate::metrics::add;
use crate::presence::{Presence, StoredRun};
use crate::tier::{ObjectTier, VerifiedBlock};

/// State of a run after a request.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    Run(StoredRun),
    Absent,
    Expired,
    Avoided,
    /// The request failed.
    Unknown,
}

/// Part of an object.
struct ObjectRange {
    bytes: Bytes,
    object_bytes: u64,
    e_tag: Option<String>,
}

impl ObjectTier {
    /// Returns the number of leading blocks of a chain that are stored. A failure counts as a miss.
    pub async fn look_up(&self, chain: &[BlockIdentity], deadline: Instant) -> usize {
        self.look_up_from(chain, 0, deadline).await
    }

    /// Like `look_up`, for a caller that does not need the blocks before `first`: their runs count as stored.
    pub async fn look_up_from(&self, chain: &[BlockIdentity], first: usize, deadline: Instant) -> usize {
        let run_blocks = self.config.run_blocks;
        let (mut run, mut window) = (first / run_blocks, 1);
        let runs = chain.len() / run_blocks;
        add(&self.counters.look_ups, 1);
        while run < runs {
            let end = (run + window).min(runs);
            let asked =
                join_all((run..end).map(|run| self.whole_run(chain, run * run_blocks, run_blocks, deadline)));
            let hits = asked.await.iter().take_while(|found| found.is_some()).count();
            run += hits;
            if run < end {
                break;
            }
            window = (window * 2).min(self.config.run_concurrency);
        }
        let start = run * run_blocks;
        let partial = self.partial_run(chain, start, deadline).await;
        let blocks = start + partial.map_or(0, |run| run.index.entries.len());
        add(&self.counters.hit_blocks, blocks as u64);
        add(&self.counters.missed_runs, u64::from(blocks < chain.len()));
        blocks
    }

    /// Reads blocks of a chain. Returns the leading part of `blocks` that is stored and was
    /// verified. At most `run_concurrency` runs are in memory besides the result.
    pub async fn get(
        &self,
        chain: &[BlockIdentity],
        blocks: Range<usize>,
        deadline: Instant,
    ) -> Vec<VerifiedBlock> {
        let run_blocks = self.config.run_blocks;
        let blocks = blocks.start..blocks.end.min(chain.len());
        let mut verified = Vec::with_capacity(blocks.len());
        if blocks.is_empty() {
            return verified;
        }
        let runs = blocks.start / run_blocks..blocks.end.div_ceil(run_blocks);
        let mut reads = stream::iter(runs.map(|run| {
            let start = run * run_blocks;
            let wanted = blocks.start.max(start) - start..blocks.end.min(start + run_blocks) - start;
            async move { (wanted.len(), self.get_run(chain, start, wanted, deadline).await) }
        }))
        .buffered(self.config.run_concurrency);
        while let Some((wanted, mut read)) = reads.next().await {
            let whole = read.len() == wanted;
            verified.append(&mut read);
            if !whole {
                break;
            }
        }
        add(&self.counters.read_blocks, verified.len() as u64);
        verified
    }

    /// Reads `wanted` blocks of the run that starts at block `start` of the chain.
    async fn get_run(
        &self,
        chain: &[BlockIdentity],
        start: usize,
        wanted: Range<usize>,
        deadline: Instant,
    ) -> Vec<VerifiedBlock> {
        let mut verified = Vec::new();
        for read in 0..2 {
            let Some(run) = self.any_run(chain, start, deadline).await else { break };
            let last = run.index.entries.len() - 1;
            let there = wanted.start..wanted.end.min(last + 1);
            if there.is_empty() {
                break;
            }
            let identity = run.index.entries[last].identity;
            match self.read_payload(&run, there.clone(), deadline).await {
                Ok(blocks) if blocks.len() == there.len() => return blocks,
                Ok(blocks) => {
                    verified = blocks;
                    add(&self.counters.damaged_reads, 1);
                    if read == 1 {
                        self.discard_damaged(identity, deadline).await;
                    }
                }
                Err(error) => {
                    self.presence.forget(&identity);
                    match error.cause() {
                        Some(FailureCause::Precondition) => add(&self.counters.replaced_objects, 1),
                        Some(FailureCause::OutOfRange) => {
                            add(&self.counters.damaged_reads, 1);
                            if read == 1 {
                                self.discard_damaged(identity, deadline).await;
                            }
                        }
                        _ => break,
                    }
                }
            }
            if !self.budget.withdraw() {
                add(&self.counters.retries_denied, 1);
                break;
            }
        }
        verified
    }

    /// Returns the whole run, or else the longest partial run.
    async fn any_run(&self, chain: &[BlockIdentity], start: usize, deadline: Instant) -> Option<StoredRun> {
        let run_blocks = self.config.run_blocks;
        if chain.len() - start >= run_blocks
            && let Some(run) = self.whole_run(chain, start, run_blocks, deadline).await
        {
            return Some(run);
        }
        self.partial_run(chain, start, deadline).await
    }

    /// Returns the longest partial run that starts at block `start` of the chain.
    async fn partial_run(
        &self,
        chain: &[BlockIdentity],
        start: usize,
        deadline: Instant,
    ) -> Option<StoredRun> {
        if !self.config.store_partial || start >= chain.len() {
            return None;
        }
        let halves = std::iter::successors(Some(self.config.run_blocks / 2), |blocks| Some(blocks / 2));
        let lengths = halves.take_while(|blocks| *blocks > 0).filter(|blocks| start + blocks <= chain.len());
        let asked = join_all(lengths.map(|blocks| self.whole_run(chain, start, blocks, deadline)));
        asked.await.into_iter().flatten().next()
    }

    /// Returns the run of exactly these blocks of the chain, if it is stored.
    async fn whole_run(
        &self,
        chain: &[BlockIdentity],
        start: usize,
        blocks: usize,
        deadline: Instant,
    ) -> Option<StoredRun> {
        let wanted = &chain[start..start + blocks];
        let last = wanted[blocks - 1];
        let Found::Run(run) = self.find(last, deadline).await else { return None };
        let entries = &run.index.entries;
        if entries.len() != blocks {
            add(&self.counters.foreign_runs, 1);
            return None;
        }
        if entries.iter().map(|entry| &entry.identity).ne(wanted) {
            // The last identity determines all before it, so this object was not made from a chain.
            add(&self.counters.damaged_reads, 1);
            self.discard_damaged(last, deadline).await;
            return None;
        }
        Some(run)
    }

    /// Returns the run that ends with a block, from the cache or from the store.
    pub(crate) async fn find(&self, last: BlockIdentity, deadline: Instant) -> Found {
        match self.presence.get(&last, Instant::now()) {
            Some(Presence::Present(run)) => self.unless_expired(run),
            Some(Presence::Absent) => Found::Absent,
            Some(Presence::Avoided) => Found::Avoided,
            None => self.read_index(last, deadline).await,
        }
    }

    fn unless_expired(&self, run: StoredRun) -> Found {
        if self.is_expired(run.index.created_unix_ms) {
            add(&self.counters.expired_runs, 1);
            return Found::Expired;
        }
        Found::Run(run)
    }

    async fn read_index(&self, last: BlockIdentity, deadline: Instant) -> Found {
        for read in 0..2 {
            let error = match self.request_index(last, deadline).await {
                Ok(Some(run)) => {
                    self.presence.set(last, Presence::Present(run.clone()), Instant::now());
                    return self.unless_expired(run);
                }
                Ok(None) => None,
                Err(error) => Some(error),
            };
            match error.as_ref().and_then(ObjectError::cause) {
                Some(FailureCause::NotFound) => {
                    self.presence.set(last, Presence::Absent, Instant::now());
                    return Found::Absent;
                }
                None | Some(FailureCause::OutOfRange) => add(&self.counters.damaged_reads, 1),
                Some(FailureCause::Precondition) => add(&self.counters.replaced_objects, 1),
                Some(_) => return Found::Unknown,
            }
            let damaged = error.and_then(|error| error.cause()) != Some(FailureCause::Precondition);
            if read == 1 && damaged {
                self.discard_damaged(last, deadline).await;
                return Found::Avoided;
            }
            if read == 0 && !self.budget.withdraw() {
                add(&self.counters.retries_denied, 1);
                break;
            }
        }
        Found::Unknown
    }

    /// Reads and checks an index; `None` if the object is not what was stored under this key.
    async fn request_index(
        &self,
        last: BlockIdentity,
        deadline: Instant,
    ) -> Result<Option<StoredRun>, ObjectError> {
        let key = self.key(last);
        let first = 0..self.config.index_read_bytes;
        let mut part = self.read_range(Operation::ReadIndex, &key, first, None, deadline).await?;
        let mut decoded = RunIndex::decode(&part.bytes);
        if let Err(FormatError::Short(needed)) = decoded
            && needed as u64 <= part.object_bytes
            && needed > part.bytes.len()
            && part.bytes.len() as u64 == self.config.index_read_bytes
        {
            let e_tag = part.e_tag.take();
            let all = 0..needed as u64;
            part = self.read_range(Operation::ReadIndex, &key, all, e_tag, deadline).await?;
            decoded = RunIndex::decode(&part.bytes);
        }
        let Ok(index) = decoded else { return Ok(None) };
        let ours = index.layout_fingerprint == self.config.layout_fingerprint
            && index.object_bytes == part.object_bytes
            && index.entries.last().is_some_and(|entry| entry.identity == last);
        Ok(ours.then(|| StoredRun { index: Arc::new(index), e_tag: part.e_tag }))
    }

    /// Reads blocks of a run with one request; returns those before the first damaged one.
    async fn read_payload(
        &self,
        run: &StoredRun,
        blocks: Range<usize>,
        deadline: Instant,
    ) -> Result<Vec<VerifiedBlock>, ObjectError> {
        let entries = &run.index.entries;
        let bytes = entries[blocks.start].range.start..entries[blocks.end - 1].range.end;
        let key = self.key(entries[entries.len() - 1].identity);
        let payload = if bytes.is_empty() {
            Bytes::new()
        } else {
            let e_tag = run.e_tag.clone();
            self.read_range(Operation::ReadPayload, &key, bytes.clone(), e_tag, deadline).await?.bytes
        };
        add(&self.counters.read_bytes, payload.len() as u64);
        let mut verified = Vec::with_capacity(blocks.len());
        for entry in &entries[blocks] {
            let (from, to) = (entry.range.start - bytes.start, entry.range.end - bytes.start);
            if to > payload.len() as u64 {
                break;
            }
            let block = payload.slice(from as usize..to as usize);
            if xxh3_64(&block) != entry.checksum {
                break;
            }
            let (identity, meta) = (entry.identity, entry.meta.clone());
            verified.push(VerifiedBlock { identity, meta, payload: block, checksum: entry.checksum });
        }
        Ok(verified)
    }

    /// Reads a range; returns fewer bytes if the object ends before it.
    async fn read_range(
        &self,
        operation: Operation,
        key: &str,
        range: Range<u64>,
        e_tag: Option<String>,
        deadline: Instant,
    ) -> Result<ObjectRange, ObjectError> {
        let path = Path::from(key);
        let request = || async {
            let options = GetOptions {
                if_match: e_tag.clone(),
                range: Some(range.clone().into()),
                ..Default::default()
            };
            let answer = self.backend.store.get_opts(&path, options).await?;
            let (object_bytes, e_tag) = (answer.meta.size, answer.meta.e_tag.clone());
            // Bounds the allocation, whatever object size the server claims and however long the body is.
            let limit = usize::try_from((range.end - range.start).min(object_bytes)).unwrap_or(usize::MAX);
            let mut bytes = BytesMut::with_capacity(limit);
            let mut body = answer.into_stream();
            while let Some(chunk) = body.next().await {
                let chunk = chunk?;
                let room = limit - bytes.len();
                bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
                if chunk.len() > room {
                    break;
                }
            }
            Ok(ObjectRange { bytes: bytes.freeze(), object_bytes, e_tag })
        };
        self.request(operation, key, deadline, request).await
    }

    /// Called when two reads found the object damaged: deletes it, or avoids it for a while.
    async fn discard_damaged(&self, last: BlockIdentity, deadline: Instant) {
        let key = self.key(last);
        add(&self.counters.damaged_objects, 1);
        self.presence.set(last, Presence::Avoided, Instant::now());
        if self.config.delete_damaged {
            // If this fails, the object is avoided, and the next put deletes it.
            let _ = self.delete_key(&key, deadline).await;
        }
    }
}
