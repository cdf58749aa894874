//! Peers that break the protocol, announce what never comes, subscribe without end, or stop reading: their connection
//! ends, or they lose messages, and everybody else is served meanwhile.

use std::time::Duration;

use bytes::Bytes;
use router_zmtp::wire::{self, Command, Decoder, Event, SocketKind};
use router_zmtp::{
    DealerSocket, Endpoint, Error, Inbound, Limits, PubSocket, Replies, RouterSocket, SubListener, SubSocket,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

const WITHIN: Duration = Duration::from_secs(20);
const LOCAL: &str = "tcp://127.0.0.1:0";

/// A greeting, and a command of 9,187,201,950,435,737,471 bytes of which none comes.
fn hostile_bytes() -> Vec<u8> {
    let bytes = [&wire::greeting()[..], b"\x06", &[0x7F; 8]].concat();
    assert_eq!(bytes.len(), 73);
    bytes
}

async fn raw(endpoint: &Endpoint) -> TcpStream {
    TcpStream::connect(("127.0.0.1", endpoint.port().expect("a port"))).await.expect("connects")
}

/// Waits until the other side has closed the connection.
async fn wait_for_end(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    let ended = async { while !matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)) {} };
    tokio::time::timeout(WITHIN, ended).await.expect("the connection ends");
}

async fn until(mut holds: impl FnMut() -> bool) {
    let holding = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WITHIN, holding).await.expect("in time");
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WITHIN, future).await.expect("in time")
}

/// A peer of which the test writes every byte.
struct RawPeer {
    stream: TcpStream,
    decoder: Decoder,
    unread: Vec<u8>,
}

impl RawPeer {
    fn new(stream: TcpStream) -> Self {
        Self { stream, decoder: Decoder::new(Limits::SUBSCRIBER), unread: Vec::new() }
    }

    async fn greeted(endpoint: &Endpoint, kind: SocketKind) -> Self {
        let mut this = Self::new(raw(endpoint).await);
        this.greet(kind).await;
        this
    }

    async fn greet(&mut self, kind: SocketKind) {
        self.write(&[&wire::greeting()[..], &wire::ready(kind)].concat()).await;
        assert!(matches!(self.event().await, Event::Greeting { .. }));
        assert!(matches!(self.event().await, Event::Command(Command::Ready { .. })));
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("written");
    }

    async fn event(&mut self) -> Event {
        let mut buffer = [0; 4096];
        loop {
            let mut input = &self.unread[..];
            let event = self.decoder.next(&mut input).expect("sound bytes");
            self.unread = input.to_vec();
            if let Some(event) = event {
                return event;
            }
            let count = in_time(self.stream.read(&mut buffer)).await.expect("read");
            assert!(count > 0, "closed");
            self.unread.extend_from_slice(&buffer[..count]);
        }
    }
}

