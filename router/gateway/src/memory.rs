//! The memory of requests: `gateway.request_memory`, in three parts that together never exceed it.
//!
//! * `large`, five eighths: memory that requests hold from their body's first byte to the end of their
//!   answer.
//! * `small`, an eighth: the same for small bodies when `large` is full, so that large bodies do not keep
//!   them out.
//! * `scratch`, a quarter: working memory of parsing, rendering and tokenising, for as long as they run.
//!
//! A request is charged before its body is read and waits in line when no memory is free. It never waits
//! for a part while it holds memory of the same part, and `scratch` is taken last and released without
//! waiting: no two requests can wait for each other. A [`MemoryCharge`] is released on drop. Work in the
//! compute pool holds the charges of its request as well, so that memory becomes free only when the work
//! has ended.
//!
//! Charges are upper estimates of allocations (a body is charged three times: as received, as sent to an
//! engine, and as tokens), in units of 1 KiB.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;

const UNIT_BYTES: usize = 1 << 10;

/// Bodies up to this size are small.
pub(crate) const SMALL_BODY_BYTES: usize = 64 << 10;

/// Bytes that a request holds for each byte of its body until its tokens are counted.
const HELD_COPIES: usize = 3;

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// One part of the memory.
#[derive(Debug)]
struct MemoryPool {
    free: Semaphore,
    units: u32,
}

impl MemoryPool {
    fn new(bytes: usize) -> Arc<Self> {
        let units = units(bytes);
        Arc::new(Self { free: Semaphore::new(units as usize), units })
    }

    fn held_bytes(&self) -> usize {
        (self.units as usize - self.free.available_permits()) * UNIT_BYTES
    }

    /// Waits in line until the memory is free. A larger charge than the part is reduced to the whole part.
    async fn charge(self: &Arc<Self>, bytes: usize) -> MemoryCharge {
        let units = units(bytes).min(self.units);
        // The semaphore is never closed.
        if let Ok(permit) = self.free.acquire_many(units).await {
            permit.forget();
        }
        MemoryCharge { part: Arc::clone(self), units: Mutex::new(units) }
    }

    /// Charges memory if it is free now and no request waits for it.
    fn try_charge(self: &Arc<Self>, bytes: usize) -> Option<MemoryCharge> {
        let units = units(bytes);
        self.free.try_acquire_many(units).ok()?.forget();
        Some(MemoryCharge { part: Arc::clone(self), units: Mutex::new(units) })
    }
}

/// Memory that a request or its work holds; released on drop.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    part: Arc<MemoryPool>,
    units: Mutex<u32>,
}

impl MemoryCharge {
    /// Changes the charge. It grows only if the memory is free: a request that holds memory does not wait
    /// for more. Returns whether the charge covers `bytes`.
    pub(crate) fn resize(&self, bytes: usize) -> bool {
        let wanted = units(bytes).min(self.part.units);
        let mut held = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        if wanted <= *held {
            self.part.free.add_permits((*held - wanted) as usize);
            *held = wanted;
        } else if let Ok(permit) = self.part.free.try_acquire_many(wanted - *held) {
            permit.forget();
            *held = wanted;
        } else {
            return false;
        }
        true
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        let held = *self.units.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.part.free.add_permits(held as usize);
    }
}

/// Memory that a request holds, and working memory that processing it needs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Footprint {
    pub(crate) held: Option<Arc<MemoryCharge>>,
    /// Working memory of one job on the whole body, in bytes.
    pub(crate) work_bytes: usize,
}

impl Footprint {
    /// Changes the memory that the request holds; returns whether so much is available.
    pub(crate) fn resize(&self, bytes: usize) -> bool {
        self.held.as_ref().is_none_or(|held| held.resize(bytes))
    }
}

/// Memory of all requests, in three parts.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    large: Arc<MemoryPool>,
    small: Arc<MemoryPool>,
    scratch: Arc<MemoryPool>,
}

