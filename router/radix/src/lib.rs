//! The prefix index: which worker holds how long a prefix, and in which tier.

mod arena;
mod children;
mod grace;
mod holders;
mod index;
mod keys;
mod limits;
mod node;
mod parked;
mod reader;
mod sync;
mod writer;

pub use holders::Tier;
pub use index::{AtBound, Held, Index, IndexConfig, IndexWriter, Member, Outcome, Usage};
pub use keys::EngineHash;
pub use limits::{MEMBERS_MAX, READERS_MAX};
pub use reader::{Overlaps, Reader};

/// What a model check breaks on purpose, to see that it would notice.
#[cfg(loom)]
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Nothing.
    Nothing,
    /// What is unlinked is reused at once.
    NoGrace,
    /// A split is published before the new node is complete.
    EarlySplit,
    /// Readers do not look at the shape again.
    NoSecondLook,
}

#[cfg(loom)]
static BROKEN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Breaks something in the following models.
#[cfg(loom)]
#[doc(hidden)]
pub fn break_on_purpose(what: Broken) {
    BROKEN.store(what as u32, std::sync::atomic::Ordering::SeqCst);
}

#[cfg(loom)]
pub(crate) fn broken(what: Broken) -> bool {
    BROKEN.load(std::sync::atomic::Ordering::SeqCst) == what as u32
}
