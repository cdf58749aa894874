//! Which reads of one connection may begin, by the bytes that they will bring.
//!
//! The problem: a client sends 32 `GET`s of 64 MiB in one packet. All would run side by side, and only when they are
//! finished would anybody know what they weigh. So a read says its size first and reserves it: from
//! [`Values::size_hint`], which costs nothing, or else from [`Values::look`]. A few reads ([`UNSIZED_READS_MAX`]) go
//! without when the store has no hint, so that a short pipeline does not ask twice for each key.
//!
//! Invariants: reservations are made in the order of the commands, so what a read waits for is always older than
//! itself or on its way to the client, and nothing waits for each other; reservations and unsent answers together stay
//! within `bytes_max`, apart from one read that is larger alone.
//!
//! The order comes from the order in which [`Lanes`](crate::lanes::Lanes) polls: whoever has not been admitted marks
//! the pass, and those behind it wait. No waker is kept, because each pass polls all lanes, and a pass follows whatever
//! makes room. Only the connection's task comes here; atomics are there because its future is `Send`.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;

use futures_util::future::join_all;

use crate::values::{ValueError, Values};

/// Reads of unknown size that one connection has under way.
pub(crate) const UNSIZED_READS_MAX: usize = 4;
/// Sizes that one command asks for at a time.
const LOOKS_AT_ONCE: usize = 16;

/// What a command's reads weigh.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) bytes: usize,
    /// Reads whose bytes are not known.
    unsized_reads: usize,
}

/// What one connection has reserved.
#[derive(Debug)]
pub(crate) struct Admission {
    bytes_max: usize,
    reserved: AtomicUsize,
    unsized_reads: AtomicUsize,
    /// Answers that the client has not taken.
    unsent: AtomicUsize,
    /// An older read has not been admitted in this pass.
    behind: AtomicBool,
}

impl Admission {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            reserved: AtomicUsize::new(0),
            unsized_reads: AtomicUsize::new(0),
            unsent: AtomicUsize::new(0),
            behind: AtomicBool::new(false),
        }
    }

    /// Bytes of reads that have begun and were not answered yet.
    pub(crate) fn reserved(&self) -> usize {
        self.reserved.load(Relaxed)
    }

    /// Tells how many bytes of answers wait for the client.
    pub(crate) fn unsent(&self, bytes: usize) {
        self.unsent.store(bytes, Relaxed);
    }

    /// All lanes are about to be polled, the oldest first.
    pub(crate) fn begin_pass(&self) {
        self.behind.store(false, Relaxed);
    }

    /// A command was answered.
    pub(crate) fn release(&self, size: Size) {
        self.reserved.fetch_sub(size.bytes, Relaxed);
        self.unsized_reads.fetch_sub(size.unsized_reads, Relaxed);
    }

    /// What reads of these keys will bring. The bytes are at most what a reservation can be, and absent keys bring none.
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
                self.behind.store(true, Relaxed);
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

    /// One more than the limit stands for whatever is above it.
    fn sum(&self, bytes: usize, more: u64) -> usize {
        bytes
            .saturating_add(usize::try_from(more).unwrap_or(usize::MAX))
            .min(self.bytes_max.saturating_add(1))
    }

    /// Waits until there is room, and reserves it. To be given back with [`Admission::release`].
    pub(crate) async fn reserve(&self, size: Size) -> Size {
        // A read that is larger than everything fits when there is nothing else.
        let size = Size { bytes: size.bytes.min(self.bytes_max), ..size };
        poll_fn(|_| {
            let used = self.reserved().saturating_add(self.unsent.load(Relaxed));
            if size.bytes > 0
                && (self.behind.load(Relaxed) || used.saturating_add(size.bytes) > self.bytes_max)
            {
                self.behind.store(true, Relaxed);
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
        // Ten would fit, but fifty comes first.
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
