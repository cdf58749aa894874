//! A suite that checks the contract of [`IoEngine`], clause by clause, on any engine.
//!
//! [`conformance`] opens the engine several times over the same storage, whose contents it destroys. Each check
//! is named for what it proves and panics with the seed when the engine violates the contract. Contents are
//! generated from a tag for each block, so that a block from another place, or from an earlier write, differs
//! from the right one.
//!
//! For tests: allocates and copies.

mod driving;
mod model;
mod random;
mod rig;
mod shapes;

use std::time::{Duration, Instant};

use dataplane_memory::PageSize;

use crate::IoEngine;
pub use crate::memory::{MemoryEngine, MemoryFiles};
pub use driving::{drop_waits, full_hands_back, poll_keeps_its_budget, sleep_and_wake, sync};
pub use model::random_requests;
pub use random::Random;
pub use shapes::{geometry_is_usable, invalid_requests, sizes_and_alignments};

/// Assumptions and extent of the suite.
#[derive(Debug, Clone)]
pub struct Conformance {
    /// Seed of every draw.
    pub seed: u64,
    /// Number of requests of the random check.
    pub requests: usize,
    /// Bytes of each file that are used, at its start and (a block) at its end.
    pub bytes_max: u64,
    /// Whether the engine accepts memory that was not registered; if not, such requests must fail as
    /// `Unmapped`.
    pub unregistered: bool,
    /// Page size of the slabs that are registered.
    pub pages: PageSize,
    /// Time after which a batch counts as stuck.
    pub patience: Duration,
}

impl Default for Conformance {
    fn default() -> Self {
        Self {
            seed: 1,
            requests: 2000,
            bytes_max: 16 << 20,
            unregistered: true,
            pages: PageSize::Standard,
            patience: Duration::from_secs(30),
        }
    }
}

/// Opens the engine under test on the same storage at each call. The previous one has been dropped.
pub type Open<'a> = dyn FnMut() -> Box<dyn IoEngine> + 'a;

/// Runs every check. Needs at least 1 MiB in each file.
///
/// # Panics
/// When the engine violates the contract; the message has the clause and the seed.
pub fn conformance(open: &mut Open<'_>, options: &Conformance) {
    eprintln!("conformance: seed {}, {} random requests", options.seed, options.requests);
    type Check = fn(&mut Open<'_>, &Conformance);
    let checks: [(&str, Check); 9] = [
        ("geometry", geometry_is_usable),
        ("sizes and alignments", sizes_and_alignments),
        ("invalid requests", invalid_requests),
        ("full", full_hands_back),
        ("budget", poll_keeps_its_budget),
        ("sleep and wake", sleep_and_wake),
        ("random requests", random_requests),
        ("drop", drop_waits),
        ("sync", sync),
    ];
    for (name, check) in checks {
        let started = Instant::now();
        check(open, options);
        eprintln!("conformance: {name}: ok, {} ms", started.elapsed().as_millis());
    }
}
