//! Execution of commands: admin commands, reads and writes, and their data pointers.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{Machine, Queue};
use crate::command::{admin, nvm};
use crate::status::Status;
use crate::testing::Faults;
use crate::testing::controller::lock;

const INVALID_OPCODE: Status = Status::new(0, 0x01);
const INVALID_FIELD: Status = Status::new(0, 0x02);
const DATA_TRANSFER_ERROR: Status = Status::new(0, 0x04);
const INTERNAL_ERROR: Status = Status::new(0, 0x06);
const OUT_OF_RANGE: Status = Status::new(0, 0x80);
const INVALID_QUEUE: Status = Status::new(1, 0x01);
const WRITE_FAULT: Status = Status::new(2, 0x80);
const READ_ERROR: Status = Status::new(2, 0x81);

impl Machine {
    pub(super) fn run_admin(&mut self, opcode: u8, words: &[u32; 16], faults: &Faults) -> (Status, u32) {
        let address = u64::from(words[6]) | u64::from(words[7]) << 32;
        let (id, entries) = (words[10] as u16, (words[10] >> 16) as u16 + 1);
        let is_queue =
            usize::from(id) < self.queues.len() && id > 0 && entries <= self.device.queue_entries_max;
        match opcode {
            admin::IDENTIFY => {
                let bytes = match words[10] {
                    0 if words[1] == 1 => self.namespace_bytes(),
                    1 => self.controller_bytes(),
                    // A namespace that is not active is all zeroes.
                    0 => [0; 4096],
                    _ => return (INVALID_FIELD, 0),
                };
                (self.write_bytes(address, &bytes), 0)
            }
            admin::SET_FEATURES if words[10] == admin::FEATURE_QUEUES => {
                let last = u32::from(self.device.queue_pairs) - 1;
                (Status::SUCCESS, last << 16 | last)
            }
            admin::CREATE_COMPLETION_QUEUE if is_queue && words[11] == 1 => {
                self.completion_queues[usize::from(id)] = Some(Queue::new(address, entries));
                (Status::SUCCESS, 0)
            }
            admin::CREATE_SUBMISSION_QUEUE if is_queue && words[11] & 1 == 1 => {
                let completions =
                    self.completion_queues.get_mut((words[11] >> 16) as usize).and_then(Option::take);
                let Some(completions) = completions else { return (INVALID_QUEUE, 0) };
                self.queues[usize::from(id)] = Some((Queue::new(address, entries), completions));
                self.clear_doorbells(id.into());
                (Status::SUCCESS, 0)
            }
            admin::CREATE_COMPLETION_QUEUE | admin::CREATE_SUBMISSION_QUEUE => (INVALID_QUEUE, 0),
            admin::ABORT => self.abort(words[10], faults),
            _ => (INVALID_OPCODE, 0),
        }
    }

    /// Executes an abort. Every command was executed at once in this device, so an abort completes one that was
    /// lost.
    fn abort(&mut self, target: u32, faults: &Faults) -> (Status, u32) {
        if faults.ignores_aborts {
            return (Status::SUCCESS, 1);
        }
        self.complete((target & 0xffff) as usize, (target >> 16) as u16, 0, Status::new(0, 0x07), true);
        (Status::SUCCESS, 0)
    }

    fn controller_bytes(&self) -> [u8; 4096] {
        let mut bytes = [0; 4096];
        bytes[4..24].copy_from_slice(b"SOFT0               ");
        bytes[24..64].fill(b' ');
        bytes[24..43].copy_from_slice(b"Software controller");
        bytes[64..72].copy_from_slice(b"1.0     ");
        bytes[77] = self.device.transfer_exponent;
        bytes[516] = 1;
        bytes[525] = self.device.has_volatile_cache.into();
        bytes[536] = self.device.takes_sgl.into();
        bytes
    }

    fn namespace_bytes(&self) -> [u8; 4096] {
        let mut bytes = [0; 4096];
        bytes[..8].copy_from_slice(&self.device.blocks.to_le_bytes());
        bytes[130] = self.device.block_bytes.trailing_zeros() as u8;
        bytes
    }

    pub(super) fn run_io(&mut self, opcode: u8, words: &[u32; 16], faults: &Faults) -> Status {
        let is_transfer = matches!(opcode, nvm::READ | nvm::WRITE);
        if words[1] != 1 {
            return INVALID_FIELD;
        }
        if is_transfer && self.random.per_mille(faults.media_errors_per_mille) {
            return if opcode == nvm::READ { READ_ERROR } else { WRITE_FAULT };
        }
        if is_transfer && self.random.per_mille(faults.internal_errors_per_mille) {
            return INTERNAL_ERROR;
        }
        match opcode {
            nvm::FLUSH => {
                lock(&self.shared.counters).flushes += 1;
                Status::SUCCESS
            }
            nvm::READ | nvm::WRITE => self.transfer(opcode, words, faults),
            _ => INVALID_OPCODE,
        }
    }

