//! Keeps one publisher's events in order: which message is next, which is missing, which was seen, and which
//! comes from another life of the publisher. Pure: it says what to ask for, and is told what came.
//!
//! Numbers begin at 0 with the publisher's process, and nothing else marks a restart. A number that was passed
//! is either a message seen before (the replay brought it too) or a new life whose first messages were
//! missed: the payload tells which, since batches carry their time. A new life may also have passed the last known
//! number unseen; so a replay begins with the last message that is known, and only if that is still the same does
//! the rest belong to it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use router_radix::IndexWriter;
use xxhash_rust::xxh3::xxh3_64;

use crate::shared_blocks::SharedBlocks;
use crate::tracker::{Applied, Tracker};
use crate::trtllm::{Polled, PolledError};
use crate::wire::{self, EventBatch};

/// Messages whose payload is remembered. More than a replay can overlap with what is on its way.
const RECENT_MAX: usize = 4096;

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the message is dealt with.
    Done,
    /// Ask for everything from a number on, hand it to [`Follower::replayed`], and then the same message to
    /// [`Follower::after_replay`].
    Replay {
        /// The first missing number.
        from: u64,
    },
}

/// One publisher, followed.
#[derive(Debug)]
pub struct Follower {
    tracker: Tracker,
    next: Option<u64>,
    recent: VecDeque<(u64, u64)>,
    /// By rank, of an engine that is asked.
    polled_next: HashMap<u32, u64>,
}

impl Follower {
    /// A publisher about which nothing is known.
    #[must_use]
    pub fn new(tracker: Tracker) -> Self {
        Self { tracker, next: None, recent: VecDeque::new(), polled_next: HashMap::new() }
    }

    /// The publisher's blocks.
    #[must_use]
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// The number that the next message should have.
    #[must_use]
    pub fn expected(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    /// Where a replay begins: with the last message that is known, to see whether it is still the same.
    #[must_use]
    pub fn replay_from(&self) -> u64 {
        self.expected().saturating_sub(1)
    }

    /// A message of the live feed.
    pub fn live(&mut self, index: &mut IndexWriter<'_>, sequence: u64, payload: &[u8]) -> Step {
        let expected = self.expected();
        if sequence < expected {
            if self.was_seen(sequence, payload) {
                return Step::Done;
            }
            tracing::info!(sequence, expected, "KV events: the publisher has restarted");
            self.start_over(index);
        }
        let expected = self.expected();
        if sequence > expected {
            return Step::Replay { from: self.replay_from() };
        }
        self.apply(index, sequence, payload);
        Step::Done
    }

    /// A message that was asked for. When it tells that the publisher has started again, what it has must be asked for
    /// anew, from its beginning.
    pub fn replayed(&mut self, index: &mut IndexWriter<'_>, sequence: u64, payload: &[u8]) -> Step {
        let expected = self.expected();
        if sequence < expected {
            let known = self.recent.binary_search_by_key(&sequence, |recent| recent.0);
            if known.is_ok_and(|at| self.recent[at].1 != xxh3_64(payload)) {
                tracing::info!(sequence, "KV events: the publisher has restarted, and passed what was known");
                self.start_over(index);
                return Step::Replay { from: 0 };
            }
            return Step::Done;
        }
        if sequence > expected {
            // The publisher's memory begins later than what is known.
            self.skip_to(index, sequence);
        }
        self.apply(index, sequence, payload);
        Step::Done
    }

    /// A replay from [`Self::replay_from`] on has brought nothing, not even the last message that is known: the publisher has started
    /// again, and has not passed it yet. What the index has of it is from before the restart.
    pub fn replayed_nothing(&mut self, index: &mut IndexWriter<'_>) -> Step {
        if self.expected() == 0 {
            return Step::Done;
        }
        tracing::info!(
            expected = self.expected(),
            "KV events: the publisher has restarted, and said little since"
        );
        self.start_over(index);
        Step::Replay { from: 0 }
    }

    /// The live message that a replay was asked for, again. What is still missing is lost for good: everything
    /// is forgotten, since an index that is short costs time, and one that is wrong costs more.
    pub fn after_replay(&mut self, index: &mut IndexWriter<'_>, sequence: u64, payload: &[u8]) {
        let expected = self.expected();
        if sequence > expected {
            tracing::warn!(sequence, expected, "KV events: lost for good; starting over");
            self.skip_to(index, sequence);
        }
        if sequence == self.expected() {
            self.apply(index, sequence, payload);
        }
    }

    /// An answer of an engine that is asked for its events (TensorRT-LLM), and forgets what it has told: what is missing is
    /// lost for good. Each of its ranks counts for itself; the index takes them for one.
    pub fn polled(&mut self, index: &mut IndexWriter<'_>, events: Vec<Result<Polled, PolledError>>) {
        for event in events {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    // It may have been a removal.
                    tracing::warn!(%error, "KV events: starting over");
                    self.tracker.counters.broken += 1;
                    self.start_over(index);
                    continue;
                }
            };
            let rank = event.rank.unwrap_or(0);
            let expected = self.polled_next.get(&rank).copied();
            if let Some(expected) = expected.filter(|expected| *expected != event.id) {
                tracing::info!(rank, id = event.id, expected, "KV events: starting over");
                self.start_over(index);
            }
            self.polled_next.insert(rank, event.id + 1);
            self.tracker.apply(index, &EventBatch { events: event.events, ..EventBatch::default() });
        }
    }

    /// Something is wrong with what is known: forgets it, and asks for everything with the next message.
    pub fn start_over(&mut self, index: &mut IndexWriter<'_>) {
        self.tracker.forget(index);
        self.next = None;
        self.recent.clear();
        self.polled_next.clear();
    }

    /// Goes on from a saved state: the next number, and the last message's hash.
    pub(crate) fn resume(&mut self, next: u64, last: u64) {
        self.next = Some(next);
        self.recent.clear();
        if let Some(before) = next.checked_sub(1).filter(|_| last != 0) {
            self.recent.push_back((before, last));
        }
    }

    /// Hash of the last message; 0 when there is none.
    pub(crate) fn last(&self) -> u64 {
        self.recent.back().map_or(0, |recent| recent.1)
    }

    /// The publisher shares stores with others; `None`: it does no more.
    pub fn share(&mut self, shared: Option<Arc<SharedBlocks>>) {
        self.tracker.share(shared);
    }

    pub(crate) fn tracker_mut(&mut self) -> &mut Tracker {
        &mut self.tracker
    }

    fn skip_to(&mut self, index: &mut IndexWriter<'_>, sequence: u64) {
        self.tracker.forget(index);
        self.next = Some(sequence);
    }

    fn was_seen(&self, sequence: u64, payload: &[u8]) -> bool {
        // They are in order, without holes but where something was skipped.
        let at = self.recent.binary_search_by_key(&sequence, |recent| recent.0);
        at.is_ok_and(|at| self.recent[at].1 == xxh3_64(payload))
    }

    fn apply(&mut self, index: &mut IndexWriter<'_>, sequence: u64, payload: &[u8]) {
        self.next = Some(sequence + 1);
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((sequence, xxh3_64(payload)));
        match wire::decode(payload) {
            Ok(batch) => {
                for broken in &batch.broken {
                    tracing::warn!(sequence, error = %broken.error, "KV events: an event is not understood");
                }
                if self.tracker.apply(index, &batch) == Applied::Doubtful {
                    self.tracker.forget(index);
                }
            }
            Err(error) => {
                tracing::warn!(sequence, %error, "KV events: a batch is not understood; starting over");
                self.tracker.forget(index);
            }
        }
    }
}
