//! Publishes KV events as vLLM does: ZMQ PUB with `[topic, sequence, payload]`, and a ROUTER that replays.
//!
//! The engine's thread numbers and encodes a batch and hands it to a bounded queue; it never waits. A batch
//! that does not fit is dropped, and the gap in the numbers tells every subscriber.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use router_events::wire::{EventBatch, KvEvent, encode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use zeromq::prelude::*;
use zeromq::{Endpoint, PubSocket, RouterSocket, ZmqMessage};

/// Batches kept for replay, as vLLM does by default.
const REPLAY_BATCHES: usize = 10_000;
/// Batches that may wait for the publishing task.
const QUEUE_BATCHES: usize = 8192;
/// A replay reply that a client does not take for so long ends the replay.
const REPLAY_SEND_WITHIN: Duration = Duration::from_secs(5);

/// The engine's end.
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

/// Where the sockets ended up.
#[derive(Debug, Clone)]
pub struct PublisherAddresses {
    /// `tcp://…` of the PUB socket.
    pub events: String,
    /// `tcp://…` of the replay socket.
    pub replay: String,
}

/// The publishing tasks. Dropping it ends them.
pub struct EventPublisher {
    addresses: PublisherAddresses,
    tasks: [JoinHandle<()>; 2],
}

type Buffer = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

impl EventPublisher {
    /// Binds both sockets on `host` (port 0 lets the system choose) and starts the tasks.
    pub async fn bind(
        host: &str,
        events_port: u16,
        replay_port: u16,
        topic: String,
    ) -> Result<(Self, EventSink), String> {
        let mut publisher = PubSocket::new();
        let events = publisher.bind(&format!("tcp://{host}:{events_port}")).await;
        let events = events.map_err(|error| format!("KV events on {host}:{events_port}: {error}"))?;
        let mut router = RouterSocket::new();
        let replay = router.bind(&format!("tcp://{host}:{replay_port}")).await;
        let replay = replay.map_err(|error| format!("KV event replay on {host}:{replay_port}: {error}"))?;
        let address = |endpoint: &Endpoint| match endpoint {
            Endpoint::Tcp(_, port) => format!("tcp://{host}:{port}"),
            other => other.to_string(),
        };
        let addresses = PublisherAddresses { events: address(&events), replay: address(&replay) };
        let buffer: Buffer = Arc::default();
        let (queue, batches) = mpsc::channel(QUEUE_BATCHES);
        let topic = Bytes::from(topic);
        let tasks = [
            tokio::spawn(publish(publisher, batches, Arc::clone(&buffer), topic.clone())),
            tokio::spawn(replay_requests(router, buffer, topic)),
        ];
        Ok((Self { addresses, tasks }, EventSink { queue, next: 0 }))
    }

    /// Where subscribers connect.
    #[must_use]
    pub fn addresses(&self) -> &PublisherAddresses {
        &self.addresses
    }
}

impl Drop for EventPublisher {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn message(frames: Vec<Bytes>) -> Option<ZmqMessage> {
    ZmqMessage::try_from(frames).ok()
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

async fn publish(
    mut socket: PubSocket,
    mut batches: mpsc::Receiver<(u64, Bytes)>,
    buffer: Buffer,
    topic: Bytes,
) {
    while let Some((sequence, payload)) = batches.recv().await {
        {
            let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
            if buffer.len() == REPLAY_BATCHES {
                buffer.pop_front();
            }
            buffer.push_back((sequence, payload.clone()));
        }
        let Some(message) = message(vec![topic.clone(), number(sequence), payload]) else { continue };
        // Without subscribers there is nobody to miss it; the replay buffer has it.
        let _unheard = socket.send(message).await;
    }
}

/// Answers `[identity, "", start]` with every kept batch from there on and an end marker.
async fn replay_requests(mut socket: RouterSocket, buffer: Buffer, topic: Bytes) {
    while let Ok(request) = socket.recv().await {
        let frames = request.into_vec();
        let (Some(identity), Some(start)) = (frames.first(), frames.last()) else { continue };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else { continue };
        let start = u64::from_be_bytes(start);
        let kept: Vec<(u64, Bytes)> = {
            let buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
            buffer.iter().filter(|(sequence, _)| *sequence >= start).cloned().collect()
        };
        let end = (u64::MAX, Bytes::new());
        for (sequence, payload) in kept.into_iter().chain([end]) {
            let topic = if sequence == u64::MAX { Bytes::new() } else { topic.clone() };
            let reply = vec![identity.clone(), Bytes::new(), topic, number(sequence), payload];
            let Some(reply) = message(reply) else { break };
            match tokio::time::timeout(REPLAY_SEND_WITHIN, socket.send(reply)).await {
                Ok(Ok(())) => {}
                _ => break,
            }
        }
    }
}
