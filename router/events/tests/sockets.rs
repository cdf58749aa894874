//! Real ZMQ sockets: a publisher that listens and one that connects, replay in both shapes, ranks on ports of their
//! own, and a rank whose index is not trusted any more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use router_events::follower::Follower;
use router_events::subscribe::{Feed, Followed, follow};
use router_events::tracker::Tracker;
use router_events::wire::{EventBatch, KvEvent, Stored, encode};
use router_radix::{Index, IndexConfig, Member};
use tokio::sync::Notify;
use zeromq::prelude::*;
use zeromq::{PubSocket, RouterSocket, ZmqMessage};

const BLOCK_TOKENS: usize = 4;

/// The batch with this number: one block, the child of the one before.
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

fn message(frames: Vec<Bytes>) -> ZmqMessage {
    ZmqMessage::try_from(frames).expect("frames")
}

fn number(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

struct Rig {
    index: Arc<Index>,
    member: Member,
    distrust: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
}

impl Rig {
    fn follow(feed: Feed) -> Self {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let member = index.write().join().expect("room");
        let follower = Follower::new(Tracker::new(member, BLOCK_TOKENS));
        let distrust = Arc::<Notify>::default();
        let followed = Followed {
            follower: Arc::new(Mutex::new(follower)),
            index: Arc::clone(&index),
            distrust: Arc::clone(&distrust),
        };
        let task = tokio::spawn(follow(feed, followed, || {}));
        Self { index, member, distrust, task }
    }

    fn blocks(&self) -> usize {
        self.index.write().held(self.member).len()
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
async fn replay_server(with_topic: bool, published: Arc<AtomicU64>) -> (String, tokio::task::JoinHandle<()>) {
    let mut socket = RouterSocket::new();
    let endpoint = socket.bind("tcp://127.0.0.1:0").await.expect("bound").to_string();
    let task = tokio::spawn(async move {
        while let Ok(request) = socket.recv().await {
            let frames = request.into_vec();
            let from = u64::from_be_bytes(frames[2][..].try_into().expect("a number"));
            let topic = |topic: &'static [u8]| with_topic.then_some(Bytes::from_static(topic));
            let batches = (from..published.load(Ordering::SeqCst))
                .map(|at| (topic(b"kv@pod@model"), number(at), payload(at)));
            let end = (topic(b""), number(u64::MAX), Bytes::new());
            for (topic, number, payload) in batches.chain([end]) {
                let head = [frames[0].clone(), Bytes::new()].into_iter();
                let reply = head.chain(topic).chain([number, payload]).collect();
                socket.send(message(reply)).await.expect("sent");
            }
        }
    });
    (endpoint, task)
}

async fn publish(socket: &mut PubSocket, at: u64) {
    let frames = vec![Bytes::from_static(b"kv@pod@model"), number(at), payload(at)];
    socket.send(message(frames)).await.expect("sent");
}

#[tokio::test]
async fn replay_in_both_shapes_fills_what_was_missed() {
    for with_topic in [false, true] {
        let mut socket = PubSocket::new();
        let events = socket.bind("tcp://127.0.0.1:0").await.expect("bound").to_string();
        let published = Arc::new(AtomicU64::new(5));
        let (replay, server) = replay_server(with_topic, Arc::clone(&published)).await;
        let rig = Rig::follow(Feed { events, replay: Some(replay), bind: false });
        rig.wait_for(5).await;
        // A subscription takes a moment to be known to the publisher: what it missed is asked for.
        for at in 5..30 {
            published.store(at + 1, Ordering::SeqCst);
            publish(&mut socket, at).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        rig.wait_for(30).await;
        // Whatever makes it doubtful: everything is asked for again, and only what is still there comes back.
        published.store(5, Ordering::SeqCst);
        rig.distrust.notify_one();
        rig.wait_for(5).await;
        server.abort();
    }
}

#[tokio::test]
async fn a_publisher_may_connect_and_ranks_have_ports_of_their_own() {
    // A free port, and the next one.
    let base = loop {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = probe.local_addr().expect("bound").port();
        if port < u16::MAX && std::net::TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            break port;
        }
    };
    let feed = Feed { events: format!("tcp://127.0.0.1:{base}"), replay: None, bind: true };
    let ranks = [Rig::follow(feed.of_rank(0)), Rig::follow(feed.of_rank(1))];
    for (rank, rig) in ranks.iter().enumerate() {
        let mut socket = PubSocket::new();
        let endpoint = format!("tcp://127.0.0.1:{}", base as usize + rank);
        while socket.connect(&endpoint).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // A subscription takes a moment to be known to the publisher. Repeated messages do no harm.
        for _ in 0..200 {
            for at in 0..(3 + rank as u64) {
                publish(&mut socket, at).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            if rig.blocks() == 3 + rank {
                break;
            }
        }
        rig.wait_for(3 + rank).await;
    }
}
