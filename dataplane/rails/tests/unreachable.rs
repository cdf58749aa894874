//! Unreachable peers do not delay hand-offs of other peers.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use dataplane_fabric::wait::ThreadPolicy;
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_rails::{PeerRole, RailsConfig, SharedKey, Transport, TransportRequest};
use dataplane_shm::ShmConfig;
use dataplane_tcp::TcpConfig;
use dataplane_transfer::{
    BondConfig, Command, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferNode,
    TransferService,
};
use dataplane_verbs::VerbsConfig;

const LAYOUT: PieceLayout = PieceLayout::whole(1, 16 << 10, 1);
const PATIENCE: Duration = Duration::from_secs(30);
/// Number of addresses that do not answer, and of expectations of them in flight.
const UNREACHABLE: usize = 64;
/// Longest additional delay of another transfer.
const DELAY_MAX: Duration = Duration::from_millis(5);

struct Node {
    service: TransferService,
    notices: Receiver<Notice>,
    pool: Arc<SlotPool>,
    address: String,
}

impl Node {
    fn new() -> Self {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 256 };
        let slab = Slab::create("unreachable", layout, PageSize::Standard).expect("a slab");
        let pool = SlotPool::new(Arc::new(slab));
        let config = RailsConfig {
            transports: vec![TransportRequest { transport: Transport::Tcp, is_named: true }],
            role: PeerRole::Worker,
            key: SharedKey::default(),
            host: "h".to_owned(),
            socket: std::env::temp_dir().join(format!("kvasir-unreachable-{}.sock", std::process::id())),
            shm: ShmConfig::default(),
            listen: loopback,
            // Longer than the measurement, so that no connection is given up during it.
            tcp: TcpConfig { handshake_timeout: Duration::from_secs(60), ..TcpConfig::default() },
            devices: Vec::new(),
            near: None,
            rdma_listen: loopback,
            rdma: VerbsConfig::default(),
            connections_per_device: 1,
            device: None,
            verbs_library: None,
            bond: BondConfig::default(),
            corrupt: None,
        };
        let rails = dataplane_rails::open(&config, pool.slab()).expect("TCP");
        let address = format!("tcp:{}", rails.address.tcp.expect("it listens"));
        let counters = Arc::new(TransferCounters::default());
        let node = TransferNode::new(rails.bond, LAYOUT, Limits::default(), counters);
        let (sender, notices) = channel();
        let service =
            TransferService::start(node, ThreadPolicy::default(), move |notice| drop(sender.send(notice)))
                .expect("a thread");
        Self { service, notices, pool, address }
    }

    fn expect(&self, transfer: u64, address: &str, patience: Duration) {
        let slots: Vec<SlotRef> = vec![self.pool.acquire().expect("a slot")];
        let (address, deadline) = (address.to_owned(), Instant::now() + patience);
        let expect = Command::Expect { transfer, address, content: [1; 16], first_block: 0, slots, deadline };
        self.service.submit(expect).expect("room");
    }

    /// Waits for the end of this transfer. No other may end meanwhile: a peer that is given up would cause
    /// no delay.
    fn outcome(&self, wanted: u64) -> Outcome {
        match self.notices.recv_timeout(PATIENCE).expect("an end") {
            Notice::Arrived { transfer, outcome, .. } if transfer == wanted => outcome,
            other => panic!("waiting for {wanted}: {other:?}"),
        }
    }
}

/// A listener that accepts no connection and whose backlog is full: connecting to it gets no answer.
struct Mute {
    listener: TcpListener,
    _queued: Vec<TcpStream>,
}

impl Mute {
    fn new() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        rustix::net::listen(&listener, 0).expect("a queue of one");
        let address = listener.local_addr().expect("bound");
        let mut queued = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(50)) {
            queued.push(stream);
            assert!(queued.len() < 64, "the queue is never full");
        }
        Self { listener, _queued: queued }
    }

    fn address(&self) -> String {
        format!("tcp:{}", self.listener.local_addr().expect("bound"))
    }
}

/// Returns the longest time of the nine fastest in ten hand-offs.
fn slowest_of_most(receiver: &Node, sender: &Node, first: u64) -> Duration {
    let mut times: Vec<Duration> = (first..first + 200)
        .map(|transfer| {
            let start = Instant::now();
            receiver.expect(transfer, &sender.address, PATIENCE);
            let slots = vec![sender.pool.acquire().expect("a slot")];
            let push = Command::Push { transfer, content: [1; 16], first_block: 0, slots, layers: 0..1 };
            sender.service.submit(push).expect("room");
            sender.service.submit(Command::PushEnd { transfer }).expect("room");
            assert_eq!(receiver.outcome(transfer), Outcome::Complete);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() * 9 / 10]
}

#[test]
fn peers_that_cannot_be_reached_delay_nobody_else() {
    let (receiver, sender) = (Node::new(), Node::new());
    let mutes: Vec<Mute> = (0..UNREACHABLE).map(|_| Mute::new()).collect();
    slowest_of_most(&receiver, &sender, 1);
    let before = slowest_of_most(&receiver, &sender, 1000);
    for (number, mute) in mutes.iter().enumerate() {
        // Deadlines that pass long after the measurement, even on a slow machine.
        receiver.expect(10_000 + number as u64, &mute.address(), 20 * PATIENCE);
    }
    let beside = slowest_of_most(&receiver, &sender, 2000);
    println!("a hand-off: {before:?}, and {beside:?} beside {UNREACHABLE} peers that cannot be reached");
    assert!(beside <= before + DELAY_MAX, "{before:?}, and {beside:?} beside {UNREACHABLE} that hang");
    let is_tried = |number: &u64| {
        receiver.service.submit(Command::Cancel { transfer: 10_000 + number }).expect("room");
        receiver.outcome(10_000 + number) == Outcome::SenderStopped
    };
    assert!(
        (0..UNREACHABLE as u64).all(|number| is_tried(&number)),
        "each waited for its connection until then"
    );
}
