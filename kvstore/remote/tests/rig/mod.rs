//! Pool nodes and clients over the simulated fabric: one tick is one millisecond. The contents of a block
//! follow from its identity, so that any bytes can be checked.

#![allow(dead_code, reason = "each test file uses a part of it")]

mod memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_remote::{
    Description, Outcome, PoolConfig, PoolCounters, PoolNode, PoolServer, RemoteConfig, RemoteCounters,
    RemotePool, StoreBlock, StoreResult, Ticket, checksum, group_of,
};
pub(crate) use memory::{MemoryBlocks, Retained};

/// Bytes of a slot in simulations.
pub(crate) const SLOT_BYTES: usize = 12 << 10;
/// Group size in simulations.
pub(crate) const GROUP_BLOCKS: usize = 8;

/// Returns a pool of `slot_count` slots.
pub(crate) fn slots(name: &str, slot_count: u32, slot_bytes: usize) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes, slot_count };
    SlotPool::new(Arc::new(Slab::create(name, layout, PageSize::Standard).expect("slab")))
}

/// Returns the identities of a chain.
pub(crate) fn chain(number: u64, blocks: usize) -> Vec<BlockIdentity> {
    let hash = |position: usize| xxhash_rust::xxh3::xxh3_128_with_seed(&position.to_le_bytes(), number);
    (0..blocks).map(|position| BlockIdentity(hash(position).to_le_bytes())).collect()
}

/// Length of the block in bytes, at most `most`.
pub(crate) fn block_bytes(identity: &BlockIdentity, most: usize) -> usize {
    most - identity.0[3] as usize % (most / 2)
}

/// Contents of the block.
pub(crate) fn content(identity: &BlockIdentity, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    fastrand::Rng::with_seed(identity.short()).fill(&mut out);
    out
}

/// Whether the slot and the description are those of the block.
pub(crate) fn is_right(identity: &BlockIdentity, slot: &SlotRef, description: &Description) -> bool {
    let most = slot.slab().layout().slot_bytes;
    let mut bytes = vec![0; description.bytes as usize];
    slot.slab().read(slot.slot(), 0, &mut bytes);
    bytes == content(identity, block_bytes(identity, most)) && description.meta == !identity.short()
}

/// Returns the block at a position of a chain, in a slot with these bytes.
pub(crate) fn block_with(
    chain: &[BlockIdentity],
    position: usize,
    slot: SlotRef,
    bytes: &[u8],
    group: usize,
) -> StoreBlock {
    let identity = chain[position];
    slot.slab().write(slot.slot(), 0, bytes);
    let description = Description {
        parent: if position == 0 { BlockIdentity([0; 16]) } else { chain[position - 1] },
        bytes: bytes.len() as u32,
        checksum: checksum(&identity, &slot, bytes.len()),
        meta: !identity.short(),
    };
    let group = group_of(chain, position, group).expect("a position of the chain");
    StoreBlock { identity, group, slot, description }
}

/// Returns the block at a position of a chain, in a slot of this pool.
pub(crate) fn block(
    chain: &[BlockIdentity],
    position: usize,
    pool: &Arc<SlotPool>,
    group: usize,
) -> Option<StoreBlock> {
    let slot = pool.acquire()?;
    let most = slot.slab().layout().slot_bytes;
    let bytes = content(&chain[position], block_bytes(&chain[position], most));
    Some(block_with(chain, position, slot, &bytes, group))
}

/// Settings with timeouts in ticks.
pub(crate) fn config(seed: u64) -> RemoteConfig {
    let ms = Duration::from_millis;
    RemoteConfig {
        group_blocks: GROUP_BLOCKS,
        request_timeout: ms(20),
        transfer_timeout: ms(40),
        open_first: ms(10),
        open_max: ms(80),
        probe_timeout: ms(20),
        verify_bytes_per_poll: 64 << 10,
        hot_count: 0,
        seed,
        ..RemoteConfig::default()
    }
}

/// Settings with a lease of 300 ticks.
pub(crate) fn pool_config() -> PoolConfig {
    PoolConfig { lease: Duration::from_millis(300), verify_bytes_per_poll: 64 << 10, ..PoolConfig::default() }
}

pub(crate) struct Server {
    pub(crate) server: PoolServer<SimFabric, MemoryBlocks>,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) retained: Retained,
    /// Number of the server in the network.
    pub(crate) number: usize,
    /// Whether the server is polled.
    pub(crate) runs: bool,
}

pub(crate) struct Client {
    pub(crate) pool: RemotePool<SimFabric>,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) number: usize,
    pub(crate) runs: bool,
}

