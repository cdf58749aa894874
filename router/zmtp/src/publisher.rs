//! PUB: every message to every peer that has subscribed to a prefix of its first frame.
//!
//! [`PubSocket::send`] never waits. A peer whose queue is full loses the message, which is counted; a peer that reads
//! nothing for `write_within` loses its connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::task::JoinHandle;

use crate::accept::{Counters, SocketCounters, accept};
use crate::connection::{Connection, Reader, Writer};
use crate::endpoint::Listener;
use crate::queue::{QueueReceiver, QueueSender, Refused, queue};
use crate::wire::{self, Command, Event, SocketKind, SubscriptionChange};
use crate::{Endpoint, Error, Limits};

/// A PUB socket. Dropping it ends all connections.
#[derive(Debug)]
pub struct PubSocket {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    task: JoinHandle<()>,
}

impl PubSocket {
    /// Listens.
    ///
    /// # Errors
    ///
    /// The endpoint cannot be listened on.
    pub async fn bind(endpoint: &str, limits: Limits) -> Result<Self, Error> {
        let (listener, endpoint) = Listener::bind(endpoint).await?;
        let shared = Arc::new(Shared::new(limits));
        let counters = Arc::clone(&shared.counters);
        let peers = Arc::clone(&shared);
        let serve = move |connection| serve(connection, Arc::clone(&peers));
        let task = tokio::spawn(accept(listener, SocketKind::Pub, limits, counters, serve));
        Ok(Self { shared, endpoint, task })
    }

    /// Connects to one listening subscriber. When that connection ends the socket has no peer any more
    /// ([`PubSocket::is_connected`]); the caller has to connect again.
    ///
    /// # Errors
    ///
    /// The peer cannot be reached, or is no subscriber.
    pub async fn connect(endpoint: &str, limits: Limits) -> Result<Self, Error> {
        let connection = Connection::connect(endpoint, SocketKind::Pub, &limits).await?;
        let endpoint: Endpoint = endpoint.parse()?;
        let shared = Arc::new(Shared::new(limits));
        let peers = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            let ended = serve(connection, Arc::clone(&peers)).await;
            peers.counters.count_end(&ended);
        });
        Ok(Self { shared, endpoint, task })
    }

    /// Endpoint that the socket listens on, with the port that the system chose, or is connected to.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether the socket still has a use: a connected one ends with its connection.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !self.task.is_finished()
    }

    /// Number of peers with a subscription.
    #[must_use]
    pub fn subscribers(&self) -> usize {
        self.shared.lock().peers.values().filter(|peer| !peer.subscriptions.prefixes.is_empty()).count()
    }

    /// Counters of the socket.
    #[must_use]
    pub fn counters(&self) -> SocketCounters {
        self.shared.counters.get()
    }

    /// Queues a message for every peer with a matching subscription.
    pub fn send(&self, parts: &[Bytes]) {
        let Some(topic) = parts.first() else { return };
        let subscribers = self.shared.lock();
        let mut encoded = None;
        for peer in subscribers.peers.values().filter(|peer| peer.subscriptions.matches(topic)) {
            let bytes = encoded.get_or_insert_with(|| wire::message(parts));
            if peer.queue.offer(bytes.clone(), bytes.len()) == Err(Refused::Full) {
                self.shared.counters.count_dropped();
            }
        }
    }
}

impl Drop for PubSocket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
struct Shared {
    limits: Limits,
    counters: Arc<Counters>,
    subscribers: Mutex<Subscribers>,
}

#[derive(Debug, Default)]
struct Subscribers {
    next: u64,
    peers: HashMap<u64, Subscriber>,
}

#[derive(Debug)]
struct Subscriber {
    subscriptions: Subscriptions,
    queue: QueueSender<Bytes>,
}

