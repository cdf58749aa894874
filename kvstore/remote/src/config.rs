//! Settings with defaults and ranges.

use std::time::Duration;

use crate::RemoteError;
use crate::wire::BLOCKS_PER_MESSAGE_MAX;

/// Settings of a node that serves its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Maximum number of leases and reservations at a time, of all clients. 1 to 1048576.
    pub leases_max: usize,
    /// Maximum number of leases and reservations of one client. 1 to 1048576.
    pub leases_per_peer_max: usize,
    /// Maximum number of slots that one client has reserved and not committed. 1 to 1048576.
    pub reserved_slots_per_peer_max: usize,
    /// Time within which a client must have read the blocks it found, or written the slots it reserved; a
    /// client that takes longer is disconnected. 100 ms to 10 min.
    pub lease: Duration,
    /// Maximum number of messages queued for one client; a client beyond it is disconnected. 16 to 65536.
    pub outbox_max: usize,
    /// Maximum number of blocks that clients reported as damaged and that wait to be verified. 1 to 65536.
    pub suspects_max: usize,
    /// Maximum number of events handled in one poll. 1 to 65536.
    pub poll_budget: usize,
    /// Maximum number of bytes verified in one poll. 8 KiB to 1 GiB.
    pub verify_bytes_per_poll: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            leases_max: 16_384,
            leases_per_peer_max: 4096,
            reserved_slots_per_peer_max: 1024,
            lease: Duration::from_secs(10),
            outbox_max: 1024,
            suspects_max: 256,
            poll_budget: 256,
            verify_bytes_per_poll: 1 << 20,
        }
    }
}

impl PoolConfig {
    /// Checks the ranges. The error lists all values that are out of range.
    pub fn check(&self) -> Result<(), RemoteError> {
        let mut ranges = Ranges::default();
        ranges.count("leases_max", self.leases_max, 1, 1 << 20);
        ranges.count("leases_per_peer_max", self.leases_per_peer_max, 1, 1 << 20);
        ranges.count("reserved_slots_per_peer_max", self.reserved_slots_per_peer_max, 1, 1 << 20);
        ranges.milliseconds("lease", self.lease, 100, 600_000);
        ranges.count("outbox_max", self.outbox_max, 16, 1 << 16);
        ranges.count("suspects_max", self.suspects_max, 1, 1 << 16);
        ranges.count("poll_budget", self.poll_budget, 1, 1 << 16);
        ranges.count("verify_bytes_per_poll", self.verify_bytes_per_poll, 8 << 10, 1 << 30);
        ranges.end()
    }
}

/// Settings of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Consecutive blocks of a chain that live on one node. Must be equal at all clients of a pool. 1 to 64.
    pub group_blocks: usize,
    /// Maximum number of nodes. 1 to 1024.
    pub nodes_max: usize,
    /// Maximum number of look-ups, fetches and stores in flight. 1 to 65536.
    pub operations_max: usize,
    /// Maximum number of blocks of one look-up, fetch or store. 1 to 65536.
    pub blocks_max: usize,
    /// Time after which a request without an answer counts as a failure of the node. 1 ms to 60 s.
    pub request_timeout: Duration,
    /// Time after which a read, a write or a commit ends the connection. Less than half of the nodes' lease.
    /// 1 ms to 5 min.
    pub transfer_timeout: Duration,
    /// Number of failures in a row after which no more requests go to a node. 1 to 1000.
    pub failures_to_open: u32,
    /// First wait before the node is probed. 1 ms to 60 s.
    pub open_first: Duration,
    /// Maximum wait between probes, reached by doubling. `open_first` to 10 min.
    pub open_max: Duration,
    /// Maximum time for connecting and the answer to the probe. 1 ms to 60 s.
    pub probe_timeout: Duration,
    /// Maximum number of reads in flight to one node, and of writes. 1 to 4096.
    pub transfers_in_flight_max: usize,
    /// Maximum number of messages of one lane queued for one node. 16 to 65536.
    pub outbox_max: usize,
    /// Maximum number of events handled in one poll. 1 to 65536.
    pub poll_budget: usize,
    /// Maximum number of bytes verified in one poll. 8 KiB to 1 GiB.
    pub verify_bytes_per_poll: usize,
    /// Number of requests for a group within `hot_window` from which on it gets a second home; 0: never. 0 to
    /// 255.
    pub hot_count: u8,
    /// Window of `hot_count`. 10 ms to 1 h.
    pub hot_window: Duration,
    /// Maximum bytes per second written for second homes; 0: none.
    pub replicate_bytes_per_second: u64,
    /// Maximum number of groups that wait for their second home. 1 to 4096.
    pub replications_max: usize,
    /// Maximum number of groups whose second home is remembered. 1 to 1048576.
    pub replicated_max: usize,
    /// Counters in each row of the sketch that finds hot groups. 64 to 1048576.
    pub sketch_width: usize,
    /// Seed of the randomness in retries and choices. Any value.
    pub seed: u64,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            group_blocks: 32,
            nodes_max: 64,
            operations_max: 1024,
            blocks_max: 8192,
            request_timeout: Duration::from_millis(200),
            transfer_timeout: Duration::from_secs(2),
            failures_to_open: 3,
            open_first: Duration::from_millis(100),
            open_max: Duration::from_secs(10),
            probe_timeout: Duration::from_secs(1),
            transfers_in_flight_max: 64,
            outbox_max: 1024,
            poll_budget: 256,
            verify_bytes_per_poll: 4 << 20,
            hot_count: 8,
            hot_window: Duration::from_secs(10),
            replicate_bytes_per_second: 64 << 20,
            replications_max: 64,
            replicated_max: 16_384,
            sketch_width: 4096,
            seed: 1,
        }
    }
}

