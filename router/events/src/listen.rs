//! Publishers that connect to the gateway: one listener per endpoint, for any number of publishers.
//!
//! llm-d's usual deployment lets every engine connect to one port of the gateway, with the topic `kv@POD@MODEL`. Only the
//! topic identifies the sender of a message. It belongs to the worker that reports it as its own (vLLM's
//! `/kv_event_sources`); for a worker that reports none, to the one whose URL has the address between the topic's `@`.
//!
//! Invariants: a message goes to one worker or to none. When two workers claim a topic, or two connections use one in turn,
//! those workers' events are unattributable: they get no messages, and what was learnt from events is forgotten until
//! the ambiguity ends. A worker whose queue is full loses messages; the gap in its numbers asks for a replay.
//!
//! ```text
//!   Clear ──▶ Ambiguous   a second worker joins with the topic; two connections use it in turn
//!   Ambiguous ──▶ Clear   the second worker leaves; the second connection closes
//! ```

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use router_zmtp::queue::{QueueReceiver, QueueSender, Refused, queue};
use router_zmtp::{Endpoint, Error, Inbound, Limits, SubListener};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Largest number of endpoints. Beyond it, endpoints without a worker are closed first.
const LISTENERS_MAX: usize = 64;
/// Messages queued for one worker, which takes none during a replay.
const QUEUED_MESSAGES_MAX: usize = 4096;
/// Bytes queued for one worker.
const QUEUED_BYTES_MAX: usize = 4 << 20;
/// Open connections of one topic that are told apart.
const EARLIER_MAX: usize = 8;
/// Topics of one listener whose connections are remembered.
const TOPICS_MAX: usize = 8192;
/// Longest topic that is attributed.
const TOPIC_BYTES_MAX: usize = 512;
/// Unmatched topics of one listener that are named in the log. All of them are counted.
const UNMATCHED_NAMED_MAX: usize = 64;

/// Identity of a publisher besides its endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Publisher {
    /// The worker's name, for the log.
    pub name: String,
    /// Host, or host and port, of the worker's URL.
    pub address: String,
    /// Topic that the worker reports.
    pub topic: Option<String>,
}

/// Counters of the listeners.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ListenCounters {
    /// Messages that belong to no worker, or to more than one.
    pub unattributed: u64,
    /// Messages dropped because a worker's queue was full.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct Counts {
    unattributed: AtomicU64,
    dropped: AtomicU64,
}

/// The endpoints on which this process listens for publishers.
#[derive(Debug, Default)]
pub struct Listeners {
    open: tokio::sync::Mutex<HashMap<String, Arc<Listener>>>,
    counts: Arc<Counts>,
}

impl Listeners {
    /// Sum of the counters of all listeners.
    #[must_use]
    pub fn counters(&self) -> ListenCounters {
        ListenCounters {
            unattributed: self.counts.unattributed.load(Ordering::Relaxed),
            dropped: self.counts.dropped.load(Ordering::Relaxed),
        }
    }

    /// Listens at the endpoint, unless it is open already, and returns the publisher's messages to the caller.
    pub(crate) async fn join(&self, endpoint: &str, publisher: Publisher) -> Result<Membership, String> {
        // Held while binding, so that two workers do not race for the port.
        let mut open = self.open.lock().await;
        let listener = match open.get(endpoint) {
            Some(listener) => Arc::clone(listener),
            None => {
                if open.len() >= LISTENERS_MAX {
                    open.retain(|_, listener| !listener.lock().members.is_empty());
                }
                if open.len() >= LISTENERS_MAX {
                    return Err(format!("more than {LISTENERS_MAX} endpoints to listen on"));
                }
                let socket = bind(endpoint).await.map_err(|error| error.to_string())?;
                let demux = Demux::new(endpoint, Arc::clone(&self.counts));
                let listener = Listener::start(socket, demux);
                open.insert(endpoint.to_owned(), Arc::clone(&listener));
                listener
            }
        };
        let (sender, batches) = queue(QUEUED_MESSAGES_MAX, QUEUED_BYTES_MAX);
        let (ambiguity, is_ambiguous) = watch::channel(false);
        let member = listener.lock().join(publisher, sender, ambiguity);
        Ok(Membership { listener, member, batches, is_ambiguous })
    }
}

