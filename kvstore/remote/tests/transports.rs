//! Real transports between threads of this machine: a whole chain stored and fetched, byte for byte.

mod rig;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use dataplane_fabric::wait::ThreadPolicy;
use dataplane_memory::SlotPool;
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_tcp::{TcpConfig, TcpFabric};
use kvstore_remote::{
    Outcome, PoolConfig, PoolCounters, PoolNode, PoolServer, PoolService, RemoteConfig, RemoteCounters,
    RemotePool, StoreResult,
};
use rig::{MemoryBlocks, block, chain, counted, is_right, slots};

const SLOT_BYTES: usize = 256 << 10;
const BLOCKS: usize = 100;
const PATIENCE: Duration = Duration::from_secs(30);

fn serve<F: Fabric + Send + 'static>(fabric: F, pool: &Arc<SlotPool>) -> PoolService {
    serve_with(fabric, pool, PoolConfig::default())
}

fn serve_with<F: Fabric + Send + 'static>(
    fabric: F,
    pool: &Arc<SlotPool>,
    config: PoolConfig,
) -> PoolService {
    let counters = Arc::new(PoolCounters::default());
    let server = PoolServer::new(fabric, MemoryBlocks::new(pool), config, counters).expect("server");
    PoolService::start(server, ThreadPolicy::default()).expect("thread")
}

fn config() -> RemoteConfig {
    // Generous timeouts: the machine is shared, and a slow node must not be taken for a dead one.
    let (request_timeout, transfer_timeout) = (Duration::from_secs(4), Duration::from_secs(4));
    RemoteConfig { request_timeout, transfer_timeout, probe_timeout: PATIENCE, ..RemoteConfig::default() }
}

fn client<F: Fabric>(fabric: F, nodes: &[PoolNode]) -> RemotePool<F> {
    let now = Instant::now();
    let counters = Arc::new(RemoteCounters::default());
    let mut pool = RemotePool::new(fabric, config(), counters, now).expect("client");
    pool.set_nodes(nodes, now).expect("nodes");
    let mut outcomes = Vec::new();
    while pool.usable_nodes() < nodes.len() {
        pool.poll(Instant::now(), &mut outcomes);
        assert!(now.elapsed() < PATIENCE, "never connected");
        std::thread::yield_now();
    }
    pool
}

fn outcome<F: Fabric>(pool: &mut RemotePool<F>) -> Outcome {
    let start = Instant::now();
    let mut outcomes = Vec::new();
    while outcomes.is_empty() {
        if pool.poll(Instant::now(), &mut outcomes) == 0 {
            std::thread::yield_now();
        }
        assert!(start.elapsed() < PATIENCE, "no outcome");
    }
    outcomes.remove(0)
}

