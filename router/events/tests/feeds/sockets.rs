//! Real ZMQ sockets: a publisher that listens and one that connects, replay in both forms, ranks on separate ports, a rank
//! whose index is distrusted, and many publishers at one port.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use router_events::follower::Follower;
use router_events::listen::{Listeners, Publisher};
use router_events::subscribe::{Feed, SubscriptionContext, follow};
use router_events::tracker::Tracker;
use router_events::wire::{EventBatch, KvEvent, Stored, encode};
use router_radix::{Index, IndexConfig, Member};
use router_zmtp::{Limits, PubSocket, Replies, RouterSocket};
use tokio::sync::Notify;

const BLOCK_TOKENS: usize = 4;

/// Returns the batch with this number: one block, the child of the one before.
fn payload(number: u64) -> Bytes {
    let stored = Stored {
        hashes: vec![number + 1],
        parent: number.checked_sub(1).map(|before| before + 1),
        tokens: vec![number as u32; BLOCK_TOKENS],
        block_tokens: BLOCK_TOKENS,
        ..Stored::default()
    };
    encode(&EventBatch { events: vec![KvEvent::Stored(stored)], ..EventBatch::default() }).into()
}

fn number(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

struct Rig {
    index: Arc<Index>,
    member: Member,
    resync: Arc<Notify>,
    follower: Arc<Mutex<Follower>>,
    task: tokio::task::JoinHandle<()>,
}

impl Rig {
    fn follow(feed: Feed) -> Self {
        Self::listen(feed, &Arc::default())
    }

    fn listen(feed: Feed, listeners: &Arc<Listeners>) -> Self {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let member = index.write().join().expect("room");
        let follower = Arc::new(Mutex::new(Follower::new(Tracker::new(member, BLOCK_TOKENS))));
        let resync = Arc::<Notify>::default();
        let followed = SubscriptionContext {
            follower: Arc::clone(&follower),
            index: Arc::clone(&index),
            resync: Arc::clone(&resync),
        };
        let task = tokio::spawn(follow(feed, followed, Arc::clone(listeners), || {}));
        Self { index, member, resync, follower, task }
    }

    fn blocks(&self) -> usize {
        self.index.write().held(self.member).len()
    }

    /// Times that all blocks were forgotten.
    fn resets(&self) -> u64 {
        self.follower.lock().expect("no panic").tracker().counters.resets
    }

    async fn wait_for(&self, blocks: usize) {
        for _ in 0..500 {
            if self.blocks() == blocks {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} blocks, not {blocks}", self.blocks());
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answers every replay request with what was published so far, as vLLM did up to 0.24 or as it does since 0.27.1.
async fn replay_server(with_topic: bool, published: Arc<AtomicU64>) -> RouterSocket {
    replay_server_at("tcp://127.0.0.1:0", with_topic, published).await
}

async fn replay_server_at(endpoint: &str, with_topic: bool, published: Arc<AtomicU64>) -> RouterSocket {
    let answer = move |request: Vec<Bytes>| -> Replies {
        let from = u64::from_be_bytes(request[1][..].try_into().expect("a number"));
        let topic = move |topic: &'static [u8]| with_topic.then_some(Bytes::from_static(topic));
        let batches = (from..published.load(Ordering::SeqCst))
            .map(move |at| (topic(b"kv@pod@model"), number(at), payload(at)));
        let end = (topic(b""), number(u64::MAX), Bytes::new());
        let reply = |(topic, number, payload): (Option<Bytes>, Bytes, Bytes)| -> Vec<Bytes> {
            std::iter::once(Bytes::new()).chain(topic).chain([number, payload]).collect()
        };
        Box::new(batches.chain([end]).map(reply))
    };
    RouterSocket::bind(endpoint, Limits::REPLAY_SERVER, answer).await.expect("bound")
}

fn publish_as(socket: &PubSocket, topic: &'static str, at: u64) {
    socket.send(&[Bytes::from_static(topic.as_bytes()), number(at), payload(at)]);
}

fn publish(socket: &PubSocket, at: u64) {
    publish_as(socket, "kv@pod@model", at);
}

/// A publisher that connects to the gateway, once that listens and has subscribed.
async fn connected(endpoint: &str) -> PubSocket {
    let socket = loop {
        match PubSocket::connect(endpoint, Limits::PUBLISHER).await {
            Ok(socket) => break socket,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    while socket.subscribers() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    socket
}

/// A port that is free, as is the next one.
fn free_ports() -> u16 {
    loop {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = probe.local_addr().expect("bound").port();
        if port < u16::MAX && std::net::TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
}

/// The feed of a worker that connects to the gateway.
fn bound(port: u16, worker: &str, topic: Option<&str>) -> Feed {
    let publisher = Publisher {
        name: format!("http://{worker}"),
        address: worker.to_owned(),
        topic: topic.map(str::to_owned),
    };
    Feed { events: format!("tcp://127.0.0.1:{port}"), replay: None, bind: true, publisher }
}

#[tokio::test]
async fn replay_in_both_shapes_fills_what_was_missed() {
    for with_topic in [false, true] {
        let socket = PubSocket::bind("tcp://127.0.0.1:0", Limits::PUBLISHER).await.expect("bound");
        let published = Arc::new(AtomicU64::new(5));
        let server = replay_server(with_topic, Arc::clone(&published)).await;
        let rig = Rig::follow(Feed {
            events: socket.endpoint().to_string(),
            replay: Some(server.endpoint().to_string()),
            bind: false,
            publisher: Publisher::default(),
        });
        rig.wait_for(5).await;
        // A publisher learns of a subscription after a moment: messages before that are requested by a replay.
        for at in 5..30 {
            published.store(at + 1, Ordering::SeqCst);
            publish(&socket, at);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        rig.wait_for(30).await;
        // When the index is distrusted, everything is requested again, and only blocks that still exist come back.
        published.store(5, Ordering::SeqCst);
        rig.resync.notify_one();
        rig.wait_for(5).await;
    }
}

#[tokio::test]
async fn a_replay_that_fails_is_asked_for_again_and_nothing_is_forgotten() {
    let socket = PubSocket::bind("tcp://127.0.0.1:0", Limits::PUBLISHER).await.expect("bound");
    let replay = format!("tcp://127.0.0.1:{}", free_ports());
    let rig = Rig::follow(Feed {
        events: socket.endpoint().to_string(),
        replay: Some(replay.clone()),
        bind: false,
        publisher: Publisher::default(),
    });
    while socket.subscribers() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // The engine is too busy to take the first call.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _server = replay_server_at(&replay, true, Arc::new(AtomicU64::new(5))).await;
    rig.wait_for(5).await;
    assert_eq!(rig.resets(), 0);
}

#[tokio::test]
async fn a_publisher_may_connect_and_ranks_have_ports_of_their_own() {
    let base = free_ports();
    let feed = bound(base, "127.0.0.1:8000", Some("kv@pod@model"));
    let ranks = [Rig::follow(feed.of_rank(0)), Rig::follow(feed.of_rank(1))];
    for (rank, rig) in ranks.iter().enumerate() {
        let socket = connected(&format!("tcp://127.0.0.1:{}", base as usize + rank)).await;
        for at in 0..(3 + rank as u64) {
            publish(&socket, at);
        }
        rig.wait_for(3 + rank).await;
    }
}

#[tokio::test]
async fn publishers_at_one_port_are_told_apart_by_topic() {
    let port = free_ports();
    let endpoint = format!("tcp://127.0.0.1:{port}");
    let listeners = Arc::<Listeners>::default();
    let topics = ["kv@10.0.0.1@m", "kv@10.0.0.2:8000@m", "kv@nobody@m"];
    let rigs = [
        Rig::listen(bound(port, "service-a:8000", Some(topics[0])), &listeners),
        Rig::listen(bound(port, "10.0.0.2:8000", None), &listeners),
    ];
    let engines = [connected(&endpoint).await, connected(&endpoint).await, connected(&endpoint).await];
    // Numbers of several publishers interleave; each worker has its own count.
    for at in 0..40 {
        for (engine, topic) in engines.iter().zip(topics) {
            if at < 20 || topic == topics[1] {
                publish_as(engine, topic, at);
            }
        }
    }
    rigs[0].wait_for(20).await;
    rigs[1].wait_for(40).await;
    assert_eq!(rigs.each_ref().map(Rig::resets), [0, 0], "no numbers were mixed");
    for _ in 0..500 {
        if listeners.counters().unattributed == 20 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(listeners.counters().unattributed, 20, "nobody's events");
    // A worker joins with the topic of another: the messages of both are ambiguous.
    let third = Rig::listen(bound(port, "10.0.0.3:8000", Some(topics[0])), &listeners);
    rigs[0].wait_for(0).await;
    publish_as(&engines[0], topics[0], 20);
    publish_as(&engines[1], topics[1], 40);
    rigs[1].wait_for(41).await;
    assert_eq!((rigs[0].blocks(), third.blocks()), (0, 0));
}

#[tokio::test]
async fn a_port_in_use_is_tried_again() {
    let port = free_ports();
    let taken = std::net::TcpListener::bind(("127.0.0.1", port)).expect("free");
    let rig = Rig::follow(bound(port, "127.0.0.1:8000", Some("kv@pod@model")));
    tokio::time::sleep(Duration::from_millis(150)).await;
    drop(taken);
    let socket = connected(&format!("tcp://127.0.0.1:{port}")).await;
    publish(&socket, 0);
    rig.wait_for(1).await;
}

#[tokio::test]
async fn hostile_bytes_at_a_shared_port_harm_no_worker() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let port = free_ports();
    let rig = Rig::follow(bound(port, "127.0.0.1:8000", Some("kv@pod@model")));
    let socket = connected(&format!("tcp://127.0.0.1:{port}")).await;
    let mut hostile = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("connects");
    let bytes = [&router_zmtp::wire::greeting()[..], b"\x06", &[0x7F; 8]].concat();
    hostile.write_all(&bytes).await.expect("written");
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(10), hostile.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "the connection ends");
    publish(&socket, 0);
    rig.wait_for(1).await;
}
