//! The thread of the controller: registers, queues, commands.

mod execute;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::controller::{Shared, lock};
use super::faults::Random;
use super::{Faults, SoftwareDevice};
use crate::registers::{ACQ, AQA, ASQ, CC, CC_ENABLE, CC_SHUTDOWN_MASK, CSTS, doorbell};
use crate::status::Status;

#[derive(Debug, Clone, Copy, Default)]
struct Queue {
    address: u64,
    entries: u16,
    /// Head of a submission queue, tail of a completion queue.
    at: u16,
    /// Phase of the lap, for a completion queue.
    phase: bool,
}

impl Queue {
    fn new(address: u64, entries: u16) -> Self {
        Self { address, entries, at: 0, phase: true }
    }
}

/// A completion that is held back until later ones were written.
#[derive(Debug)]
struct Held {
    behind: u64,
    queue: usize,
    command: u16,
    result: u32,
    status: Status,
}

/// The thread's own state.
pub(super) struct Machine {
    shared: Arc<Shared>,
    device: SoftwareDevice,
    is_enabled: bool,
    /// Submission and completion queue by number; 0 is the admin pair.
    queues: Vec<Option<(Queue, Queue)>>,
    completion_queues: Vec<Option<Queue>>,
    held: VecDeque<Held>,
    random: Random,
    seed: u64,
    io_commands: u64,
    /// A completion was hidden since the controller was enabled, so the driver cannot know how full its queue
    /// is.
    has_hidden: bool,
}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>, device: SoftwareDevice) -> Self {
        Self {
            shared,
            device,
            is_enabled: false,
            queues: Vec::new(),
            completion_queues: Vec::new(),
            held: VecDeque::new(),
            random: Random(0),
            seed: 0,
            io_commands: 0,
            has_hidden: false,
        }
    }

    fn faults(&mut self) -> Faults {
        let faults = lock(&self.shared.faults).clone();
        if faults.seed != self.seed {
            (self.seed, self.random) = (faults.seed, Random(faults.seed));
        }
        faults
    }

    /// Does the work that is due; returns whether there was any.
    pub(super) fn step(&mut self) -> bool {
        if self.shared.is_removed.load(Ordering::Acquire) {
            return false;
        }
        let faults = self.faults();
        if self.shared.reset_wanted.load(Ordering::Acquire) {
            self.disable();
            self.shared.set_register(CC, 0);
            lock(&self.shared.counters).resets += 1;
            self.shared.reset_wanted.store(false, Ordering::Release);
        }
        let configuration = self.shared.register(CC);
        match (configuration & CC_ENABLE != 0, self.is_enabled) {
            (true, false) if !faults.cannot_be_enabled => self.enable(),
            (false, true) if !faults.cannot_be_disabled => self.disable(),
            _ => {}
        }
        if configuration & CC_SHUTDOWN_MASK != 0 && self.shared.register(CSTS) >> 2 & 3 == 0 {
            self.shared.set_register(CSTS, self.shared.register(CSTS) | 2 << 2);
            lock(&self.shared.counters).shutdowns += 1;
        }
        if !self.is_enabled || self.shared.register(CSTS) & 2 != 0 {
            return false;
        }
        let mut worked = false;
        for queue in 0..self.queues.len() {
            while self.fetch_and_run(queue, &faults) {
                worked = true;
            }
        }
        // No other completion follows that could release the held ones.
        worked | self.release(u64::MAX)
    }

    fn enable(&mut self) {
        let long =
            |at: usize| u64::from(self.shared.register(at)) | u64::from(self.shared.register(at + 4)) << 32;
        let attributes = self.shared.register(AQA);
        let entries = (attributes as u16 & 0xfff) + 1;
        let completions = Queue::new(long(ACQ), (attributes >> 16) as u16 + 1);
        if self.shared.register(CC) >> 16 & 0xff != 0x46 || self.shared.register(CC) >> 7 & 0xf != 0 {
            lock(&self.shared.counters).violations += 1;
        }
        self.queues = vec![None; usize::from(self.device.queue_pairs) + 1];
        self.completion_queues = vec![None; self.queues.len()];
        self.queues[0] = Some((Queue::new(long(ASQ), entries), completions));
        for queue in 0..self.queues.len() {
            self.clear_doorbells(queue);
        }
        (self.is_enabled, self.has_hidden) = (true, false);
        lock(&self.shared.counters).enables += 1;
        self.shared.set_register(CSTS, 1);
    }

    fn disable(&mut self) {
        self.is_enabled = false;
        self.queues.clear();
        self.held.clear();
        self.shared.set_register(CSTS, 0);
    }

    fn stride(&self) -> usize {
        4 << self.device.doorbell_stride
    }

    fn clear_doorbells(&self, queue: usize) {
        for is_completion in [false, true] {
            self.shared.set_register(doorbell(queue as u16, is_completion, self.stride()), 0);
        }
    }

    /// Takes one command of a queue, if there is one, and completes it, now or later.
    fn fetch_and_run(&mut self, queue: usize, faults: &Faults) -> bool {
        let tail = self.shared.register(doorbell(queue as u16, false, self.stride())) as u16;
        let Some((submission, _)) = self.queues.get_mut(queue).and_then(Option::as_mut) else { return false };
        if tail >= submission.entries {
            lock(&self.shared.counters).violations += 1;
            return false;
        }
        if submission.at == tail {
            return false;
        }
        let address = submission.address + 64 * u64::from(submission.at);
        submission.at = (submission.at + 1) % submission.entries;
        let Some(words) = self.read_words::<16>(address) else { return true };
        let (opcode, id) = (words[0] as u8, (words[0] >> 16) as u16);
        if queue == 0 {
            let (status, result) = self.run_admin(opcode, &words, faults);
            self.complete(queue, id, result, status, true);
            return true;
        }
        self.io_commands += 1;
        lock(&self.shared.counters).commands += 1;
        if self.fails_whole(faults) {
            return false;
        }
        let status = self.run_io(opcode, &words, faults);
        self.complete_with_faults(queue, id, status, faults);
        true
    }

    /// Applies the faults that end everything: removal, and a fatal status. Returns whether one applied.
    fn fails_whole(&mut self, faults: &Faults) -> bool {
        if faults.removed_after.is_some_and(|count| self.io_commands > count) {
            self.shared.is_removed.store(true, Ordering::Release);
            return true;
        }
        if faults.fatal_after.is_some_and(|count| self.io_commands > count) {
            lock(&self.shared.faults).fatal_after = None;
            self.shared.set_register(CSTS, self.shared.register(CSTS) | 2);
            return true;
        }
        false
    }

    fn complete_with_faults(&mut self, queue: usize, id: u16, status: Status, faults: &Faults) {
        if self.random.per_mille(faults.lost_per_mille) {
            return;
        }
        if self.random.per_mille(faults.wrong_phase_per_mille) {
            return self.complete(queue, id, 0, status, false);
        }
        if self.random.per_mille(faults.wrong_id_per_mille) {
            return self.complete(queue, 0xfff0, 0, status, true);
        }
        if self.random.per_mille(faults.reordered_per_mille) {
            let behind = self.random.below(16) + 1;
            self.held.push_back(Held { behind, queue, command: id, result: 0, status });
            return;
        }
        self.complete(queue, id, 0, status, true);
        self.release(1);
    }

    /// Counts `count` completions against the held ones, and completes those that are due.
    fn release(&mut self, count: u64) -> bool {
        let mut released = false;
        let mut index = 0;
        while index < self.held.len() {
            self.held[index].behind = self.held[index].behind.saturating_sub(count);
            if self.held[index].behind > 0 {
                index += 1;
            } else if let Some(held) = self.held.remove(index) {
                self.complete(held.queue, held.command, held.result, held.status, true);
                released = true;
            }
        }
        released
    }

    fn complete(&mut self, queue: usize, id: u16, result: u32, status: Status, has_right_phase: bool) {
        self.has_hidden |= !has_right_phase;
        let head = self.shared.register(doorbell(queue as u16, true, self.stride())) as u16;
        let Some((submission, completion)) = self.queues.get_mut(queue).and_then(Option::as_mut) else {
            return;
        };
        let next = (completion.at + 1) % completion.entries;
        if next == head && !self.has_hidden {
            // The driver must bound commands in flight so that this cannot happen.
            lock(&self.shared.counters).violations += 1;
        }
        let phase = completion.phase == has_right_phase;
        let words = [
            result,
            0,
            u32::from(submission.at) | (queue as u32) << 16,
            u32::from(id) | u32::from(phase) << 16 | u32::from(status.0) << 17,
        ];
        let address = completion.address + 16 * u64::from(completion.at);
        completion.at = next;
        if next == 0 {
            completion.phase = !completion.phase;
        }
        self.shared.with_memory(address, 16, |start| {
            for (index, word) in words.into_iter().enumerate() {
                // SAFETY: `with_memory` checked that 16 bytes are mapped here.
                let place = unsafe { start.add(4 * index) }.cast::<u32>();
                // SAFETY: aligned, as queues are; the driver accesses completions by atomics only.
                let place = unsafe { AtomicU32::from_ptr(place) };
                // Release: pairs with the driver's acquire after it saw the phase in the last word.
                place.store(word, Ordering::Release);
            }
        });
    }
}
