//! The nodes of a simulated cluster: real gateways, mock engines, and the files that tell who is there.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use tools_mocker::{Dialect, Mock, MockConfig};

use crate::catalog::{self, MODEL};
use crate::kernel::{self, Cut, DiskFaults, HostId, LinkFaults, MICROSECOND, MILLISECOND, ProcessId, report};
use crate::model;
use crate::plan::{EnginePlan, Link, Make, Node, Plan, Role, Tiers};

const GATEWAY_PORT: u16 = 8000;
const ADMIN_PORT: u16 = 9090;
const ENGINE_PORT: u16 = 8100;
/// Ports of a worker's KV events, their replay and its data plane.
const WORKER_PORTS: [u16; 3] = [8101, 8102, 8103];
const STORE_PORT: u16 = 7400;
const STORE_HTTP_PORT: u16 = 7401;

/// A gateway or an engine, and the process that is it now.
struct Member {
    host: HostId,
    process: ProcessId,
    is_frozen: bool,
}

struct Gateway {
    member: Member,
    /// State of each engine in this gateway's file of workers.
    lists: Vec<Listed>,
    writes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    In,
    Draining,
    Out,
}

struct Engine {
    member: Member,
    plan: EnginePlan,
    /// Set by the engine's own process once it listens.
    mock: Arc<Mutex<Option<Arc<Mock>>>>,
}

pub(crate) struct Cluster {
    client: HostId,
    gateways: Vec<Gateway>,
    engines: Vec<Engine>,
    stores: Vec<Member>,
    usual: LinkFaults,
    peers: bool,
    requests_max: u32,
    is_reference: bool,
}

pub(crate) fn faults_of(link: Link) -> LinkFaults {
    LinkFaults {
        delay: (20 * MICROSECOND, link.delay_us * MICROSECOND),
        lose_one_in: link.lose_one_in,
        lost_delay: 200 * MILLISECOND,
        rate: link.rate,
        split_one_in: link.split_one_in,
        is_down: false,
    }
}

impl Cluster {
    /// Starts everything. `client` is the host of the scenario itself.
    pub(crate) fn start(plan: &Plan, client: HostId) -> Result<Self> {
        let mut cluster = Self {
            client,
            gateways: Vec::new(),
            engines: Vec::new(),
            stores: Vec::new(),
            usual: faults_of(plan.link),
            peers: plan.peers,
            requests_max: plan.requests_max,
            is_reference: plan.is_reference(),
        };
        let gateways: Vec<HostId> =
            (0..plan.gateways).map(|number| kernel::add_host(&format!("gateway{number}"))).collect();
        for number in 0..plan.tiers.stores {
            let host = kernel::add_host(&format!("store{number}"));
            write_store_config(host, number)?;
            let process = start_store(host, number);
            cluster.stores.push(Member { host, process, is_frozen: false });
        }
        let stores: Vec<HostId> = cluster.stores.iter().map(|store| store.host).collect();
        for (number, engine) in plan.engines.iter().enumerate() {
            let host = kernel::add_host(&format!("engine{number}"));
            let mock = Arc::default();
            if engine.make == Make::Worker {
                write_worker_config(host, number, engine, plan.tiers, &stores)?;
            }
            let process = start_engine(host, number, engine, Arc::clone(&mock));
            let member = Member { host, process, is_frozen: false };
            cluster.engines.push(Engine { member, plan: engine.clone(), mock });
        }
        let hosts: Vec<HostId> = [client]
            .into_iter()
            .chain(gateways.iter().copied())
            .chain(cluster.engines.iter().map(|engine| engine.member.host))
            .chain(stores)
            .collect();
        for (index, a) in hosts.iter().enumerate() {
            for b in &hosts[index + 1..] {
                kernel::set_link(*a, *b, cluster.usual);
            }
        }
        for (number, host) in gateways.iter().enumerate() {
            let lists = vec![Listed::In; plan.engines.len()];
            let member = Member { host: *host, process: ProcessId::NONE, is_frozen: false };
            cluster.gateways.push(Gateway { member, lists, writes: 0 });
            cluster.write_list(number)?;
            cluster.write_config(number, &gateways)?;
            cluster.gateways[number].member.process = start_gateway(*host, number);
        }
        Ok(cluster)
    }

