//! [`Transfer`]: blocks between host tensors and the store, moved in pieces by several threads at once.
//!
//! A thread of the queue that takes a transfer claims its next piece and puts the transfer back at the end of
//! the queue, so that a long transfer does not delay other requests and idle threads help. Pieces are claimed
//! in order. The first miss ends a load: later pieces are not begun, and blocks that running pieces have read
//! behind the miss do not count. The thread that ends the last piece creates the completion.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::{Backend, ChainPosition, Identity, LoadReport, Loaded, NewBlock};
use crate::buffers::{Destination, Source};
use crate::operation::{Outcome, catch_store_panic};
use crate::registry::TensorsGuard;
use crate::status::{Failure, Status};

/// Least number of blocks of a piece. One thread requests this many from the disk at a time.
const PIECE_BLOCKS: usize = 8;
/// Bytes of a piece of a load with small blocks: a disk needs this many in flight to reach its bandwidth.
const LOADED_PIECE_BYTES: usize = 4 << 20;
/// A load of at least this many pieces of [`PIECE_BLOCKS`] is not cut into fewer, so that several threads can help.
const PIECES_MIN: usize = 16;
/// Most blocks of a piece.
const PIECE_BLOCKS_MAX: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Save,
    Load,
}

/// The blocks of a transfer, with all numbers checked.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) direction: Direction,
    pub(crate) tensors: TensorsGuard,
    pub(crate) identities: Vec<Identity>,
    /// Block number in the tensors, one for each identity.
    pub(crate) blocks: Vec<u64>,
    /// The place of the first block, if the identities are a chain. `None`: the blocks belong to no chain.
    pub(crate) chain: Option<ChainPosition>,
    /// The tenant of blocks that are saved.
    pub(crate) tenant: u32,
    /// Blocks of a load that the disk has not delivered by this time are misses.
    pub(crate) deadline: Instant,
}

#[derive(Debug)]
pub(crate) struct Transfer {
    what: Blocks,
    piece_blocks: usize,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    /// The first block that has not been claimed.
    next: usize,
    /// Blocks from this number on are not needed: the transfer ends here, or an earlier block is a miss.
    end: usize,
    running: usize,
    /// Time at which the first piece was begun.
    started: Option<Instant>,
    loaded: Loaded,
    /// Time spent reading, summed over all pieces.
    reading: Duration,
    /// Whether the transfer is in the queue, with pieces left to claim.
    is_queued: bool,
    saved: usize,
    failure: Option<Failure>,
}

/// The piece of a transfer that a thread has claimed.
pub(crate) struct Claim {
    /// The claimed piece; it must be carried out even if it is empty.
    pub(crate) piece: Range<usize>,
    /// Whether the transfer goes back into the queue.
    pub(crate) has_more: bool,
}

impl Blocks {
    /// Returns the chain place of the block with index `at`.
    pub(crate) fn place(&self, at: usize) -> ChainPosition {
        let tenant = self.tenant;
        match (self.chain, at.checked_sub(1)) {
            (None, _) => ChainPosition { tenant, ..ChainPosition::default() },
            (Some(first), None) => ChainPosition { tenant, ..first },
            (Some(first), Some(before)) => ChainPosition {
                parent: Some(self.identities[before]),
                position: first.position + at as u32,
                tenant,
            },
        }
    }

    /// Returns the outcome of the whole transfer, given the number of blocks moved.
    pub(crate) fn outcome(&self, moved: usize) -> Outcome {
        let status = match self.direction {
            _ if moved == self.identities.len() => Status::Ok,
            Direction::Save => Status::Throttled,
            Direction::Load => Status::Miss,
        };
        Outcome { payload_bytes: moved, ..Outcome::of(status) }
    }
}

impl Transfer {
    pub(crate) fn new(what: Blocks) -> Self {
        let end = what.identities.len();
        let progress = Progress {
            next: 0,
            end,
            running: 0,
            started: None,
            loaded: Loaded::default(),
            reading: Duration::ZERO,
            is_queued: true,
            saved: 0,
            failure: None,
        };
        let piece_blocks = match what.direction {
            Direction::Save => PIECE_BLOCKS,
            Direction::Load => {
                let bytes = LOADED_PIECE_BYTES.checked_div(what.tensors.block_bytes());
                let share = end / PIECES_MIN;
                bytes.unwrap_or(PIECE_BLOCKS).min(share).clamp(PIECE_BLOCKS, PIECE_BLOCKS_MAX)
            }
        };
        Self { what, piece_blocks, progress: Mutex::new(progress) }
    }

