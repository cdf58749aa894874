//! Table of the requests at the kernel, by number.

use std::ptr::NonNull;

use crate::error::describe;
use crate::{Completion, IoError, Request};

/// A request in flight.
#[derive(Debug)]
pub struct Pending {
    request: Request,
    address: NonNull<u8>,
    registered: Option<u16>,
    moved: usize,
    retries: u32,
    /// Number of the request's latest entry in the ring.
    entry: u64,
}

// SAFETY: the address points into the buffer that the request owns; only the kernel uses it.
unsafe impl Send for Pending {}

/// Result of one completion for its request.
#[derive(Debug)]
pub enum Outcome {
    /// This number of further bytes was moved.
    Moved(usize),
    /// No byte was moved; submit the same again.
    Retry,
    /// No byte was moved; submit the same again, without naming registered memory.
    RetryUnregistered,
    /// The request has failed.
    Failed(IoError),
}

impl Pending {
    /// `address` is the buffer's; `registered` names the registered buffer that contains all of it.
    pub(super) fn new(request: Request, address: NonNull<u8>, registered: Option<u16>) -> Self {
        Self { request, address, registered, moved: 0, retries: 0, entry: 0 }
    }

    /// The caller's request.
    #[must_use]
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Number of the registered buffer, if it contains the whole buffer.
    #[must_use]
    pub fn registered(&self) -> Option<u16> {
        self.registered
    }

    /// Number of bytes still to be moved.
    #[must_use]
    pub fn left(&self) -> usize {
        self.request.buffer.len() - self.moved
    }

    /// File offset of the remaining bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.request.offset + self.moved as u64
    }

    /// Address of the remaining bytes.
    #[must_use]
    pub fn place(&self) -> *mut u8 {
        self.address.as_ptr().wrapping_add(self.moved)
    }

    /// Returns an error of this request.
    #[must_use]
    #[cold]
    pub fn failed(&self, engine: &'static str, errno: i32) -> IoError {
        IoError::from_errno(engine, self.describe(), errno)
    }

    /// "read 4096 bytes at 0x0 of file 2".
    #[must_use]
    #[cold]
    pub fn describe(&self) -> String {
        let request = &self.request;
        describe(request.operation, request.buffer.len(), request.offset, request.file)
    }

    pub(super) fn advance(&mut self, moved: usize) {
        self.moved += moved;
        self.retries = 0;
    }

    /// Sets the number of the request's next entry in the ring.
    pub(super) fn enter(&mut self, entry: u64) {
        self.entry = entry;
    }

    pub(super) fn forget_registration(&mut self) {
        self.registered = None;
    }

    /// Counts one more attempt without progress; returns their number.
    pub(super) fn retry(&mut self) -> u32 {
        self.retries += 1;
        self.retries
    }

    pub(super) fn complete(self, result: Result<(), IoError>) -> Completion {
        Completion { id: self.request.id, buffer: self.request.buffer, result }
    }
}

/// A table of requests with a fixed number of entries.
#[derive(Debug)]
pub(super) struct PendingTable {
    entries: Box<[Option<Pending>]>,
    free: Vec<u32>,
}

impl PendingTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self { entries: (0..capacity).map(|_| None).collect(), free: (0..capacity as u32).rev().collect() }
    }

    pub(super) fn used(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Adds a request; returns its number. The caller has checked that there is room.
    pub(super) fn insert(&mut self, pending: Pending) -> u32 {
        let number = self.free.pop().expect("fewer requests than the depth are under way");
        self.entries[number as usize] = Some(pending);
        number
    }

    /// Returns the request with this number, if there is one.
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Pending> {
        self.entries.get_mut(usize::try_from(number).ok()?)?.as_mut()
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Pending> {
        let pending = self.entries.get_mut(usize::try_from(number).ok()?)?.take()?;
        self.free.push(number as u32);
        Some(pending)
    }

    /// Removes a request whose latest entry has this number or a later one.
    pub(super) fn take_from(&mut self, entry: u64) -> Option<Pending> {
        let is_later = |place: &Option<Pending>| place.as_ref().is_some_and(|pending| pending.entry >= entry);
        let number = self.entries.iter().position(is_later)?;
        self.remove(number as u64)
    }

    /// Leaks every request, so that their buffers are never reused.
    pub(super) fn leak(&mut self) {
        self.entries.iter_mut().filter_map(Option::take).for_each(std::mem::forget);
    }
}
