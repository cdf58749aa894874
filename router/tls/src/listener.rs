//! The listener: accepts connections, runs their handshakes concurrently, and returns those that succeed.
//!
//! Each handshake is a task of the runtime that accepts, so that a silent client delays no other. The set
//! of handshakes is bounded; at the limit the oldest is aborted once its time is over, and meanwhile
//! connections wait in the kernel. Dropping the listener ends the handshakes in flight.

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::serve::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use crate::config::HandshakeLimits;
use crate::identity::PeerAddr;
use crate::server::{ServerStream, ServerTls};
use crate::socket::ClientSocket;

/// First pause after a failed accept; each further one in a row is twice as long.
const BACK_OFF_MIN: Duration = Duration::from_millis(10);
const BACK_OFF_MAX: Duration = Duration::from_secs(1);

/// A TCP listener whose connections speak TLS, for `axum::serve`.
pub struct TlsListener {
    tcp: TcpListener,
    tls: Arc<ServerTls>,
    limits: HandshakeLimits,
    write_timeout: Option<Duration>,
    handshakes: JoinSet<Option<(ServerStream, PeerAddr)>>,
    /// Start of each handshake, the oldest first; finished ones are removed when they reach the front.
    begun: VecDeque<(Instant, AbortHandle)>,
    /// The handshake that was aborted for its age, until it has left the set.
    evicted: Option<Id>,
    /// Number of failed accepts in a row.
    failures: u32,
    /// End of the pause after a failed accept.
    backoff_until: Option<Instant>,
}

impl TlsListener {
    /// Creates a listener with the default limits.
    #[must_use]
    pub fn new(tcp: TcpListener, tls: Arc<ServerTls>) -> Self {
        Self::with_limits(tcp, tls, HandshakeLimits::default())
    }

    /// Creates a listener with these limits.
    #[must_use]
    pub fn with_limits(tcp: TcpListener, tls: Arc<ServerTls>, limits: HandshakeLimits) -> Self {
        let limits = HandshakeLimits { in_flight_max: limits.in_flight_max.max(1), ..limits };
        Self {
            tcp,
            tls,
            limits,
            write_timeout: None,
            handshakes: JoinSet::new(),
            begun: VecDeque::new(),
            evicted: None,
            failures: 0,
            backoff_until: None,
        }
    }

    /// Closes connections whose client reads no byte for `write_timeout` while there are bytes to write.
    #[must_use]
    pub fn with_write_timeout(mut self, write_timeout: Duration) -> Self {
        self.write_timeout = Some(write_timeout);
        self
    }

    fn begin(&mut self, tcp: TcpStream, addr: SocketAddr) {
        self.failures = 0;
        let (tls, limit) = (self.tls.clone(), self.limits.timeout);
        let tcp = ClientSocket::accepted(tcp, self.write_timeout);
        let handshake = self.handshakes.spawn(async move {
            let (counter, reason) = match timeout(limit, tls.handshake(tcp, addr)).await {
                Ok(Ok(connection)) => {
                    tls.tally.completed.fetch_add(1, Ordering::Relaxed);
                    return Some(connection);
                }
                Ok(Err(error)) => (&tls.tally.failed, error.to_string()),
                Err(_) => (&tls.tally.timed_out, "it took too long".to_owned()),
            };
            counter.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(client = %addr, reason, "TLS handshake failed");
            None
        });
        // An entry keeps its task's memory, so finished tasks are removed.
        self.forget_ended();
        if self.begun.len() >= 2 * self.limits.in_flight_max {
            self.begun.retain(|(_, handshake)| !handshake.is_finished());
        }
        self.begun.push_back((Instant::now(), handshake));
    }

    /// Returns when the time of the oldest handshake in flight is over, if the set is full. One handshake
    /// at a time is aborted.
    fn eviction(&mut self) -> Option<Instant> {
        if self.handshakes.len() < self.limits.in_flight_max || self.evicted.is_some() {
            return None;
        }
        self.forget_ended();
        self.begun.front().map(|(begun, _)| *begun + self.limits.timeout_when_full)
    }

    fn forget_ended(&mut self) {
        while self.begun.front().is_some_and(|(_, handshake)| handshake.is_finished()) {
            self.begun.pop_front();
        }
    }

    fn evict(&mut self) {
        if let Some((_, handshake)) = self.begun.pop_front() {
            handshake.abort();
            self.evicted = Some(handshake.id());
            self.tls.tally.timed_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn accept_failed(&mut self, error: &io::Error) {
        if let Some(rest) = back_off(error, self.failures) {
            self.failures = self.failures.saturating_add(1);
            self.backoff_until = Some(Instant::now() + rest);
            self.tls.tally.accept_errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, "accept failed");
        }
    }
}

impl Listener for TlsListener {
    type Io = ServerStream;
    type Addr = PeerAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            // All state of an iteration is in `self`: dropping this future between iterations loses
            // nothing.
            let is_full = self.handshakes.len() >= self.limits.in_flight_max;
            let (evict_at, backoff_until) = (self.eviction(), self.backoff_until);
            tokio::select! {
                Some(ended) = self.handshakes.join_next_with_id() => {
                    // An error is an aborted handshake; a failed handshake was logged by its task.
                    let (id, connection) = ended.unwrap_or_else(|error| (error.id(), None));
                    if self.evicted == Some(id) {
                        self.evicted = None;
                    }
                    if let Some(connection) = connection {
                        return connection;
                    }
                }
                () = sleep_until_some(evict_at) => self.evict(),
                () = sleep_until_some(backoff_until) => self.backoff_until = None,
                accepted = self.tcp.accept(), if !is_full && backoff_until.is_none() => match accepted {
                    Ok((tcp, addr)) => self.begin(tcp, addr),
                    Err(error) => self.accept_failed(&error),
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(PeerAddr { addr: self.tcp.local_addr()?, certificate: None })
    }
}

async fn sleep_until_some(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}

/// Returns the pause after a failed accept; `None` when the client closed the connection before it was
/// accepted.
fn back_off(error: &io::Error, failures: u32) -> Option<Duration> {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return None;
    }
    let doubled = BACK_OFF_MIN.saturating_mul(1 << failures.min(16));
    Some(doubled.min(BACK_OFF_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_is_left_alone_for_longer_and_longer() {
        let full = io::Error::other("no file descriptors");
        let waits: Vec<_> = [0, 1, 2, 6, 7, u32::MAX].map(|failures| back_off(&full, failures)).into();
        let expected = [10, 20, 40, 640, 1000, 1000].map(|wait| Some(Duration::from_millis(wait)));
        assert_eq!(waits, expected);
        assert_eq!(back_off(&io::ErrorKind::ConnectionAborted.into(), 3), None);
    }
}
