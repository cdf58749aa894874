//! SUB: connected to one publisher, or listening for several.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;

use crate::accept::{Counters, SocketCounters, accept};
use crate::connection::Connection;
use crate::endpoint::Listener;
use crate::limits::PING_EVERY;
use crate::wire::{self, Command, Event, SocketKind};
use crate::{Endpoint, Error, Limits};

/// Messages of all peers of a listener that may wait for its owner. Their bytes count against `receive_bytes_max`.
const INBOUND_MAX: usize = 256;

/// A SUB socket that is connected to one publisher.
#[derive(Debug)]
pub struct SubSocket {
    connection: Connection,
}

impl SubSocket {
    /// Connects, and subscribes to topics that begin with `prefix`.
    ///
    /// # Errors
    ///
    /// The publisher cannot be reached, or is no publisher.
    pub async fn connect(endpoint: &str, prefix: &[u8], limits: Limits) -> Result<Self, Error> {
        let mut connection = Connection::connect(endpoint, SocketKind::Sub, &limits).await?;
        connection.writer.write(wire::subscribe(prefix)).await?;
        Ok(Self { connection })
    }

    /// Returns the next message. Cancel-safe. Between calls the publisher's queue fills.
    ///
    /// # Errors
    ///
    /// The connection has ended: connect again.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, Error> {
        self.connection.receive().await
    }
}

/// An event of a publisher that has connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inbound {
    /// A message.
    Message {
        /// Number of the connection; never used again.
        connection: u64,
        /// Frames of the message, at least one.
        parts: Vec<Bytes>,
    },
    /// A connection has ended.
    Closed {
        /// Number of the connection.
        connection: u64,
    },
}

#[derive(Debug)]
struct Arrived {
    inbound: Inbound,
    _held: Option<OwnedSemaphorePermit>,
}

/// A SUB socket that listens for publishers. Dropping it ends all connections.
#[derive(Debug)]
pub struct SubListener {
    endpoint: Endpoint,
    counters: Arc<Counters>,
    arrived: mpsc::Receiver<Arrived>,
    task: JoinHandle<()>,
}

impl SubListener {
    /// Listens, and subscribes at every publisher to topics that begin with `prefix`.
    ///
    /// # Errors
    ///
    /// The endpoint cannot be listened on.
    pub async fn bind(endpoint: &str, prefix: &[u8], limits: Limits) -> Result<Self, Error> {
        let (listener, endpoint) = Listener::bind(endpoint).await?;
        let counters = Arc::<Counters>::default();
        let (sender, arrived) = mpsc::channel(INBOUND_MAX);
        let (next, prefix) = (Arc::new(AtomicU64::new(0)), Bytes::copy_from_slice(prefix));
        let serve = move |connection| {
            serve(connection, next.fetch_add(1, Ordering::Relaxed), sender.clone(), prefix.clone())
        };
        let accepting = accept(listener, SocketKind::Sub, limits, Arc::clone(&counters), serve);
        Ok(Self { endpoint, counters, arrived, task: tokio::spawn(accepting) })
    }

    /// Endpoint that the socket listens on, with the port that the system chose.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Counters of the socket.
    #[must_use]
    pub fn counters(&self) -> SocketCounters {
        self.counters.get()
    }

    /// Returns the next message or end of a connection; never `None` while the socket listens. Cancel-safe. Between calls
    /// publishers wait.
    pub async fn recv(&mut self) -> Option<Inbound> {
        self.arrived.recv().await.map(|arrived| arrived.inbound)
    }
}

impl Drop for SubListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    connection: Connection,
    number: u64,
    arrived: mpsc::Sender<Arrived>,
    prefix: Bytes,
) -> Result<(), Error> {
    let ended = forward(connection, number, &arrived, &prefix).await;
    let closed = Arrived { inbound: Inbound::Closed { connection: number }, _held: None };
    let _owner_gone = arrived.send(closed).await;
    ended
}

async fn forward(
    mut connection: Connection,
    number: u64,
    arrived: &mpsc::Sender<Arrived>,
    prefix: &[u8],
) -> Result<(), Error> {
    connection.writer.write(wire::subscribe(prefix)).await?;
    // Peers of ZMTP 3.0 need not know PING.
    let may_ping = connection.minor > 0;
    let mut ping = tokio::time::interval(PING_EVERY);
    ping.tick().await;
    loop {
        let event = tokio::select! {
            event = connection.reader.next() => event?,
            _ = ping.tick(), if may_ping => {
                connection.writer.write(wire::ping()).await?;
                continue;
            }
        };
        match event {
            Event::Message(parts) => {
                let inbound = Inbound::Message { connection: number, parts };
                let held = connection.reader.take_charge();
                if arrived.send(Arrived { inbound, _held: held }).await.is_err() {
                    return Ok(());
                }
            }
            Event::Command(Command::Ping { context }) => {
                connection.writer.write(wire::pong(&context)).await?
            }
            Event::Command(_) | Event::Greeting { .. } => drop(connection.reader.take_charge()),
        }
    }
}
