//! The subscription to one publisher.
//!
//! The feed is a ZMQ PUB: messages before the subscription, and while a connection is down, are lost. So a new
//! subscription first requests everything from the publisher's replay socket, and each gap in the numbers is filled the
//! same way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use router_radix::Index;
use router_zmtp::{DealerSocket, Limits, SubSocket};
use tokio::sync::Notify;

use crate::follower::{Follower, Step};
use crate::listen::{Delivery, Listeners, Membership, Publisher};

const CONNECT_WITHIN: Duration = Duration::from_millis(500);
const LIMITS: Limits = Limits { handshake_within: CONNECT_WITHIN, ..Limits::SUBSCRIBER };
/// Longest silence of a publisher during a replay. The replay as a whole has no time limit.
const REPLAY_SILENCE_MAX: Duration = Duration::from_secs(5);
/// Pauses before an interrupted replay is requested again. After the last one the index stays without these blocks until
/// the engine stores them again.
const REPLAY_PAUSES: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1)];
/// Restarts of a publisher that are followed during one replay.
const RESTARTS_MAX: usize = 3;
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// End marker of a replay: -1 as eight bytes.
pub(crate) const REPLAY_END: u64 = u64::MAX;

/// Endpoints of a publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feed {
    /// The PUB socket: the endpoint that it listens on, or connects to (see `bind`).
    pub events: String,
    /// The replay socket, if there is one.
    pub replay: Option<String>,
    /// Whether the gateway listens and the publisher connects: vLLM connects when its endpoint names a host.
    pub bind: bool,
    /// Identity of the publisher among those that connect to the same port. Used only with `bind`.
    pub publisher: Publisher,
}

impl Feed {
    /// The feed of a data-parallel rank: engines count ports up from the first rank's.
    #[must_use]
    pub fn of_rank(&self, rank: u16) -> Self {
        Self {
            events: port_after(&self.events, rank),
            replay: self.replay.as_deref().map(|replay| port_after(replay, rank)),
            bind: self.bind,
            publisher: self.publisher.clone(),
        }
    }
}

/// Returns the endpoint with its port raised by `by`; an endpoint without a port is unchanged.
fn port_after(endpoint: &str, by: u16) -> String {
    let moved = endpoint.rsplit_once(':').and_then(|(host, port)| {
        let port: u16 = port.parse().ok()?;
        Some(format!("{host}:{}", port.checked_add(by)?))
    });
    moved.unwrap_or_else(|| endpoint.to_owned())
}

/// State that a subscription shares with the rest of the process.
#[derive(Debug, Clone)]
pub struct SubscriptionContext {
    /// The publisher's state.
    pub follower: Arc<Mutex<Follower>>,
    /// The index that the subscription writes to.
    pub index: Arc<Index>,
    /// Notified to forget all blocks of the publisher and request them again.
    pub resync: Arc<Notify>,
}