    /// Number of identities of the transfer.
    pub(crate) fn identities(&self) -> usize {
        self.what.identities.len()
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // No code panics while the lock is held.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims the next piece, which may be empty, for a thread that took the transfer out of the queue.
    pub(crate) fn claim(&self) -> Claim {
        let mut progress = self.progress();
        let start = progress.next.min(progress.end);
        let piece = start..progress.end.min(start + self.piece_blocks);
        progress.next = piece.end;
        progress.running += 1;
        progress.started.get_or_insert_with(Instant::now);
        progress.is_queued = piece.end < progress.end;
        Claim { piece, has_more: progress.is_queued }
    }

    /// Carries out a claimed piece. Returns the outcome of the transfer if no other thread works on it and none will.
    ///
    /// # Safety
    /// The blocks of the tensors must be usable as the header says for the time of the call: a load's for writes, a save's
    /// for reads.
    pub(crate) unsafe fn carry_out(
        &self,
        piece: Range<usize>,
        backend: &dyn Backend,
    ) -> Option<Result<Outcome, Failure>> {
        match self.what.direction {
            Direction::Save => {
                // SAFETY: readable by the contract of this function.
                let saved = catch_store_panic(|| unsafe { self.save(piece, backend) });
                self.finish_piece(saved.map(|saved| self.progress().saved += saved), backend)
            }
            Direction::Load => {
                let begun = Instant::now();
                // SAFETY: writable by the contract of this function.
                let loaded = catch_store_panic(|| unsafe { self.load(piece.clone(), backend) });
                self.finish_piece(
                    loaded.map(|loaded| self.record_loaded(&piece, loaded, begun.elapsed())),
                    backend,
                )
            }
        }
    }

    /// Adds what a piece of a load read to the transfer's totals, and ends the prefix at its first miss.
    fn record_loaded(&self, piece: &Range<usize>, loaded: Loaded, reading: Duration) {
        let mut progress = self.progress();
        if loaded.blocks < piece.len() {
            progress.end = progress.end.min(piece.start + loaded.blocks);
        }
        progress.loaded.blocks += loaded.blocks;
        progress.loaded.asked_of_disk += loaded.asked_of_disk;
        progress.loaded.from_disk += loaded.from_disk;
        progress.loaded.room_wait += loaded.room_wait;
        progress.reading += reading;
    }

    /// Ends a piece. Returns the outcome of the transfer if no other thread works on it and none will.
    fn finish_piece(
        &self,
        piece: Result<(), Failure>,
        backend: &dyn Backend,
    ) -> Option<Result<Outcome, Failure>> {
        let mut progress = self.progress();
        progress.running -= 1;
        if let Err(failure) = piece {
            progress.end = 0;
            progress.failure.get_or_insert(failure);
        }
        if progress.running > 0 || progress.is_queued {
            return None;
        }
        let is_load = self.what.direction == Direction::Load;
        if let Some(started) = progress.started.filter(|_| is_load && progress.failure.is_none()) {
            let (loaded, reading) = (progress.loaded, progress.reading);
            let (wanted, deadline) = (self.what.identities.len(), self.what.deadline);
            backend.observe_load(&LoadReport { loaded, wanted, started, reading, deadline });
        }
        let moved = if is_load { progress.end } else { progress.saved };
        Some(progress.failure.take().map_or_else(|| Ok(self.what.outcome(moved)), Err))
    }

    /// Saves the piece's blocks. Returns the number of blocks that the store took or already had.
    ///
    /// # Safety
    /// As for [`Self::carry_out`].
    unsafe fn save(&self, piece: Range<usize>, backend: &dyn Backend) -> Result<usize, Failure> {
        let mut buffers = Vec::new();
        let blocks = piece.map(|at| {
            let ranges = self.what.tensors.ranges(self.what.blocks[at], &mut buffers)?;
            // SAFETY: readable and not written to for the time of this call, by the contract of this function.
            let payload = unsafe { Source::new(ranges) };
            Ok(NewBlock { identity: self.what.identities[at], place: self.what.place(at), payload })
        });
        let blocks = blocks.collect::<Result<Vec<_>, Failure>>()?;
        Ok(backend.put_all(&blocks)?)
    }

    /// Reads the piece's blocks. Returns how many were read, and from which tier.
    ///
    /// # Safety
    /// As for [`Self::carry_out`].
    unsafe fn load(&self, piece: Range<usize>, backend: &dyn Backend) -> Result<Loaded, Failure> {
        let mut buffers = Vec::new();
        let places = piece.clone().map(|at| {
            let ranges = self.what.tensors.ranges(self.what.blocks[at], &mut buffers)?;
            // SAFETY: writable and used by no other code for the time of this call, by the contract of this function.
            Ok(unsafe { Destination::new(ranges) })
        });
        let mut places = places.collect::<Result<Vec<_>, Failure>>()?;
        Ok(backend.get_prefix(&self.what.identities[piece], &mut places, self.what.deadline)?)
    }
}