/// Stores with one client and fetches with the other.
fn a_chain_goes_there_and_back<F: Fabric>(
    writer: &mut RemotePool<F>,
    reader: &mut RemotePool<F>,
    own: [&Arc<SlotPool>; 2],
) {
    let chain = chain(1, BLOCKS);
    let blocks =
        (0..BLOCKS).map(|at| block(&chain, at, own[0], config().group_blocks).expect("slot")).collect();
    let now = Instant::now();
    writer.store(blocks, now + PATIENCE, now).expect("room");
    match outcome(writer) {
        Outcome::Stored { results, .. } => assert_eq!(results, [StoreResult::Stored; BLOCKS]),
        other => panic!("{other:?}"),
    }
    // Lets the nodes' threads go to sleep before the reader starts.
    std::thread::sleep(Duration::from_millis(60));
    for _ in 0..3 {
        let targets = (0..BLOCKS).map(|_| own[1].acquire().expect("slot")).collect();
        let now = Instant::now();
        reader.fetch(&chain, 0, targets, now + PATIENCE, now).expect("room");
        match outcome(reader) {
            Outcome::Fetched { blocks, unused, held, .. } => {
                assert_eq!((blocks.len(), unused.len(), held), (BLOCKS, 0, 0));
                for (identity, block) in chain.iter().zip(&blocks) {
                    assert!(is_right(identity, &block.slot, &block.description));
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(counted(&reader.counters().snapshot(), "hit_blocks"), 3 * BLOCKS as u64);
    assert!(reader.is_idle() && writer.is_idle());
}

fn nothing_is_left(services: &[PoolService], own: [&Arc<SlotPool>; 2]) {
    let start = Instant::now();
    let leases =
        || services.iter().map(|service| counted(&service.counters().snapshot(), "leases")).sum::<u64>();
    while leases() > 0 || own.iter().any(|pool| pool.used_count() > 0) {
        assert!(start.elapsed() < PATIENCE, "{} leases, {} slots", leases(), own[1].used_count());
        std::thread::yield_now();
    }
    let blocks = services.iter().map(|service| counted(&service.counters().snapshot(), "blocks"));
    assert_eq!(blocks.sum::<u64>(), BLOCKS as u64);
}

#[test]
fn over_shared_memory() {
    let pools: Vec<_> = (0..2).map(|_| slots("server", 128, SLOT_BYTES)).collect();
    let address = |at: usize| format!("@kvasir-remote-{}-{at}", std::process::id());
    let services: Vec<_> = pools
        .iter()
        .enumerate()
        .map(|(at, pool)| {
            let slab = Arc::clone(pool.slab());
            serve(ShmFabric::new(slab, Some(&address(at)), ShmConfig::default()).expect("fabric"), pool)
        })
        .collect();
    let nodes: Vec<_> =
        (0..2).map(|at| PoolNode { name: format!("store-{at}"), address: address(at) }).collect();
    let own = [slots("writer", 128, SLOT_BYTES), slots("reader", 128, SLOT_BYTES)];
    let open = |pool: &Arc<SlotPool>| {
        ShmFabric::new(Arc::clone(pool.slab()), None, ShmConfig::default()).expect("fabric")
    };
    let mut clients = [client(open(&own[0]), &nodes), client(open(&own[1]), &nodes)];
    let [writer, reader] = &mut clients;
    a_chain_goes_there_and_back(writer, reader, [&own[0], &own[1]]);
    nothing_is_left(&services, [&own[0], &own[1]]);
    assert!(services.iter().all(|service| !service.has_stopped()));
}

#[test]
fn over_tcp() {
    let pools: Vec<_> = (0..2).map(|_| slots("server", 128, SLOT_BYTES)).collect();
    let (mut services, mut nodes) = (Vec::new(), Vec::new());
    for (at, pool) in pools.iter().enumerate() {
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let fabric = TcpFabric::new(Arc::clone(pool.slab()), listen, TcpConfig::default()).expect("fabric");
        let address = fabric.listening_on().expect("bound").to_string();
        nodes.push(PoolNode { name: format!("store-{at}"), address });
        services.push(serve(fabric, pool));
    }
    let own = [slots("writer", 128, SLOT_BYTES), slots("reader", 128, SLOT_BYTES)];
    let open = |pool: &Arc<SlotPool>| {
        TcpFabric::new(Arc::clone(pool.slab()), None, TcpConfig::default()).expect("fabric")
    };
    let mut clients = [client(open(&own[0]), &nodes), client(open(&own[1]), &nodes)];
    let [writer, reader] = &mut clients;
    a_chain_goes_there_and_back(writer, reader, [&own[0], &own[1]]);
    nothing_is_left(&services, [&own[0], &own[1]]);
    // A stopped node is noticed, and costs a miss.
    services.truncate(1);
    let (start, mut outcomes) = (Instant::now(), Vec::new());
    while reader.usable_nodes() > 1 {
        reader.poll(Instant::now(), &mut outcomes);
        assert!(start.elapsed() < PATIENCE, "the end of a node is not noticed");
        std::thread::yield_now();
    }
}

/// Looks up, sleeps longer than the lease, and reads with the clock from before. The node has ended the
/// connection; until it knows that nothing more can arrive (shared memory: when the client has noticed) the
/// slots stay unchanged, so the read returns the right bytes or nothing. Afterwards the node has its slots
/// back.
fn is_fenced<F: Fabric>(pool: &mut RemotePool<F>, own: &Arc<SlotPool>, service: &PoolService) {
    let chain = chain(1, 10);
    let blocks = (0..10).map(|at| block(&chain, at, own, config().group_blocks).expect("slot")).collect();
    let now = Instant::now();
    pool.store(blocks, now + PATIENCE, now).expect("room");
    assert!(matches!(outcome(pool), Outcome::Stored { results, .. } if results == [StoreResult::Stored; 10]));
    let asked = Instant::now();
    let ticket = pool.look_up(&chain, 0, asked + PATIENCE, asked).expect("room");
    assert!(matches!(outcome(pool), Outcome::Found { blocks, .. } if blocks.len() == 10));
    let of_service = |name| counted(&service.counters().snapshot(), name);
    while of_service("fences") == 0 {
        assert!(asked.elapsed() < PATIENCE, "no fence");
        std::thread::sleep(Duration::from_millis(5));
    }
    let targets = (0..10).map(|_| own.acquire().expect("slot")).collect();
    pool.read(ticket, targets, asked + PATIENCE, asked).expect("it believes to hold the lease");
    match outcome(pool) {
        Outcome::Fetched { blocks, unused, held, .. } => {
            assert_eq!(blocks.len() + unused.len() + held, 10);
            let right = |(identity, block): (_, &kvstore_remote::Verified)| {
                is_right(identity, &block.slot, &block.description)
            };
            assert!(chain.iter().zip(&blocks).all(right));
        }
        other => panic!("{other:?}"),
    }
    let mut outcomes = Vec::new();
    while pool.usable_nodes() == 0 || of_service("fenced_slots") > 0 || own.used_count() > 0 {
        pool.poll(Instant::now(), &mut outcomes);
        outcomes.clear();
        assert!(
            asked.elapsed() < PATIENCE,
            "{} fenced, {} used",
            of_service("fenced_slots"),
            own.used_count()
        );
        std::thread::yield_now();
    }
    assert_eq!((of_service("expired_leases"), of_service("blocks")), (1, 10));
}

fn short_lease() -> PoolConfig {
    PoolConfig { lease: Duration::from_millis(700), ..PoolConfig::default() }
}

#[test]
fn a_late_reader_is_fenced_over_tcp() {
    let (pool, own) = (slots("server", 16, SLOT_BYTES), slots("client", 32, SLOT_BYTES));
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let fabric = TcpFabric::new(Arc::clone(pool.slab()), listen, TcpConfig::default()).expect("fabric");
    let address = fabric.listening_on().expect("bound").to_string();
    let service = serve_with(fabric, &pool, short_lease());
    let fabric = TcpFabric::new(Arc::clone(own.slab()), None, TcpConfig::default()).expect("fabric");
    let mut client = client(fabric, &[PoolNode { name: "store".to_owned(), address }]);
    is_fenced(&mut client, &own, &service);
}

#[test]
fn a_late_reader_is_fenced_over_shared_memory() {
    let (pool, own) = (slots("server", 16, SLOT_BYTES), slots("client", 32, SLOT_BYTES));
    let address = format!("@kvasir-remote-late-{}", std::process::id());
    let fabric =
        ShmFabric::new(Arc::clone(pool.slab()), Some(&address), ShmConfig::default()).expect("fabric");
    let service = serve_with(fabric, &pool, short_lease());
    let fabric = ShmFabric::new(Arc::clone(own.slab()), None, ShmConfig::default()).expect("fabric");
    let mut client = client(fabric, &[PoolNode { name: "store".to_owned(), address }]);
    is_fenced(&mut client, &own, &service);
}

/// A node dies repeatedly in the middle of reads and writes, and comes back at its address: operations in
/// flight end, nothing of them is left over, and afterwards stores and fetches succeed as at the start.
#[test]
fn a_node_that_dies_again_and_again_over_tcp_serves_when_it_is_back() {
    const ROUNDS: u64 = 24;
    const CHAIN: usize = 60;
    let (client_slots, mut now) = (slots("client", 256, SLOT_BYTES), Instant::now());
    let fabric = TcpFabric::new(Arc::clone(client_slots.slab()), None, TcpConfig::default()).expect("fabric");
    let counters = Arc::new(RemoteCounters::default());
    let config = RemoteConfig {
        open_first: Duration::from_millis(1),
        open_max: Duration::from_millis(20),
        request_timeout: Duration::from_secs(4),
        transfer_timeout: Duration::from_secs(4),
        ..RemoteConfig::default()
    };
    let mut pool = RemotePool::new(fabric, config, Arc::clone(&counters), now).expect("client");
    let mut address = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut random = 7_u64;
    for round in 0..=ROUNDS {
        let server_slots = slots("server", 256, SLOT_BYTES);
        let fabric = TcpFabric::new(Arc::clone(server_slots.slab()), Some(address), TcpConfig::default())
            .expect("fabric");
        address = fabric.listening_on().expect("bound");
        let service = serve(fabric, &server_slots);
        let node = PoolNode { name: "store".to_owned(), address: address.to_string() };
        pool.set_nodes(&[node], now).expect("a node");
        let (started, mut outcomes) = (Instant::now(), Vec::new());
        while pool.usable_nodes() == 0 {
            pool.poll(Instant::now(), &mut outcomes);
            assert!(started.elapsed() < PATIENCE, "round {round}: never usable");
            std::thread::yield_now();
        }
        let (own, other) = (chain(round, CHAIN), chain(1000 + round, CHAIN));
        now = Instant::now();
        let blocks = |chain: &[_]| {
            (0..CHAIN).map(|at| block(chain, at, &client_slots, config.group_blocks).expect("slot")).collect()
        };
        pool.store(blocks(&own), now + PATIENCE, now).expect("room");
        if round == ROUNDS {
            // The node's last death may not have been noticed yet.
            let mut stored = outcome(&mut pool);
            while !matches!(&stored, Outcome::Stored { results, .. } if results[..] == [StoreResult::Stored; CHAIN])
            {
                assert!(now.elapsed() < PATIENCE, "{stored:?}");
                let again = Instant::now();
                pool.store(blocks(&own), again + PATIENCE, again).expect("room");
                stored = outcome(&mut pool);
            }
            let targets = (0..CHAIN).map(|_| client_slots.acquire().expect("slot")).collect();
            pool.fetch(&own, 0, targets, Instant::now() + PATIENCE, Instant::now()).expect("room");
            let fetched = outcome(&mut pool);
            assert!(
                matches!(&fetched, Outcome::Fetched { blocks, .. } if blocks.len() == CHAIN),
                "{fetched:?}"
            );
            return;
        }
        // Some blocks exist already, to be read while others are written.
        let mut started = 1;
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if round % 2 == 0 {
            drop(outcome(&mut pool));
            started = 2;
            let targets = (0..CHAIN).map(|_| client_slots.acquire().expect("slot")).collect();
            pool.fetch(&own, 0, targets, Instant::now() + PATIENCE, Instant::now()).expect("room");
            pool.store(blocks(&other), now + PATIENCE, now).expect("room");
        }
        let until = Instant::now() + Duration::from_micros((random >> 33) % 8000);
        while Instant::now() < until {
            pool.poll(Instant::now(), &mut outcomes);
        }
        drop(service);
        while !(outcomes.len() >= started && pool.is_idle()) {
            pool.poll(Instant::now(), &mut outcomes);
            assert!(now.elapsed() < PATIENCE, "round {round}: {} of {started} have ended", outcomes.len());
            std::thread::yield_now();
        }
        let transfers =
            || counters.nodes().iter().map(|(_, node)| counted(&node.snapshot(), "transfers")).sum::<u64>();
        assert_eq!(transfers(), 0, "round {round}: transfers that never ended");
        drop(outcomes);
        assert_eq!(client_slots.used_count(), 0, "round {round}: slots that never came back");
    }
}