impl RequestMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        let (small, scratch) = (bytes / 8, bytes / 4);
        let large = bytes - small - scratch;
        Self {
            large: MemoryPool::new(large),
            small: MemoryPool::new(small),
            scratch: MemoryPool::new(scratch),
        }
    }

    /// Returns the largest body that can be held, in bytes.
    pub(crate) fn body_bytes_max(&self) -> usize {
        self.large.units as usize * UNIT_BYTES / HELD_COPIES
    }

    /// Charges memory for a body of that size and the forms made of it. Waits in line.
    pub(crate) async fn hold(&self, body_bytes: usize) -> MemoryCharge {
        let bytes = HELD_COPIES * body_bytes;
        if let Some(charge) = self.large.try_charge(bytes) {
            return charge;
        }
        let part = if body_bytes <= SMALL_BODY_BYTES { &self.small } else { &self.large };
        part.charge(bytes).await
    }

    /// Charges memory for an answer, if it is free now.
    pub(crate) fn try_hold(&self, bytes: usize) -> Option<MemoryCharge> {
        self.large.try_charge(bytes.min(self.large.units as usize * UNIT_BYTES))
    }

    /// Charges working memory for a job. Waits in line; a job larger than the part runs alone.
    pub(crate) async fn scratch(&self, bytes: usize) -> MemoryCharge {
        self.scratch.charge(bytes).await
    }

    pub(crate) fn held_bytes(&self) -> usize {
        [&self.large, &self.small, &self.scratch].into_iter().map(|part| part.held_bytes()).sum()
    }
}

/// Returns the bytes that a request holds once it is read: its body, the engine's copy of it, and its
/// tokens.
pub(crate) fn held_bytes(body_bytes: usize, tokens: usize) -> usize {
    2 * body_bytes + 4 * tokens
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const MIB: usize = 1 << 20;

    /// Returns the result of polling a future once.
    fn polled<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match polled(pin!(future)) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[test]
    fn requests_hold_no_more_than_the_memory_for_them() {
        let memory = RequestMemory::new(512 * MIB);
        let mut held = Vec::new();
        while let Some(charge) = now(memory.hold(15 * MIB)) {
            held.push(charge);
        }
        // 320 MiB, 45 MiB each.
        assert_eq!(held.len(), 7);
        assert_eq!(memory.held_bytes(), 7 * 45 * MIB);
        // Small bodies still find memory, until their part is used up, too.
        let mut small = Vec::new();
        while let Some(charge) = now(memory.hold(SMALL_BODY_BYTES)) {
            small.push(charge);
        }
        assert!((300..400).contains(&small.len()), "{}", small.len());
        assert!(memory.held_bytes() <= (512 - 128) * MIB);
        // Working memory is independent of the memory that bodies hold.
        let work = now(memory.scratch(usize::MAX)).expect("free");
        assert!(memory.held_bytes() <= 512 * MIB);
        assert!(now(memory.scratch(1)).is_none());
        drop((work, held, small));
        assert_eq!(memory.held_bytes(), 0);
    }

    #[test]
    fn who_waits_for_memory_gets_it_in_turn_and_leaves_nothing_when_it_goes() {
        let memory = RequestMemory::new(64 * MIB);
        assert_eq!(memory.body_bytes_max(), 40 * MIB / 3);
        let first = now(memory.hold(10 * MIB)).expect("free");
        {
            let mut given_up = pin!(memory.hold(5 * MIB));
            assert!(polled(given_up.as_mut()).is_pending());
        }
        let mut second = pin!(memory.hold(5 * MIB));
        let mut third = pin!(memory.hold(MIB));
        assert!(polled(second.as_mut()).is_pending());
        assert!(polled(third.as_mut()).is_pending());
        // The charge is reduced to the bytes really held.
        first.resize(held_bytes(10 * MIB, MIB));
        let Poll::Ready(second) = polled(second.as_mut()) else { panic!("its turn") };
        assert!(polled(third.as_mut()).is_pending());
        // A holder does not wait for more: none is free, and its charge stays.
        first.resize(30 * MIB);
        drop(second);
        let Poll::Ready(third) = polled(third.as_mut()) else { panic!("its turn") };
        assert_eq!(memory.held_bytes(), 24 * MIB + 3 * MIB);
        first.resize(30 * MIB);
        assert_eq!(memory.held_bytes(), 30 * MIB + 3 * MIB);
        drop((first, third));
        assert_eq!(memory.held_bytes(), 0);
    }
}
