//! Requests of the caller, independent of how commands reach the device: from `submit`, which checks them,
//! until `poll` hands them back.
//!
//! Hot path: no allocation after `new`, no lock, no system call.

use std::collections::VecDeque;

use kvstore_io::{Buffer, Completion, Full, Geometry, IoError, IoErrorKind, Operation, Request};

use crate::registrations::Registrations;
use crate::requests::{Requests, Target};

#[derive(Debug)]
pub(crate) struct RequestQueue {
    /// Name of the engine, for errors.
    engine: &'static str,
    pub(crate) geometry: Geometry,
    pub(crate) registrations: Registrations,
    pub(crate) requests: Requests,
    /// Requests with bytes that no command was made for yet, oldest first. Only the first is partly issued.
    pub(crate) pending: VecDeque<u16>,
    /// Number of requests at the end of `pending` that `flush` has not handed over.
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

    /// Accepts a request. An invalid request, or one for which `refused` returns an error, completes with that
    /// error.
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

    /// Checks a request and returns how the device reaches its memory.
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

    /// Hands over all requests that were submitted.
    pub(crate) fn flush(&mut self) {
        self.unflushed = 0;
    }

    /// The oldest pending request that was handed over.
    #[inline]
    pub(crate) fn first(&self) -> Option<u16> {
        if self.pending.len() > self.unflushed { self.pending.front().copied() } else { None }
    }

    /// Completes a request that has no command in flight and gets no further one. A request that failed before
    /// all of it was issued completes only after it was taken off the head of `pending`.
    pub(crate) fn finish_if_over(&mut self, index: u16) {
        let Some(active) = self.requests.get(index) else { return };
        let is_pending = self.pending.front() == Some(&index);
        if active.outstanding == 0 && !is_pending && (active.is_issued() || active.failure.is_some()) {
            self.finished.extend(self.requests.remove(index));
        }
    }

    /// Ends all pending requests, also those that were not handed over. Requests without an error get this one.
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

    /// Moves up to `budget` completions; returns their number.
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

    /// Checks that a file exists. Returns the name of a sync of it, for errors.
    pub(crate) fn check_sync(&self, file: u32) -> Result<String, IoError> {
        let operation = format!("sync file {file}");
        if (file as usize) < self.geometry.files.len() {
            return Ok(operation);
        }
        Err(self.error(IoErrorKind::Invalid, operation, "there is no such file"))
    }

    /// An error of this engine.
    pub(crate) fn error(&self, kind: IoErrorKind, operation: String, reason: &str) -> IoError {
        IoError { engine: self.engine, operation, kind, reason: reason.to_owned() }
    }
}

/// Describes a request in words, for errors.
pub(crate) fn describe(request: &Request) -> String {
    let operation = match request.operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let bytes = request.buffer.len();
    format!("{operation} {bytes} bytes at {:#x} of file {}", request.offset, request.file)
}
