//! Admission of the reads of one connection, by the bytes that they will return.
//!
//! The problem: a client sends 32 `GET`s of 64 MiB in one packet. All would run side by side, and their sizes
//! would be known only when they are finished. So a read reserves its size first, which comes from
//! [`Values::size_hint`], at no cost, or else from [`Values::look`]. A few reads ([`UNSIZED_READS_MAX`]) start
//! without a size when the store has no hint, so that a short pipeline does not query each key twice.
//!
//! Invariants: reservations are made in the order of the commands, so a read waits only for reads that are
//! older or whose answer is on its way to the client, and no cycle of waits exists; reservations and unsent
//! answers together stay within `bytes_max`, apart from a single read that is larger than that.
//!
//! The order comes from the order in which [`RunningCommands`](crate::running_commands::RunningCommands) polls: a read that was not admitted
//! sets `has_waiting_read` for the pass, and the reads after it wait. No waker is kept, because each pass polls all
//! running commands, and a pass follows every event that frees bytes. Only the connection's task uses this; atomics are
//! needed because its future is `Send`.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;

use futures_util::future::join_all;

use crate::values::{ValueError, Values};

/// Maximum number of reads of unknown size that one connection has in flight.
pub(crate) const UNSIZED_READS_MAX: usize = 4;
/// Number of keys of one command whose sizes are queried concurrently.
const LOOKS_AT_ONCE: usize = 16;

/// Size of the reads of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) bytes: usize,
    /// Number of reads whose size is not known.
    unsized_reads: usize,
}

/// Reservations of one connection.
#[derive(Debug)]
pub(crate) struct Admission {
    bytes_max: usize,
    reserved: AtomicUsize,
    unsized_reads: AtomicUsize,
    /// Bytes of answers that the client has not taken.
    unsent: AtomicUsize,
    /// An older read was not admitted in this pass.
    has_waiting_read: AtomicBool,
}

impl Admission {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            reserved: AtomicUsize::new(0),
            unsized_reads: AtomicUsize::new(0),
            unsent: AtomicUsize::new(0),
            has_waiting_read: AtomicBool::new(false),
        }
    }

    /// Reserved bytes of reads that have begun and were not answered yet.
    pub(crate) fn reserved(&self) -> usize {
        self.reserved.load(Relaxed)
    }

    /// Sets the number of bytes of answers that wait for the client.
    pub(crate) fn unsent(&self, bytes: usize) {
        self.unsent.store(bytes, Relaxed);
    }

    /// Starts a pass: all running commands are about to be polled, the oldest first.
    pub(crate) fn begin_pass(&self) {
        self.has_waiting_read.store(false, Relaxed);
    }

    /// Releases the reservation of a command that was answered.
    pub(crate) fn release(&self, size: Size) {
        self.reserved.fetch_sub(size.bytes, Relaxed);
        self.unsized_reads.fetch_sub(size.unsized_reads, Relaxed);
    }

    /// Returns the size of reads of these keys. Bytes are capped at one above `bytes_max`; absent keys count
    /// none.
    pub(crate) async fn size<V: Values>(&self, values: &V, keys: &[&[u8]]) -> Result<Size, ValueError> {
        let mut size = Size::default();
        for key in keys {
            match values.size_hint(key) {
                Some(bytes) => size.bytes = self.sum(size.bytes, bytes),
                None => size.unsized_reads += 1,
            }
        }
        if self.unsized_reads.load(Relaxed) + size.unsized_reads <= UNSIZED_READS_MAX {
            return Ok(size);
        }
        let mut looking = pin!(self.look(values, keys));
        poll_fn(|context| {
            let looked = looking.as_mut().poll(context);
            if looked.is_pending() {
                self.has_waiting_read.store(true, Relaxed);
            }
            looked
        })
        .await
    }

    async fn look<V: Values>(&self, values: &V, keys: &[&[u8]]) -> Result<Size, ValueError> {
        let mut bytes = 0;
        for some in keys.chunks(LOOKS_AT_ONCE) {
            for entry in join_all(some.iter().map(|key| values.look(key))).await {
                bytes = self.sum(bytes, entry?.map_or(0, |entry| entry.bytes));
            }
        }
        Ok(Size { bytes, unsized_reads: 0 })
    }

    /// Adds sizes. The result `bytes_max + 1` stands for every larger sum.
    fn sum(&self, bytes: usize, more: u64) -> usize {
        bytes
            .saturating_add(usize::try_from(more).unwrap_or(usize::MAX))
            .min(self.bytes_max.saturating_add(1))
    }

    /// Waits until there is room, and reserves it until [`Admission::release`].
    pub(crate) async fn reserve(&self, size: Size) -> Size {
        // A read larger than `bytes_max` is admitted when nothing else is reserved.
        let size = Size { bytes: size.bytes.min(self.bytes_max), ..size };
        poll_fn(|_| {
            let used = self.reserved().saturating_add(self.unsent.load(Relaxed));
            if size.bytes > 0
                && (self.has_waiting_read.load(Relaxed) || used.saturating_add(size.bytes) > self.bytes_max)
            {
                self.has_waiting_read.store(true, Relaxed);
                return Poll::Pending;
            }
            self.reserved.fetch_add(size.bytes, Relaxed);
            self.unsized_reads.fetch_add(size.unsized_reads, Relaxed);
            Poll::Ready(size)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn reservations_are_made_in_order_and_one_may_be_too_large() {
        let context = &mut Context::from_waker(Waker::noop());
        let admission = Admission::new(100);
        let of = |bytes| Size { bytes, unsized_reads: 0 };
        let mut reserves: Vec<_> =
            [60, 50, 10, 101].map(|bytes| Box::pin(admission.reserve(of(bytes)))).into();
        let mut pass = |expected: &[Option<usize>]| {
            admission.begin_pass();
            let polled: Vec<_> = (reserves.iter_mut())
                .map(|reserve| match reserve.as_mut().poll(context) {
                    Poll::Ready(size) => Some(size.bytes),
                    Poll::Pending => None,
                })
                .collect();
            assert_eq!(polled, expected);
            let mut kept = polled.iter();
            reserves.retain(|_| kept.next().is_some_and(Option::is_none));
        };
        // Ten bytes would fit, but the read of fifty comes first.
        pass(&[Some(60), None, None, None]);
        pass(&[None, None, None]);
        admission.release(of(60));
        admission.unsent(60);
        pass(&[None, None, None]);
        admission.unsent(0);
        pass(&[Some(50), Some(10), None]);
        admission.release(of(50));
        pass(&[None]);
        admission.release(of(10));
        pass(&[Some(100)]);
        assert_eq!(admission.reserved(), 100);
    }
}
