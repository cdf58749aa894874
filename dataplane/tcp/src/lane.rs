//! State that the connections of one lane of one peer share: the counts that keep the order between them, the
//! reads requested and served, and the requests that were split into several frames.

use std::collections::VecDeque;

use dataplane_fabric::{Completion, Event};

use crate::conflicts::Conflicts;
use crate::extent::Extent;
use crate::reads::Reads;
use crate::send::SERVED_FRAMES_MAX;
use crate::wire::SIBLINGS_MAX;

/// Largest number of connections of one lane.
pub(crate) const CONNECTIONS_MAX: usize = SIBLINGS_MAX + 1;
/// Largest number of requests of one lane that are split into several frames at a time.
const SPLITS_MAX: usize = 256;
/// Largest number of response frames whose generation was checked and whose verification was not sent yet.
pub(crate) const VERIFIED_MAX: usize = 1024;

/// A read of the peer of which some bytes have not been made into frames.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Served {
    pub(crate) number: u32,
    pub(crate) from: Extent,
    pub(crate) generation: u32,
    /// Number of bytes that have been made into frames.
    pub(crate) at: u32,
}

/// Completion that the end of a frame causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameCompletion {
    /// No completion.
    Silent,
    /// The frame is the whole request with this id.
    Request(u64),
    /// The frame is one of those of this split request.
    Split(u16),
}

#[derive(Debug, Clone, Copy, Default)]
struct Split {
    id: u64,
    frames_left: u32,
}

pub(crate) struct Lane {
    /// Numbers of the lane's connections in the fabric's table.
    pub(crate) connections: [Option<u32>; CONNECTIONS_MAX],
    pub(crate) connection_count: usize,
    /// Writes sent on each sibling since the session began, wrapping; the first entry is that of connection
    /// 1.
    put: [u32; SIBLINGS_MAX],
    /// Value of `put` when the last fence was sent.
    fenced: [u32; SIBLINGS_MAX],
    /// Writes of the peer that have landed, by sibling.
    landed: [u32; SIBLINGS_MAX],
    /// Whether connection 0 waits at a fence that the siblings have not reached.
    pub(crate) is_held: bool,
    pub(crate) reads: Reads,
    pub(crate) serving: VecDeque<Served>,
    serving_max: usize,
    /// (number, bytes) of responses whose verification is to be sent.
    pub(crate) verified: VecDeque<(u32, u32)>,
    /// Bytes of writes in flight; only with several connections.
    pub(crate) conflicts: Option<Conflicts>,
    splits: Box<[Split]>,
    free_splits: Vec<u16>,
}

impl Lane {
    /// Creates a lane that is not open yet.
    pub(crate) fn new(connection_count: usize) -> Self {
        Self {
            connections: [None; CONNECTIONS_MAX],
            connection_count,
            put: [0; SIBLINGS_MAX],
            fenced: [0; SIBLINGS_MAX],
            landed: [0; SIBLINGS_MAX],
            is_held: false,
            reads: Reads::new(0),
            serving: VecDeque::new(),
            serving_max: 0,
            verified: VecDeque::new(),
            conflicts: None,
            splits: Box::default(),
            free_splits: Vec::new(),
        }
    }

    /// Allocates the tables: for our reads that the peer serves, and for at most `serving_max` of its reads
    /// that this node serves.
    pub(crate) fn open(&mut self, reads: Reads, serving_max: usize) {
        let splits = if self.connection_count > 1 { SPLITS_MAX } else { 0 };
        self.reads = reads;
        self.serving = VecDeque::with_capacity(serving_max);
        self.serving_max = serving_max;
        // At the bound every connection of the lane stops making frames of responses; each may still have
        // `SERVED_FRAMES_MAX` queued, which are added when they are sent.
        self.verified = VecDeque::with_capacity(VERIFIED_MAX + CONNECTIONS_MAX * SERVED_FRAMES_MAX);
        self.conflicts = (self.connection_count > 1).then(Conflicts::new);
        self.splits = vec![Split::default(); splits].into_boxed_slice();
        self.free_splits = (0..splits as u16).rev().collect();
    }

