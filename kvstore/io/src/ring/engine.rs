//! The engine over a ring.
//!
//! Hot path: a request is one entry in a table and one in the submission queue; no allocation, no lock. Short
//! transfers are queued again for the remaining bytes, and so are entries that the kernel could not take
//! (EAGAIN, EINTR), a bounded number of times.
//!
//! Thread: the one that flushes, polls or waits first, from then on (SINGLE_ISSUER; other threads get EEXIST).
//! A call from another thread ends the engine: every later call, on any thread, is an error, requests that the
//! kernel has not got complete with that error, and those that it has got never complete. Dropping it leaks
//! those buffers, since the kernel may still write there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::Slab;
use io_uring::{cqueue, squeue};

use super::pending::{Outcome, Pending, PendingTable};
use super::registered::Registered;
use super::ring::Ring;
use super::setup::RingConfig;
use crate::{Completion, Full, Geometry, IoEngine, IoError, Request, Waker};

/// Number of retries without progress after which a request fails.
const RETRIES_MAX: u32 = 10_000;

/// Encoding of requests for the kernel.
pub trait Commands: Send {
    /// Entry of the submission queue.
    type Submission: squeue::EntryMarker;
    /// Entry of the completion queue.
    type Completion: cqueue::EntryMarker;

    /// Name of the engine.
    fn name(&self) -> &'static str;

    /// Returns the entry that moves the remaining bytes of a request, or the next part of them.
    fn build(&self, pending: &Pending) -> Self::Submission;

    /// Interprets a completion of a request.
    fn outcome(&self, pending: &Pending, completion: &Self::Completion) -> Outcome;

    /// See [`IoEngine::sync`].
    fn sync(&self, file: u32) -> Result<(), IoError>;
}

/// An engine over a ring.
pub struct RingEngine<K: Commands> {
    // Declared first, so that it is dropped before the memory that is registered with it.
    ring: Ring<K::Submission, K::Completion>,
    commands: K,
    geometry: Geometry,
    pending: PendingTable,
    /// Completions of requests that were refused without the kernel.
    refused: VecDeque<Completion>,
    /// Numbers of requests that have to be queued again.
    again: VecDeque<u64>,
    registered: Registered,
}

impl<K: Commands> RingEngine<K> {
    pub(crate) fn assemble(
        ring: Ring<K::Submission, K::Completion>,
        commands: K,
        geometry: Geometry,
    ) -> Self {
        let depth = geometry.depth_max;
        Self {
            ring,
            commands,
            geometry,
            pending: PendingTable::new(depth),
            refused: VecDeque::with_capacity(depth),
            again: VecDeque::with_capacity(depth),
            registered: Registered::default(),
        }
    }

    /// Calls of io_uring_enter(2) so far.
    #[must_use]
    pub fn enters(&self) -> u64 {
        self.ring.enters()
    }

    /// Extends the file's size, so that requests pass which the device must refuse.
    #[cfg(test)]
    pub(crate) fn extend_for_test(&mut self, bytes: u64) {
        self.geometry.files[0] += bytes;
    }

    /// Makes the ring for a configuration, before an engine is made of it.
    pub(crate) fn ring(
        name: &'static str,
        config: &RingConfig,
    ) -> Result<Ring<K::Submission, K::Completion>, IoError> {
        Ring::new(name, config)
    }
}

/// Handles one completion of the ring; `Some` when the request is over. `again` collects requests to be queued
/// again.
fn handle_completion<K: Commands>(
    commands: &K,
    pending: &mut PendingTable,
    again: &mut VecDeque<u64>,
    number: u64,
    completion: &K::Completion,
) -> Option<Completion> {
    // Ignores an unknown number, which would be an error of the kernel.
    let request = pending.get_mut(number)?;
    let result = match commands.outcome(request, completion) {
        Outcome::Moved(bytes) => {
            request.advance(bytes.min(request.left()));
            if request.left() > 0 {
                again.push_back(number);
                return None;
            }
            Ok(())
        }
        Outcome::Retry if request.retry() <= RETRIES_MAX => {
            again.push_back(number);
            return None;
        }
        Outcome::Retry => Err(request.failed(commands.name(), libc::EAGAIN)),
        Outcome::RetryUnregistered => {
            request.forget_registration();
            again.push_back(number);
            return None;
        }
        Outcome::Failed(error) => Err(error),
    };
    Some(pending.remove(number)?.complete(result))
}

