//! The copies in flight, with the purpose of each.

use std::collections::HashMap;

use dataplane_memory::{Copier, CopyDone, CopyRefused, DeviceError, SlotCopy};

use crate::node::TransferId;

/// Purpose of a copy.
#[derive(Debug, Clone, Copy)]
pub(super) enum Purpose {
    /// A block of this part of a transfer that is sent.
    Out { transfer: TransferId, part: u64 },
    /// `rows` rows of a block of a transfer that is received.
    In { transfer: TransferId, block: u32, rows: u32 },
}

/// Result of starting a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Started {
    Yes,
    /// The copier is full; the copy is retried later.
    Full,
    /// The copier cannot do the copy: it reaches other memory only, or the slots are too small.
    Never,
}

#[derive(Debug)]
pub(super) struct Copies<C> {
    pub(super) copier: C,
    purposes: HashMap<u64, Purpose>,
    capacity: usize,
    next_token: u64,
    done: Vec<CopyDone>,
}

impl<C: Copier> Copies<C> {
    pub(super) fn new(copier: C, capacity: usize) -> Self {
        let (purposes, done) = (HashMap::with_capacity(capacity), Vec::with_capacity(capacity));
        Self { copier, purposes, capacity: capacity.max(1), next_token: 0, done }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.purposes.is_empty()
    }

    /// Starts `copy`, whose token is set here.
    pub(super) fn start(&mut self, copy: SlotCopy, purpose: Purpose) -> Started {
        if self.purposes.len() >= self.capacity {
            return Started::Full;
        }
        let token = self.next_token;
        match self.copier.submit(SlotCopy { token, ..copy }) {
            Ok(()) => {
                self.next_token += 1;
                self.purposes.insert(token, purpose);
                Started::Yes
            }
            Err(CopyRefused::Full(_)) => Started::Full,
            Err(CopyRefused::Outside(_) | CopyRefused::Unreachable(_)) => Started::Never,
        }
    }

    pub(super) fn reap(&mut self, ended: &mut Vec<(Purpose, Result<(), DeviceError>)>) {
        self.copier.poll(&mut self.done);
        for CopyDone { token, result } in self.done.drain(..) {
            let purpose = self.purposes.remove(&token);
            assert!(purpose.is_some(), "copy {token} ended twice, or was never submitted");
            ended.extend(purpose.map(|purpose| (purpose, result)));
        }
    }
}
