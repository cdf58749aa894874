//! Deterministic work for the prefix index, the same for every side of a comparison.
//!
//! * [`Operation`] and [`text`]: what is stored, removed and looked up, and its form as a file.
//! * [`tree`]: prompts that share prefixes as chats do.
//! * [`mooncake`]: the published conversation trace; [`azure`]: Azure's traces of lengths.
//!
//! The sequence hash of a block is the xxh3 chain over block hashes, since some indexes work only with that.

#![forbid(unsafe_code)]

pub mod azure;
pub mod mooncake;
mod operation;
mod random;
pub mod text;
pub mod tree;

pub use operation::{Operation, Workload, chained};
pub use random::Random;
