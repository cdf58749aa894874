//! The subscription to one publisher.
//!
//! The feed is a ZMQ PUB: messages before the subscription, and while a connection is down, are lost. So a
//! fresh subscription first asks the publisher's replay socket for everything it still has, and each gap in
//! the numbers is filled the same way. When replay cannot fill it, the publisher's blocks are forgotten: an
//! index that is short costs time, one that is wrong costs more.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use router_radix::Index;
use zeromq::prelude::*;
use zeromq::{DealerSocket, SocketOptions, SubSocket, ZmqMessage};

use crate::tracker::{Sequence, Tracker};
use crate::wire;

const CONNECT_WITHIN: Duration = Duration::from_millis(500);
const REPLAY_WITHIN: Duration = Duration::from_secs(5);
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// End marker of a replay: -1 as eight bytes.
const REPLAY_END: u64 = u64::MAX;

/// Where a publisher is.
#[derive(Debug, Clone)]
pub struct Feed {
    /// The PUB socket.
    pub events: String,
    /// The replay socket, if there is one.
    pub replay: Option<String>,
}

/// Follows a publisher until the task is dropped. `ready` is called once the index holds what the publisher
/// could tell about the past.
pub async fn follow(feed: Feed, tracker: Arc<Mutex<Tracker>>, index: Arc<Index>, ready: impl Fn() + Send) {
    loop {
        match subscription(&feed.events).await {
            Ok(socket) => {
                // What came while we were away; a publisher that has nothing answers with the end alone.
                let from = lock(&tracker).expected();
                catch_up(&feed, &tracker, &index, from).await;
                ready();
                let reason = listen(&feed, &tracker, &index, socket).await;
                tracing::info!(feed = feed.events, reason, "KV events: subscription ended");
            }
            Err(error) => tracing::debug!(feed = feed.events, error, "KV events: not reachable yet"),
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

fn lock(tracker: &Mutex<Tracker>) -> std::sync::MutexGuard<'_, Tracker> {
    tracker.lock().unwrap_or_else(PoisonError::into_inner)
}

fn options() -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(CONNECT_WITHIN);
    options
}

async fn subscription(endpoint: &str) -> Result<SubSocket, String> {
    let mut socket = SubSocket::with_options(options());
    socket.subscribe("").await.map_err(|error| error.to_string())?;
    socket.connect(endpoint).await.map_err(|error| error.to_string())?;
    Ok(socket)
}

async fn listen(feed: &Feed, tracker: &Mutex<Tracker>, index: &Index, mut socket: SubSocket) -> String {
    loop {
        let message = match socket.recv().await {
            Ok(message) => message,
            Err(error) => return error.to_string(),
        };
        let Some((sequence, payload)) = numbered(&message) else { continue };
        let judged = lock(tracker).judge(sequence);
        match judged {
            Sequence::Old => continue,
            Sequence::Next => {}
            Sequence::Gap { from } => {
                catch_up(feed, tracker, index, from).await;
                if lock(tracker).expected() < sequence {
                    tracing::warn!(
                        feed = feed.events,
                        from,
                        sequence,
                        "KV events: lost for good; starting over"
                    );
                    lock(tracker).skip_to(index, sequence);
                }
            }
            Sequence::Restart => {
                tracing::info!(feed = feed.events, "KV events: the publisher has restarted");
                lock(tracker).reset(index);
            }
        }
        apply(tracker, index, sequence, &payload);
    }
}

fn apply(tracker: &Mutex<Tracker>, index: &Index, sequence: u64, payload: &[u8]) {
    let mut tracker = lock(tracker);
    if tracker.expected() != sequence {
        return; // The replay brought it already.
    }
    match wire::decode(payload) {
        Ok(batch) => tracker.apply(index, sequence, &batch),
        Err(error) => {
            tracing::warn!(%error, sequence, "KV events: a batch is not understood; starting over");
            tracker.skip_to(index, sequence + 1);
        }
    }
}

/// Number and payload: the last two frames, whatever precedes them.
fn numbered(message: &ZmqMessage) -> Option<(u64, Bytes)> {
    let count = message.len();
    let payload = message.get(count.checked_sub(1)?)?.clone();
    let number = message.get(count.checked_sub(2)?)?;
    Some((u64::from_be_bytes(number[..].try_into().ok()?), payload))
}

/// Asks for everything from `from` on and applies it.
async fn catch_up(feed: &Feed, tracker: &Mutex<Tracker>, index: &Index, from: u64) {
    let Some(replay) = &feed.replay else { return };
    match tokio::time::timeout(REPLAY_WITHIN, replayed(replay, tracker, index, from)).await {
        Ok(Ok(batches)) => tracing::debug!(from, batches, "KV events: replayed"),
        Ok(Err(error)) => tracing::warn!(error, from, "KV events: replay failed"),
        Err(_) => tracing::warn!(from, "KV events: replay timed out"),
    }
}

async fn replayed(endpoint: &str, tracker: &Mutex<Tracker>, index: &Index, from: u64) -> Result<u64, String> {
    let mut socket = DealerSocket::with_options(options());
    socket.connect(endpoint).await.map_err(|error| error.to_string())?;
    let frames = vec![Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())];
    let request = ZmqMessage::try_from(frames).map_err(|error| error.to_string())?;
    socket.send(request).await.map_err(|error| error.to_string())?;
    let mut batches = 0;
    loop {
        let reply = socket.recv().await.map_err(|error| error.to_string())?;
        let Some((sequence, payload)) = numbered(&reply) else {
            return Err("a reply without number".to_owned());
        };
        if sequence == REPLAY_END {
            return Ok(batches);
        }
        if batches == 0 && sequence > lock(tracker).expected() {
            // The publisher's buffer begins later than what we know.
            lock(tracker).skip_to(index, sequence);
        }
        apply(tracker, index, sequence, &payload);
        batches += 1;
    }
}