/// Listens at the endpoint. Engines may know the gateway by the name of a service, which is no address of this host; all
/// addresses are listened on then.
async fn bind(endpoint: &str) -> Result<SubListener, Error> {
    let named = match SubListener::bind(endpoint, b"", Limits::SUBSCRIBER).await {
        Err(error) => error,
        bound => return bound,
    };
    let is_elsewhere = match &named {
        Error::Bind { source, .. } => {
            use std::io::ErrorKind::{AddrInUse, PermissionDenied};
            !matches!(source.kind(), AddrInUse | PermissionDenied)
        }
        _ => false,
    };
    let port = endpoint.parse::<Endpoint>().ok().and_then(|endpoint| endpoint.port());
    let Some(port) = port.filter(|_| is_elsewhere) else { return Err(named) };
    for wildcard in [format!("tcp://[::]:{port}"), format!("tcp://0.0.0.0:{port}")] {
        if let Ok(socket) = SubListener::bind(&wildcard, b"", Limits::SUBSCRIBER).await {
            tracing::warn!(
                endpoint,
                address = %socket.endpoint(),
                reason = %named,
                "KV events: no address of this host has that name; listening on all of them"
            );
            return Ok(socket);
        }
    }
    Err(named)
}

/// One endpoint. Dropping it ends all connections.
#[derive(Debug)]
struct Listener {
    demux: Arc<Mutex<Demux>>,
    task: JoinHandle<()>,
}

impl Listener {
    fn start(mut socket: SubListener, demux: Demux) -> Arc<Self> {
        let demux = Arc::new(Mutex::new(demux));
        let sorting = Arc::clone(&demux);
        let task = tokio::spawn(async move {
            while let Some(inbound) = socket.recv().await {
                let mut demux = lock(&sorting);
                match inbound {
                    Inbound::Message { connection, parts } => demux.message(connection, &parts),
                    Inbound::Closed { connection } => demux.closed(connection),
                }
            }
        });
        Arc::new(Self { demux, task })
    }

    fn lock(&self) -> MutexGuard<'_, Demux> {
        lock(&self.demux)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(demux: &Mutex<Demux>) -> MutexGuard<'_, Demux> {
    demux.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A worker's part of a listener. Dropping it leaves the listener.
#[derive(Debug)]
pub(crate) struct Membership {
    listener: Arc<Listener>,
    member: u64,
    batches: QueueReceiver<(u64, Bytes)>,
    is_ambiguous: watch::Receiver<bool>,
}

/// An item delivered to a worker.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// Number and payload of a batch.
    Batch(u64, Bytes),
    /// The worker's messages have become ambiguous (true), or attributable again (false).
    Ambiguous(bool),
}

impl Membership {
    /// Whether the worker's messages cannot be attributed to it alone.
    pub(crate) fn is_ambiguous(&mut self) -> bool {
        *self.is_ambiguous.borrow_and_update()
    }

