//! Counters of the object tier.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($name:ident: $help:literal,)*) => {
        /// Counters of the object tier. Each only grows.
        #[derive(Debug, Default)]
        pub struct ObjectCounters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl ObjectCounters {
            /// Name, help text and value of each counter.
            #[must_use]
            pub fn snapshot(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), $help, self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    look_ups: "Look-ups of a chain",
    hit_blocks: "Blocks that look-ups found",
    missed_runs: "Runs that are not there",
    read_blocks: "Blocks handed out after verification",
    read_bytes: "Payload bytes read, before verification",
    written_bytes: "Object bytes uploaded",
    stored_runs: "Runs stored",
    present_runs: "Runs that were there already when they were to be stored",
    throttled_puts: "Puts dropped: too many in flight, breaker open or server asks to slow down",
    failed_puts: "Puts that failed",
    requests: "Requests, without retries",
    retries: "Requests made again",
    retries_denied: "Retries not made because the budget was used up",
    failures: "Tries that failed, except not found and precondition",
    deadlines: "Requests given up at the caller's deadline",
    breaker_opened: "Times the breaker opened",
    breaker_rejections: "Requests that an open breaker turned into a miss",
    damaged_reads: "Reads whose bytes were not what had been stored",
    damaged_objects: "Objects that two reads found damaged",
    foreign_runs: "Objects of another run length under a key that was asked for",
    expired_runs: "Objects that were older than their time to live",
    replaced_objects: "Objects that changed between the read of index and payload",
    deleted_objects: "Objects deleted",
    swept_objects: "Objects deleted by sweeps",
    unconditional_puts: "Puts without a condition because the server knows none",
}

impl ObjectCounters {
    /// The value of one counter; 0 for an unknown name.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        self.snapshot().into_iter().find(|(counter, ..)| *counter == name).map_or(0, |(.., value)| value)
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
