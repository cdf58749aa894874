//! Requests that were accepted and are not complete. Fixed size, no allocation after start-up.

use kvstore_io::{Completion, IoError, Request};

/// The way in which the device reaches a request's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Directly, at this device address.
    Mapped(u64),
    /// Through bounce buffers.
    Bounced,
}

#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub(crate) request: Request,
    pub(crate) target: Target,
    /// Bytes that commands were made for.
    pub(crate) issued: usize,
    /// Commands in flight.
    pub(crate) outstanding: usize,
    /// The first error of any of its commands.
    pub(crate) failure: Option<IoError>,
}

impl ActiveRequest {
    pub(crate) fn is_issued(&self) -> bool {
        self.issued == self.request.buffer.len()
    }

    fn completion(self) -> Completion {
        let result = self.failure.map_or(Ok(()), Err);
        Completion { id: self.request.id, buffer: self.request.buffer, result }
    }
}

/// A table of requests by index.
#[derive(Debug)]
pub(crate) struct Requests {
    slots: Box<[Option<ActiveRequest>]>,
    free: Vec<u16>,
}

impl Requests {
    pub(crate) fn new(count: usize) -> Self {
        Self { slots: (0..count).map(|_| None).collect(), free: (0..count as u16).rev().collect() }
    }

    /// Adds a request and returns its index, or hands the request back when the table is full.
    pub(crate) fn insert(&mut self, request: Request, target: Target) -> Result<u16, Request> {
        let Some(index) = self.free.pop() else { return Err(request) };
        self.slots[usize::from(index)] =
            Some(ActiveRequest { request, target, issued: 0, outstanding: 0, failure: None });
        Ok(index)
    }

    #[inline]
    pub(crate) fn get(&mut self, index: u16) -> Option<&mut ActiveRequest> {
        self.slots.get_mut(usize::from(index))?.as_mut()
    }

    /// Removes a request and returns its completion.
    pub(crate) fn remove(&mut self, index: u16) -> Option<Completion> {
        let active = self.slots.get_mut(usize::from(index))?.take()?;
        self.free.push(index);
        Some(active.completion())
    }
}