impl SubscriptionContext {
    fn lock(&self) -> MutexGuard<'_, Follower> {
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows a publisher until the task is dropped. `ready` is called once the index has caught up with the publisher's
/// past events.
pub async fn follow(
    feed: Feed,
    followed: SubscriptionContext,
    listeners: Arc<Listeners>,
    ready: impl Fn() + Send,
) {
    let mut complaint = String::new();
    loop {
        match Subscription::open(&feed, &listeners).await {
            Ok(mut subscription) => {
                complaint.clear();
                if subscription.is_ambiguous() {
                    // Blocks from a snapshot cannot be kept up to date.
                    followed.lock().start_over(&mut followed.index.write());
                } else {
                    // Requests messages missed before the subscription; a publisher without any answers with the end marker alone.
                    let from = followed.lock().replay_from();
                    catch_up(&feed, &followed, from).await;
                }
                ready();
                let reason = listen(&feed, &followed, subscription).await;
                tracing::info!(feed = feed.events, reason, "KV events: subscription ended");
            }
            // A port that cannot be opened is an operator's mistake: logged once per reason.
            Err(error) if feed.bind && error != complaint => {
                tracing::warn!(
                    feed = feed.events,
                    worker = feed.publisher.name,
                    error,
                    "KV events: not followed"
                );
                complaint = error;
            }
            Err(error) => tracing::debug!(feed = feed.events, error, "KV events: not reachable yet"),
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

/// The live feed.
#[derive(Debug)]
enum Subscription {
    /// The gateway has connected to the publisher.
    Connected(Box<SubSocket>),
    /// The publisher connects to a listener of the gateway.
    Bound(Membership),
}

impl Subscription {
    async fn open(feed: &Feed, listeners: &Listeners) -> Result<Self, String> {
        if feed.bind {
            return listeners.join(&feed.events, feed.publisher.clone()).await.map(Self::Bound);
        }
        let socket = SubSocket::connect(&feed.events, b"", LIMITS).await;
        socket.map(|socket| Self::Connected(Box::new(socket))).map_err(|error| error.to_string())
    }

    /// Whether the publisher's messages cannot be attributed to it alone.
    fn is_ambiguous(&mut self) -> bool {
        match self {
            Self::Connected(_) => false,
            Self::Bound(membership) => membership.is_ambiguous(),
        }
    }

    /// Returns the next delivery, or the reason for which there is none. Cancel-safe.
    async fn next(&mut self) -> Result<Delivery, String> {
        match self {
            Self::Connected(socket) => loop {
                let parts = socket.recv().await.map_err(|error| error.to_string())?;
                if let Some((sequence, payload)) = numbered(&parts) {
                    return Ok(Delivery::Batch(sequence, payload));
                }
            },
            Self::Bound(membership) => {
                membership.next().await.ok_or_else(|| "the listener has ended".to_owned())
            }
        }
    }
}

async fn listen(feed: &Feed, followed: &SubscriptionContext, mut subscription: Subscription) -> String {
    let mut is_ambiguous = subscription.is_ambiguous();
    loop {
        let delivery = tokio::select! {
            delivery = subscription.next() => delivery,
            () = followed.resync.notified() => Ok(Delivery::Ambiguous(is_ambiguous)),
        };
        match delivery {
            Err(reason) => return reason,
            // Index distrusted, or ambiguity begun or ended: the index may hold too much or too little.
            Ok(Delivery::Ambiguous(now)) => {
                is_ambiguous = now;
                followed.lock().start_over(&mut followed.index.write());
                if !is_ambiguous {
                    catch_up(feed, followed, 0).await;
                }
            }
            Ok(Delivery::Batch(..)) if is_ambiguous => {}
            Ok(Delivery::Batch(sequence, payload)) => {
                let step = followed.lock().live(&mut followed.index.write(), sequence, &payload);
                if let Step::Replay { from } = step {
                    catch_up(feed, followed, from).await;
                    followed.lock().after_replay(&mut followed.index.write(), sequence, &payload);
                }
            }
        }
    }
}

/// Number and payload: the last two frames of a message.
pub(crate) fn numbered(parts: &[Bytes]) -> Option<(u64, Bytes)> {
    let [.., number, payload] = parts else { return None };
    Some((u64::from_be_bytes(number[..].try_into().ok()?), payload.clone()))
}

/// Requests everything from `from` on and applies it. An interrupted replay is continued.
async fn catch_up(feed: &Feed, followed: &SubscriptionContext, mut from: u64) {
    let Some(replay) = &feed.replay else { return };
    let mut pauses = REPLAY_PAUSES.iter();
    loop {
        let error = match replayed(replay, followed, from).await {
            Ok(batches) => return tracing::debug!(from, batches, "KV events: replayed"),
            Err(error) => error,
        };
        let Some(pause) = pauses.next() else {
            return tracing::warn!(error, from, replay, "KV events: replay failed");
        };
        tracing::info!(error, from, replay, "KV events: a replay broke off; asking again");
        tokio::time::sleep(*pause).await;
        from = followed.lock().replay_from();
    }
}

/// Result of a publisher's operation, or an error after [`REPLAY_SILENCE_MAX`].
async fn unless_silent<T, E: ToString>(said: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    match tokio::time::timeout(REPLAY_SILENCE_MAX, said).await {
        Ok(said) => said.map_err(|error| error.to_string()),
        Err(_) => Err(format!("nothing came for {} s", REPLAY_SILENCE_MAX.as_secs())),
    }
}

async fn replayed(endpoint: &str, followed: &SubscriptionContext, mut from: u64) -> Result<u64, String> {
    for _ in 0..RESTARTS_MAX {
        let mut socket = unless_silent(DealerSocket::connect(endpoint, LIMITS)).await?;
        let request = [Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())];
        unless_silent(socket.send(&request)).await?;
        let mut batches = 0;
        let again = loop {
            let reply = unless_silent(socket.recv()).await?;
            let Some((sequence, payload)) = numbered(&reply) else {
                return Err("a reply without number".to_owned());
            };
            if sequence == REPLAY_END {
                if batches == 0
                    && let Step::Replay { from } =
                        followed.lock().replayed_nothing(&mut followed.index.write())
                {
                    break from;
                }
                return Ok(batches);
            }
            let step = followed.lock().replayed(&mut followed.index.write(), sequence, &payload);
            if let Step::Replay { from } = step {
                break from;
            }
            batches += 1;
        };
        // The publisher has restarted: replay from its beginning, on a new socket, without the rest of the old answer.
        from = again;
    }
    Err("it started again and again".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_ports_up() {
        let feed = Feed {
            events: "tcp://10.0.0.1:5557".into(),
            replay: Some("tcp://[::1]:65535".into()),
            bind: false,
            publisher: Publisher::default(),
        };
        let third = feed.of_rank(2);
        assert_eq!(third.events, "tcp://10.0.0.1:5559");
        assert_eq!(third.replay.as_deref(), Some("tcp://[::1]:65535"), "no such port: left as it is");
        assert_eq!(feed.of_rank(0), feed);
        assert_eq!(port_after("ipc:///run/x", 3), "ipc:///run/x");
    }
}