pub(crate) struct Cluster {
    pub(crate) network: SimNetwork,
    pub(crate) servers: Vec<Option<Server>>,
    pub(crate) clients: Vec<Client>,
    pub(crate) server_slots: u32,
    pub(crate) tick: u64,
    start: Instant,
    nodes: usize,
    /// Seed of the delays of servers' answers; zero: none.
    delays: u64,
}

impl Cluster {
    pub(crate) fn new(
        seed: u64,
        faults: Faults,
        counts: (usize, usize),
        server_slots: u32,
        config: RemoteConfig,
    ) -> Self {
        Self::delaying(seed, faults, counts, server_slots, config, 0)
    }

    /// Like `new`; servers delay some answers, as nodes with a disk do, drawn from a seed.
    pub(crate) fn delaying(
        seed: u64,
        faults: Faults,
        counts: (usize, usize),
        server_slots: u32,
        config: RemoteConfig,
        delays: u64,
    ) -> Self {
        let network = SimNetwork::new(seed, faults);
        let start = Instant::now();
        let mut cluster = Self {
            network,
            servers: Vec::new(),
            clients: Vec::new(),
            server_slots,
            tick: 0,
            start,
            nodes: 0,
            delays,
        };
        for _ in 0..counts.0 {
            let server = cluster.make_server();
            cluster.servers.push(Some(server));
        }
        for number in 0..counts.1 {
            let slots = slots("client", 256, SLOT_BYTES);
            let fabric = cluster.network.add_node(Arc::clone(slots.slab()));
            let config = RemoteConfig { seed: config.seed + number as u64, ..config };
            let pool =
                RemotePool::new(fabric, config, Arc::new(RemoteCounters::default()), start).expect("client");
            let (outcomes, number) = (Vec::new(), cluster.nodes);
            cluster.nodes += 1;
            cluster.clients.push(Client { pool, slots, outcomes, number, runs: true });
        }
        cluster.tell_nodes();
        cluster
    }

    fn make_server(&mut self) -> Server {
        let slots = slots("server", self.server_slots, SLOT_BYTES);
        let fabric = self.network.add_node(Arc::clone(slots.slab()));
        let counters = Arc::new(PoolCounters::default());
        let blocks = MemoryBlocks::delaying(&slots, self.delays);
        let retained = blocks.retained();
        let server = PoolServer::new(fabric, blocks, pool_config(), counters).expect("server");
        self.nodes += 1;
        Server { server, slots, retained, number: self.nodes - 1, runs: true }
    }

    /// Tells all clients the present nodes.
    pub(crate) fn tell_nodes(&mut self) {
        let nodes = self.node_list();
        let now = self.now();
        for client in &mut self.clients {
            client.pool.set_nodes(&nodes, now).expect("few nodes with different names");
        }
    }

    /// Returns the nodes that are alive.
    pub(crate) fn node_list(&self) -> Vec<PoolNode> {
        let living = self.servers.iter().enumerate();
        let living = living.filter_map(|(at, server)| server.as_ref().map(|server| (at, server.number)));
        living
            .map(|(at, number)| PoolNode { name: format!("store-{at}"), address: number.to_string() })
            .collect()
    }

