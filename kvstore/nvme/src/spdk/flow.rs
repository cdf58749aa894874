//! Translation of requests into SPDK's calls and back. The hot path: no allocation of this crate, no lock, no
//! system call.
//!
//! SPDK reports a completion by calling back from within its own poll. The callback only stores the status in the
//! command's word; the engine collects the words afterwards, so that no callback ever reaches into the engine.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use kvstore_io::{Buffer, IoError, Operation};

use super::engine::SpdkEngine;
use crate::commands::{InFlight, Owner};
use crate::engine::Blocking;
use crate::request_queue::describe;
use crate::requests::Target;
use crate::status::Status;
use crate::{NvmeError, spdk};

/// Value of a command's word while it is in flight; afterwards the word holds `DONE` and the status.
pub(super) const WAITING: u32 = 0;
const DONE: u32 = 1 << 31;

/// Called by SPDK for each completion.
///
/// # Safety
/// The argument is the command's word, and the completion entry is valid, as SPDK promises.
pub(super) unsafe extern "C" fn completed(word: *mut c_void, completion: *const [u32; 4]) {
    // SAFETY: SPDK passes a completion entry that is valid for the call.
    let entry = unsafe { *completion };
    // SAFETY: the words live as long as the engine, which frees its queue pair, and with it every command, first.
    let word = unsafe { AtomicU32::from_ptr(word.cast()) };
    // Bits 17 to 31 of the last word are the status. The engine reads in this very thread.
    word.store(DONE | entry[3] >> 17, Ordering::Relaxed);
}

impl SpdkEngine {
    /// Makes commands of pending requests, as far as there is room.
    pub(super) fn issue(&mut self) {
        if self.queue.first().is_none() || self.dead.is_some() {
            return;
        }
        let now = Instant::now();
        while let Some(index) = self.queue.first() {
            if !self.commands.has_room() || !self.issue_request(index, now) {
                break;
            }
        }
    }