    /// Returns the next delivery; `None` when the listener is gone. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Delivery> {
        tokio::select! {
            biased;
            changed = self.is_ambiguous.changed() => {
                changed.ok()?;
                Some(Delivery::Ambiguous(*self.is_ambiguous.borrow_and_update()))
            }
            batch = self.batches.recv() => {
                let (sequence, payload) = batch?.item.clone();
                Some(Delivery::Batch(sequence, payload))
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.listener.lock().leave(self.member);
    }
}

#[derive(Debug)]
struct Member {
    id: u64,
    publisher: Publisher,
    batches: QueueSender<(u64, Bytes)>,
    ambiguity: watch::Sender<bool>,
    /// Whether another member claims one of the topics.
    overlaps: bool,
}

/// The connections that have used a member's topic.
#[derive(Debug)]
struct TopicConnections {
    member: u64,
    /// The connection that used the topic last.
    current: u64,
    /// Earlier connections that are still open.
    earlier: Vec<u64>,
    /// Whether an earlier connection has used the topic again: there are two publishers.
    contested: bool,
}

impl TopicConnections {
    /// Records that a connection has used the topic.
    fn heard(&mut self, connection: u64) {
        if connection == self.current {
            return;
        }
        // A publisher that has reconnected does not use its old connection any more.
        let before = self.earlier.len();
        self.earlier.retain(|earlier| *earlier != connection);
        self.contested |= self.earlier.len() < before;
        if self.earlier.len() >= EARLIER_MAX {
            // A single publisher does not reconnect so often without closing its old connections.
            self.contested = true;
            return;
        }
        self.earlier.push(self.current);
        self.current = connection;
    }

