//! What a request asks of the gate, what it is told, and what the gate says of itself.

use std::sync::Arc;
use std::time::Duration;

use super::permit::Permit;
use super::wait::Wait;

/// Largest `waiting_max`. A waiter takes about 500 bytes.
pub const WAITING_MAX_LIMIT: usize = 1 << 20;

/// How many may be inside and wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateConfig {
    /// Requests inside, at least 1.
    pub running_max: u32,
    /// Requests that wait; 0 turns the queue off.
    pub waiting_max: usize,
    /// Requests of one tenant and priority that wait.
    pub tenant_waiting_max: usize,
    /// Longest wait that a request is let into the queue for.
    pub wait_max: Duration,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self {
            running_max: 1024,
            waiting_max: 4096,
            tenant_waiting_max: 4096,
            wait_max: Duration::from_secs(60),
        }
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Who; the unit of fairness.
    pub tenant: &'a Arc<str>,
    /// Lower is earlier.
    pub priority: i32,
    /// Share of the tenant while it waits beside others; 0 counts as 1. The one with which a tenant began to wait
    /// counts until it has nobody waiting.
    pub weight: u32,
    /// Estimated tokens.
    pub cost: u64,
    /// Latest time to go inside, in nanoseconds of the same clock as `now`.
    pub deadline: u64,
}

/// The request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// When it would probably be let in.
    pub retry_after: Duration,
    /// Whether the queue was full, rather than the wait too long.
    pub is_queue_full: bool,
}

/// What became of asking.
#[derive(Debug)]
#[must_use]
pub enum Entry {
    /// Inside.
    Admitted(Permit),
    /// In the queue: await it. Dropping it gives up the place.
    Waiting(Wait),
    /// Refused at once; nothing is held.
    Full(Refusal),
}

/// Counts of a gate, since its start where not said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GateStats {
    /// Inside now.
    pub running: u32,
    /// Waiting now.
    pub waiting: u32,
    /// Estimated tokens of the waiting, now.
    pub waiting_tokens: u64,
    /// Estimated tokens per second that all places serve; 0 while unknown.
    pub tokens_per_second: f64,
    /// Let in at once.
    pub admitted_at_once: u64,
    /// Let in from the queue.
    pub admitted_late: u64,
    /// Refused because the queue was full.
    pub refused_full: u64,
    /// Refused because the wait would have been too long.
    pub refused_long: u64,
    /// Waited past their deadline.
    pub expired: u64,
    /// Gave up waiting.
    pub abandoned: u64,
}
