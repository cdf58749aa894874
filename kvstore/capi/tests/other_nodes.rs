//! Stores of this process that share blocks through a pool and through objects, by the functions that C calls:
//! a block that one engine has saved is a hit for the other, and a failing pool costs no more than misses.

#[allow(dead_code, reason = "devices' part is for other tests")]
mod engine;
#[allow(dead_code, reason = "of the emulator's harness only random numbers are used")]
#[path = "../../../dataplane/kernels/tests/emulator/harness.rs"]
mod harness;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane_memory::PageSize;
use dataplane_rails::{
    PeerRole, RailsConfig, SharedKey, Transport, TransportRequest, fresh_seed, worker_socket,
};
use dataplane_transfer::{BondConfig, ThreadPolicy};
use dataplane_verbs::VerbsConfig;
use engine::{Engine, Identity, Rig, name};
use harness::{Random, seed};
use kvasir_kv::{Event, NodeStatistics, Status, Transfer};
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog};
use kvstore_io::testing::{MemoryEngine, MemoryFiles};
use kvstore_remote::{PoolConfig, PoolCounters, PoolServer, PoolService};
use kvstore_store::{DISK_META_BYTES_MAX, DiskTier, HostTier, Store, StoreBuilder, StoreConfig, StorePool};

const BLOCKS: usize = 64;
/// A block of 12 planes; its slot of 20 KiB has the store's head before the payload.
const SHAPES: [(usize, usize); 12] = [(1280, 1200); 12];
const SLOT: usize = 20 << 10;

/// A node that keeps blocks for other nodes.
struct Pool {
    // Dropped first: it closes its connections.
    _service: PoolService,
    counters: Arc<PoolCounters>,
    address: String,
    store: Arc<Store>,
}

fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Pool {
    fn new(transport: Transport, slots: u32, slot_bytes: usize, listen: SocketAddr) -> Self {
        Self::named(
            &format!("{}-other-nodes-{}", std::process::id(), unique()),
            transport,
            slots,
            slot_bytes,
            listen,
        )
    }

    /// Creates a pool with this socket name, which a restarted node keeps.
    fn named(socket: &str, transport: Transport, slots: u32, slot_bytes: usize, listen: SocketAddr) -> Self {
        Self::over(socket, transport, slots, slot_bytes, listen, None)
    }

    /// As [`Self::named`], with a disk whose blocks outlive the pool.
    fn over(
        socket: &str,
        transport: Transport,
        slots: u32,
        slot_bytes: usize,
        listen: SocketAddr,
        disk: Option<DiskTier>,
    ) -> Self {
        let host = HostTier { slots, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let builder = StoreBuilder::new(StoreConfig::new(slot_bytes, 1), host).expect("memory");
        let builder = match disk {
            Some(disk) => builder.disk(disk),
            None => builder,
        };
        let (store, _) = builder.start(|_| {}).expect("starts");
        let store = Arc::new(store);
        let rails = RailsConfig {
            transports: vec![TransportRequest { transport, is_named: true }],
            role: PeerRole::Store,
            key: SharedKey::default(),
            host: String::new(),
            socket: worker_socket(&std::env::temp_dir(), socket),
            shm: dataplane_shm::ShmConfig::default(),
            device: None,
            listen,
            tcp: dataplane_tcp::TcpConfig::default(),
            devices: Vec::new(),
            near: None,
            rdma_listen: loopback(0),
            rdma: VerbsConfig::default(),
            connections_per_device: 1,
            verbs_library: None,
            bond: BondConfig { seed: fresh_seed(), ..BondConfig::default() },
            corrupt: None,
        };
        let rails = dataplane_rails::open(&rails, store.slab()).expect("opens");
        let address = rails.address.notation().remove(0);
        let counters = Arc::new(PoolCounters::default());
        let blocks = StorePool::new(Arc::clone(&store));
        let server = PoolServer::new(rails.bond, blocks, PoolConfig::default(), Arc::clone(&counters));
        let service = PoolService::start(server.expect("a server"), ThreadPolicy::default()).expect("starts");
        Self { _service: service, counters, address, store }
    }

    fn count(&self, name: &str) -> u64 {
        let all = self.counters.snapshot();
        all.iter().find(|(known, ..)| *known == name).map(|(.., value)| *value).expect("a counter")
    }

    fn wait(&self, name: &str, is_right: impl Fn(u64) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_right(self.count(name)) {
            assert!(Instant::now() < deadline, "{name} is {}", self.count(name));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// Returns a store with an engine's tensors, and with other nodes as in `far`.
fn store(far: &str, random: &mut Random) -> (Rig, Engine, u64) {
    let configuration =
        format!("[store]\nslot = \"16 KiB\"\n[host_tier]\ncapacity = \"{} B\"\n{far}", 2 * BLOCKS * SLOT);
    let open = kvasir_kv::testing::open(&configuration, |_| unreachable!("no device"), None);
    let rig = Rig::new(open.expect("opens"));
    let engine = Engine::on_host(random, &SHAPES, BLOCKS);
    let tensors = rig.register(&engine);
    (rig, engine, tensors)
}

/// Submits a fetch of the blocks of a chain behind the first `held`.
fn submit_fetch(rig: &Rig, user: u64, names: &[Identity], held: usize) {
    submit_fetch_within(rig, user, names, held, Duration::ZERO);
}

/// As [`submit_fetch`]; `deadline` limits the fetch, unless it is zero.
fn submit_fetch_within(rig: &Rig, user: u64, names: &[Identity], held: usize, deadline: Duration) {
    let transfer = Transfer {
        user,
        operation: 9,
        bytes: size_of::<Transfer>() as u32,
        tensors: 0,
        identities: names.as_ptr(),
        blocks: std::ptr::null(),
        count: names.len(),
        event: std::ptr::null_mut(),
        parent: std::ptr::null(),
        position: 0,
        is_chain: 0,
        deadline_us: deadline.as_micros() as u32,
        held: held as u32,
        tenant: 0,
        reserved: 0,
    };
    // SAFETY: the identities are there.
    let status = unsafe { kvasir_kv::kvasir_kv_submit_transfer(rig.0, &raw const transfer) };
    assert_eq!(status, 0, "{}", rig.last_error());
}

/// Returns the number of blocks of the chain that are here after the fetch, those held included.
fn fetch(rig: &Rig, names: &[Identity], held: usize) -> usize {
    submit_fetch(rig, 9, names, held);
    let end = rig.poll(Duration::from_secs(30));
    assert_eq!((end.user, end.status), (9, 0), "{}", rig.last_error());
    end.payload_bytes as usize
}

fn nodes(pools: &[&Pool]) -> String {
    let nodes = pools.iter().enumerate().map(|(at, pool)| format!("\"n{at}={}\"", pool.address));
    format!("[remote_tier]\nnodes = [{}]\ndeadline = \"2s\"\n", nodes.collect::<Vec<_>>().join(", "))
}

/// Returns the statistics of the nodes that a store shares blocks with, with their names.
fn states(rig: &Rig) -> Vec<(String, NodeStatistics)> {
    let mut count = 0;
    // SAFETY: no room is asked for, and `count` is writable.
    let status = unsafe { kvasir_kv::kvasir_kv_nodes(rig.0, std::ptr::null_mut(), 0, 0, &raw mut count) };
    assert_eq!(status, 0, "{}", rig.last_error());
    let size = size_of::<NodeStatistics>();
    let mut nodes = vec![std::mem::MaybeUninit::<NodeStatistics>::zeroed(); count];
    // SAFETY: `nodes` has room for `count` of them.
    let status =
        unsafe { kvasir_kv::kvasir_kv_nodes(rig.0, nodes.as_mut_ptr().cast(), size, count, &raw mut count) };
    assert_eq!((status, count), (0, nodes.len()), "{}", rig.last_error());
    let named = |node: std::mem::MaybeUninit<NodeStatistics>| {
        // SAFETY: zero is a value of each field, and the library wrote the others.
        let node = unsafe { node.assume_init() };
        let name = std::ffi::CStr::from_bytes_until_nul(&node.name).expect("a final 0");
        (name.to_str().expect("UTF-8").to_owned(), node)
    };
    nodes.into_iter().map(named).collect()
}

fn chain(round: u64, count: usize) -> (Vec<Identity>, Vec<u64>) {
    ((0..count as u64).map(|at| name(round, at)).collect(), (0..count as u64).collect())
}

#[test]
fn a_chain_that_one_engine_saved_is_a_hit_of_another() {
    let random = &mut Random(seed(2001));
    for transport in [Transport::Shm, Transport::Tcp] {
        let pools =
            [Pool::new(transport, 256, SLOT, loopback(0)), Pool::new(transport, 256, SLOT, loopback(0))];
        // Three groups of 16, so that both nodes probably get some.
        let far = format!("{}group = 16\n", nodes(&[&pools[0], &pools[1]]));
        let (one, saved, of_one) = store(&far, random);
        let (two, mut loaded, of_two) = store(&far, random);
        let (names, blocks) = chain(1, 48);
        assert_eq!(fetch(&two, &names, 0), 0, "nobody has saved them");
        assert_eq!(one.save(of_one, &names, &blocks), (0, 48));
        let all = |pools: &[Pool; 2]| pools.iter().map(|pool| pool.count("registered_blocks")).sum::<u64>();
        let deadline = Instant::now() + Duration::from_secs(20);
        while all(&pools) < 48 {
            assert!(Instant::now() < deadline, "{} of 48 are in the pools", all(&pools));
            std::thread::sleep(Duration::from_millis(1));
        }
        // The caller holds the first five blocks: they are not fetched.
        assert_eq!(fetch(&two, &names, 5), 48, "over {transport:?}");
        assert_eq!(two.statistics().far_read, 43);
        // The memory of a pool on this host is read in place.
        let copied = if transport == Transport::Shm { 0 } else { 43 };
        assert_eq!(two.statistics().blocks, copied, "over {transport:?}");
        assert_eq!(two.load(of_two, &names[5..], &blocks[5..]), (0, 43));
        for block in 5..48 {
            assert_eq!(loaded.payload_now(block), saved.payload(block), "block {block}");
        }
        assert_eq!(fetch(&two, &names, 0), 48, "and those, when they are wanted");
        assert_eq!(fetch(&two, &names, 48), 48, "nothing is left to ask for");
        // Blocks read in place are requested again some time after they were read.
        let (read, damaged) = (two.statistics().far_read, two.statistics().damaged);
        let is_right = if transport == Transport::Shm { read >= 48 } else { read == 48 };
        assert!(is_right && damaged == 0, "{read} read, {damaged} damaged over {transport:?}");
        assert_eq!(one.statistics().far_written, 48);
        let (of_one, of_two) = (states(&one), states(&two));
        let names: Vec<&str> = of_two.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["n0", "n1"]);
        for ((_, saved), (_, read)) in of_one.iter().zip(&of_two) {
            assert_eq!((saved.is_usable, read.is_usable, read.failures, read.damaged_blocks), (1, 1, 0, 0));
            assert!(read.requests > 0 && read.latency_us > 0, "{read:?}");
        }
        let sum = |nodes: &[(String, NodeStatistics)], of: fn(&NodeStatistics) -> u64| {
            nodes.iter().map(|(_, node)| of(node)).sum::<u64>()
        };
        assert_eq!(sum(&of_one, |node| node.stored_blocks), 48);
        // The second fetch requested the whole chain: blocks that were already here were read once more.
        let read_there = sum(&of_two, |node| node.read_blocks);
        assert!((read..=43 + 48).contains(&read_there), "{read_there} read over {transport:?}");
        // The last look-up's lease is released with its reads.
        pools.iter().for_each(|pool| pool.wait("leases", |leases| leases == 0));
    }
}

#[test]
fn a_pool_that_is_gone_is_a_miss_and_comes_back() {
    let random = &mut Random(seed(2002));
    let pool = Pool::new(Transport::Tcp, 128, SLOT, loopback(0));
    let far = nodes(&[&pool]).replace("2s", "300ms");
    let (one, saved, of_one) = store(&far, random);
    let (two, mut loaded, of_two) = store(&far, random);
    let (names, blocks) = chain(2, 20);
    assert_eq!(one.save(of_one, &names, &blocks), (0, 20));
    pool.wait("registered_blocks", |count| count == 20);
    let listen: SocketAddr =
        pool.address.strip_prefix("tcp:").and_then(|text| text.parse().ok()).expect("an address");
    drop(pool);
    for _ in 0..5 {
        let asked = Instant::now();
        assert_eq!(fetch(&two, &names, 0), 0);
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    }
    let [(_, dead)] = &states(&two)[..] else { panic!("one node") };
    assert!(dead.is_usable == 0 && dead.failures > 0, "{dead:?}");
    // The new pool is empty; blocks saved from now on are shared again.
    let pool = Pool::new(Transport::Tcp, 128, SLOT, listen);
    let mut round = 3;
    let deadline = Instant::now() + Duration::from_secs(30);
    let (names, blocks) = loop {
        let (names, blocks) = chain(round, 20);
        assert_eq!(one.save(of_one, &names, &blocks), (0, 20));
        std::thread::sleep(Duration::from_millis(200));
        if fetch(&two, &names, 0) == 20 {
            break (names, blocks);
        }
        assert!(Instant::now() < deadline, "the pool was not found again");
        round += 1;
    };
    assert_eq!(two.load(of_two, &names, &blocks), (0, 20));
    (0..20).for_each(|block| assert_eq!(loaded.payload_now(block), saved.payload(block), "block {block}"));
    pool.wait("leases", |leases| leases == 0);
    assert_eq!(states(&two)[0].1.is_usable, 1);
}

/// Returns a disk of so many slots in memory, which outlives its tier.
fn disk_over(files: &MemoryFiles) -> DiskTier {
    let files = files.clone();
    let open = move || {
        let engine = Box::new(MemoryEngine::new(&files, 4096, 1 << 20, 64));
        let config = DiskConfig {
            slot_bytes: SLOT as u32,
            meta_bytes_max: DISK_META_BYTES_MAX as u16,
            operations_max: 32,
            ..DiskConfig::default()
        };
        let areas = [Area { file: 0, offset: 0, bytes: DISK_BYTES as u64 }];
        let (log, recovered, _) = DiskLog::open(config, &areas, engine, 77, ClockReading::now())?;
        Ok((log, recovered))
    };
    let admission = AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() };
    DiskTier { open: Box::new(open), depth: 16, eviction: PolicyKind::Lru, admission }
}

const DISK_BYTES: usize = 8 << 20;

/// Three chains are found in a pool whose memory has room for one, through its disk; and again in a pool
/// started over that disk.
#[test]
fn a_pool_keeps_more_than_its_memory_holds_and_its_disk_outlives_it() {
    let random = &mut Random(seed(2013));
    let files = MemoryFiles::new(&[DISK_BYTES]);
    let socket = format!("{}-disk-{}", std::process::id(), unique());
    let start = |listen| Pool::over(&socket, Transport::Tcp, 60, SLOT, listen, Some(disk_over(&files)));
    let pool = start(loopback(0));
    let listen: SocketAddr =
        pool.address.strip_prefix("tcp:").and_then(|text| text.parse().ok()).expect("an address");
    let far = format!("{}group = 16\n", nodes(&[&pool]));
    let (one, saved, of_one) = store(&far, random);
    for round in 1..=3 {
        let (names, blocks) = chain(round, 48);
        assert_eq!(one.save(of_one, &names, &blocks), (0, 48));
        pool.wait("registered_blocks", |count| count == 48 * round);
        // Wait until the pool's memory is written through, before it is needed for the next chain.
        let deadline = Instant::now() + Duration::from_secs(20);
        while pool.store.blocks()[1] < 48 * round {
            assert!(Instant::now() < deadline, "{} blocks are on its disk", pool.store.blocks()[1]);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let read_all = |pool: &Pool, random: &mut Random, blocks_of: [usize; 3]| {
        let (two, mut loaded, of_two) = store(&far, random);
        for (round, count) in (1..).zip(blocks_of) {
            let (names, blocks) = chain(round, count);
            // The store may not be connected yet, or the disk may take longer than the deadline of a look-up.
            let deadline = Instant::now() + Duration::from_secs(20);
            while fetch(&two, &names, 0) < count {
                assert!(Instant::now() < deadline, "chain {round} is not found");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(two.load(of_two, &names, &blocks), (0, count as u64));
            (0..count as u64)
                .for_each(|at| assert_eq!(loaded.payload_now(at), saved.payload(at), "block {at}"));
        }
        let all: usize = blocks_of.iter().sum();
        assert_eq!((two.statistics().far_read, two.statistics().damaged), (all as u64, 0));
        pool.wait("leases", |leases| leases == 0);
    };
    read_all(&pool, random, [48; 3]);
    // The first chain continues: its blocks were only on the disk, and were onboarded during a look-up.
    let (names, blocks) = chain(1, 56);
    assert_eq!(fetch(&one, &names[..48], 0), 48);
    save_behind(&one, of_one, &names[48..], &blocks[48..], &names[47], 48);
    pool.wait("registered_blocks", |count| count == 3 * 48 + 8);
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.store.blocks()[1] < 3 * 48 + 8 {
        assert!(Instant::now() < deadline, "{} blocks are on its disk", pool.store.blocks()[1]);
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.store.close();
    drop(pool);
    let pool = start(listen);
    assert_eq!(pool.store.blocks(), [0, 3 * 48 + 8], "its memory begins empty");
    read_all(&pool, random, [56, 48, 48]);
}

/// Saves blocks that follow `parent`, whose chain has `position` blocks before them.
fn save_behind(
    rig: &Rig,
    tensors: u64,
    names: &[Identity],
    blocks: &[u64],
    parent: &Identity,
    position: u32,
) {
    let transfer = Transfer {
        user: 8,
        operation: 5,
        bytes: size_of::<Transfer>() as u32,
        tensors,
        identities: names.as_ptr(),
        blocks: blocks.as_ptr(),
        count: names.len(),
        event: std::ptr::null_mut(),
        parent,
        position,
        is_chain: 1,
        deadline_us: 0,
        held: 0,
        tenant: 0,
        reserved: 0,
    };
    // SAFETY: the arrays and the tensors are there.
    let status = unsafe { kvasir_kv::kvasir_kv_submit_transfer(rig.0, &raw const transfer) };
    assert_eq!(status, 0, "{}", rig.last_error());
    let end = rig.poll(Duration::from_secs(30));
    assert_eq!((end.user, end.status, end.payload_bytes as usize), (8, 0, names.len()));
}

#[test]
fn objects_are_shared_as_pools_are() {
    let random = &mut Random(seed(2003));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("objects-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let far = format!("[object_tier]\nurl = \"file://{}\"\nrun = \"4\"\n", folder.display());
    let (one, saved, of_one) = store(&far, random);
    let (two, mut loaded, of_two) = store(&far, random);
    let (names, blocks) = chain(4, 18);
    assert_eq!(one.save(of_one, &names, &blocks), (0, 18));
    let deadline = Instant::now() + Duration::from_secs(20);
    while one.statistics().far_written < 16 {
        assert!(Instant::now() < deadline, "{} are written", one.statistics().far_written);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(fetch(&two, &names, 0), 16, "whole runs of four are kept");
    assert_eq!(two.load(of_two, &names, &blocks), (Status::Miss as i32, 16));
    (0..16).for_each(|block| assert_eq!(loaded.payload_now(block), saved.payload(block), "block {block}"));
    drop((one, two));
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn a_fetch_ends_at_its_deadline() {
    let random = &mut Random(seed(2009));
    // A node that accepts connections and never answers.
    let silent = std::net::TcpListener::bind(loopback(0)).expect("binds");
    let address = silent.local_addr().expect("bound");
    let far = format!("[remote_tier]\nnodes = [\"n0=tcp:{address}\"]\ndeadline = \"30s\"\n");
    let (rig, _engine, _) = store(&far, random);
    let (names, _) = chain(1, 8);
    for _ in 0..3 {
        let started = Instant::now();
        submit_fetch_within(&rig, 9, &names, 0, Duration::from_millis(50));
        let end = rig.poll(Duration::from_secs(20));
        assert_eq!((end.user, end.status, end.payload_bytes), (9, 0, 0));
        assert!(started.elapsed() < Duration::from_millis(900), "{:?}", started.elapsed());
    }
}

#[test]
fn a_store_without_other_tiers_answers_a_fetch_at_once() {
    let random = &mut Random(seed(2004));
    let (one, _engine, tensors) = store("", random);
    let (names, blocks) = chain(5, 8);
    assert_eq!(fetch(&one, &names, 0), 0);
    assert_eq!(one.save(tensors, &names, &blocks), (0, 8));
    assert_eq!((fetch(&one, &names, 0), fetch(&one, &names, 3), fetch(&one, &[], 0)), (8, 8, 0));
    assert_eq!(states(&one), []);
}

/// Events name the blocks that tiers gain and lose, in their order.
#[test]
fn the_tiers_tell_what_they_gain_and_lose() {
    let random = &mut Random(seed(2005));
    let (one, _engine, tensors) = store("[queue]\nevents = 4096\n", random);
    let taken = || {
        let mut events = [Event { identity: [0; 16], kind: 0, tier: 0 }; 100];
        let mut count = 0;
        // SAFETY: room for as many events.
        let status = unsafe {
            kvasir_kv::kvasir_kv_take_events(one.0, events.as_mut_ptr(), events.len(), &raw mut count)
        };
        assert_eq!(status, 0);
        events[..count].to_vec()
    };
    let (names, blocks) = chain(6, 64);
    assert_eq!(one.save(tensors, &names, &blocks), (0, 64));
    let mut held: std::collections::HashSet<Identity> = taken().iter().map(|event| event.identity).collect();
    assert_eq!(held, names.iter().copied().collect());
    // Host memory has room for twice as many: evictions by these three are reported.
    for round in 7..10 {
        let (names, blocks) = chain(round, 64);
        assert_eq!(one.save(tensors, &names, &blocks).0, 0);
    }
    loop {
        let events = taken();
        if events.is_empty() {
            break;
        }
        for event in events {
            assert_eq!(event.tier, 1);
            match event.kind {
                1 => assert!(held.insert(event.identity)),
                _ => assert!(held.remove(&event.identity)),
            }
        }
    }
    assert_eq!((held.len() as u64, one.statistics().events_lost), (one.statistics().blocks, 0));
    assert!(held.len() <= 128);
}

/// Blocks that exceed the slots of a pool are counted, and not retried.
#[test]
fn blocks_too_large_for_a_pool_are_counted() {
    let random = &mut Random(seed(2006));
    let pool = Pool::new(Transport::Shm, 64, SLOT / 2, loopback(0));
    let (one, _engine, tensors) = store(&nodes(&[&pool]), random);
    let (names, blocks) = chain(11, 12);
    assert_eq!(one.save(tensors, &names, &blocks), (0, 12));
    let deadline = Instant::now() + Duration::from_secs(20);
    while one.statistics().far_too_large < 12 {
        assert!(Instant::now() < deadline, "{:?}", one.statistics());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((one.statistics().far_too_large, one.statistics().far_written), (12, 0));
    assert_eq!(fetch(&one, &chain(12, 3).0, 0), 0);
}

/// A store closes while fetches wait for a node that does not answer, without waiting for them.
#[test]
fn a_store_closes_while_fetches_are_under_way() {
    let random = &mut Random(seed(2007));
    // The listener accepts connections and never answers.
    let silent = std::net::TcpListener::bind(loopback(0)).expect("a port");
    let address = silent.local_addr().expect("an address");
    let far = format!("[remote_tier]\nnodes = [\"n=tcp:{address}\"]\ndeadline = \"60s\"\n");
    let (one, _engine, _) = store(&far, random);
    for user in 0..20 {
        submit_fetch(&one, user, &chain(20 + user, 8).0, 0);
    }
    let asked = Instant::now();
    drop(one);
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
}

/// Pools end and restart many times during saves and fetches: all blocks saved afterwards are shared.
#[test]
fn pools_that_come_and_go_leave_nothing_behind() {
    let random = &mut Random(seed(2008));
    let names = [0, 1].map(|number| format!("{}-come-and-go-{number}", std::process::id()));
    let start = |name: &str| Pool::named(name, Transport::Shm, 128, SLOT, loopback(0));
    let mut pools = names.each_ref().map(|name| Some(start(name)));
    let far = nodes(&pools.iter().flatten().collect::<Vec<_>>()).replace("2s", "200ms");
    let (one, saved, of_one) = store(&far, random);
    let (two, mut loaded, of_two) = store(&far, random);
    for round in 0..40 {
        let (chain, blocks) = chain(100 + round, 40);
        assert_eq!(one.save(of_one, &chain, &blocks).0, 0);
        submit_fetch(&two, 9, &chain, 0);
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        let victim = random.below(2) as usize;
        pools[victim] = None;
        std::thread::sleep(Duration::from_millis(random.below(30)));
        pools[victim] = Some(start(&names[victim]));
        let asked = two.poll(Duration::from_secs(30)).payload_bytes as usize;
        assert!(asked <= 40);
        if asked > 0 {
            // Blocks in the memory of the killed pool may be lost with it.
            let (status, came) = two.load(of_two, &chain[..asked], &blocks[..asked]);
            assert_eq!(status, i32::from(came < asked as u64), "{came} of {asked}");
            (0..came).for_each(|block| {
                assert_eq!(loaded.payload_now(block), saved.payload(block), "block {block}")
            });
        }
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut round = 200;
    loop {
        let (chain, blocks) = chain(round, 40);
        assert_eq!(one.save(of_one, &chain, &blocks).0, 0);
        std::thread::sleep(Duration::from_millis(300));
        if fetch(&two, &chain, 0) == 40 {
            break;
        }
        assert!(Instant::now() < deadline, "{:?}", one.statistics());
        round += 1;
    }
    pools.iter().flatten().for_each(|pool| pool.wait("leases", |leases| leases == 0));
}

/// Pools die and restart at their addresses many times during saves and fetches: afterwards blocks are shared
/// at once, in both directions.
#[test]
fn pools_that_died_often_are_shared_as_before() {
    const ROUNDS: u64 = 120;
    let random = &mut Random(seed(2021));
    let mut pools: Vec<Pool> = (0..2).map(|_| Pool::new(Transport::Tcp, 256, SLOT, loopback(0))).collect();
    let far = nodes(&[&pools[0], &pools[1]]).replace("2s", "300ms");
    let listens: Vec<SocketAddr> = pools
        .iter()
        .map(|pool| pool.address.strip_prefix("tcp:").and_then(|text| text.parse().ok()).expect("an address"))
        .collect();
    let (one, _saved, of_one) = store(&far, random);
    let (two, _loaded, of_two) = store(&far, random);
    for round in 0..ROUNDS {
        let ((names, blocks), (others, other_blocks)) = (chain(5000 + round, 20), chain(9000 + round, 20));
        one.save(of_one, &names, &blocks);
        two.save(of_two, &others, &other_blocks);
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        let victim = random.below(2) as usize;
        let dead = pools.remove(victim);
        if round % 3 == 0 {
            fetch(&two, &names, 0);
            fetch(&one, &others, 0);
        }
        drop(dead);
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        pools.insert(victim, Pool::new(Transport::Tcp, 256, SLOT, listens[victim]));
    }
    for ((from, of_from, to), first) in [((&one, of_one, &two), 20_000), ((&two, of_two, &one), 30_000)] {
        let started = Instant::now();
        let mut number = first;
        loop {
            let (names, blocks) = chain(number, 20);
            from.save(of_from, &names, &blocks);
            std::thread::sleep(Duration::from_millis(100));
            if fetch(to, &names, 0) == 20 {
                break;
            }
            assert!(started.elapsed() < Duration::from_secs(30), "blocks are not shared any more");
            number += 1;
        }
        println!("shared after {:?}, {} chains", started.elapsed(), number - first + 1);
    }
}