    pub(crate) fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.tick)
    }

    pub(crate) fn after(&self, ticks: u64) -> Instant {
        self.now() + Duration::from_millis(ticks)
    }

    pub(crate) fn step(&mut self) {
        self.tick += 1;
        self.network.advance(1);
        let now = self.now();
        for server in self.servers.iter_mut().flatten().filter(|server| server.runs) {
            server.server.poll(now);
        }
        for client in self.clients.iter_mut().filter(|client| client.runs) {
            client.pool.poll(now, &mut client.outcomes);
        }
    }

    pub(crate) fn run(&mut self, ticks: u64) {
        (0..ticks).for_each(|_| self.step());
    }

    /// Steps until `so` returns true; returns the number of ticks.
    pub(crate) fn until(&mut self, what: &str, ticks: u64, mut so: impl FnMut(&mut Self) -> bool) -> u64 {
        for tick in 0..=ticks {
            if so(self) {
                return tick;
            }
            self.step();
        }
        panic!("not within {ticks} ticks: {what}");
    }

    /// Steps until every client can ask every node.
    pub(crate) fn until_connected(&mut self) {
        let nodes = self.servers.iter().flatten().count();
        self.until("all connected", 3000, |cluster| {
            cluster.clients.iter().all(|client| client.pool.usable_nodes() == nodes)
        });
    }

    pub(crate) fn server(&mut self, at: usize) -> &mut Server {
        self.servers[at].as_mut().expect("it lives")
    }

    /// Returns the server that a group is placed on.
    pub(crate) fn home(&self, group: &BlockIdentity) -> usize {
        let mut placement = kvstore_remote::Placement::default();
        for at in 0..self.servers.len() {
            placement.add(kvstore_remote::NodeId(at as u32), &format!("store-{at}"));
        }
        placement.best_two(group, |_| true)[0].expect("nodes").0 as usize
    }

    pub(crate) fn begin_store(&mut self, client: usize, chain: &[BlockIdentity], ticks: u64) -> Ticket {
        let (now, deadline) = (self.now(), self.after(ticks));
        let client = &mut self.clients[client];
        let blocks = (0..chain.len())
            .map(|position| block(chain, position, &client.slots, GROUP_BLOCKS).expect("slots"))
            .collect();
        client.pool.store(blocks, deadline, now).expect("room")
    }

    pub(crate) fn begin_fetch(&mut self, client: usize, chain: &[BlockIdentity], ticks: u64) -> Ticket {
        let (now, deadline) = (self.now(), self.after(ticks));
        let client = &mut self.clients[client];
        let targets = chain.iter().map(|_| client.slots.acquire().expect("slots")).collect();
        client.pool.fetch(chain, 0, targets, deadline, now).expect("room")
    }

    /// Waits for the outcome of a store.
    pub(crate) fn stored(&mut self, client: usize, wanted: Ticket) -> Vec<StoreResult> {
        let is_it =
            |outcome: &Outcome| matches!(outcome, Outcome::Stored { ticket, .. } if *ticket == wanted);
        match self.outcome(client, is_it) {
            Outcome::Stored { results, .. } => results,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for the outcome of a fetch and checks its blocks; returns the number of blocks and of slots held.
    pub(crate) fn fetched(
        &mut self,
        client: usize,
        chain: &[BlockIdentity],
        wanted: Ticket,
    ) -> (usize, usize) {
        let is_it =
            |outcome: &Outcome| matches!(outcome, Outcome::Fetched { ticket, .. } if *ticket == wanted);
        match self.outcome(client, is_it) {
            Outcome::Fetched { blocks, held, .. } => {
                for (identity, block) in chain.iter().zip(&blocks) {
                    assert!(is_right(identity, &block.slot, &block.description), "a wrong block was served");
                }
                (blocks.len(), held)
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn outcome(&mut self, client: usize, is_it: impl Fn(&Outcome) -> bool) -> Outcome {
        self.until("an outcome", 2000, |cluster| cluster.clients[client].outcomes.iter().any(&is_it));
        let outcomes = &mut self.clients[client].outcomes;
        let at = outcomes.iter().position(is_it).expect("it is there");
        outcomes.remove(at)
    }

    /// Stores a chain whole and waits for it.
    pub(crate) fn store(&mut self, client: usize, chain: &[BlockIdentity]) {
        let ticket = self.begin_store(client, chain, 1000);
        let results = self.stored(client, ticket);
        assert!(results.iter().all(|result| *result == StoreResult::Stored), "{results:?}");
    }

    /// Fetches a chain and waits for it; returns the number of blocks.
    pub(crate) fn fetch(&mut self, client: usize, chain: &[BlockIdentity], ticks: u64) -> usize {
        let ticket = self.begin_fetch(client, chain, ticks);
        self.fetched(client, chain, ticket).0
    }

    /// Waits until everything has ended, and asserts that nothing is left over.
    pub(crate) fn assert_no_leak(&mut self) {
        self.clients.iter_mut().for_each(|client| client.outcomes.clear());
        self.until("everything is over", 3000, |cluster| {
            cluster.clients.iter_mut().for_each(|client| client.outcomes.clear());
            cluster.clients.iter().all(|client| client.pool.is_idle())
                && cluster.servers.iter().flatten().all(|server| server.server.is_idle())
        });
        for (at, client) in self.clients.iter().enumerate() {
            assert_eq!(client.slots.used_count(), 0, "slots leaked at client {at}");
        }
        for (at, server) in self.servers.iter().enumerate() {
            let Some(server) = server else { continue };
            assert_eq!(server.slots.used_count(), server.server.block_count(), "slots leaked at server {at}");
        }
    }

    /// Kills a server; its peers learn of it after a delay.
    pub(crate) fn kill(&mut self, at: usize) {
        self.servers[at] = None;
    }

    /// Starts a server again, empty, at another address, and tells the clients.
    pub(crate) fn restart(&mut self, at: usize) {
        let server = self.make_server();
        self.servers[at] = Some(server);
        self.tell_nodes();
    }
}

/// Returns a counter by name.
pub(crate) fn counted(counters: &[(&'static str, &'static str, u64)], name: &str) -> u64 {
    counters.iter().find(|counter| counter.0 == name).expect("a counter of that name").2
}