    fn write_config(&self, number: usize, gateways: &[HostId]) -> Result<()> {
        let others = gateways.iter().enumerate().filter(|(other, _)| self.peers && *other != number);
        let peers: Vec<String> = others
            .map(|(_, host)| format!("\"http://{}:{GATEWAY_PORT}\"", kernel::host_address(*host)))
            .collect();
        let config = format!(
            "[gateway]\nlisten = \"0.0.0.0:{GATEWAY_PORT}\"\nadmin_listen = \"0.0.0.0:{ADMIN_PORT}\"\nthreads = 1\ncompute_threads = 1\nmodel = \"tiny\"\n\
             model_folder = \"{MODEL}\"\n\
             health_interval = \"1s\"\nhealth_timeout = \"1s\"\nstall = \"5s\"\nanswer_within = \"20s\"\n\
             worker_wait = \"5s\"\nwrite_timeout = \"10s\"\npeers = [{}]\n\
             requests_max = {}\n\
             [router]\ndisaggregate_above_tokens = 40\n\
             [discovery]\nfile = \"gateway{number}.workers.toml\"\n",
            peers.join(", "),
            self.requests_max,
        );
        std::fs::write(format!("gateway{number}.toml"), config).context("the gateway's configuration")
    }

    /// Writes a gateway's list of workers.
    fn write_list(&mut self, number: usize) -> Result<()> {
        let gateway = &mut self.gateways[number];
        gateway.writes += 1;
        // Each state of the file has a length of its own: times of real files are not simulated.
        let mut text = format!("#{}\n", "-".repeat(gateway.writes));
        for (engine, listed) in self.engines.iter().zip(&gateway.lists) {
            if *listed == Listed::Out {
                continue;
            }
            let address = kernel::host_address(engine.member.host);
            writeln!(text, "[[worker]]\nurl = \"http://{address}:{ENGINE_PORT}\"")?;
            if *listed == Listed::Draining {
                writeln!(text, "draining = true")?;
            }
        }
        let (path, new) = (format!("gateway{number}.workers.toml"), format!("gateway{number}.workers.new"));
        std::fs::write(&new, text)?;
        std::fs::rename(new, path).context("the list of workers")
    }

    pub(crate) fn gateway_address(&self, number: u8) -> SocketAddr {
        let host = self.gateways[usize::from(number)].member.host;
        SocketAddr::from((kernel::host_address(host), GATEWAY_PORT))
    }

    pub(crate) fn admin_address(&self, number: u8) -> SocketAddr {
        let host = self.gateways[usize::from(number)].member.host;
        SocketAddr::from((kernel::host_address(host), ADMIN_PORT))
    }

    pub(crate) fn gateways(&self) -> usize {
        self.gateways.len()
    }

    pub(crate) fn engines(&self) -> usize {
        self.engines.len()
    }

    pub(crate) fn engine_name(&self, number: usize) -> String {
        format!("{}:{ENGINE_PORT}", kernel::host_address(self.engines[number].member.host))
    }

    pub(crate) fn engine_address(&self, number: usize) -> SocketAddr {
        SocketAddr::from((kernel::host_address(self.engines[number].member.host), ENGINE_PORT))
    }

    pub(crate) fn has_events(&self, number: usize) -> bool {
        self.engines[number].plan.events
    }