fn part(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

#[tokio::test]
async fn seventy_three_hostile_bytes_end_only_their_own_connection() {
    let publisher = PubSocket::bind(LOCAL, Limits::PUBLISHER).await.expect("bound");
    let answer = |request: Vec<Bytes>| -> Replies { Box::new((0..3).map(move |_| request.clone())) };
    let server = RouterSocket::bind(LOCAL, Limits::REPLAY_SERVER, answer).await.expect("bound");
    let mut listener = SubListener::bind(LOCAL, b"", Limits::SUBSCRIBER).await.expect("bound");
    // Peers from before.
    let endpoints = [publisher.endpoint(), server.endpoint(), listener.endpoint()].map(ToString::to_string);
    let mut subscriber =
        SubSocket::connect(&endpoints[0], b"kv", Limits::SUBSCRIBER).await.expect("connected");
    let mut client = DealerSocket::connect(&endpoints[1], Limits::SUBSCRIBER).await.expect("connected");
    let engine = PubSocket::connect(&endpoints[2], Limits::PUBLISHER).await.expect("connected");
    until(|| publisher.subscribers() == 1 && engine.subscribers() == 1).await;
    for endpoint in [publisher.endpoint(), server.endpoint(), listener.endpoint()] {
        let mut stream = raw(endpoint).await;
        stream.write_all(&hostile_bytes()).await.expect("written");
        wait_for_end(&mut stream).await;
    }
    until(|| publisher.counters().broken == 1 && server.counters().broken == 1).await;
    until(|| listener.counters().broken == 1).await;

    let message = vec![part("kv@pod"), part("number"), part("payload")];
    publisher.send(&message);
    publisher.send(&[part("other")]);
    publisher.send(&message);
    for _ in 0..2 {
        assert_eq!(in_time(subscriber.recv()).await.expect("a message"), message);
    }
    let request = vec![Bytes::new(), part("12345678")];
    client.send(&request).await.expect("sent");
    for _ in 0..3 {
        assert_eq!(in_time(client.recv()).await.expect("a reply"), request);
    }
    engine.send(&message);
    let inbound = in_time(listener.recv()).await.expect("a message");
    assert!(matches!(&inbound, Inbound::Message { parts, .. } if *parts == message), "{inbound:?}");
    // The end of a connection is told, too.
    drop(engine);
    assert!(matches!(in_time(listener.recv()).await, Some(Inbound::Closed { .. })));
}

#[tokio::test]
async fn a_hostile_publisher_ends_only_the_subscription() {
    let fake = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let endpoint = format!("tcp://{}", fake.local_addr().expect("bound"));
    let task = tokio::spawn(async move {
        let (mut stream, _) = fake.accept().await.expect("a peer");
        stream.write_all(&hostile_bytes()).await.expect("written");
        wait_for_end(&mut stream).await;
        let mut peer = RawPeer::new(fake.accept().await.expect("a peer").0);
        peer.greet(SocketKind::Pub).await;
        peer.write(&[&[2_u8][..], &[0x7F; 8]].concat()).await;
        wait_for_end(&mut peer.stream).await;
    });
    let refused = SubSocket::connect(&endpoint, b"", Limits::SUBSCRIBER).await;
    assert!(matches!(refused, Err(Error::Wire(_))), "{refused:?}");
    let mut socket = SubSocket::connect(&endpoint, b"", Limits::SUBSCRIBER).await.expect("a handshake");
    let ended = in_time(socket.recv()).await;
    assert!(matches!(ended, Err(Error::Wire(_))), "{ended:?}");
    drop(socket);
    in_time(task).await.expect("the fake publisher saw both ends");
}

#[tokio::test]
async fn a_flood_of_subscriptions_is_cut_off() {
    let publisher = PubSocket::bind(LOCAL, Limits::PUBLISHER).await.expect("bound");
    let mut subscriber = SubSocket::connect(&publisher.endpoint().to_string(), b"", Limits::SUBSCRIBER)
        .await
        .expect("connected");
    for flood in [wire::subscribe(&[b'x'; 200]), wire::command("SUBSCRIBE", &[b'x'; 200])] {
        let mut peer = RawPeer::greeted(publisher.endpoint(), SocketKind::Sub).await;
        for _ in 0..200_000 {
            if peer.stream.write_all(&flood).await.is_err() {
                break;
            }
        }
        wait_for_end(&mut peer.stream).await;
    }
    until(|| publisher.counters().broken == 2 && publisher.subscribers() == 1).await;
    publisher.send(&[part("topic")]);
    assert_eq!(in_time(subscriber.recv()).await.expect("a message"), [part("topic")]);
}

#[tokio::test]
async fn a_subscriber_that_stops_reading_loses_messages_and_holds_up_nobody() {
    let limits =
        Limits { queued_bytes_max: 1 << 20, write_within: Duration::from_millis(300), ..Limits::PUBLISHER };
    let publisher = PubSocket::bind(LOCAL, limits).await.expect("bound");
    let mut peer = RawPeer::greeted(publisher.endpoint(), SocketKind::Sub).await;
    peer.write(&wire::subscribe(b"")).await;
    until(|| publisher.subscribers() == 1).await;
    let payload = Bytes::from(vec![1; 256 << 10]);
    for _ in 0..200 {
        publisher.send(&[part("topic"), payload.clone()]);
    }
    assert!(publisher.counters().dropped > 0);
    // A subscriber that comes now is served, and the one that does not read loses its connection.
    let mut subscriber = SubSocket::connect(&publisher.endpoint().to_string(), b"late", Limits::SUBSCRIBER)
        .await
        .expect("connected");
    until(|| {
        // Until the system's own buffers are full, too.
        publisher.send(&[part("topic"), payload.clone()]);
        publisher.counters().broken == 1 && publisher.subscribers() == 1
    })
    .await;
    publisher.send(&[part("late")]);
    assert_eq!(in_time(subscriber.recv()).await.expect("a message"), [part("late")]);
}

#[tokio::test]
async fn silent_connections_keep_nobody_out_and_peers_are_bounded() {
    let limits = Limits { handshakes_max: 4, peers_max: 2, ..Limits::PUBLISHER };
    let publisher = PubSocket::bind(LOCAL, limits).await.expect("bound");
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(raw(publisher.endpoint()).await);
    }
    until(|| publisher.counters().refused == 16).await;
    let endpoint = publisher.endpoint().to_string();
    let mut peers = Vec::new();
    for _ in 0..2 {
        peers.push(SubSocket::connect(&endpoint, b"", Limits::SUBSCRIBER).await.expect("connected"));
    }
    until(|| publisher.subscribers() == 2).await;
    let mut third = RawPeer::greeted(publisher.endpoint(), SocketKind::Sub).await;
    wait_for_end(&mut third.stream).await;
    // A place that is given back is there for the next.
    peers.pop();
    until(|| publisher.subscribers() == 1).await;
    peers.push(SubSocket::connect(&endpoint, b"", Limits::SUBSCRIBER).await.expect("connected"));
    until(|| publisher.subscribers() == 2).await;
}

