//! Blocks between host tensors and the store: a transfer is carried out in pieces, side by side.
//!
//! A thread of the queue that comes to a transfer claims the next piece of it and puts the transfer back behind
//! whatever else waits, so that a long one keeps no other request from its turn, and threads that are idle help. Pieces
//! are claimed in order. A load's first miss ends it: pieces behind it are not begun, and what those that run have read
//! there does not count. Who ends the last piece makes the completion.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::{Backend, ChainPlace, Identity, LoadReport, Loaded, NewBlock};
use crate::buffers::{Destination, Source};
use crate::operation::{Outcome, by_store};
use crate::registry::InUse;
use crate::status::{Failure, Status};

/// Least blocks of a piece: as many are asked of the disk at a time by one thread.
const PIECE_BLOCKS: usize = 8;
/// Bytes of a piece of a load, where its blocks are small: a disk needs as many under way for its bandwidth.
const LOADED_PIECE_BYTES: usize = 4 << 20;
/// A load that has so many pieces of [`PIECE_BLOCKS`] is cut into no fewer, for threads that help.
const PIECES_MIN: usize = 16;
/// Most blocks of a piece.
const PIECE_BLOCKS_MAX: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Save,
    Load,
}

/// What is to be moved, with all numbers checked.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) direction: Direction,
    pub(crate) tensors: InUse,
    pub(crate) identities: Vec<Identity>,
    /// One for each identity.
    pub(crate) blocks: Vec<u64>,
    /// The place of the first block, where the identities are a chain; `None`: each stands for itself.
    pub(crate) chain: Option<ChainPlace>,
    /// The tenant of blocks that are saved.
    pub(crate) tenant: u32,
    /// Blocks of a load that the disk has not given by then are misses.
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
    /// The first block that is in no piece yet.
    next: usize,
    /// Blocks from here on are not wanted any more: there are none, or one before them is a miss.
    end: usize,
    running: usize,
    /// When its first piece was begun.
    started: Option<Instant>,
    loaded: Loaded,
    /// Time in which pieces were read.
    reading: Duration,
    /// It waits in the queue for somebody to claim a piece.
    is_queued: bool,
    saved: usize,
    failure: Option<Failure>,
}

/// What a thread that came to a transfer does with it.
pub(crate) struct Claim {
    /// To be carried out, however short.
    pub(crate) piece: Range<usize>,
    /// The transfer goes back into the queue.
    pub(crate) has_more: bool,
}

impl Blocks {
    /// The place of the block of this number in its chain.
    pub(crate) fn place(&self, at: usize) -> ChainPlace {
        let tenant = self.tenant;
        match (self.chain, at.checked_sub(1)) {
            (None, _) => ChainPlace { tenant, ..ChainPlace::default() },
            (Some(first), None) => ChainPlace { tenant, ..first },
            (Some(first), Some(before)) => ChainPlace {
                parent: Some(self.identities[before]),
                position: first.position + at as u32,
                tenant,
            },
        }
    }

    /// How the transfer of all of them ended, by how many were moved.
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

    /// Identities that it keeps.
    pub(crate) fn identities(&self) -> usize {
        self.what.identities.len()
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Nothing panics while it is held.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next piece, which may be empty, for a thread that took the transfer out of the queue.
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

    /// Carries out a piece that was claimed. Returns how the transfer ended, if nobody works on it any more.
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
                let saved = by_store(|| unsafe { self.save(piece, backend) });
                self.finish_piece(saved.map(|saved| self.progress().saved += saved), backend)
            }
            Direction::Load => {
                let begun = Instant::now();
                // SAFETY: writable by the contract of this function.
                let loaded = by_store(|| unsafe { self.load(piece.clone(), backend) });
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

    /// Ends a piece. Returns how the transfer ended, if nobody works on it any more.
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

    /// How many of the piece's blocks the store took or had.
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

    /// Reads the piece's blocks; tells which came, and from where.
    ///
    /// # Safety
    /// As for [`Self::carry_out`].
    unsafe fn load(&self, piece: Range<usize>, backend: &dyn Backend) -> Result<Loaded, Failure> {
        let mut buffers = Vec::new();
        let places = piece.clone().map(|at| {
            let ranges = self.what.tensors.ranges(self.what.blocks[at], &mut buffers)?;
            // SAFETY: writable and nobody else's for the time of this call, by the contract of this function.
            Ok(unsafe { Destination::new(ranges) })
        });
        let mut places = places.collect::<Result<Vec<_>, Failure>>()?;
        Ok(backend.get_prefix(&self.what.identities[piece], &mut places, self.what.deadline)?)
    }
}