impl RemoteConfig {
    /// Checks the ranges. The error lists all values that are out of range.
    pub fn check(&self) -> Result<(), RemoteError> {
        let mut ranges = Ranges::default();
        ranges.count("group_blocks", self.group_blocks, 1, BLOCKS_PER_MESSAGE_MAX);
        ranges.count("nodes_max", self.nodes_max, 1, 1024);
        ranges.count("operations_max", self.operations_max, 1, 1 << 16);
        ranges.count("blocks_max", self.blocks_max, 1, 1 << 16);
        ranges.milliseconds("request_timeout", self.request_timeout, 1, 60_000);
        ranges.milliseconds("transfer_timeout", self.transfer_timeout, 1, 300_000);
        ranges.count("failures_to_open", self.failures_to_open as usize, 1, 1000);
        ranges.milliseconds("open_first", self.open_first, 1, 60_000);
        ranges.milliseconds("open_max", self.open_max, self.open_first.as_millis() as usize, 600_000);
        ranges.milliseconds("probe_timeout", self.probe_timeout, 1, 60_000);
        ranges.count("transfers_in_flight_max", self.transfers_in_flight_max, 1, 4096);
        ranges.count("outbox_max", self.outbox_max, 16, 1 << 16);
        ranges.count("poll_budget", self.poll_budget, 1, 1 << 16);
        ranges.count("verify_bytes_per_poll", self.verify_bytes_per_poll, 8 << 10, 1 << 30);
        ranges.milliseconds("hot_window", self.hot_window, 10, 3_600_000);
        ranges.count("replications_max", self.replications_max, 1, 4096);
        ranges.count("replicated_max", self.replicated_max, 1, 1 << 20);
        ranges.count("sketch_width", self.sketch_width, 64, 1 << 20);
        ranges.end()
    }
}

#[derive(Default)]
struct Ranges {
    problems: Vec<String>,
}

impl Ranges {
    fn count(&mut self, name: &str, value: usize, least: usize, most: usize) {
        if value < least || value > most {
            self.problems.push(format!("{name} is {value}, which is not in {least}..={most}"));
        }
    }

    fn milliseconds(&mut self, name: &str, value: Duration, least: usize, most: usize) {
        self.count(&format!("{name} in ms"), value.as_millis() as usize, least, most);
    }

    fn end(self) -> Result<(), RemoteError> {
        if self.problems.is_empty() { Ok(()) } else { Err(RemoteError::Config { problems: self.problems }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_named_at_once() {
        assert!(RemoteConfig::default().check().is_ok() && PoolConfig::default().check().is_ok());
        let wrong = RemoteConfig { group_blocks: 65, nodes_max: 0, ..RemoteConfig::default() };
        let Err(RemoteError::Config { problems }) = wrong.check() else { panic!("accepted") };
        assert_eq!(problems.len(), 2, "{problems:?}");
        let wrong = PoolConfig { lease: Duration::ZERO, ..PoolConfig::default() };
        assert!(wrong.check().is_err());
    }
}
