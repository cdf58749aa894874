//! A request's arguments to the gate, the gate's answers, and its statistics.

use std::sync::Arc;
use std::time::Duration;

use super::permit::Permit;
use super::wait::Wait;

/// Largest `waiting_max`. A waiter takes about 500 bytes.
pub const WAITING_MAX_LIMIT: usize = 1 << 20;

/// Limits of a gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateConfig {
    /// Largest number of admitted requests, at least 1.
    pub running_max: u32,
    /// Largest number of waiting requests; 0 turns the queue off.
    pub waiting_max: usize,
    /// Largest number of waiting requests of one tenant and priority.
    pub tenant_waiting_max: usize,
    /// Longest expected wait with which a request may enter the queue.
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

/// Arguments of a request for admission.
#[derive(Debug, Clone, Copy)]
pub struct AdmissionRequest<'a> {
    /// Tenant of the request; the unit of fairness.
    pub tenant: &'a Arc<str>,
    /// Priority; a lower value is earlier.
    pub priority: i32,
    /// Share of the tenant while it waits beside other tenants; 0 counts as 1. The weight of a tenant's
    /// first waiting request counts until the tenant has none waiting.
    pub weight: u32,
    /// Estimated tokens.
    pub cost: u64,
    /// Latest time of admission, in nanoseconds of the same clock as `now`.
    pub deadline: u64,
}

/// The request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Expected time until the request would be admitted.
    pub retry_after: Duration,
    /// Whether the queue was full, rather than the wait too long.
    pub is_queue_full: bool,
}

/// Result of asking for admission.
#[derive(Debug)]
#[must_use]
pub enum Entry {
    /// The request was admitted.
    Admitted(Permit),
    /// The request is queued: await it. Dropping it gives up the place.
    Waiting(Wait),
    /// The request was refused immediately; it holds nothing.
    Full(Refusal),
}

/// Counters of a gate, since its start where not said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GateStats {
    /// Requests that are admitted now.
    pub running: u32,
    /// Requests that wait now.
    pub waiting: u32,
    /// Estimated tokens of the requests that wait now.
    pub waiting_tokens: u64,
    /// Estimated tokens per second that all places serve; 0 while unknown.
    pub tokens_per_second: f64,
    /// Requests admitted without waiting.
    pub admitted_at_once: u64,
    /// Requests admitted from the queue.
    pub admitted_from_queue: u64,
    /// Requests refused because the queue was full.
    pub refused_full: u64,
    /// Requests refused because the wait would have been too long.
    pub refused_wait_too_long: u64,
    /// Requests that waited past their deadline.
    pub expired: u64,
    /// Requests that gave up waiting.
    pub abandoned: u64,
}
