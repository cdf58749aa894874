//! Counters of nodes and clients. Written by the thread that drives a side, read by any thread; all relaxed, as
//! nothing depends on their order. Counters only grow; levels are present values.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Name, help text and value of a counter.
pub(crate) type CounterSample = (&'static str, &'static str, u64);

macro_rules! counters {
    ($(#[$doc:meta])* $visibility:vis $name:ident, $count:literal, { $($field:ident: $help:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        $visibility struct $name {
            $(#[doc = $help] $visibility $field: AtomicU64,)*
        }

        impl $name {
            /// Name, help text and value of each counter.
            #[must_use]
            $visibility fn snapshot(&self) -> [CounterSample; $count] {
                [$((stringify!($field), $help, self.$field.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// Counters of a pool node.
    pub PoolCounters, 19, {
        slots: "Slots in memory (level)",
        free_slots: "Free slots (level)",
        blocks: "Blocks in memory (level)",
        leases: "Leases and reservations out (level)",
        fenced_slots: "Slots kept until the connection of a late client has ended (level)",
        verifying_blocks: "Blocks that wait for their checksum (level)",
        peers: "Connected clients (level)",
        look_ups: "Look-ups answered",
        hit_blocks: "Blocks found by look-ups",
        missed_blocks: "Blocks asked for beyond the first that was not here",
        reserved_blocks: "Slots granted to clients",
        refused_blocks: "Offers refused for want of a slot or because of their size",
        registered_blocks: "Blocks written, verified and registered",
        damaged_blocks: "Blocks whose bytes had the wrong checksum",
        evicted_blocks: "Blocks evicted from memory; the disk may still have them",
        expired_leases: "Leases that their client did not end in time",
        fences: "Connections ended because of an expired lease",
        violations: "Connections ended because of a malformed or unexpected message",
        other_versions: "Connections ended because the client speaks another version of the protocol",
    }
}

counters! {
    /// Counters of one node as a client sees it.
    pub NodeCounters, 13, {
        usable: "1 while it is asked; 0 until it has first answered, and while it cannot be reached or failed and is left alone (level)",
        breaker: "0 closed, 1 open, 2 probing (level)",
        latency_us: "Moving average of the time to answer a look-up (level)",
        leases: "Leases held there (level)",
        transfers: "Reads and writes in flight (level)",
        requests: "Requests sent",
        timeouts: "Requests not answered in time",
        read_blocks: "Blocks read and verified, or read in place",
        damaged_blocks: "Blocks read whose checksum was wrong",
        failures: "Times that it was left alone because it could not be reached or failed",
        refused: "Requests that the node refused for want of room",
        read_bytes: "Bytes read and verified",
        stored_blocks: "Blocks that it has taken",
    }
}

counters! {
    /// Counters of a client, over all nodes.
    pub(crate) PoolClientTotals, 18, {
        operations: "Operations under way (level)",
        usable_nodes: "Nodes that are asked (level)",
        held_slots: "Target slots of ended operations whose reads are still in flight (level)",
        asked_blocks: "Blocks asked for",
        hit_blocks: "Blocks fetched and verified, or found where they can be read in place",
        mapped_blocks: "Blocks of nodes on this host that are read where they lie",
        missed_blocks: "Blocks asked for and not fetched",
        damaged_blocks: "Blocks read whose checksum was wrong",
        stored_blocks: "Blocks stored",
        present_blocks: "Blocks offered that the node had or was getting",
        full_blocks: "Blocks offered that the node had no room for",
        failed_blocks: "Blocks offered and not stored for another reason",
        deadlines: "Operations ended by their deadline",
        late_answers: "Answers to requests of operations that had ended",
        second_asks: "Groups asked for again at their other home",
        replicated_groups: "Groups that got a second home",
        dropped_replications: "Hot groups not replicated because the queue was full",
        lost_leases: "Leases that ended with their connection or by time",
    }
}

/// Counters of a client.
#[derive(Debug, Default)]
pub struct RemoteCounters {
    pub(crate) totals: PoolClientTotals,
    /// Locked when membership changes and when counters are read, never for an operation.
    nodes: Mutex<Vec<(String, Arc<NodeCounters>)>>,
}

impl RemoteCounters {
    /// Name, help text and value of each counter over all nodes.
    #[must_use]
    pub fn snapshot(&self) -> [CounterSample; 18] {
        self.totals.snapshot()
    }

    /// Returns name and counters of the present nodes.
    #[must_use]
    pub fn nodes(&self) -> Vec<(String, Arc<NodeCounters>)> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_nodes(&self, nodes: Vec<(String, Arc<NodeCounters>)>) {
        *self.nodes.lock().unwrap_or_else(PoisonError::into_inner) = nodes;
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: usize) {
    counter.fetch_add(amount as u64, Ordering::Relaxed);
}

/// Sets a level.
pub(crate) fn set(level: &AtomicU64, value: usize) {
    level.store(value as u64, Ordering::Relaxed);
}
