//! Keeps one publisher's events in order: the next, the missing and the repeated messages, and messages of another run of
//! the publisher. Pure: it returns what to request, and is given what arrived.
//!
//! Numbers begin at 0 with the publisher's process, and nothing else marks a restart. A number below the next one is
//! either a message seen before (the replay brought it too) or the message of a new run whose first messages were missed:
//! the payload decides, since batches carry their time. A new run may also have passed the last known number unseen; so a
//! replay begins with the last known message, and only if that is unchanged does the rest belong to it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use router_radix::IndexWriter;
use xxhash_rust::xxh3::xxh3_64;

use crate::shared_blocks::SharedBlocks;
use crate::tracker::{Applied, Tracker};
use crate::trtllm::{Polled, PolledError};
use crate::wire::{self, EventBatch};

/// Messages whose payload hash is remembered. More than a replay can overlap with messages in flight.
const RECENT_MAX: usize = 4096;

/// Next action for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the message is applied, or was seen before.
    Done,
    /// Request a replay from a number on, pass it to [`Follower::replayed`], and then the same message to
    /// [`Follower::after_replay`].
    Replay {
        /// The first missing number.
        from: u64,
    },
}

/// State of one followed publisher.
#[derive(Debug)]
pub struct Follower {
    tracker: Tracker,
    next: Option<u64>,
    recent: VecDeque<(u64, u64)>,
    /// Next numbers by rank, for an engine that is polled.
    polled_next: HashMap<u32, u64>,
}

impl Follower {
    /// Starts with a publisher about which nothing is known.
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

    /// First number of a replay: the last known message, to check that it is unchanged.
    #[must_use]
    pub fn replay_from(&self) -> u64 {
        self.expected().saturating_sub(1)
    }

    /// Applies a message of the live feed.
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

    /// Applies a message of a replay. When it shows that the publisher has restarted, a replay from its beginning is
    /// needed.
    pub fn replayed(&mut self, index: &mut IndexWriter<'_>, sequence: u64, payload: &[u8]) -> Step {
        let expected = self.expected();
        if sequence < expected {
            let known = self.recent.binary_search_by_key(&sequence, |recent| recent.0);
            if known.is_ok_and(|at| self.recent[at].1 != xxh3_64(payload)) {
                tracing::info!(
                    sequence,
                    "KV events: the publisher has restarted, and its sequence numbers have passed the last known one"
                );
                self.start_over(index);
                return Step::Replay { from: 0 };
            }
            return Step::Done;
        }
        if sequence > expected {
            // The publisher's replay buffer begins after the next expected number.
            self.skip_to(index, sequence);
        }
        self.apply(index, sequence, payload);
        Step::Done
    }

    /// A replay from [`Self::replay_from`] on has brought nothing, not even the last known message: the publisher has restarted,
    /// and has not reached that number yet. The index's blocks of it are from before the restart.
    pub fn replayed_nothing(&mut self, index: &mut IndexWriter<'_>) -> Step {
        if self.expected() == 0 {
            return Step::Done;
        }
        tracing::info!(
            expected = self.expected(),
            "KV events: the publisher has restarted, and has not reached the last known sequence number"
        );
        self.start_over(index);
        Step::Replay { from: 0 }
    }

    /// Applies the live message that a replay was requested for. Messages still missing are lost: everything is forgotten,
    /// since an incomplete index costs time, and a wrong one costs more.
    pub fn after_replay(&mut self, index: &mut IndexWriter<'_>, sequence: u64, payload: &[u8]) {
        let expected = self.expected();
        if sequence > expected {
            tracing::warn!(
                sequence,
                expected,
                "KV events: messages are missing and cannot be replayed; the publisher's blocks are indexed anew"
            );
            self.skip_to(index, sequence);
        }
        if sequence == self.expected() {
            self.apply(index, sequence, payload);
        }
    }

    /// Applies an answer of an engine that is polled (TensorRT-LLM). It forgets events that it has returned, so missing ones are
    /// lost. Each of its ranks counts separately; the index treats them as one.
    pub fn polled(&mut self, index: &mut IndexWriter<'_>, events: Vec<Result<Polled, PolledError>>) {
        for event in events {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    // The event may have been a removal.
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

    /// Forgets the publisher's blocks after an error, and requests everything with the next message.
    pub fn start_over(&mut self, index: &mut IndexWriter<'_>) {
        self.tracker.forget(index);
        self.next = None;
        self.recent.clear();
        self.polled_next.clear();
    }

    /// Continues from a saved state: the next number, and the last message's hash.
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

    /// Sets the blocks in stores that the publisher shares with others; `None`: it shares none.
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
        // Numbers are in order, without gaps except where messages were skipped.
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
