//! Fault injection for tests: a fabric that lets one in so many slot writes land with a wrong byte.
//!
//! [`CorruptingFabric`] wraps any transport. The write is posted unchanged and is followed by an inline write
//! of one flipped byte, so that real bytes in the peer's real memory are wrong: what the receiver's checksum
//! must catch. Used by the tests (`[faults]` in the configuration); not constructed when it is off.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::{Slab, SlabKind};

use crate::{
    ConnectError, Event, Fabric, Full, INLINE_BYTES_MAX, Operation, PeerId, Source, Target, WorkRequest,
};

/// A fabric that corrupts some of the slot writes that it passes on.
pub struct CorruptingFabric<F> {
    inner: F,
    one_in: u64,
    random: fastrand::Rng,
}

impl<F: Fabric> CorruptingFabric<F> {
    /// Corrupts about one in `one_in` writes (at least 1: every write), chosen by `seed`.
    pub fn new(inner: F, one_in: u64, seed: u64) -> Self {
        Self { inner, one_in: one_in.max(1), random: fastrand::Rng::with_seed(seed ^ 0xC0AA) }
    }

    fn chosen(&mut self) -> bool {
        self.random.u64(..self.one_in) == 0
    }

    /// Posts the write without its immediate, then the wrong byte with the immediate.
    fn post_corrupted(&mut self, request: WorkRequest) -> Result<(), Full> {
        let WorkRequest { id, peer, priority, operation } = request;
        let Operation::Write { source: Source::Slot { slot, offset, len }, target, rows, immediate } =
            operation
        else {
            return self.inner.post(WorkRequest { id, peer, priority, operation });
        };
        // With rows, a byte of the first row: it has the same distance from the start on both sides.
        let middle = rows.map_or(len, |rows| rows.bytes) / 2;
        let mut wrong = [0_u8; INLINE_BYTES_MAX];
        slot.slab().read(slot.slot(), (offset + middle) as usize, &mut wrong[..1]);
        wrong[0] ^= 0x40;
        let source = Source::Slot { slot, offset, len };
        let whole = Operation::Write { source, target, rows, immediate: None };
        if let Err(Full(refused)) = self.inner.post(WorkRequest { id: 0, peer, priority, operation: whole }) {
            let Operation::Write { source, target, .. } = refused.operation else {
                return Err(Full(refused));
            };
            let operation = Operation::Write { source, target, rows, immediate };
            return Err(Full(WorkRequest { id, peer, priority, operation }));
        }
        let target = Target { offset: target.offset + middle, ..target };
        let source = Source::Inline { bytes: wrong, len: 1 };
        let operation = Operation::Write { source, target, rows: None, immediate };
        self.inner.post(WorkRequest { id, peer, priority, operation })
    }
}

impl<F: Fabric> Fabric for CorruptingFabric<F> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        self.inner.connect(address)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        // Bytes in a device's memory cannot be read here: those writes are passed on unchanged.
        let is_slot_write = matches!(
            &request.operation,
            Operation::Write { source: Source::Slot { slot, len: 1.., .. }, .. } if slot.slab().device().is_none()
        );
        if is_slot_write && self.chosen() { self.post_corrupted(request) } else { self.inner.post(request) }
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        self.inner.poll(budget, events)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.inner.disconnect(peer);
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.inner.wait_descriptors(descriptors);
    }

    fn prepare_wait(&mut self) -> bool {
        self.inner.prepare_wait()
    }

    fn checks_generations(&self) -> bool {
        self.inner.checks_generations()
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.inner.shown_slab(kind)
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.inner.carries(slab)
    }

    fn is_shown_to(&self, peer: PeerId, kind: SlabKind) -> bool {
        self.inner.is_shown_to(peer, kind)
    }

    fn mapped_slab(&self, peer: PeerId) -> Option<Arc<Slab>> {
        self.inner.mapped_slab(peer)
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        self.inner.peer_shows(peer, kind)
    }

    fn reaches(&self, peer: PeerId, here: Option<&Arc<Slab>>, there: SlabKind) -> bool {
        self.inner.reaches(peer, here, there)
    }

    fn message_bytes_max(&self) -> usize {
        self.inner.message_bytes_max()
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }
}