impl<K: Commands> RingEngine<K> {
    /// Queues the remaining bytes of request `number`.
    fn push(&mut self, number: u64) {
        let Some(pending) = self.pending.get_mut(number) else { return };
        let mut entry = self.commands.build(pending);
        squeue::EntryMarker::set_user_data(&mut entry, number);
        pending.enter(self.ring.pushed());
        // SAFETY: the buffer belongs to the table until its completion was taken, and the descriptor to the commands for
        // longer; the table has no more places than the ring has entries.
        unsafe { self.ring.push(&entry) };
    }

    /// Takes completions of the ring, at most `budget` that end a request, and continues unfinished requests.
    fn take(&mut self, budget: usize, mut deliver: impl FnMut(Completion)) -> Result<usize, IoError> {
        let Self { ring, commands, pending, again, .. } = self;
        let mut count = 0;
        ring.reap(|number, completion| {
            if let Some(completion) = handle_completion(&*commands, pending, again, number, completion) {
                deliver(completion);
                count += 1;
            }
            count < budget
        });
        if self.again.is_empty() {
            return Ok(count);
        }
        while let Some(number) = self.again.pop_front() {
            self.push(number);
        }
        self.ring.submit().map(|()| count)
    }

    /// Completes the requests that the kernel has not got, once another thread has used the ring.
    fn fail_cross_thread(&mut self) {
        if self.ring.is_cross_thread() {
            // The queue will not be handed over any more, so the kernel does not use these buffers.
            while let Some(pending) = self.pending.take_from(self.ring.handed_over()) {
                let error = self.ring.wrong_thread_error(&pending.describe());
                self.refused.push_back(pending.complete(Err(error)));
            }
        }
    }

    /// Waits until no request is in flight, and drops the buffers.
    fn drain(&mut self) -> Result<(), IoError> {
        self.ring.submit()?;
        let mut armed = self.ring.disarm();
        while armed || self.pending.used() > 0 {
            self.ring.block()?;
            self.take(usize::MAX, drop)?;
            armed = self.ring.is_armed();
        }
        Ok(())
    }
}

impl<K: Commands> IoEngine for RingEngine<K> {
    fn name(&self) -> &'static str {
        self.commands.name()
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        self.registered.add(self.commands.name(), &self.ring.submitter(), slab)
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        if self.in_flight() >= self.geometry.depth_max {
            return Err(Full(request));
        }
        match self.geometry.check(&request) {
            Ok(address) if self.ring.is_cross_thread() => {
                let pending = Pending::new(request, address, None);
                let error = self.ring.wrong_thread_error(&pending.describe());
                self.refused.push_back(pending.complete(Err(error)));
            }
            Ok(address) => {
                let registered = self.registered.find(address, request.buffer.len());
                let number = self.pending.insert(Pending::new(request, address, registered));
                self.push(u64::from(number));
            }
            Err(reason) => {
                let result = Err(IoError::invalid(self.commands.name(), &request, reason));
                self.refused.push_back(Completion { id: request.id, buffer: request.buffer, result });
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        let flushed = self.ring.submit();
        self.fail_cross_thread();
        flushed
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        let refused = budget.min(self.refused.len());
        completions.extend(self.refused.drain(..refused));
        let before = completions.len();
        if refused < budget && self.pending.used() > 0 {
            // An error of continuing occurs again at the next flush, which reports it.
            let _ = self.take(budget - refused, |completion| completions.push(completion));
            self.fail_cross_thread();
        }
        refused + completions.len() - before
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        let waited = if self.refused.is_empty() {
            self.ring.sleep(until, self.pending.used() > 0)
        } else {
            self.ring.submit()
        };
        self.fail_cross_thread();
        waited
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(self.ring.waker()) as Arc<dyn Waker>
    }

    fn in_flight(&self) -> usize {
        self.pending.used() + self.refused.len()
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        self.commands.sync(file)
    }
}

impl<K: Commands> Drop for RingEngine<K> {
    fn drop(&mut self) {
        if self.drain().is_ok() {
            // The kernel frees a ring asynchronously; files would stay open, and locked, until then.
            let _closed = self.ring.submitter().unregister_files();
        } else {
            // The kernel may still write to these buffers: they must never be reused.
            self.pending.leak();
            self.ring.leak_wake_count();
        }
    }
}