    pub(crate) fn mock(&self, number: usize) -> Option<Arc<Mock>> {
        self.engines[number].mock.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn is_reference(&self) -> bool {
        self.is_reference
    }

    pub(crate) fn stores(&self) -> usize {
        self.stores.len()
    }

    pub(crate) fn store_address(&self, number: usize) -> SocketAddr {
        SocketAddr::from((kernel::host_address(self.stores[number].host), STORE_HTTP_PORT))
    }

    /// Sockets that a node has open.
    pub(crate) fn sockets(&self, node: Node) -> Vec<String> {
        self.member(node).map_or_else(Vec::new, |member| kernel::open_sockets(member.process))
    }

    fn host(&self, node: Node) -> HostId {
        self.member(node).map_or(self.client, |member| member.host)
    }

    fn member(&self, node: Node) -> Option<&Member> {
        match node {
            Node::Client => None,
            Node::Gateway(number) => self.gateways.get(usize::from(number)).map(|gateway| &gateway.member),
            Node::Engine(number) => self.engines.get(usize::from(number)).map(|engine| &engine.member),
            Node::Store(number) => self.stores.get(usize::from(number)),
        }
    }

    fn member_mut(&mut self, node: Node) -> Option<&mut Member> {
        match node {
            Node::Client => None,
            Node::Gateway(number) => {
                self.gateways.get_mut(usize::from(number)).map(|gateway| &mut gateway.member)
            }
            Node::Engine(number) => {
                self.engines.get_mut(usize::from(number)).map(|engine| &mut engine.member)
            }
            Node::Store(number) => self.stores.get_mut(usize::from(number)),
        }
    }

    pub(crate) fn kill(&mut self, node: Node, silently: bool) {
        if let Node::Engine(number) = node {
            let mock =
                self.engines[usize::from(number)].mock.lock().unwrap_or_else(PoisonError::into_inner).take();
            // Dropping the mock would run code of a process that was killed.
            std::mem::forget(mock);
        }
        if let Some(member) = self.member_mut(node) {
            member.is_frozen = false;
            kernel::kill(member.process, silently);
        }
    }

    /// Starts a process again that was killed.
    pub(crate) fn restart(&mut self, node: Node) {
        if self.member(node).is_none_or(|member| kernel::is_alive(member.process)) {
            return;
        }
        match node {
            Node::Client => {}
            Node::Gateway(number) => {
                let member = &mut self.gateways[usize::from(number)].member;
                member.process = start_gateway(member.host, usize::from(number));
            }
            Node::Engine(number) => {
                let engine = &mut self.engines[usize::from(number)];
                engine.member.process = start_engine(
                    engine.member.host,
                    usize::from(number),
                    &engine.plan,
                    Arc::clone(&engine.mock),
                );
            }
            Node::Store(number) => {
                let member = &mut self.stores[usize::from(number)];
                member.process = start_store(member.host, number);
            }
        }
    }

    pub(crate) fn freeze(&mut self, node: Node, is_frozen: bool) {
        if let Some(member) = self.member_mut(node)
            && kernel::is_alive(member.process)
            && member.is_frozen != is_frozen
        {
            member.is_frozen = is_frozen;
            kernel::freeze(member.process, is_frozen);
        }
    }

    pub(crate) fn set_link(&self, a: Node, b: Node, faults: LinkFaults) {
        kernel::set_link(self.host(a), self.host(b), faults);
    }

    pub(crate) fn usual_link(&self) -> LinkFaults {
        self.usual
    }

    pub(crate) fn cut(&self, a: Node, b: Node, silently: bool) {
        kernel::cut(self.host(a), self.host(b), if silently { Cut::Silently } else { Cut::Reset });
    }

    pub(crate) fn set_disk(&self, node: Node, faults: DiskFaults) {
        kernel::set_disk(self.host(node), faults);
    }

    pub(crate) fn jump(&self, node: Node, millis: i64) {
        kernel::jump_clock(self.host(node), millis * MILLISECOND as i64);
    }

    /// Takes an engine from the lists of workers, lets it drain, or puts it back.
    pub(crate) fn list(&mut self, engine: u8, is_in: bool, drains: bool) -> Result<()> {
        let state = match (is_in, drains) {
            (true, _) => Listed::In,
            (false, true) => Listed::Draining,
            (false, false) => Listed::Out,
        };
        for number in 0..self.gateways.len() {
            if self.gateways[number].lists[usize::from(engine)] != state {
                self.gateways[number].lists[usize::from(engine)] = state;
                self.write_list(number)?;
            }
        }
        Ok(())
    }

    /// Everything that is wrong is put right again.
    pub(crate) fn heal(&mut self) -> Result<()> {
        let nodes: Vec<Node> = [Node::Client]
            .into_iter()
            .chain((0..self.gateways.len() as u8).map(Node::Gateway))
            .chain((0..self.engines.len() as u8).map(Node::Engine))
            .chain((0..self.stores.len() as u8).map(Node::Store))
            .collect();
        for (index, a) in nodes.iter().enumerate() {
            for b in &nodes[index + 1..] {
                self.set_link(*a, *b, self.usual);
            }
            self.set_disk(*a, DiskFaults::default());
            self.freeze(*a, false);
            self.restart(*a);
        }
        for number in 0..self.engines.len() {
            if let Some(mock) = self.mock(number) {
                mock.heal();
            }
            self.list(number as u8, true, false)?;
        }
        Ok(())
    }
}

fn start_gateway(host: HostId, number: usize) -> ProcessId {
    kernel::start_process(host, &format!("gateway{number}"), move || {
        control_node::run(["kvasir", "gateway", "--config", &format!("gateway{number}.toml")]);
        report::fail(&format!("gateway{number} has ended by itself"));
    })
}

fn start_store(host: HostId, number: u8) -> ProcessId {
    kernel::start_process(host, &format!("store{number}"), move || {
        control_node::run(["kvasir", "store", "--config", &format!("store{number}.toml")]);
        report::fail(&format!("store{number} has ended by itself"));
    })
}

/// Runs a worker, again and again where its disk keeps it from starting, as whoever supervises it would.
fn run_worker(host: HostId, number: usize, role: Role) -> ! {
    let role = match role {
        Role::Both => "both",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    let config = format!("worker{number}.toml");
    loop {
        control_node::run(["kvasir", "worker", "--role", role, "--config", &config]);
        if kernel::disk_of(host) == DiskFaults::default() {
            report::fail(&format!("worker {number} has ended by itself"));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn write_store_config(host: HostId, number: u8) -> Result<()> {
    let address = kernel::host_address(host);
    let config = format!(
        "[store]\nname = \"store{number}\"\npool = \"2 MiB\"\nslot = \"8 KiB\"\nlisten = \"{address}:{STORE_PORT}\"\n\
         http = \"{address}:{STORE_HTTP_PORT}\"\nlease = \"5s\"\nresp = []\n\
         [transfer]\ntransport = \"tcp\"\nhuge_pages = false\nzero_copy_from = \"0 B\"\n"
    );
    std::fs::write(format!("store{number}.toml"), config).context("the store's configuration")
}

fn write_worker_config(
    host: HostId,
    number: usize,
    plan: &EnginePlan,
    tiers: Tiers,
    stores: &[HostId],
) -> Result<()> {
    let address = kernel::host_address(host);
    let [events, replay, transfer] = WORKER_PORTS;
    let nodes: Vec<String> = stores
        .iter()
        .enumerate()
        .map(|(number, host)| format!("\"store{number}=tcp:{}:{STORE_PORT}\"", kernel::host_address(*host)))
        .collect();
    let nodes = if tiers.host_kib == 0 { String::new() } else { nodes.join(", ") };
    let disk = if tiers.host_kib == 0 { 0 } else { tiers.disk_kib };
    let context = model::CONTEXT.min((plan.blocks - 2) * 16);
    let config = format!(
        "[engine]\nmodel_name = \"tiny\"\nmodel_folder = \"{MODEL}\"\nthreads = 1\nblocks = {}\n\
         context_tokens = {context}\n\
         [worker]\nlisten = \"{address}:{ENGINE_PORT}\"\nevents = \"{address}:{events}\"\nreplay = \"{address}:{replay}\"\n\
         [transfer]\ntransport = \"tcp\"\nlisten = \"{address}:{transfer}\"\nhuge_pages = false\n\
         zero_copy_from = \"0 B\"\ndeadline = \"5s\"\nlease = \"8s\"\n\
         [host_tier]\ncapacity = \"{} KiB\"\n\
         [disk_tier]\ncapacity = \"{disk} KiB\"\nsegment = \"1 MiB\"\npath = \"disk{number}\"\n\
         [remote_tier]\nnodes = [{nodes}]\n",
        plan.blocks, tiers.host_kib
    );
    std::fs::write(format!("worker{number}.toml"), config).context("the worker's configuration")
}

fn start_engine(
    host: HostId,
    number: usize,
    plan: &EnginePlan,
    place: Arc<Mutex<Option<Arc<Mock>>>>,
) -> ProcessId {
    let plan = plan.clone();
    kernel::start_process(host, &format!("engine{number}"), move || {
        if plan.make == Make::Worker {
            run_worker(host, number, plan.role);
        }
        let ended = run_engine(host, number, &plan, &place);
        report::fail(&format!("engine{number} has ended: {ended:?}"));
    })
}

fn run_engine(
    host: HostId,
    number: usize,
    plan: &EnginePlan,
    place: &Mutex<Option<Arc<Mock>>>,
) -> Result<()> {
    let config = MockConfig {
        dialect: if plan.make == Make::Sglang { Dialect::Sglang } else { Dialect::Vllm },
        blocks: plan.blocks,
        context_tokens: (plan.blocks - 1) * 16,
        decode_seconds_per_step: plan.step_us as f64 / 1e6,
        prefill_seconds_per_token: plan.token_us as f64 / 1e6,
        events: plan.events,
        seed: number as u64,
        bootstrap_timeout: Duration::from_secs(20),
        ..catalog::engine_config()?
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let address = SocketAddr::from((kernel::host_address(host), ENGINE_PORT));
        let mock = Mock::start(config, address).await?;
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(mock));
        std::future::pending::<()>().await;
        Ok(())
    })
}
