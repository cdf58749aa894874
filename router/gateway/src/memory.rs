//! The memory that requests may take: `gateway.request_memory`, in three parts that together are never more than it.
//!
//! * `large`, five eighths: what requests hold from their body's first byte to the end of their answer.
//! * `small`, an eighth: the same for small bodies when `large` is full, so that large ones do not keep them out.
//! * `scratch`, a quarter: what parsing, rendering and tokenising take beside that, for as long as they run.
//!
//! A request is charged before its body is read and waits in line when there is no room. It never waits for one part while
//! it holds of the same part, and `scratch` is taken last and given back without waiting for anything: no two requests can
//! wait for each other. A [`MemoryCharge`] gives back on drop. Work in the compute pool holds the charges of its request as
//! well, so that memory is free for others only when the work has really ended.
//!
//! Amounts are estimates from above of what is allocated (a body is charged three times: as it came, as it is sent to
//! an engine, and as tokens), in units of 1 KiB.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;

const UNIT_BYTES: usize = 1 << 10;

/// Bodies up to this size are small.
pub(crate) const SMALL_BODY_BYTES: usize = 64 << 10;

/// What a request holds for each byte of its body until its tokens are counted.
const HELD_COPIES: usize = 3;

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// One part of the memory.
#[derive(Debug)]
struct MemoryPart {
    free: Semaphore,
    units: u32,
}

impl MemoryPart {
    fn new(bytes: usize) -> Arc<Self> {
        let units = units(bytes);
        Arc::new(Self { free: Semaphore::new(units as usize), units })
    }

    fn held_bytes(&self) -> usize {
        (self.units as usize - self.free.available_permits()) * UNIT_BYTES
    }

    /// Waits in line until there is room. More than all of it is all of it.
    async fn charge(self: &Arc<Self>, bytes: usize) -> MemoryCharge {
        let units = units(bytes).min(self.units);
        // The semaphore is never closed.
        if let Ok(permit) = self.free.acquire_many(units).await {
            permit.forget();
        }
        MemoryCharge { part: Arc::clone(self), units: Mutex::new(units) }
    }

    /// The same, if there is room now and no request waits for it.
    fn try_charge(self: &Arc<Self>, bytes: usize) -> Option<MemoryCharge> {
        let units = units(bytes);
        self.free.try_acquire_many(units).ok()?.forget();
        Some(MemoryCharge { part: Arc::clone(self), units: Mutex::new(units) })
    }
}

/// Memory that a request or its work holds; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    part: Arc<MemoryPart>,
    units: Mutex<u32>,
}

impl MemoryCharge {
    /// Holds so much from now on. More is taken only if it is free: a request that holds memory does not wait for more of it. Whether
    /// it holds so much.
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

/// What a request holds, and what working on it takes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Footprint {
    pub(crate) held: Option<Arc<MemoryCharge>>,
    /// Bytes that one piece of work on the whole body takes beside it.
    pub(crate) work_bytes: usize,
}

impl Footprint {
    /// What the request holds from now on; whether there is so much.
    pub(crate) fn resize(&self, bytes: usize) -> bool {
        self.held.as_ref().is_none_or(|held| held.resize(bytes))
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    large: Arc<MemoryPart>,
    small: Arc<MemoryPart>,
    scratch: Arc<MemoryPart>,
}

impl RequestMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        let (small, scratch) = (bytes / 8, bytes / 4);
        let large = bytes - small - scratch;
        Self {
            large: MemoryPart::new(large),
            small: MemoryPart::new(small),
            scratch: MemoryPart::new(scratch),
        }
    }

    /// The largest body that can ever be held.
    pub(crate) fn body_bytes_max(&self) -> usize {
        self.large.units as usize * UNIT_BYTES / HELD_COPIES
    }

    /// Memory for a body of that size and what is made of it. Waits in line.
    pub(crate) async fn hold(&self, body_bytes: usize) -> MemoryCharge {
        let bytes = HELD_COPIES * body_bytes;
        if let Some(charge) = self.large.try_charge(bytes) {
            return charge;
        }
        let part = if body_bytes <= SMALL_BODY_BYTES { &self.small } else { &self.large };
        part.charge(bytes).await
    }

    /// The same for so many bytes of an answer, if there is room now.
    pub(crate) fn try_hold(&self, bytes: usize) -> Option<MemoryCharge> {
        self.large.try_charge(bytes.min(self.large.units as usize * UNIT_BYTES))
    }

    /// Memory for a piece of work. Waits in line; a piece that takes more than all of it runs alone.
    pub(crate) async fn scratch(&self, bytes: usize) -> MemoryCharge {
        self.scratch.charge(bytes).await
    }

    pub(crate) fn held_bytes(&self) -> usize {
        [&self.large, &self.small, &self.scratch].into_iter().map(|part| part.held_bytes()).sum()
    }
}

/// What a request holds once it is read: its body, the engine's copy of it, and its tokens.
pub(crate) fn held_bytes(body_bytes: usize, tokens: usize) -> usize {
    2 * body_bytes + 4 * tokens
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const MIB: usize = 1 << 20;

    /// What a future is after one look.
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
        // Small ones find room all the same; they, too, come to an end.
        let mut small = Vec::new();
        while let Some(charge) = now(memory.hold(SMALL_BODY_BYTES)) {
            small.push(charge);
        }
        assert!((300..400).contains(&small.len()), "{}", small.len());
        assert!(memory.held_bytes() <= (512 - 128) * MIB);
        // Work does not wait for what bodies hold.
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
        // Settled at what it really holds.
        first.resize(held_bytes(10 * MIB, MIB));
        let Poll::Ready(second) = polled(second.as_mut()) else { panic!("its turn") };
        assert!(polled(third.as_mut()).is_pending());
        // Holding does not wait for more: there is none, and it goes on with what it has.
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