    /// Removes a connection. `false`: it was the only one.
    fn closed(&mut self, connection: u64) -> bool {
        self.earlier.retain(|earlier| *earlier != connection);
        if self.current == connection {
            let Some(last) = self.earlier.pop() else { return false };
            self.current = last;
        }
        self.contested &= !self.earlier.is_empty();
        true
    }
}

/// Sorts one listener's messages by publisher.
#[derive(Debug)]
struct Demux {
    endpoint: String,
    members: Vec<Member>,
    joined: u64,
    topics: HashMap<Bytes, TopicConnections>,
    unmatched: HashSet<Bytes>,
    counts: Arc<Counts>,
}

impl Demux {
    fn new(endpoint: &str, counts: Arc<Counts>) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            members: Vec::new(),
            joined: 0,
            topics: HashMap::new(),
            unmatched: HashSet::new(),
            counts,
        }
    }

    fn join(
        &mut self,
        publisher: Publisher,
        batches: QueueSender<(u64, Bytes)>,
        ambiguity: watch::Sender<bool>,
    ) -> u64 {
        self.joined += 1;
        let id = self.joined;
        self.members.push(Member { id, publisher, batches, ambiguity, overlaps: false });
        self.compare_claims();
        id
    }

    fn leave(&mut self, id: u64) {
        self.members.retain(|member| member.id != id);
        self.topics.retain(|_, speakers| speakers.member != id);
        self.compare_claims();
    }

    /// Members that report the same topic overlap from the beginning; other overlaps are found by a message.
    fn compare_claims(&mut self) {
        let mut claims: HashMap<&str, usize> = HashMap::new();
        for topic in self.members.iter().filter_map(|member| member.publisher.topic.as_deref()) {
            *claims.entry(topic).or_default() += 1;
        }
        let is_doubled =
            |member: &Member| member.publisher.topic.as_deref().is_some_and(|topic| claims[topic] > 1);
        let overlaps: Vec<bool> = self.members.iter().map(is_doubled).collect();
        for (member, overlaps) in self.members.iter_mut().zip(overlaps) {
            member.overlaps = overlaps;
        }
        self.tell();
    }

    fn message(&mut self, connection: u64, parts: &[Bytes]) {
        let numbered = crate::subscribe::numbered(parts);
        let (Some(topic), Some((sequence, payload))) = (parts.first().filter(|_| parts.len() >= 3), numbered)
        else {
            return self.unattributed();
        };
        match owners(&self.members, topic)[..] {
            [] => {
                self.name_unmatched(topic);
                self.unattributed();
            }
            [at] => {
                let is_remembered = self.heard(topic, self.members[at].id, connection);
                let member = &self.members[at];
                if !is_remembered || *member.ambiguity.borrow() {
                    return self.unattributed();
                }
                let bytes = payload.len();
                if member.batches.offer((sequence, payload), bytes) == Err(Refused::Full) {
                    self.counts.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
            ref several => {
                let mut is_new = false;
                for at in several {
                    is_new |= !std::mem::replace(&mut self.members[*at].overlaps, true);
                }
                if is_new {
                    self.tell();
                }
                self.unattributed();
            }
        }
    }

    fn closed(&mut self, connection: u64) {
        let mut is_settled = false;
        self.topics.retain(|_, speakers| {
            let was_contested = speakers.contested;
            let is_used = speakers.closed(connection);
            is_settled |= was_contested && !(is_used && speakers.contested);
            is_used
        });
        if is_settled {
            self.tell();
        }
    }

    /// Records the connection that uses the topic. `false`: there are too many topics to remember it.
    fn heard(&mut self, topic: &Bytes, member: u64, connection: u64) -> bool {
        if let Some(speakers) = self.topics.get_mut(topic).filter(|speakers| speakers.member == member) {
            let was_contested = speakers.contested;
            speakers.heard(connection);
            if speakers.contested && !was_contested {
                self.tell();
            }
            return true;
        }
        if self.topics.len() >= TOPICS_MAX && !self.topics.contains_key(topic) {
            return false;
        }
        let speakers =
            TopicConnections { member, current: connection, earlier: Vec::new(), contested: false };
        // Copied, because the topic's bytes are a part of a message, which would stay in memory.
        self.topics.insert(Bytes::copy_from_slice(topic), speakers);
        true
    }

    fn unattributed(&self) {
        self.counts.unattributed.fetch_add(1, Ordering::Relaxed);
    }

    fn name_unmatched(&mut self, topic: &Bytes) {
        // Engines may connect before the gateway has described any worker.
        if self.members.is_empty() || self.unmatched.len() >= UNMATCHED_NAMED_MAX {
            return;
        }
        let shown = topic.slice(..topic.len().min(TOPIC_BYTES_MAX));
        if self.unmatched.contains(&shown) {
            return;
        }
        tracing::warn!(
            endpoint = self.endpoint,
            topic = %String::from_utf8_lossy(&shown),
            "KV events: this topic is no worker's; its messages are left out"
        );
        self.unmatched.insert(Bytes::copy_from_slice(&shown));
    }

    /// Notifies every member whose state has changed.
    fn tell(&self) {
        let contested: HashSet<u64> = self
            .topics
            .values()
            .filter(|speakers| speakers.contested)
            .map(|speakers| speakers.member)
            .collect();
        for member in &self.members {
            let now = member.overlaps || contested.contains(&member.id);
            let changed = member.ambiguity.send_if_modified(|was| std::mem::replace(was, now) != now);
            if changed && now {
                tracing::warn!(
                    endpoint = self.endpoint,
                    worker = member.publisher.name,
                    topic = member.publisher.topic,
                    "KV events: several publishers use this port and topic; this worker's events cannot be attributed"
                );
            } else if changed {
                tracing::info!(
                    endpoint = self.endpoint,
                    worker = member.publisher.name,
                    "KV events: this worker's events can be attributed again"
                );
            }
        }
    }
}

/// The members that a topic may belong to.
fn owners(members: &[Member], topic: &[u8]) -> Vec<usize> {
    if topic.len() > TOPIC_BYTES_MAX {
        return Vec::new();
    }
    let all = || members.iter().map(|member| &member.publisher).enumerate();
    let is_named =
        |publisher: &Publisher| publisher.topic.as_ref().is_some_and(|own| own.as_bytes() == topic);
    let named: Vec<usize> = all().filter(|(_, publisher)| is_named(publisher)).map(|(at, _)| at).collect();
    if !named.is_empty() {
        return named;
    }
    let Some(address) = address_in(topic) else { return Vec::new() };
    let is_there = |publisher: &Publisher| publisher.topic.is_none() && is_at(&publisher.address, address);
    all().filter(|(_, publisher)| is_there(publisher)).map(|(at, _)| at).collect()
}

/// The address in `kv@ADDRESS@MODEL`.
fn address_in(topic: &[u8]) -> Option<&str> {
    let mut parts = std::str::from_utf8(topic).ok()?.splitn(3, '@');
    let (_kind, address, _model) = (parts.next()?, parts.next()?, parts.next()?);
    (!address.is_empty()).then_some(address)
}

/// Whether a worker is at an address; the port is compared only if the address has one.
fn is_at(worker: &str, address: &str) -> bool {
    let (worker, address) = (host_and_port(worker), host_and_port(address));
    worker.0 == address.0 && (address.1.is_none() || worker.1 == address.1)
}

fn host_and_port(text: &str) -> (String, Option<u16>) {
    let host = |host: &str| {
        let bare = host.trim_matches(['[', ']']);
        bare.parse::<IpAddr>().map_or_else(|_| bare.to_ascii_lowercase(), |ip| ip.to_string())
    };
    // An IPv6 address without brackets has colons, and no port.
    if text.parse::<IpAddr>().is_ok() {
        return (host(text), None);
    }
    match text.rsplit_once(':').map(|(name, port)| (name, port.parse())) {
        Some((name, Ok(port))) => (host(name), Some(port)),
        _ => (host(text), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Batches = QueueReceiver<(u64, Bytes)>;

    struct Joined {
        id: u64,
        batches: Batches,
        is_ambiguous: watch::Receiver<bool>,
    }

    impl Joined {
        /// Numbers of the received batches.
        async fn numbers(&mut self) -> Vec<u64> {
            let mut numbers = Vec::new();
            let waiting = std::time::Duration::from_millis(1);
            while let Ok(Some(batch)) = tokio::time::timeout(waiting, self.batches.recv()).await {
                numbers.push(batch.item.0);
            }
            numbers
        }

        fn is_ambiguous(&self) -> bool {
            *self.is_ambiguous.borrow()
        }
    }

    fn demux() -> Demux {
        Demux::new("tcp://gateway:5557", Arc::default())
    }

    fn join(demux: &mut Demux, address: &str, topic: Option<&str>) -> Joined {
        let publisher = Publisher {
            name: format!("http://{address}"),
            address: address.to_owned(),
            topic: topic.map(str::to_owned),
        };
        let (sender, batches) = queue(16, 1 << 20);
        let (ambiguity, is_ambiguous) = watch::channel(false);
        let id = demux.join(publisher, sender, ambiguity);
        Joined { id, batches, is_ambiguous }
    }

    fn send(demux: &mut Demux, connection: u64, topic: &str, sequence: u64) {
        let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
        let parts = [Bytes::copy_from_slice(topic.as_bytes()), number, Bytes::from_static(b"payload")];
        demux.message(connection, &parts);
    }

    fn unattributed(demux: &Demux) -> u64 {
        demux.counts.unattributed.load(Ordering::Relaxed)
    }

    #[tokio::test(start_paused = true)]
    async fn topics_tell_publishers_at_one_port_apart() {
        let mut demux = demux();
        let mut named = join(&mut demux, "service-a:8000", Some("kv@10.0.0.1:8000@m"));
        let mut by_address = join(&mut demux, "10.0.0.2:8000", None);
        let mut by_host = join(&mut demux, "[fd00::3]:8000", None);
        send(&mut demux, 1, "kv@10.0.0.1:8000@m", 1);
        send(&mut demux, 2, "kv@10.0.0.2:8000@m", 2);
        send(&mut demux, 2, "kv@10.0.0.2@org/m@v1", 3);
        send(&mut demux, 3, "kv@FD00:0::3@m", 4);
        for topic in ["", "kv", "kv@@m", "kv@10.0.0.1@m", "kv@10.0.0.2:8001@m", "kv@10.0.0.9@m"] {
            send(&mut demux, 4, topic, 9);
        }
        assert_eq!(named.numbers().await, [1]);
        assert_eq!(by_address.numbers().await, [2, 3]);
        assert_eq!(by_host.numbers().await, [4]);
        assert_eq!(unattributed(&demux), 6);
        // Without topic, or without number.
        demux.message(1, &[Bytes::copy_from_slice(&7_u64.to_be_bytes()), Bytes::new()]);
        demux.message(1, &[Bytes::new(), Bytes::new(), Bytes::new()]);
        assert_eq!(unattributed(&demux), 8);
        assert_eq!(named.numbers().await, [0; 0]);
        // A worker that has left.
        demux.leave(named.id);
        send(&mut demux, 1, "kv@10.0.0.1:8000@m", 2);
        assert_eq!(unattributed(&demux), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn workers_with_one_topic_get_no_events_until_one_leaves() {
        let mut demux = demux();
        let mut first = join(&mut demux, "10.0.0.1:8000", Some(""));
        send(&mut demux, 1, "", 0);
        assert!(!first.is_ambiguous());
        let mut second = join(&mut demux, "10.0.0.2:8000", Some(""));
        assert!(first.is_ambiguous() && second.is_ambiguous());
        send(&mut demux, 1, "", 1);
        send(&mut demux, 2, "", 0);
        assert_eq!(first.numbers().await, [0]);
        assert_eq!(second.numbers().await, [0; 0]);
        demux.leave(second.id);
        assert!(!first.is_ambiguous());
        send(&mut demux, 1, "", 2);
        assert_eq!(unattributed(&demux), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_of_two_workers_is_nobodys() {
        let mut demux = demux();
        let mut first = join(&mut demux, "10.0.0.1:8000", None);
        let mut second = join(&mut demux, "10.0.0.1:8001", None);
        send(&mut demux, 1, "kv@10.0.0.1:8001@m", 0);
        assert_eq!(second.numbers().await, [0]);
        send(&mut demux, 1, "kv@10.0.0.1@m", 1);
        assert!(first.is_ambiguous() && second.is_ambiguous());
        assert!(first.numbers().await.is_empty() && second.numbers().await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn two_connections_that_use_one_topic_in_turn_are_noticed() {
        let mut demux = demux();
        let mut only = join(&mut demux, "10.0.0.1:8000", Some(""));
        // The publisher reconnects, and its old connection stays half open for a while.
        send(&mut demux, 1, "", 0);
        send(&mut demux, 2, "", 1);
        send(&mut demux, 2, "", 2);
        assert_eq!(only.numbers().await, [0, 1, 2]);
        // An engine that the gateway does not know publishes under the same topic.
        send(&mut demux, 1, "", 0);
        assert!(only.is_ambiguous());
        send(&mut demux, 2, "", 3);
        assert_eq!(only.numbers().await, [0; 0]);
        demux.closed(1);
        assert!(!only.is_ambiguous());
        send(&mut demux, 2, "", 4);
        assert_eq!(only.numbers().await, [4]);
        demux.closed(2);
        assert!(demux.topics.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_takes_nothing_loses_messages_alone() {
        let mut demux = demux();
        let mut slow = join(&mut demux, "a", Some("a"));
        let mut other = join(&mut demux, "b", Some("b"));
        for sequence in 0..20 {
            send(&mut demux, 1, "a", sequence);
        }
        send(&mut demux, 2, "b", 0);
        assert_eq!(demux.counts.dropped.load(Ordering::Relaxed), 4);
        assert_eq!(slow.numbers().await, (0..16).collect::<Vec<u64>>());
        assert_eq!(other.numbers().await, [0]);
    }

    #[tokio::test(start_paused = true)]
    async fn topics_are_bounded() {
        let mut demux = demux();
        let mut worker = join(&mut demux, "10.0.0.1:8000", None);
        for number in 0..TOPICS_MAX + 100 {
            send(&mut demux, 1, &format!("kv@10.0.0.1@{number}"), 0);
            worker.numbers().await;
        }
        assert_eq!((demux.topics.len(), unattributed(&demux)), (TOPICS_MAX, 100));
        for number in 0..100 {
            send(&mut demux, 1, &format!("unknown {number}"), 0);
        }
        assert_eq!(demux.unmatched.len(), UNMATCHED_NAMED_MAX);
    }
}