#[tokio::test]
async fn one_host_cannot_take_all_places() {
    let limits = Limits { peers_max: 4, peers_per_address_max: 2, ..Limits::PUBLISHER };
    let publisher = PubSocket::bind("tcp://0.0.0.0:0", limits).await.expect("bound");
    let port = publisher.endpoint().port().expect("a port");
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut peer = RawPeer::greeted(publisher.endpoint(), SocketKind::Sub).await;
        peer.write(&wire::subscribe(b"")).await;
        idle.push(peer);
    }
    until(|| publisher.subscribers() == 2).await;
    let mut third = RawPeer::greeted(publisher.endpoint(), SocketKind::Sub).await;
    wait_for_end(&mut third.stream).await;
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.2:0".parse().expect("an address")).expect("bound");
    let late = socket.connect(([127, 0, 0, 1], port).into()).await.expect("connects");
    let mut late = RawPeer::new(late);
    late.greet(SocketKind::Sub).await;
    late.write(&wire::subscribe(b"")).await;
    until(|| publisher.subscribers() == 3).await;
    idle.clear();
    until(|| publisher.subscribers() == 1).await;
    let mut next = RawPeer::greeted(publisher.endpoint(), SocketKind::Sub).await;
    next.write(&wire::subscribe(b"")).await;
    until(|| publisher.subscribers() == 2).await;
}

#[tokio::test]
async fn handshakes_and_messages_must_end_in_time() {
    let within = Duration::from_millis(400);
    let limits = Limits { handshake_within: within, message_within: within, ..Limits::SUBSCRIBER };
    let mut listener = SubListener::bind(LOCAL, b"", limits).await.expect("bound");
    let mut silent = raw(listener.endpoint()).await;
    wait_for_end(&mut silent).await;
    let mut peer = RawPeer::greeted(listener.endpoint(), SocketKind::Pub).await;
    peer.write(b"\x00\x05half").await;
    wait_for_end(&mut peer.stream).await;
    until(|| listener.counters().broken == 2).await;
    assert!(matches!(in_time(listener.recv()).await, Some(Inbound::Closed { .. })));
}

#[tokio::test]
async fn incomplete_messages_of_all_peers_share_one_budget() {
    let limits = Limits { receive_bytes_max: 300 << 10, ..Limits::SUBSCRIBER };
    let mut listener = SubListener::bind(LOCAL, b"", limits).await.expect("bound");
    let head = [&[2_u8][..], &(16_u64 << 20).to_be_bytes()].concat();
    let mut peers = Vec::new();
    for _ in 0..3 {
        let mut peer = RawPeer::greeted(listener.endpoint(), SocketKind::Pub).await;
        peer.write(&head).await;
        let _may_be_cut = peer.stream.write_all(&vec![0; 200 << 10]).await;
        peers.push(peer);
    }
    until(|| listener.counters().broken >= 2).await;
    // Small messages need no share of it.
    let engine =
        PubSocket::connect(&listener.endpoint().to_string(), Limits::PUBLISHER).await.expect("connected");
    until(|| engine.subscribers() == 1).await;
    engine.send(&[part("topic")]);
    loop {
        match in_time(listener.recv()).await.expect("listening") {
            Inbound::Message { parts, .. } => {
                assert_eq!(parts, [part("topic")]);
                break;
            }
            Inbound::Closed { .. } => {}
        }
    }
}

#[tokio::test]
async fn pings_are_answered_and_wrong_sockets_refused() {
    let publisher = PubSocket::bind(LOCAL, Limits::PUBLISHER).await.expect("bound");
    let mut peer = RawPeer::greeted(publisher.endpoint(), SocketKind::XSub).await;
    peer.write(&wire::command("PING", b"\0\0life")).await;
    assert_eq!(peer.event().await, Event::Command(Command::Pong));
    let refused = DealerSocket::connect(&publisher.endpoint().to_string(), Limits::SUBSCRIBER).await;
    assert!(matches!(refused, Err(Error::Handshake(_))), "{refused:?}");
}

#[tokio::test]
async fn unix_sockets_serve_and_replace_what_a_dead_process_left() {
    let path = std::env::temp_dir().join(format!("kvasir-zmtp-{}.sock", std::process::id()));
    let endpoint = format!("ipc://{}", path.display());
    drop(std::os::unix::net::UnixListener::bind(&path).expect("left behind"));
    let publisher = PubSocket::bind(&endpoint, Limits::PUBLISHER).await.expect("bound");
    assert!(PubSocket::bind(&endpoint, Limits::PUBLISHER).await.is_err(), "in use");
    let mut subscriber = SubSocket::connect(&endpoint, b"", Limits::SUBSCRIBER).await.expect("connected");
    until(|| publisher.subscribers() == 1).await;
    publisher.send(&[part("topic"), Bytes::from(vec![7; 100_000])]);
    assert_eq!(in_time(subscriber.recv()).await.expect("a message")[1].len(), 100_000);
    drop(publisher);
    until(|| !path.exists()).await;
}
