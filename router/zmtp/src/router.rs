//! ROUTER as a server: each request is answered with a sequence of messages, on the connection that it came from.
//!
//! Every peer has its own task, so that a peer that does not read its replies delays no other. Replies are pulled one at a time:
//! an answer of any length costs one message of memory.

use std::sync::Arc;

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::accept::{Counters, SocketCounters, accept};
use crate::connection::Connection;
use crate::endpoint::Listener;
use crate::wire::{self, Command, Event, SocketKind};
use crate::{Endpoint, Error, Limits};

/// The messages of an answer, without the identity that libzmq puts before them.
pub type Replies = Box<dyn Iterator<Item = Vec<Bytes>> + Send>;
type Answer = Arc<dyn Fn(Vec<Bytes>) -> Replies + Send + Sync>;

/// A ROUTER socket that answers requests. Dropping it ends all connections.
#[derive(Debug)]
pub struct RouterSocket {
    endpoint: Endpoint,
    counters: Arc<Counters>,
    task: JoinHandle<()>,
}

impl RouterSocket {
    /// Listens. `answer` gets the frames of a request, without an identity; neither it nor its iterator may block for
    /// long.
    ///
    /// # Errors
    ///
    /// The endpoint cannot be listened on.
    pub async fn bind(
        endpoint: &str,
        limits: Limits,
        answer: impl Fn(Vec<Bytes>) -> Replies + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let (listener, endpoint) = Listener::bind(endpoint).await?;
        let counters = Arc::<Counters>::default();
        let answer: Answer = Arc::new(answer);
        let serve = move |connection| serve(connection, Arc::clone(&answer), limits);
        let accepting = accept(listener, SocketKind::Router, limits, Arc::clone(&counters), serve);
        Ok(Self { endpoint, counters, task: tokio::spawn(accepting) })
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
}

impl Drop for RouterSocket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut connection: Connection, answer: Answer, limits: Limits) -> Result<(), Error> {
    // A client that is closed for being idle connects again when it has a request.
    while let Ok(event) = timeout(limits.idle_within, connection.reader.next()).await {
        let event = event?;
        drop(connection.reader.take_charge());
        match event {
            Event::Message(request) => {
                for reply in answer(request) {
                    connection.writer.write(wire::message(&reply)).await?;
                }
            }
            Event::Command(Command::Ping { context }) => {
                connection.writer.write(wire::pong(&context)).await?
            }
            Event::Command(_) | Event::Greeting { .. } => {}
        }
    }
    Ok(())
}
