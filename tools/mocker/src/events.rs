//! Publishes KV events as the engines do: ZMQ PUB with `[topic, sequence, payload]`, and a ROUTER that replays.
//!
//! A batch is numbered and encoded under the worker's lock, so that numbers and contents have one order, and
//! goes into a bounded queue. What does not fit is dropped, and the gap in the numbers tells every subscriber.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use router_events::wire::{EventBatch, KvEvent, encode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use zeromq::prelude::*;
use zeromq::{Endpoint, PubSocket, RouterSocket, ZmqMessage};

use crate::{Dialect, MockError};

/// Batches kept for replay, as vLLM does by default.
pub(crate) const REPLAY_BATCHES: usize = 10_000;
/// Batches that may wait for the publishing task.
const QUEUE_BATCHES: usize = 8192;
/// A replay reply that a client does not take for so long ends the replay.
const REPLAY_SEND_WITHIN: Duration = Duration::from_secs(5);

struct Numbered {
    sequence: u64,
    payload: Bytes,
    is_published: bool,
}

/// The worker's end.
pub(crate) struct EventSink {
    queue: mpsc::Sender<Numbered>,
    next: u64,
    dialect: Dialect,
}

impl EventSink {
    /// Numbers the events as one batch; unless `is_published`, only a replay has it.
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

/// The publishing tasks. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct EventPublisher {
    pub(crate) events_port: u16,
    pub(crate) replay_port: Option<u16>,
    tasks: Vec<JoinHandle<()>>,
}

type Buffer = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

fn port_of(endpoint: &Endpoint) -> u16 {
    match endpoint {
        Endpoint::Tcp(_, port) => *port,
        _ => 0,
    }
}

impl EventPublisher {
    /// Binds the sockets to ports that the system chooses and starts the tasks.
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
        let failed = |what, error| MockError::Events(format!("{what} on {endpoint}: {error}"));
        let mut publisher = PubSocket::new();
        let bound = publisher.bind(&endpoint).await.map_err(|error| failed("KV events", error))?;
        let events_port = port_of(&bound);
        let buffer: Option<Buffer> = replay.then(Buffer::default);
        let topic = Bytes::from(topic.to_owned());
        let (queue, batches) = mpsc::channel(QUEUE_BATCHES);
        let (mut tasks, mut replay_port) = (Vec::new(), None);
        if let Some(buffer) = &buffer {
            let mut router = RouterSocket::new();
            let bound = router.bind(&endpoint).await.map_err(|error| failed("KV event replay", error))?;
            replay_port = Some(port_of(&bound));
            tasks.push(tokio::spawn(replay_requests(router, Arc::clone(buffer), topic.clone())));
        }
        tasks.push(tokio::spawn(publish(publisher, batches, buffer, topic)));
        Ok((Self { events_port, replay_port, tasks }, EventSink { queue, next: 0, dialect }))
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
    mut batches: mpsc::Receiver<Numbered>,
    buffer: Option<Buffer>,
    topic: Bytes,
) {
    while let Some(Numbered { sequence, payload, is_published }) = batches.recv().await {
        if let Some(buffer) = &buffer {
            let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
            if buffer.len() == REPLAY_BATCHES {
                buffer.pop_front();
            }
            buffer.push_back((sequence, payload.clone()));
        }
        if !is_published {
            continue;
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
