//! The caller's side of an engine, however its commands reach the device: requests from `submit` until `poll` hands them
//! back, and the checks before.
//!
//! Hot path: no allocation after `new`, no lock, no system call.

use std::collections::VecDeque;

use kvstore_io::{Buffer, Completion, Full, Geometry, IoError, IoErrorKind, Operation, Request};

use crate::registrations::Registrations;
use crate::requests::{Requests, Target};

#[derive(Debug)]
pub(crate) struct RequestQueue {
    /// In errors.
    engine: &'static str,
    pub(crate) geometry: Geometry,
    pub(crate) registrations: Registrations,
    pub(crate) requests: Requests,
    /// Requests with bytes that no command was made for yet, oldest first. Only the first is partly issued.
    pub(crate) pending: VecDeque<u16>,
    /// The last of those, which `flush` has not handed over.
    unflushed: usize,
    pub(crate) finished: VecDeque<Completion>,
    /// Requests accepted and not yet handed back.
    accepted: usize,
}

impl RequestQueue {
    /// Room for `geometry.depth_max` requests.
    pub(crate) fn new(engine: &'static str, geometry: Geometry) -> Self {
        let requests_max = geometry.depth_max;
        Self {
            engine,
            geometry,
            registrations: Registrations::default(),
            requests: Requests::new(requests_max),
            pending: VecDeque::with_capacity(requests_max),
            unflushed: 0,
            finished: VecDeque::with_capacity(requests_max),
            accepted: 0,
        }
    }

    /// Accepts a request. One that is wrong, or that `refused` has an error for, completes with that.
    pub(crate) fn submit(
        &mut self,
        request: Request,
        refused: impl FnOnce(&Request) -> Option<IoError>,
    ) -> Result<(), Full> {
        if self.accepted == self.geometry.depth_max {
            return Err(Full(request));
        }
        let target = self.target(&request).and_then(|target| match refused(&request) {
            None => Ok(target),
            Some(error) => Err(error),
        });
        match target {
            Ok(target) => {
                let index = self.requests.insert(request, target).map_err(Full)?;
                self.pending.push_back(index);
                self.unflushed += 1;
            }
            Err(error) => {
                let Request { id, buffer, .. } = request;
                self.finished.push_back(Completion { id, buffer, result: Err(error) });
            }
        }
        self.accepted += 1;
        Ok(())
    }

    /// How the device reaches the request's memory, after everything about the request was checked.
    fn target(&self, request: &Request) -> Result<Target, IoError> {
        let start =
            self.geometry.check(request).map_err(|reason| IoError::invalid(self.engine, request, reason))?;
        match (&request.buffer, self.registrations.translate(start, request.buffer.len())) {
            (_, Some(address)) => Ok(Target::Mapped(address)),
            (Buffer::Pages(_), None) => Ok(Target::Bounced),
            (Buffer::Slot { .. }, None) => {
                Err(self.error(IoErrorKind::Unmapped, describe(request), "the slot's slab is not registered"))
            }
        }
    }

    /// Hands over what was submitted.
    pub(crate) fn flush(&mut self) {
        self.unflushed = 0;
    }

    /// The oldest pending request that was handed over.
    #[inline]
    pub(crate) fn first(&self) -> Option<u16> {
        if self.pending.len() > self.unflushed { self.pending.front().copied() } else { None }
    }

    /// Hands a request back when no command of it is in flight and none will be. One that failed before all of it was
    /// issued is first of the pending ones, and is taken off there.
    pub(crate) fn finish_if_over(&mut self, index: u16) {
        let Some(active) = self.requests.get(index) else { return };
        let is_pending = self.pending.front() == Some(&index);
        if active.outstanding == 0 && !is_pending && (active.is_issued() || active.failure.is_some()) {
            self.finished.extend(self.requests.remove(index));
        }
    }

    /// Ends all pending requests, also those that were not handed over. Those without an error take this one.
    pub(crate) fn fail_pending(&mut self, error: impl Fn(&Request) -> IoError) {
        self.flush();
        while let Some(index) = self.pending.pop_front() {
            if let Some(active) = self.requests.get(index)
                && active.failure.is_none()
            {
                active.failure = Some(error(&active.request));
            }
            self.finish_if_over(index);
        }
    }

    /// Moves up to `budget` completions; returns how many.
    pub(crate) fn hand_back(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        let moved = self.finished.len().min(budget);
        completions.extend(self.finished.drain(..moved));
        self.accepted -= moved;
        moved
    }

    /// Requests accepted and not yet handed back.
    pub(crate) fn in_flight(&self) -> usize {
        self.accepted
    }

    /// What a sync of this file is called in errors, if there is such a file.
    pub(crate) fn check_sync(&self, file: u32) -> Result<String, IoError> {
        let operation = format!("sync file {file}");
        if (file as usize) < self.geometry.files.len() {
            return Ok(operation);
        }
        Err(self.error(IoErrorKind::Invalid, operation, "there is no such file"))
    }

    /// What a discard of this range is called in errors, if there is such a range.
    pub(crate) fn check_discard(&self, file: u32, offset: u64, bytes: u64) -> Result<String, IoError> {
        let operation = format!("discard {bytes} bytes at {offset:#x} of file {file}");
        match self.geometry.check_range(file, offset, bytes) {
            Ok(()) => Ok(operation),
            Err(reason) => Err(self.error(IoErrorKind::Invalid, operation, reason)),
        }
    }

    /// An error of this engine.
    pub(crate) fn error(&self, kind: IoErrorKind, operation: String, reason: &str) -> IoError {
        IoError { engine: self.engine, operation, kind, reason: reason.to_owned() }
    }
}

/// In words, for errors.
pub(crate) fn describe(request: &Request) -> String {
    let operation = match request.operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let bytes = request.buffer.len();
    format!("{operation} {bytes} bytes at {:#x} of file {}", request.offset, request.file)
}
