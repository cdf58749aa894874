//! Publishes KV events as the engines do: ZMQ PUB with `[topic, sequence, payload]`, and a ROUTER that replays.
//!
//! A batch is numbered and encoded under the worker's lock, so that numbers and contents have one order, and is
//! put into a bounded queue. A batch that does not fit is dropped; the gap in the numbers shows that to
//! subscribers.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use router_events::publish::EventServer;
pub(crate) use router_events::publish::REPLAY_BATCHES;
use router_events::wire::{EventBatch, KvEvent, encode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::{Dialect, MockError};

/// Most batches that wait for the publishing task.
const QUEUE_BATCHES: usize = 8192;

struct Numbered {
    sequence: u64,
    payload: Bytes,
    is_published: bool,
}

/// The sending end, owned by the worker.
pub(crate) struct EventSink {
    queue: mpsc::Sender<Numbered>,
    next: u64,
    dialect: Dialect,
}

impl EventSink {
    /// Publishes events as one numbered batch. Unless `is_published`, only the replay has the batch.
    pub(crate) fn publish(&mut self, events: Vec<KvEvent>, is_published: bool) {
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let batch = EventBatch { timestamp, events, rank: Some(0), ..EventBatch::default() };
        let payload = match self.dialect {
            Dialect::Vllm => encode(&batch),
            Dialect::Sglang => crate::sglang_events::encode(&batch),
        };
        let numbered = Numbered { sequence: self.next, payload: payload.into(), is_published };
        if self.queue.try_send(numbered).is_err() {
            tracing::warn!(sequence = self.next, "KV events: the queue is full; a batch is dropped");
        }
        self.next += 1;
    }
}

/// The sockets and the publishing task. Dropping this value ends them.
#[derive(Debug)]
pub(crate) struct EventPublisher {
    pub(crate) events_port: u16,
    pub(crate) replay_port: Option<u16>,
    /// Serves replays after the worker has ended.
    _server: Arc<EventServer>,
    task: JoinHandle<()>,
}

impl EventPublisher {
    /// Binds the sockets to ports that the system chooses and starts the task.
    pub(crate) async fn bind(
        host: IpAddr,
        topic: &str,
        replay: bool,
        dialect: Dialect,
    ) -> Result<(Self, EventSink), MockError> {
        let endpoint = match host {
            IpAddr::V4(host) => format!("tcp://{host}:0"),
            IpAddr::V6(host) => format!("tcp://[{host}]:0"),
        };
        let server = EventServer::bind(&endpoint, replay.then_some(endpoint.as_str()), topic).await;
        let server = Arc::new(server.map_err(|error| MockError::Events(error.to_string()))?);
        let events_port = server.events().port().unwrap_or(0);
        let replay_port = server.replay().and_then(|endpoint| endpoint.port());
        let (queue, batches) = mpsc::channel(QUEUE_BATCHES);
        let task = tokio::spawn(publish(Arc::clone(&server), batches));
        let sink = EventSink { queue, next: 0, dialect };
        Ok((Self { events_port, replay_port, _server: server, task }, sink))
    }
}

impl Drop for EventPublisher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn publish(server: Arc<EventServer>, mut batches: mpsc::Receiver<Numbered>) {
    while let Some(Numbered { sequence, payload, is_published }) = batches.recv().await {
        if is_published {
            server.publish(sequence, payload);
        } else {
            server.keep(sequence, &payload);
        }
    }
}
