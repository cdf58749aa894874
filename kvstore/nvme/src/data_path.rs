//! Translation of requests into commands, and of completions into results. The hot path.

use std::sync::atomic::Ordering;
use std::time::Instant;

use kvstore_io::{Buffer, IoError, Operation};

use crate::bus::Bus;
use crate::command::{Command, DataPointer, nvm};
use crate::commands::{Commands, InFlight, Owner};
use crate::dma::PAGE_BYTES;
use crate::engine::{Blocking, NvmeEngine};
use crate::queue_pair::CompletionEntry;
use crate::request_queue::describe;
use crate::requests::Target;
use crate::status::Status;
use crate::{ENGINE_NAME, NvmeError};

impl<B: Bus> NvmeEngine<B> {
    /// Makes commands of pending requests, as far as there is room, and rings the doorbells.
    pub(crate) fn issue(&mut self) {
        if self.queue.first().is_none() || !self.health.may_issue() {
            return;
        }
        let now = Instant::now();
        while let Some(index) = self.queue.first() {
            if !self.commands.iter().any(Commands::has_room) || !self.issue_request(index, now) {
                break;
            }
        }
        self.ring();
    }

    /// Makes the next command of the first pending request, or takes it off the queue. False when it must wait.
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
        let bytes_left = active.request.buffer.len() - active.issued;
        let (opcode, is_write) = match active.request.operation {
            Operation::Read => (nvm::READ, false),
            Operation::Write => (nvm::WRITE, true),
        };
        let (offset, start) = (active.issued, active.request.offset);
        let (address, bytes, bounce) = match active.target {
            Target::Mapped(address) => {
                (address + offset as u64, bytes_left.min(self.command_bytes_max), None)
            }
            Target::Bounced => {
                let Some(bounce) = self.bounces.pop() else { return false };
                let bytes = bytes_left.min(self.bounce_bytes).min(self.command_bytes_max);
                let place = self.controller.layout.bounce_buffer(bounce);
                if let (true, Buffer::Pages(pages)) = (is_write, &active.request.buffer) {
                    self.controller.memory.copy_in(place, &pages[offset..offset + bytes]);
                }
                (self.controller.memory_address + place as u64, bytes, Some(bounce))
            }
        };
        active.issued += bytes;
        active.outstanding += 1;
        let block_bytes = self.namespace.block_bytes;
        let (block, blocks) = ((start + offset as u64) / block_bytes as u64, (bytes / block_bytes) as u32);
        let pointed = self.with_pointer(address, bytes, |pointer, namespace| {
            Command::transfer(opcode, namespace, pointer, block, blocks)
        });
        self.push_pointed(pointed, Owner::Piece { request: index, offset, bytes, bounce }, now);
        true
    }

    /// Chooses how to name the memory: up to two pages directly, more by one scatter-gather descriptor where the
    /// controller takes it (16 bytes instead of a list of up to 512 pages), else by the command id's own list.
    fn with_pointer(
        &self,
        address: u64,
        bytes: usize,
        make: impl FnOnce(DataPointer, u32) -> Command,
    ) -> (Command, Option<(u64, usize)>) {
        let in_first_page = PAGE_BYTES - address as usize % PAGE_BYTES;
        let second = address + in_first_page as u64;
        let namespace = self.namespace.id;
        if bytes <= in_first_page {
            (make(DataPointer::Prp(address, 0), namespace), None)
        } else if bytes <= in_first_page + PAGE_BYTES {
            (make(DataPointer::Prp(address, second), namespace), None)
        } else if self.use_sgl {
            (make(DataPointer::Sgl(address, bytes as u32), namespace), None)
        } else {
            let pages = (bytes - in_first_page).div_ceil(PAGE_BYTES);
            (make(DataPointer::Prp(address, 0), namespace), Some((second, pages)))
        }
    }

    fn push_pointed(&mut self, (command, list): (Command, Option<(u64, usize)>), owner: Owner, now: Instant) {
        let Some((pair, id)) = self.begin(owner, now) else { return };
        let mut command = command;
        if let Some((second, pages)) = list {
            let place = self.controller.layout.page_list(pair, id);
            for page in 0..pages {
                let address = second + (page * PAGE_BYTES) as u64;
                self.controller.memory.long(place + 8 * page).store(address, Ordering::Relaxed);
            }
            command = command.with_page_list(self.controller.memory_address + place as u64);
        }
        self.controller.pairs[pair].push(&self.controller.memory, &command.with_id(id));
        self.counters.commands += 1;
    }

    /// Queues a command that has room; see [`Self::issue`].
    pub(crate) fn push(&mut self, command: &Command, owner: Owner, now: Instant) {
        self.push_pointed((*command, None), owner, now);
    }

    /// Takes a command id of the next pair that has one; callers have checked that there is one.
    fn begin(&mut self, owner: Owner, now: Instant) -> Option<(usize, u16)> {
        let in_flight = InFlight::new(owner, now, self.command_timeout);
        let count = self.commands.len();
        for _ in 0..count {
            let pair = self.next_pair;
            self.next_pair = if pair + 1 == count { 0 } else { pair + 1 };
            if let Some(id) = self.commands[pair].begin(in_flight) {
                return Some((pair, id));
            }
        }
        debug_assert!(false, "a command was made without room for it");
        None
    }

    /// Rings one doorbell for each pair that has new commands.
    pub(crate) fn ring(&mut self) {
        for pair in &mut self.controller.pairs {
            self.counters.doorbells += u64::from(pair.ring_tail(&self.controller.bus));
        }
    }

    /// Takes completions until about `budget` requests are finished; returns whether there were any.
    pub(crate) fn reap(&mut self, budget: usize) -> bool {
        if !self.health.may_issue() {
            return false;
        }
        let mut found = false;
        for pair in 0..self.controller.pairs.len() {
            // A completion that begins a reset is the last one that is trusted.
            while self.queue.finished.len() < budget && self.health.may_issue() {
                let Some(entry) = self.controller.pairs[pair].pop(&self.controller.memory) else { break };
                found = true;
                self.complete(pair, entry);
            }
            self.controller.pairs[pair].ring_head(&self.controller.bus);
        }
        found
    }

    fn complete(&mut self, pair: usize, entry: CompletionEntry) {
        let Some(ended) = self.commands[pair].end(entry.id) else {
            self.unexpected_completion(pair, entry.id);
            return;
        };
        self.health.note_end(pair, entry.id);
        let failure = if entry.status.is_success() { None } else { Some(entry.status) };
        self.end(ended.owner, failure.map(Failure::Status));
    }

    /// Ends a command whose memory the device no longer accesses.
    pub(crate) fn end(&mut self, owner: Owner, failure: Option<Failure<'_>>) {
        let Owner::Piece { request: index, offset, bytes, bounce } = owner else {
            let device = || self.controller.bus.device().to_owned();
            self.blocking = Blocking::Done(match failure {
                None => Ok(()),
                Some(Failure::Status(status)) => {
                    Err(NvmeError::Command { device: device(), operation: "command", status })
                }
                Some(Failure::Reset(error)) => Err(error.clone()),
            });
            return;
        };
        if let Some(bounce) = bounce {
            self.bounces.push(bounce);
        }
        let Some(active) = self.queue.requests.get(index) else { return };
        active.outstanding -= 1;
        match (failure, active.request.operation, &mut active.request.buffer) {
            (Some(failure), _, _) => {
                if active.failure.is_none() {
                    active.failure = Some(failure.into_io(describe(&active.request)));
                }
            }
            (None, Operation::Write, _) => self.cache.note_write(),
            (None, Operation::Read, Buffer::Pages(pages)) => {
                if let Some(bounce) = bounce {
                    let place = self.controller.layout.bounce_buffer(bounce);
                    self.controller.memory.copy_out(place, &mut pages[offset..offset + bytes]);
                }
            }
            (None, Operation::Read, Buffer::Slot { .. }) => {}
        }
        self.queue.finish_if_over(index);
    }
}

/// Reason why a command failed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Failure<'a> {
    /// Status of its completion.
    Status(Status),
    /// The controller was reset while the command was in flight.
    Reset(&'a NvmeError),
}

impl Failure<'_> {
    #[cold]
    fn into_io(self, operation: String) -> IoError {
        match self {
            Self::Status(status) => {
                IoError { engine: ENGINE_NAME, operation, kind: status.kind(), reason: status.to_string() }
            }
            Self::Reset(error) => IoError {
                engine: ENGINE_NAME,
                operation,
                kind: kvstore_io::IoErrorKind::Device,
                reason: format!("the controller was reset: {error}"),
            },
        }
    }
}
