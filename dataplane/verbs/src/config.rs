//! Settings of one RDMA fabric.

use std::time::Duration;

use dataplane_fabric::PeerAccess;
use dataplane_fabric::auth::{SharedKey, Transport, Versions};

use crate::VerbsError;
use crate::device::PARTITION_MASK;

/// Largest message of an Ethernet or InfiniBand packet that a path may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathMtu {
    /// 256 bytes.
    B256 = 1,
    /// 512 bytes.
    B512 = 2,
    /// 1024 bytes.
    B1024 = 3,
    /// 2048 bytes.
    B2048 = 4,
    /// 4096 bytes.
    B4096 = 5,
}

impl PathMtu {
    /// From the number of bytes.
    #[must_use]
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        (1..=5).find(|&code| 128 << code == bytes).and_then(Self::from_code)
    }

    /// From `enum ibv_mtu`.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::B256),
            2 => Some(Self::B512),
            3 => Some(Self::B1024),
            4 => Some(Self::B2048),
            5 => Some(Self::B4096),
            _ => None,
        }
    }

    /// As a number of bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        128 << self as u32
    }
}

/// Settings of the RDMA fabric. [`VerbsConfig::check`] checks the ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsConfig {
    /// Port of the device, from 1; `None`: the first active one.
    pub port: Option<u8>,
    /// Row of the port's GID table, 0..=255; `None`: RoCE v2 with an IPv4 address, else with a global IPv6
    /// address, else a link-local one; row 0 on InfiniBand.
    pub gid_index: Option<u8>,
    /// Key of the partition that queue pairs are in, 1..=0x7FFF or with the membership bit; `None`: the
    /// partition of the port's first row. Peers in other partitions cannot be reached.
    pub partition: Option<u16>,
    /// Most bytes of one packet; a path uses the smallest of this value, the local port's and the peer's.
    pub path_mtu: PathMtu,
    /// Service level of the urgent and of the background lane, 0..=15 (on Ethernet the priority, 0..=7).
    pub service_levels: [u8; 2],
    /// Traffic class (DSCP times four) of RoCE packets, 0..=255.
    pub traffic_class: u8,
    /// Routers that a packet may pass, 1..=255.
    pub hop_limit: u8,
    /// Exponent t of the acknowledgement timeout of 4.096 us × 2^t, 1..=31.
    pub timeout: u8,
    /// Retries after an acknowledgement timeout, 0..=7.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted, 0..=7; 7 retries without limit.
    pub receiver_not_ready_retry: u8,
    /// Code of the delay that is requested of a peer in that case, 0..=31 (12 is 0.64 ms).
    pub receiver_not_ready_timer: u8,
    /// Reads in flight for each lane of a peer, 1..=128, cut to what the device can do.
    pub reads_in_flight: u8,
    /// Send work requests of one lane, 16..=32768, cut to what the device can do.
    pub send_queue_depth: u32,
    /// Requests that may wait in one lane before `post` returns "full", 16..=65536.
    pub request_queue_depth: u32,
    /// Number of work requests of which one is signalled, 1..=1024; the last of a batch always is.
    pub signal_every: u32,
    /// Scatter/gather entries of one work request, 1..=32, cut to what the device can do.
    pub entries_max: u32,
    /// Bytes carried inside a work request, 0..=512; reduced to the device's limit.
    pub inline_bytes: u32,
    /// Entries of the completion queue, 256..=4194304, cut to what the device can do. It bounds the work
    /// requests in flight to all peers together.
    pub completion_entries: u32,
    /// Receives posted for all peers together, 16..=32768, cut to what the device can do.
    pub receive_buffers: u32,
    /// Bytes of one receive, 256..=65536. Longer messages travel in several pieces.
    pub receive_buffer_bytes: u32,
    /// Receives that a peer may use up in one lane before they are returned to it, 2..=1024.
    pub receive_credits: u32,
    /// Buffers of [`Self::receive_buffer_bytes`] that outgoing messages are copied to, 8..=32768.
    pub send_buffers: u32,
    /// Most connections, those in the handshake or draining included, 1..=4096.
    pub connections_max: usize,
    /// Accepted sockets that are not authenticated yet, 1..=4096; they do not count as connections.
    pub handshakes_max: usize,
    /// Access of peers to the slabs that the fabric shows, enforced by the device: with
    /// [`PeerAccess::None`] peers have no key to this node's memory. A peer that may write can write the
    /// whole slabs: a device does not check generations.
    pub access: PeerAccess,
    /// The secret shared by all peers; nodes with different secrets refuse each other.
    pub key: SharedKey,
    /// Protocol versions that the node supports.
    pub versions: Versions,
    /// Slabs that can be registered besides the fabric's own, 0..=1024.
    pub slabs_max: usize,
    /// Time after which a peer that has not finished the handshake is dropped, 10 ms..=5 min.
    pub handshake_timeout: Duration,
    /// Time after which a peer counts as dead that does not answer probes or acknowledge bytes on the
    /// handshake's TCP connection, which stays open, 1 s..=10 min.
    pub peer_dead_after: Duration,
    /// Time that an ended connection waits for the device to return its work requests before its queue
    /// pairs are destroyed without them, 1 ms..=1 min.
    pub drain_timeout: Duration,
    /// Whether the device may reorder its writes to memory (PCIe relaxed ordering). For host memory,
    /// completions still follow the bytes. For an accelerator's memory a completion guarantees nothing to
    /// the accelerator's kernels, relaxed or not, until
    /// [`DeviceMemory::flush_nic_writes`](dataplane_memory::DeviceMemory::flush_nic_writes) was called.
    pub relaxed_ordering: bool,
    /// Interrupt vector of the completion channel, from 0; taken modulo the number that the device has.
    pub completion_vector: u32,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            port: None,
            gid_index: None,
            partition: None,
            path_mtu: PathMtu::B4096,
            service_levels: [0, 0],
            traffic_class: 0,
            hop_limit: 64,
            timeout: 14,
            retry_count: 7,
            receiver_not_ready_retry: 7,
            receiver_not_ready_timer: 12,
            reads_in_flight: 16,
            send_queue_depth: 512,
            request_queue_depth: 512,
            signal_every: 32,
            entries_max: 16,
            inline_bytes: 128,
            completion_entries: 32 << 10,
            receive_buffers: 4096,
            receive_buffer_bytes: 4096,
            receive_credits: 32,
            send_buffers: 1024,
            connections_max: 512,
            handshakes_max: 128,
            access: PeerAccess::default(),
            key: SharedKey::default(),
            versions: Transport::Rdma.versions(),
            slabs_max: 64,
            handshake_timeout: Duration::from_secs(5),
            peer_dead_after: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(1),
            relaxed_ordering: true,
            completion_vector: 0,
        }
    }
}