    /// Counts a write that was put on a connection.
    pub(crate) fn count_put(&mut self, index: usize) {
        if let Some(count) = index.checked_sub(1).and_then(|sibling| self.put.get_mut(sibling)) {
            *count = count.wrapping_add(1);
        }
    }

    /// Counts a write of the peer that has landed. Returns whether connection 0 may be released by it.
    pub(crate) fn count_landed(&mut self, index: usize) -> bool {
        if let Some(count) = index.checked_sub(1).and_then(|sibling| self.landed.get_mut(sibling)) {
            *count = count.wrapping_add(1);
        }
        self.is_held
    }

    /// Returns the fence to send before the next frame of connection 0; `None` when no sibling got a write
    /// since the last one.
    pub(crate) fn next_fence(&mut self) -> Option<[u32; SIBLINGS_MAX]> {
        if self.put == self.fenced {
            return None;
        }
        self.fenced = self.put;
        Some(self.put)
    }

    /// Whether all writes of the peer before a fence have landed.
    pub(crate) fn is_satisfied(&self, fence: &[u32; SIBLINGS_MAX]) -> bool {
        // The counts wrap; their difference stays far below half of the range.
        self.landed.iter().zip(fence).all(|(landed, wanted)| landed.wrapping_sub(*wanted) as i32 >= 0)
    }

    /// Adds a read of the peer to those being served.
    pub(crate) fn serve(&mut self, served: Served) -> Result<(), &'static str> {
        if self.serving.len() >= self.serving_max {
            return Err("more reads at a time than were offered");
        }
        self.serving.push_back(served);
        Ok(())
    }

    pub(crate) fn has_split(&self) -> bool {
        !self.free_splits.is_empty()
    }

    /// Registers a request that is complete when `frames` frames are.
    pub(crate) fn begin_split(&mut self, id: u64, frames: u32) -> Option<FrameCompletion> {
        let index = self.free_splits.pop()?;
        self.splits[usize::from(index)] = Split { id, frames_left: frames };
        Some(FrameCompletion::Split(index))
    }

    /// Records that a frame has completed successfully.
    pub(crate) fn finish(&mut self, finish: FrameCompletion, events: &mut VecDeque<Event>) {
        let id = match finish {
            FrameCompletion::Silent => return,
            FrameCompletion::Request(id) => id,
            FrameCompletion::Split(index) => {
                let split = &mut self.splits[usize::from(index)];
                split.frames_left -= 1;
                if split.frames_left > 0 {
                    return;
                }
                self.free_splits.push(index);
                split.id
            }
        };
        events.push_back(Event::Completed { id, completion: Completion::Done });
    }

    /// Ends the reads and split requests that are not complete.
    pub(crate) fn abandon(&mut self, events: &mut VecDeque<Event>) {
        let splits = self.splits.iter_mut().filter(|split| split.frames_left > 0).map(|split| split.id);
        let reads = self.reads.abandon().map(|read| read.id).filter(|id| *id != 0);
        events
            .extend(splits.chain(reads).map(|id| Event::Completed { id, completion: Completion::PeerDown }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_wait_for_exactly_what_was_put_before() {
        let (mut here, mut there) = (Lane::new(3), Lane::new(3));
        assert_eq!(here.next_fence(), None);
        here.count_put(0);
        assert_eq!(here.next_fence(), None, "connection 0 keeps its own order");
        here.count_put(2);
        let fence = here.next_fence().expect("a sibling took a write");
        assert_eq!(here.next_fence(), None, "nothing new");
        assert!(!there.is_satisfied(&fence));
        there.count_landed(1);
        assert!(!there.is_satisfied(&fence));
        there.count_landed(2);
        assert!(there.is_satisfied(&fence));
    }

    #[test]
    fn fences_survive_the_wrap_of_their_counts() {
        let mut lane = Lane::new(2);
        lane.landed[0] = u32::MAX;
        assert!(!lane.is_satisfied(&[0, 0, 0, 0, 0, 0, 0]));
        lane.count_landed(1);
        assert!(lane.is_satisfied(&[0, 0, 0, 0, 0, 0, 0]));
        assert!(lane.is_satisfied(&[u32::MAX, 0, 0, 0, 0, 0, 0]));
    }
}
