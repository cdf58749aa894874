//! A submission queue and the completion queue that belongs to it, as rings in [`DmaMemory`].
//!
//! Hot path: no allocation, no lock, no system call; a doorbell write for a batch of commands and one for a batch of
//! completions. The owner bounds commands in flight to one less than the entries, so that neither ring can overflow
//! and the submission queue head that completions carry need not be looked at.
//! Base Specification 2.0, 3.3.1 and 3.3.3.2 (completion entry: word 2 head and queue, word 3 id, phase, status).

use std::sync::atomic::Ordering;

use crate::bus::{Bus, completion_before_contents, memory_before_register};
use crate::command::Command;
use crate::dma::DmaMemory;
use crate::registers::doorbell;
use crate::status::Status;

pub(crate) const SUBMISSION_BYTES: usize = 64;
pub(crate) const COMPLETION_BYTES: usize = 16;

/// A completion entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompletionEntry {
    /// Word 0: the command's own result.
    pub(crate) result: u32,
    pub(crate) id: u16,
    pub(crate) status: Status,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) id: u16,
    pub(crate) entries: u16,
    /// Offsets in the memory.
    pub(crate) submission: usize,
    pub(crate) completion: usize,
    tail: u16,
    /// The tail that was last written to the doorbell.
    tail_written: u16,
    head: u16,
    head_written: u16,
    phase: bool,
    tail_doorbell: usize,
    head_doorbell: usize,
}

impl QueuePair {
    pub(crate) fn new(
        id: u16,
        entries: u16,
        (submission, completion): (usize, usize),
        stride_bytes: usize,
    ) -> Self {
        Self {
            id,
            entries,
            submission,
            completion,
            tail: 0,
            tail_written: 0,
            head: 0,
            head_written: 0,
            phase: true,
            tail_doorbell: doorbell(id, false, stride_bytes),
            head_doorbell: doorbell(id, true, stride_bytes),
        }
    }

    /// End of the last doorbell register of the pair.
    pub(crate) fn registers_end(&self) -> usize {
        self.head_doorbell.max(self.tail_doorbell) + 4
    }

    /// Empties both rings. Only while the controller does not use them.
    pub(crate) fn reset(&mut self, memory: &DmaMemory) {
        memory.clear(self.submission, usize::from(self.entries) * SUBMISSION_BYTES);
        memory.clear(self.completion, usize::from(self.entries) * COMPLETION_BYTES);
        (self.tail, self.tail_written, self.head, self.head_written, self.phase) = (0, 0, 0, 0, true);
    }

    /// Writes a command behind the last; [`Self::ring_tail`] makes the controller fetch it.
    #[inline]
    pub(crate) fn push(&mut self, memory: &DmaMemory, command: &Command) {
        let start = self.submission + usize::from(self.tail) * SUBMISSION_BYTES;
        for (index, words) in command.0.chunks_exact(2).enumerate() {
            let long = u64::from(words[0]) | u64::from(words[1]) << 32;
            memory.long(start + 8 * index).store(long, Ordering::Relaxed);
        }
        self.tail = self.next(self.tail);
    }

    #[inline]
    fn next(&self, index: u16) -> u16 {
        if index + 1 == self.entries { 0 } else { index + 1 }
    }

    /// Rings the submission doorbell if commands were pushed; returns whether there were any.
    #[inline]
    pub(crate) fn ring_tail(&mut self, bus: &impl Bus) -> bool {
        if self.tail == self.tail_written {
            return false;
        }
        memory_before_register();
        bus.write(self.tail_doorbell, self.tail.into());
        self.tail_written = self.tail;
        true
    }

    /// Whether [`Self::pop`] would return a completion.
    #[inline]
    pub(crate) fn has_completion(&self, memory: &DmaMemory) -> bool {
        let word = memory.word(self.completion + usize::from(self.head) * COMPLETION_BYTES + 12);
        // The phase bit flips with each lap of the controller, so that an entry of the last lap differs.
        (word.load(Ordering::Relaxed) >> 16 & 1 == 1) == self.phase
    }

    /// Takes the next completion.
    #[inline]
    pub(crate) fn pop(&mut self, memory: &DmaMemory) -> Option<CompletionEntry> {
        if !self.has_completion(memory) {
            return None;
        }
        // Pairs with the order in which the controller writes an entry: the word with the phase last.
        completion_before_contents();
        let start = self.completion + usize::from(self.head) * COMPLETION_BYTES;
        let result = memory.word(start).load(Ordering::Relaxed);
        let last = memory.word(start + 12).load(Ordering::Relaxed);
        self.head = self.next(self.head);
        if self.head == 0 {
            self.phase = !self.phase;
        }
        Some(CompletionEntry { result, id: last as u16, status: Status((last >> 17) as u16) })
    }

    /// Rings the completion doorbell, which gives the popped entries back to the controller.
    #[inline]
    pub(crate) fn ring_head(&mut self, bus: &impl Bus) {
        if self.head != self.head_written {
            memory_before_register();
            bus.write(self.head_doorbell, self.head.into());
            self.head_written = self.head;
        }
    }
}