/// Parses a row of the GID table: `auto`, or a number.
pub fn parse_gid_index(text: &str) -> Result<Option<u8>, VerbsError> {
    let expected = "`auto`, or a row from 0 to 255";
    match text {
        "auto" => Ok(None),
        number => number.parse().map(Some).map_err(|_| setting("gid", text, expected)),
    }
}

/// Parses a partition: `default`, or its key, such as `0x8001`.
pub fn parse_partition(text: &str) -> Result<Option<u16>, VerbsError> {
    let expected = "`default`, or a partition key like 0x8001, whose lower 15 bits are not all zero";
    let key = match text {
        "default" => return Ok(None),
        text => text.strip_prefix("0x").and_then(|digits| u16::from_str_radix(digits, 16).ok()),
    };
    key.filter(|&key| key & PARTITION_MASK != 0).map(Some).ok_or_else(|| setting("partition", text, expected))
}

fn setting(key: &'static str, value: &str, expected: &'static str) -> VerbsError {
    VerbsError::Setting { key, value: format!("{value:?}"), expected }
}

impl VerbsConfig {
    /// Returns an error for the first setting that is out of its range.
    pub fn check(&self) -> Result<(), VerbsError> {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let level = |lane: usize| u64::from(self.service_levels[lane]);
        let partition = u64::from(self.partition.map_or(1, |key| key & PARTITION_MASK));
        let table: [(&'static str, u64, u64, u64, &'static str); 25] = [
            (
                "partition",
                partition,
                1,
                u64::from(PARTITION_MASK),
                "a key whose lower 15 bits are not all zero",
            ),
            ("port", self.port.map_or(1, u64::from), 1, 254, "1..=254"),
            ("service_level_urgent", level(0), 0, 15, "0..=15"),
            ("service_level_background", level(1), 0, 15, "0..=15"),
            ("hop_limit", self.hop_limit.into(), 1, 255, "1..=255"),
            ("timeout", self.timeout.into(), 1, 31, "1..=31"),
            ("retry_count", self.retry_count.into(), 0, 7, "0..=7"),
            ("receiver_not_ready_retry", self.receiver_not_ready_retry.into(), 0, 7, "0..=7"),
            ("receiver_not_ready_timer", self.receiver_not_ready_timer.into(), 0, 31, "0..=31"),
            ("reads_in_flight", self.reads_in_flight.into(), 1, 128, "1..=128"),
            ("send_queue_depth", self.send_queue_depth.into(), 16, 32 << 10, "16..=32768"),
            ("request_queue_depth", self.request_queue_depth.into(), 16, 64 << 10, "16..=65536"),
            ("signal_every", self.signal_every.into(), 1, 1024, "1..=1024"),
            ("entries_max", self.entries_max.into(), 1, 32, "1..=32"),
            ("inline_bytes", self.inline_bytes.into(), 0, 512, "0..=512"),
            ("completion_entries", self.completion_entries.into(), 256, 4 << 20, "256..=4194304"),
            ("receive_buffers", self.receive_buffers.into(), 16, 32 << 10, "16..=32768"),
            ("receive_buffer_bytes", self.receive_buffer_bytes.into(), 256, 64 << 10, "256..=65536"),
            ("receive_credits", self.receive_credits.into(), 2, 1024, "2..=1024"),
            ("send_buffers", self.send_buffers.into(), 8, 32 << 10, "8..=32768"),
            ("connections_max", self.connections_max as u64, 1, 4096, "1..=4096"),
            ("handshakes_max", self.handshakes_max as u64, 1, 4096, "1..=4096"),
            ("slabs_max", self.slabs_max as u64, 0, 1024, "0..=1024"),
            ("handshake_timeout", millis(self.handshake_timeout), 10, 300_000, "10 ms..=5 min"),
            ("peer_dead_after", millis(self.peer_dead_after), 1000, 600_000, "1 s..=10 min"),
        ];
        for (key, value, low, high, expected) in table {
            if !(low..=high).contains(&value) {
                return Err(VerbsError::Setting { key, value: value.to_string(), expected });
            }
        }
        if !(1..=60_000).contains(&millis(self.drain_timeout)) {
            let value = millis(self.drain_timeout).to_string();
            return Err(VerbsError::Setting { key: "drain_timeout", value, expected: "1 ms..=1 min" });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_in_range_and_outliers_are_named() {
        VerbsConfig::default().check().expect("the default");
        let bad = VerbsConfig { timeout: 32, ..VerbsConfig::default() };
        assert_eq!(bad.check().expect_err("out of range").to_string(), "rdma.timeout = 32: 1..=31");
        let bad = VerbsConfig { drain_timeout: Duration::ZERO, ..VerbsConfig::default() };
        assert!(bad.check().is_err());
    }

    #[test]
    fn rows_and_partitions_are_read() {
        assert_eq!((parse_gid_index("auto").ok(), parse_gid_index("3").ok()), (Some(None), Some(Some(3))));
        assert_eq!(
            (parse_partition("default").ok(), parse_partition("0x8001").ok()),
            (Some(None), Some(Some(0x8001)))
        );
        for text in ["", "8001", "0x", "0x0", "0x8000", "0x10000", "any"] {
            let error = parse_partition(text).expect_err(text).to_string();
            assert!(error.starts_with(&format!("rdma.partition = {text:?}: `default`, or")), "{error}");
        }
        assert_eq!(
            parse_gid_index("256").expect_err("too large").to_string(),
            "rdma.gid = \"256\": `auto`, or a row from 0 to 255"
        );
    }

    #[test]
    fn mtu_codes_and_bytes_agree() {
        for (bytes, code) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            let mtu = PathMtu::from_bytes(bytes).expect("a legal size");
            assert_eq!((mtu.bytes(), mtu as u32, PathMtu::from_code(code)), (bytes, code, Some(mtu)));
        }
        assert_eq!((PathMtu::from_bytes(1500), PathMtu::from_code(6)), (None, None));
    }
}
