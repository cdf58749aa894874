//! The publishing side, as vLLM has it: a PUB socket with `[topic, sequence, payload]`, and a ROUTER for replays.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use router_zmtp::{Endpoint, Error, Limits, PubSocket, Replies, RouterSocket};

use crate::subscribe::REPLAY_END;

/// Number of batches kept for replay; vLLM's default.
pub const REPLAY_BATCHES: usize = 10_000;

/// The sockets of a publisher. Dropping it ends all connections.
#[derive(Debug)]
pub struct EventServer {
    topic: Bytes,
    publisher: PubSocket,
    replay: Option<(RouterSocket, Arc<ReplayBuffer>)>,
}

impl EventServer {
    /// Listens at both endpoints; a port 0 lets the system choose.
    ///
    /// # Errors
    ///
    /// One of them cannot be listened on.
    pub async fn bind(events: &str, replay: Option<&str>, topic: &str) -> Result<Self, Error> {
        let topic = Bytes::copy_from_slice(topic.as_bytes());
        let publisher = PubSocket::bind(events, Limits::PUBLISHER).await?;
        let replay = match replay {
            Some(endpoint) => Some(replay_server(endpoint, topic.clone()).await?),
            None => None,
        };
        Ok(Self { topic, publisher, replay })
    }

    /// Endpoint for subscribers.
    #[must_use]
    pub fn events(&self) -> &Endpoint {
        self.publisher.endpoint()
    }

    /// Endpoint for replay requests, if there is one.
    #[must_use]
    pub fn replay(&self) -> Option<&Endpoint> {
        self.replay.as_ref().map(|(socket, _)| socket.endpoint())
    }

    /// Keeps a batch for replays. Sequence numbers rise.
    pub fn keep(&self, sequence: u64, payload: &Bytes) {
        let Some((_, buffer)) = &self.replay else { return };
        let mut kept = buffer.lock();
        if kept.len() == REPLAY_BATCHES {
            kept.pop_front();
        }
        kept.push_back((sequence, payload.clone()));
    }

    /// Keeps a batch and sends it to all subscribers. Never waits: a slow subscriber loses the batch, and finds the gap in the
    /// numbers.
    pub fn publish(&self, sequence: u64, payload: Bytes) {
        self.keep(sequence, &payload);
        self.publisher.send(&[self.topic.clone(), number(sequence), payload]);
    }
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

async fn replay_server(endpoint: &str, topic: Bytes) -> Result<(RouterSocket, Arc<ReplayBuffer>), Error> {
    let buffer = Arc::<ReplayBuffer>::default();
    let answering = Arc::clone(&buffer);
    let answer = move |request: Vec<Bytes>| replies(&answering, &request, &topic);
    let socket = RouterSocket::bind(endpoint, Limits::REPLAY_SERVER, answer).await?;
    Ok((socket, buffer))
}

/// The batches that a replay can return, by rising numbers.
#[derive(Debug, Default)]
struct ReplayBuffer {
    batches: Mutex<VecDeque<(u64, Bytes)>>,
}

impl ReplayBuffer {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, Bytes)>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first batch with a number in the range.
    fn first_of(&self, from: u64, last: u64) -> Option<(u64, Bytes)> {
        let kept = self.lock();
        let at = kept.partition_point(|(sequence, _)| *sequence < from);
        kept.get(at).filter(|(sequence, _)| *sequence <= last).cloned()
    }
}

/// Answers `["", start]` with `["", topic, sequence, payload]` for every kept batch from `start` on, and an end marker with
/// an empty topic. Batches are looked up one by one, as the client takes them.
fn replies(buffer: &Arc<ReplayBuffer>, request: &[Bytes], topic: &Bytes) -> Replies {
    let start = request.last().and_then(|frame| <[u8; 8]>::try_from(&frame[..]).ok());
    let Some(start) = start.map(u64::from_be_bytes) else { return Box::new(std::iter::empty()) };
    // Later batches arrive by the live feed.
    let last = buffer.lock().back().map(|(sequence, _)| *sequence);
    let (buffer, topic, mut from) = (Arc::clone(buffer), topic.clone(), Some(start));
    let batches = std::iter::from_fn(move || {
        let (sequence, payload) = buffer.first_of(from?, last?)?;
        from = sequence.checked_add(1);
        Some(vec![Bytes::new(), topic.clone(), number(sequence), payload])
    });
    let end = vec![Bytes::new(), Bytes::new(), number(REPLAY_END), Bytes::new()];
    Box::new(batches.chain(std::iter::once(end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_begins_where_it_is_asked_to_and_ends_with_a_marker() {
        let buffer = Arc::<ReplayBuffer>::default();
        for sequence in 5..9 {
            buffer.lock().push_back((sequence, Bytes::from(vec![sequence as u8])));
        }
        let topic = Bytes::from_static(b"topic");
        let numbers = |request: &[Bytes]| -> Vec<u64> {
            let reply = |parts: Vec<Bytes>| {
                assert_eq!(parts.len(), 4);
                let number = u64::from_be_bytes(parts[2][..].try_into().expect("eight bytes"));
                assert_eq!(parts[1].is_empty(), number == REPLAY_END);
                number
            };
            replies(&buffer, request, &topic).map(reply).collect()
        };
        assert_eq!(numbers(&[Bytes::new(), number(0)]), [5, 6, 7, 8, REPLAY_END]);
        assert_eq!(numbers(&[number(7)]), [7, 8, REPLAY_END]);
        assert_eq!(numbers(&[Bytes::new(), number(9)]), [REPLAY_END]);
        assert_eq!(numbers(&[Bytes::new(), number(u64::MAX)]), [REPLAY_END]);
        assert!(numbers(&[Bytes::new()]).is_empty(), "no number");
        assert!(numbers(&[]).is_empty());
        // Batches published while the replay is answered belong to the live feed.
        let mut answer = replies(&buffer, &[number(8)], &topic);
        buffer.lock().push_back((9, Bytes::new()));
        assert_eq!(answer.next().expect("a batch")[2], number(8));
        assert_eq!(answer.next().expect("the end")[2], number(REPLAY_END));
        assert!(answer.next().is_none());
    }
}
