//! Publishes KV events as vLLM does: ZMQ PUB with `[topic, sequence, payload]`, and a ROUTER that replays.
//!
//! The engine's thread numbers and encodes a batch and pushes it to a bounded queue; it never waits. A batch
//! that does not fit is dropped, and subscribers find the gap in the numbers.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use router_events::publish::EventServer;
use router_events::wire::{EventBatch, KvEvent, encode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Batches that may wait for the publishing task.
const QUEUE_BATCHES: usize = 8192;

/// Sending side, owned by the engine's thread.
pub struct EventSink {
    queue: mpsc::Sender<(u64, Bytes)>,
    next: u64,
}

impl EventSink {
    /// Publishes the events as one batch and empties the list.
    pub(crate) fn publish(&mut self, events: &mut Vec<KvEvent>) {
        if events.is_empty() {
            return;
        }
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let batch =
            EventBatch { timestamp, events: std::mem::take(events), rank: Some(0), ..EventBatch::default() };
        if self.queue.try_send((self.next, encode(&batch).into())).is_err() {
            tracing::warn!(sequence = self.next, "KV events: the queue is full; a batch is dropped");
        }
        self.next += 1;
    }
}

/// Addresses of the bound sockets.
#[derive(Debug, Clone)]
pub struct PublisherAddresses {
    /// `tcp://…` of the PUB socket.
    pub events: String,
    /// `tcp://…` of the replay socket.
    pub replay: String,
}

/// The sockets and the publishing task. Dropping it ends them.
pub struct EventPublisher {
    addresses: PublisherAddresses,
    /// Kept, so that replays continue after the engine has ended.
    _server: Arc<EventServer>,
    task: JoinHandle<()>,
}

impl EventPublisher {
    /// Binds both sockets on `host` (port 0 lets the system choose) and starts the task.
    pub async fn bind(
        host: &str,
        events_port: u16,
        replay_port: u16,
        topic: String,
    ) -> Result<(Self, EventSink), String> {
        let (events, replay) = (format!("tcp://{host}:{events_port}"), format!("tcp://{host}:{replay_port}"));
        let server = EventServer::bind(&events, Some(&replay), &topic).await;
        let server = Arc::new(server.map_err(|error| format!("KV events: {error}"))?);
        let address = |port: Option<u16>| format!("tcp://{host}:{}", port.unwrap_or(0));
        let addresses = PublisherAddresses {
            events: address(server.events().port()),
            replay: address(server.replay().and_then(|endpoint| endpoint.port())),
        };
        let (queue, batches) = mpsc::channel(QUEUE_BATCHES);
        let task = tokio::spawn(publish(Arc::clone(&server), batches));
        Ok((Self { addresses, _server: server, task }, EventSink { queue, next: 0 }))
    }

    /// Addresses for subscribers.
    #[must_use]
    pub fn addresses(&self) -> &PublisherAddresses {
        &self.addresses
    }
}

impl Drop for EventPublisher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn publish(server: Arc<EventServer>, mut batches: mpsc::Receiver<(u64, Bytes)>) {
    while let Some((sequence, payload)) = batches.recv().await {
        server.publish(sequence, payload);
    }
}