    fn byte_range(&self, first: u64, blocks: u64) -> Option<std::ops::Range<usize>> {
        let end = first.checked_add(blocks).filter(|&end| end <= self.device.blocks)?;
        Some(first as usize * self.device.block_bytes..end as usize * self.device.block_bytes)
    }

    fn transfer(&mut self, opcode: u8, words: &[u32; 16], faults: &Faults) -> Status {
        let first = u64::from(words[10]) | u64::from(words[11]) << 32;
        let blocks = u64::from(words[12] & 0xffff) + 1;
        let Some(range) = self.byte_range(first, blocks) else { return OUT_OF_RANGE };
        let limit = 4096_usize << self.device.transfer_exponent;
        if self.device.transfer_exponent > 0 && range.len() > limit {
            lock(&self.shared.counters).violations += 1;
            return INVALID_FIELD;
        }
        let bad = &faults.bad_blocks;
        if opcode == nvm::READ && first < bad.end && bad.start < first + blocks {
            return READ_ERROR;
        }
        let Some(pieces) = self.pieces(words, range.len()) else { return INVALID_FIELD };
        let mut contents = lock(&self.shared.contents);
        let mut left = &mut contents[range];
        for (address, bytes) in pieces {
            let (piece, rest) = left.split_at_mut(bytes);
            left = rest;
            let moved = self.shared.with_memory(address, bytes, |start| match opcode {
                // SAFETY: `with_memory` checked that the memory is mapped; the driver has given it to the device until
                // the completion, and the contents are this thread's.
                nvm::READ => unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), start, bytes) },
                // SAFETY: as above, the other way round.
                _ => unsafe { std::ptr::copy_nonoverlapping(start, piece.as_mut_ptr(), bytes) },
            });
            if moved.is_none() {
                return DATA_TRANSFER_ERROR;
            }
        }
        Status::SUCCESS
    }

    /// Address and length of each piece of memory of a transfer.
    fn pieces(&self, words: &[u32; 16], bytes: usize) -> Option<Vec<(u64, usize)>> {
        let long = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        let (first, second) = (long(6), long(8));
        match words[0] >> 14 & 3 {
            1 if self.device.takes_sgl => {
                lock(&self.shared.counters).sgl += 1;
                (words[8] as usize == bytes && words[9] == 0).then(|| vec![(first, bytes)])
            }
            0 => {
                let in_first = (4096 - first as usize % 4096).min(bytes);
                let mut pieces = vec![(first, in_first)];
                let mut left = bytes - in_first;
                if left > 4096 {
                    lock(&self.shared.counters).page_lists += 1;
                    // Without chaining, which this driver does not use, a list ends with its page.
                    let pages = left.div_ceil(4096);
                    if second % 8 != 0 || second as usize % 4096 + 8 * pages > 4096 {
                        return None;
                    }
                    for page in 0..pages {
                        let words = self.read_words::<2>(second + 8 * page as u64)?;
                        let address = u64::from(words[0]) | u64::from(words[1]) << 32;
                        pieces.push((address, left.min(4096)));
                        left -= left.min(4096);
                    }
                } else if left > 0 {
                    pieces.push((second, left));
                }
                let is_aligned = first % 4 == 0 && pieces[1..].iter().all(|(address, _)| address % 4096 == 0);
                is_aligned.then_some(pieces)
            }
            _ => None,
        }
    }

    pub(super) fn read_words<const N: usize>(&self, address: u64) -> Option<[u32; N]> {
        self.shared.with_memory(address, 4 * N, |start| {
            std::array::from_fn(|index| {
                // SAFETY: `with_memory` checked that the words are mapped here.
                let place = unsafe { start.add(4 * index) }.cast::<u32>();
                // SAFETY: aligned to a word, as commands and lists are; the driver accesses them by atomics only.
                unsafe { AtomicU32::from_ptr(place) }.load(Ordering::Acquire)
            })
        })
    }

    fn write_bytes(&self, address: u64, bytes: &[u8; 4096]) -> Status {
        let written = self.shared.with_memory(address, bytes.len(), |start| {
            // SAFETY: `with_memory` checked that the page is mapped; the driver reads it after the completion.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
        });
        written.map_or(DATA_TRANSFER_ERROR, |()| Status::SUCCESS)
    }
}