    fn issue_request(&mut self, index: u16, now: Instant) -> bool {
        let Some(active) = self.queue.requests.get(index) else {
            self.queue.pending.pop_front();
            return true;
        };
        if active.is_issued() || active.failure.is_some() {
            self.queue.pending.pop_front();
            self.queue.finish_if_over(index);
            return true;
        }
        let (offset, start) = (active.issued, active.request.offset);
        let bytes_left = active.request.buffer.len() - offset;
        let is_write = active.request.operation == Operation::Write;
        let (payload, bytes, bounce) = match active.target {
            Target::Mapped(address) => {
                let payload = std::ptr::with_exposed_provenance_mut(address as usize + offset);
                (payload, bytes_left.min(self.command_bytes_max), None)
            }
            Target::Bounced => {
                let Some(bounce) = self.bounces.pop() else { return false };
                let bytes = bytes_left.min(self.bounce_bytes).min(self.command_bytes_max);
                let place = self.memory.buffer(bounce, self.bounce_bytes);
                if let (true, Buffer::Pages(pages)) = (is_write, &active.request.buffer) {
                    let piece = &pages[offset..offset + bytes];
                    // SAFETY: the bounce buffer has at least these bytes, and no command has it now.
                    unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), place, bytes) };
                }
                (place.cast::<c_void>(), bytes, Some(bounce))
            }
        };
        let owner = Owner::Piece { request: index, offset, bytes, bounce };
        let block = (start + offset as u64) / self.block_bytes as u64;
        let blocks = (bytes / self.block_bytes) as u32;
        let (namespace, pair) = (self.namespace, self.pair);
        let call = if is_write { self.library.write } else { self.library.read };
        let submitted = self.submit_command(owner, now, |word| {
            // SAFETY: namespace and queue pair are alive; the payload is registered with SPDK or is its own, and stays
            // until the callback, since the request table has the buffer; the word lives as long as the engine.
            unsafe { call(namespace, pair, payload, block, blocks, completed, word, 0) }
        });
        match submitted {
            Ok(()) => {
                if let Some(active) = self.queue.requests.get(index) {
                    active.issued += bytes;
                    active.outstanding += 1;
                }
                true
            }
            Err(errno) => {
                self.bounces.extend(bounce);
                // SPDK has no free request structure: completions free them.
                if errno == libc::ENOMEM && self.commands.count() > 0 {
                    return false;
                }
                let error = NvmeError::Spdk { device: self.device.clone(), operation: "submit", errno };
                if let Some(active) = self.queue.requests.get(index) {
                    active.failure = Some(spdk::engine::into_io(error, describe(&active.request)));
                }
                true
            }
        }
    }

    /// Takes a command id and calls SPDK with its word; an errno gives the id back.
    pub(super) fn submit_command(
        &mut self,
        owner: Owner,
        now: Instant,
        call: impl FnOnce(*mut c_void) -> i32,
    ) -> Result<(), i32> {
        let in_flight = InFlight::new(owner, now, self.command_timeout);
        let id = self.commands.begin(in_flight).ok_or(libc::ENOMEM)?;
        let word = &self.words[usize::from(id)];
        word.store(WAITING, Ordering::Relaxed);
        match call(word.as_ptr().cast()) {
            0 => Ok(()),
            errno => {
                self.commands.end(id);
                Err(errno.saturating_abs())
            }
        }
    }

    /// Lets SPDK poll for completions and takes them; returns whether there were any.
    pub(super) fn reap(&mut self) -> bool {
        if self.dead.is_some() || self.commands.count() == 0 {
            return false;
        }
        // SAFETY: the queue pair is alive, and this thread is the only one that uses it.
        let count = unsafe { (self.library.completions)(self.pair, 0) };
        if count < 0 {
            self.reset(NvmeError::Spdk {
                device: self.device.clone(),
                operation: "completions",
                errno: count,
            });
            return true;
        }
        count > 0 && self.collect()
    }

    /// Ends every command whose callback was called.
    pub(super) fn collect(&mut self) -> bool {
        let mut found = false;
        for id in 0..self.words.len() {
            let word = self.words[id].load(Ordering::Relaxed);
            if word & DONE == 0 {
                continue;
            }
            self.words[id].store(WAITING, Ordering::Relaxed);
            let Some(ended) = self.commands.end(id as u16) else { continue };
            let status = Status((word & 0x7fff) as u16);
            found = true;
            self.end(ended.owner, (!status.is_success()).then_some(status));
        }
        found
    }

    pub(super) fn end(&mut self, owner: Owner, failure: Option<Status>) {
        let Owner::Piece { request: index, offset, bytes, bounce } = owner else {
            self.blocking = Blocking::Done(match failure {
                None => Ok(()),
                Some(status) => {
                    Err(NvmeError::Command { device: self.device.clone(), operation: "command", status })
                }
            });
            return;
        };
        if let Some(active) = self.queue.requests.get(index) {
            active.outstanding -= 1;
            match (failure, active.request.operation, &mut active.request.buffer, bounce) {
                (Some(status), ..) if active.failure.is_none() => {
                    let (operation, kind) = (describe(&active.request), status.kind());
                    let reason = status.to_string();
                    active.failure = Some(IoError { engine: super::engine::NAME, operation, kind, reason });
                }
                (None, Operation::Read, Buffer::Pages(pages), Some(bounce)) => {
                    let piece = &mut pages[offset..offset + bytes];
                    let place = self.memory.buffer(bounce, self.bounce_bytes);
                    // SAFETY: the bounce buffer has these bytes, and its command is over.
                    unsafe { std::ptr::copy_nonoverlapping(place, piece.as_mut_ptr(), bytes) };
                }
                (None, Operation::Write, ..) => self.cache.note_write(),
                _ => {}
            }
        }
        self.bounces.extend(bounce);
        self.queue.finish_if_over(index);
    }
}
