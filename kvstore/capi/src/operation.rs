//! Requests for one block, or for a match, and their outcome.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::backend::{Backend, ChainPosition, GetOutcome, Identity};
use crate::buffers::{Destination, Ranges, Source};
use crate::status::{Failure, Status};

/// A request with all pointers checked.
#[derive(Debug)]
pub(crate) enum Operation {
    Get { identity: Identity, meta: Ranges, payload: Ranges },
    Put { identity: Identity, meta: Ranges, payload: Ranges },
    Delete { identity: Identity },
    Match { identities: Vec<Identity> },
}

/// Result of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) status: Status,
    pub(crate) meta_bytes: usize,
    /// For a match or a transfer: number of blocks.
    pub(crate) payload_bytes: usize,
}

impl Outcome {
    pub(crate) fn of(status: Status) -> Self {
        Self { status, meta_bytes: 0, payload_bytes: 0 }
    }
}

impl Operation {
    /// Number of identities that the request stores outside of itself.
    pub(crate) fn identities(&self) -> usize {
        match self {
            Self::Match { identities } => identities.len(),
            _ => 0,
        }
    }

    /// Carries the request out; a panic of the store becomes a failure.
    ///
    /// # Safety
    /// The ranges must be usable as the header says for the time of the call: a get's for writes, a put's for reads.
    pub(crate) unsafe fn carry_out(self, backend: &dyn Backend) -> Result<Outcome, Failure> {
        catch_store_panic(|| match self {
            Self::Get { identity, meta, payload } => {
                // SAFETY: writable and used by no other code for the time of this call, by the contract of this
                // function.
                let mut meta = unsafe { Destination::new(meta) };
                // SAFETY: as above.
                let mut payload = unsafe { Destination::new(payload) };
                let outcome = backend.get(&identity, &mut meta, &mut payload)?;
                if outcome != GetOutcome::Read {
                    return Ok(Outcome::of(outcome.into()));
                }
                Ok(Outcome { status: Status::Ok, meta_bytes: meta.filled(), payload_bytes: payload.filled() })
            }
            Self::Put { identity, meta, payload } => {
                // SAFETY: readable and not written to for the time of this call, by the contract of this function.
                let meta = unsafe { Source::new(meta) };
                // SAFETY: as above.
                let payload = unsafe { Source::new(payload) };
                Ok(Outcome::of(backend.put(&identity, ChainPosition::default(), &meta, &payload)?.into()))
            }
            Self::Delete { identity } => {
                let there = backend.delete(&identity)?;
                Ok(Outcome::of(if there { Status::Ok } else { Status::Miss }))
            }
            Self::Match { identities } => {
                let matched = backend.matched(&identities)?;
                Ok(Outcome { payload_bytes: matched, ..Outcome::of(Status::Ok) })
            }
        })
    }
}

/// Runs work of the store; a panic in it becomes a failure.
pub(crate) fn catch_store_panic<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // The panic drops what the closure captures, or the captured values are not accessed again.
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(Failure::new(Status::Panicked, "the store panicked")))
}
