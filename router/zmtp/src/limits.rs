//! Every bound on what a peer can make a socket hold or wait for.
//!
//! Lengths are checked when they are announced, before memory is reserved. A buffer grows with the bytes that have come:
//! its capacity is at most twice what was received. Memory of a socket at worst:
//!
//! ```text
//!   peers_max × queued_bytes_max                            messages that peers have not taken
//! + receive_bytes_max                                       incomplete and undelivered messages
//! + peers_max × (subscription_bytes_max + READ_BYTES)       subscriptions, read buffers
//! + handshakes_max × (command_bytes_max + READ_BYTES)       connections that are not peers yet
//! ```

use std::time::Duration;

/// Read buffer of a connection.
pub(crate) const READ_BYTES: usize = 8 << 10;
/// A listening SUB socket pings its peers this often: the connection of a host that died ends with the kernel's
/// retransmission timeout instead of holding a place for ever.
pub(crate) const PING_EVERY: Duration = Duration::from_secs(60);
/// Pause after an `accept` that failed for want of descriptors or memory.
pub(crate) const ACCEPT_RETRY_AFTER: Duration = Duration::from_millis(20);

/// Bounds of one socket. A peer that exceeds one loses its connection, unless the field says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest frame of a message, in bytes.
    pub frame_bytes_max: usize,
    /// Most bytes of all frames of a message.
    pub message_bytes_max: usize,
    /// Most frames of a message.
    pub parts_max: usize,
    /// Longest command, in bytes: READY with its metadata, SUBSCRIBE with its prefix.
    pub command_bytes_max: usize,
    /// Most subscriptions of a peer.
    pub subscriptions_max: usize,
    /// Most bytes of all subscriptions of a peer.
    pub subscription_bytes_max: usize,
    /// Most peers of a listening socket. Later ones are closed after their handshake.
    pub peers_max: usize,
    /// Most of them from one IP address, so that one host cannot take all places. Peers at a Unix socket have none.
    pub peers_per_address_max: usize,
    /// Most connections of a listening socket in their handshake. One more ends the oldest: a sound peer needs
    /// milliseconds, so silent connections cannot keep it out.
    pub handshakes_max: usize,
    /// Most messages queued for a peer. The next one is dropped and counted.
    pub queued_messages_max: usize,
    /// Most bytes queued for a peer; a longer message is queued only alone. The next one is dropped and counted.
    pub queued_bytes_max: usize,
    /// Most bytes of incomplete and undelivered messages over all peers of a listening socket.
    pub receive_bytes_max: usize,
    /// From the connection to the peer's READY. A connecting socket counts its connect, too.
    pub handshake_within: Duration,
    /// From a message's or command's first byte to its last.
    pub message_within: Duration,
    /// Time without a successful write to a peer that has something queued.
    pub write_within: Duration,
    /// Time that a client of a ROUTER socket may keep its connection without a request. It is not an error.
    pub idle_within: Duration,
}

impl Limits {
    /// A subscriber, and the client of a replay server: messages are event batches. A prompt of a million tokens makes a
    /// batch of about 6 MiB.
    pub const SUBSCRIBER: Self = Self {
        frame_bytes_max: 32 << 20,
        message_bytes_max: 32 << 20,
        parts_max: 16,
        command_bytes_max: 4 << 10,
        subscriptions_max: 64,
        subscription_bytes_max: 16 << 10,
        peers_max: 4096,
        peers_per_address_max: 2048,
        handshakes_max: 128,
        queued_messages_max: 16_384,
        queued_bytes_max: 4 << 20,
        receive_bytes_max: 48 << 20,
        handshake_within: Duration::from_secs(5),
        message_within: Duration::from_secs(30),
        write_within: Duration::from_secs(30),
        idle_within: Duration::from_secs(60),
    };

    /// A publisher: its peers send subscriptions only.
    pub const PUBLISHER: Self = Self {
        frame_bytes_max: 4 << 10,
        message_bytes_max: 4 << 10,
        parts_max: 4,
        peers_max: 128,
        peers_per_address_max: 64,
        receive_bytes_max: 1 << 20,
        ..Self::SUBSCRIBER
    };

    /// A replay server: its peers send an empty frame and a number.
    pub const REPLAY_SERVER: Self = Self { write_within: Duration::from_secs(5), ..Self::PUBLISHER };
}