impl Shared {
    fn new(limits: Limits) -> Self {
        Self { limits, counters: Arc::default(), subscribers: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Subscribers> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A multiset of the prefixes that a peer has subscribed to.
#[derive(Debug, Default)]
struct Subscriptions {
    prefixes: Vec<Bytes>,
    bytes: usize,
}

impl Subscriptions {
    fn change(&mut self, change: SubscriptionChange, limits: &Limits) -> Result<(), Error> {
        match change {
            SubscriptionChange::Subscribe(prefix) => {
                if self.prefixes.len() >= limits.subscriptions_max
                    || self.bytes + prefix.len() > limits.subscription_bytes_max
                {
                    return Err(Error::Limit("subscriptions of a peer"));
                }
                self.bytes += prefix.len();
                self.prefixes.push(prefix);
            }
            SubscriptionChange::Cancel(prefix) => {
                if let Some(at) = self.prefixes.iter().position(|held| *held == prefix) {
                    self.bytes -= self.prefixes.swap_remove(at).len();
                }
            }
        }
        debug_assert_eq!(self.bytes, self.prefixes.iter().map(Bytes::len).sum::<usize>());
        Ok(())
    }

    fn matches(&self, topic: &[u8]) -> bool {
        self.prefixes.iter().any(|prefix| topic.starts_with(prefix))
    }
}

/// A peer's entry. Dropping it removes the entry.
#[derive(Debug)]
struct SubscriberGuard {
    shared: Arc<Shared>,
    id: u64,
}

impl SubscriberGuard {
    fn take(shared: Arc<Shared>, queue: QueueSender<Bytes>) -> Self {
        let id = {
            let mut subscribers = shared.lock();
            subscribers.next += 1;
            let id = subscribers.next;
            subscribers.peers.insert(id, Subscriber { subscriptions: Subscriptions::default(), queue });
            id
        };
        Self { shared, id }
    }

    fn change(&self, change: SubscriptionChange) -> Result<(), Error> {
        match self.shared.lock().peers.get_mut(&self.id) {
            Some(peer) => peer.subscriptions.change(change, &self.shared.limits),
            None => Ok(()),
        }
    }
}

impl Drop for SubscriberGuard {
    fn drop(&mut self) {
        self.shared.lock().peers.remove(&self.id);
    }
}

async fn serve(connection: Connection, shared: Arc<Shared>) -> Result<(), Error> {
    let (sender, receiver) = queue(shared.limits.queued_messages_max, shared.limits.queued_bytes_max);
    let place = SubscriberGuard::take(shared, sender.clone());
    let Connection { reader, writer, .. } = connection;
    tokio::select! {
        ended = read(reader, &place, &sender) => ended,
        ended = write(writer, receiver) => ended,
    }
}

/// Reads subscriptions and PINGs of a peer.
async fn read(mut reader: Reader, place: &SubscriberGuard, queue: &QueueSender<Bytes>) -> Result<(), Error> {
    loop {
        let event = reader.next().await?;
        drop(reader.take_charge());
        if let Event::Command(Command::Ping { context }) = &event {
            let pong = wire::pong(context);
            let bytes = pong.len();
            // A PONG may be dropped: a peer with a full queue receives other bytes as signs of life.
            let _full = queue.offer(pong, bytes);
        }
        if let Some(change) = wire::subscription_change(&event) {
            place.change(change)?;
        }
    }
}

async fn write(mut writer: Writer, mut queue: QueueReceiver<Bytes>) -> Result<(), Error> {
    while let Some(queued) = queue.recv().await {
        writer.write(queued.item.clone()).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subscriptions_are_a_bounded_multiset_of_prefixes() {
        let limits = Limits { subscriptions_max: 3, subscription_bytes_max: 6, ..Limits::PUBLISHER };
        let mut held = Subscriptions::default();
        let add = |prefix: &'static str| SubscriptionChange::Subscribe(Bytes::from_static(prefix.as_bytes()));
        let cancel = |prefix: &'static str| SubscriptionChange::Cancel(Bytes::from_static(prefix.as_bytes()));
        assert!(!held.matches(b"kv"));
        for change in [add("kv"), add("kv"), cancel("kv"), cancel("other")] {
            held.change(change, &limits).expect("room");
        }
        assert!(held.matches(b"kv@pod") && held.matches(b"kv") && !held.matches(b"k"));
        held.change(cancel("kv"), &limits).expect("room");
        assert!(!held.matches(b"kv"));
        held.change(add(""), &limits).expect("room");
        assert!(held.matches(b"") && held.matches(b"anything"));
        assert!(held.change(add("7 bytes"), &limits).is_err());
        held.change(add("123456"), &limits).expect("room");
        held.change(add(""), &limits).expect("room");
        assert!(held.change(add(""), &limits).is_err(), "three at most");
    }
}
