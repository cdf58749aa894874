//! The nodes of a simulated cluster and the files that list them: started, stopped, and made to fail.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use tests_apiserver::ApiServer;
use tools_mocker::Mock;

use crate::bounds::LevelMonitor;
use crate::deployment::Deployment;
use crate::kernel::{
    self, Cut, DiskFaults, HostId, LinkFaults, MICROSECOND, MILLISECOND, Nanos, ProcessId, SECOND,
};
use crate::nodes::{
    self, ADMIN_PORT, CONTROL_PORT, DRAIN, ENGINE_PORT, GATEWAY_PORT, GatewayOptions, STORE_HTTP_PORT,
    Started, StopHandle,
};
use crate::oracle::{Oracle, Violation};
use crate::plan::{EngineKind, EnginePlan, Link, Node, Plan, Role, Tiers};

/// A node and its present process.
struct NodeProcess {
    host: HostId,
    process: ProcessId,
    stop: Option<StopHandle>,
    is_frozen: bool,
    /// Latest time at which the process was frozen, or its disk had faults.
    impaired_until: Nanos,
    termination: Option<Termination>,
}

/// A process that was told to stop.
#[derive(Debug, Clone, Copy)]
enum Termination {
    /// The process has time to end, and is killed at `kill_at`.
    Draining { since: Nanos, kill_at: Nanos },
    /// The process has ended, and the next one starts at `restart_at`.
    Ended { restart_at: Nanos },
}

/// Time beyond its drain that a process may take to end: transfers and disk operations that run then have time limits of
/// their own, and what a tier holds is written.
const ENDS_AFTER_DRAIN: Nanos = 20 * SECOND;
/// Time between the end of a process and the start of the next one.
const RESTARTS_AFTER: Nanos = SECOND / 2;

impl NodeProcess {
    fn new(host: HostId) -> Self {
        Self {
            host,
            process: ProcessId::NONE,
            stop: None,
            is_frozen: false,
            impaired_until: 0,
            termination: None,
        }
    }

    fn is_alive(&self) -> bool {
        kernel::is_alive(self.process)
    }

    /// Notes that the process cannot go on as usual now.
    fn note_impairment(&mut self) {
        if self.is_frozen || kernel::disk_of(self.host) != DiskFaults::default() {
            self.impaired_until = kernel::now();
        }
    }

    fn set_process(&mut self, started: Started) {
        self.process = started.process;
        self.is_frozen = false;
        self.termination = None;
        // The receiver belongs to a dead process: closing the channel would wake one of its tasks.
        std::mem::forget(std::mem::replace(&mut self.stop, started.stop));
    }
}

struct Gateway {
    member: NodeProcess,
    /// State of each engine in this gateway's workers file.
    lists: Vec<Listed>,
    writes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listed {
    In,
    Draining,
    Out,
}

struct Engine {
    member: NodeProcess,
    plan: EnginePlan,
    /// Set by the engine's own process when it listens.
    mock: Arc<Mutex<Option<Arc<Mock>>>>,
    /// Whether the engine runs a different model.
    is_other_model: bool,
}

pub(crate) struct Cluster {
    client: HostId,
    gateways: Vec<Gateway>,
    engines: Vec<Engine>,
    stores: Vec<NodeProcess>,
    controls: Vec<NodeProcess>,
    /// The API server, if the engines are pods of a Deployment.
    api: Option<NodeProcess>,
    deployment: Option<Deployment>,
    usual: LinkFaults,
    is_reference: bool,
    tiers: Tiers,
    has_keys: bool,
    counts: ClusterCounts,
}

/// Counts of process events in a cluster.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ClusterCounts {
    /// Processes that ended before their drain time was over.
    pub(crate) drained: u64,
    /// Processes that were killed because their drain time was over.
    pub(crate) killed_draining: u64,
    /// Pods that were created because control services raised the replicas.
    pub(crate) scaled_up: u64,
    /// Pods that were deleted because control services lowered the replicas.
    pub(crate) scaled_down: u64,
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
    /// Starts all nodes. `client` is the host of the scenario itself.
    pub(crate) fn start(plan: &Plan, client: HostId) -> Result<Self> {
        let mut cluster = Self {
            client,
            gateways: Vec::new(),
            engines: Vec::new(),
            stores: Vec::new(),
            controls: Vec::new(),
            api: None,
            deployment: None,
            usual: faults_of(plan.link),
            is_reference: plan.is_reference(),
            tiers: plan.tiers,
            has_keys: plan.tenants > 0,
            counts: ClusterCounts::default(),
        };
        let gateways: Vec<HostId> =
            (0..plan.gateways).map(|number| kernel::add_host(&format!("gateway{number}"))).collect();
        if cluster.has_keys {
            nodes::write_keys()?;
        }
        for number in 0..plan.tiers.stores {
            let mut member = NodeProcess::new(kernel::add_host(&format!("store{number}")));
            nodes::write_store_config(member.host, number)?;
            member.set_process(nodes::start_store(member.host, number));
            cluster.stores.push(member);
        }
        let stores: Vec<HostId> = cluster.stores.iter().map(|store| store.host).collect();
        for (number, engine) in plan.engines.iter().enumerate() {
            let member = NodeProcess::new(kernel::add_host(&format!("engine{number}")));
            if engine.kind == EngineKind::Worker {
                nodes::write_worker_config(member.host, number, engine, plan.tiers, &stores)?;
            }
            let engine = Engine { member, plan: engine.clone(), mock: Arc::default(), is_other_model: false };
            cluster.engines.push(engine);
            if plan.controls == 0 {
                cluster.start_engine(number);
            }
        }
        if plan.controls > 0 {
            cluster.start_control_plane(plan, &gateways)?;
        }
        let hosts: Vec<HostId> = [client]
            .into_iter()
            .chain(gateways.iter().copied())
            .chain(cluster.engines.iter().map(|engine| engine.member.host))
            .chain(stores)
            .chain(cluster.controls.iter().chain(&cluster.api).map(|member| member.host))
            .collect();
        for (index, a) in hosts.iter().enumerate() {
            for b in &hosts[index + 1..] {
                kernel::set_link(*a, *b, cluster.usual);
            }
        }
        for (number, host) in gateways.iter().enumerate() {
            let lists = vec![Listed::In; plan.engines.len()];
            cluster.gateways.push(Gateway { member: NodeProcess::new(*host), lists, writes: 0 });
            cluster.write_list(number)?;
            let peers: Vec<HostId> =
                gateways.iter().copied().filter(|peer| plan.peers && peer != host).collect();
            let options = GatewayOptions {
                requests_max: plan.requests_max,
                has_keys: cluster.has_keys,
                finds_pods: plan.controls > 0,
            };
            nodes::write_gateway_config(number, &peers, &options)?;
            cluster.gateways[number].member.set_process(nodes::start_gateway(*host, number));
        }
        Ok(cluster)
    }

    /// Starts the API server with a Deployment, its first pods, and the control services that scale it.
    fn start_control_plane(&mut self, plan: &Plan, gateways: &[HostId]) -> Result<()> {
        let server = Arc::new(ApiServer::new(plan.seed));
        let addresses =
            self.engines.iter().map(|engine| kernel::host_address(engine.member.host).to_string());
        self.deployment = Some(Deployment::new(Arc::clone(&server), plan.replicas, addresses.collect()));
        let mut api = NodeProcess::new(kernel::add_host("api"));
        nodes::write_kubeconfig(api.host)?;
        api.set_process(nodes::start_api_server(api.host, &server));
        self.api = Some(api);
        self.reconcile()?;
        for number in 0..plan.controls {
            let mut member = NodeProcess::new(kernel::add_host(&format!("control{number}")));
            nodes::write_control_config(
                member.host,
                number,
                plan.controls > 1,
                gateways,
                plan.engines.len(),
            )?;
            member.set_process(nodes::start_control(member.host, number));
            self.controls.push(member);
        }
        Ok(())
    }

    /// Starts and stops engines to match the Deployment.
    fn reconcile(&mut self) -> Result<()> {
        let Some(mut deployment) = self.deployment.take() else { return Ok(()) };
        let is_idle = |engine: usize| {
            // A frozen engine may hold locks.
            if self.engines[engine].member.is_frozen {
                return false;
            }
            let stats = self.mock(engine).map(|mock| mock.stats());
            stats.is_none_or(|stats| stats.running + stats.waiting == 0)
        };
        let orders = deployment.reconcile(kernel::now(), is_idle);
        self.deployment = Some(deployment);
        let orders = orders?;
        if !self.controls.is_empty() {
            self.counts.scaled_up += orders.start.len() as u64;
            self.counts.scaled_down += orders.stop.len() as u64;
        }
        for engine in orders.stop {
            self.kill(Node::Engine(engine as u8), false);
        }
        for engine in orders.start {
            self.start_engine(engine);
        }
        Ok(())
    }

    /// Ends all watches of the API server.
    pub(crate) fn cut_watches(&self) {
        if let Some(deployment) = &self.deployment {
            deployment.server().cut_watches();
        }
    }

    /// Returns the engines that gateways should know: all, or those that are pods.
    pub(crate) fn wanted_engines(&self) -> Vec<usize> {
        let is_wanted =
            |engine: &usize| self.deployment.as_ref().is_none_or(|deployment| deployment.is_staying(*engine));
        (0..self.engines.len()).filter(is_wanted).collect()
    }

    /// Whether control services scale the engines.
    fn is_scaled(&self) -> bool {
        self.deployment.is_some()
    }

    /// Returns the number of running engines, leaving ones included, and the wanted number, if control
    /// services decide it.
    pub(crate) fn scale(&self) -> Result<Option<(usize, u64)>> {
        let Some(deployment) = &self.deployment else { return Ok(None) };
        let runs = (0..self.engines.len()).filter(|engine| deployment.is_pod(*engine)).count();
        Ok(Some((runs, deployment.replicas()?)))
    }

    pub(crate) fn control_addresses(&self) -> Vec<SocketAddr> {
        let address =
            |member: &NodeProcess| SocketAddr::from((kernel::host_address(member.host), CONTROL_PORT));
        self.controls.iter().map(address).collect()
    }

    fn start_engine(&mut self, number: usize) {
        let Engine { member, plan, mock, is_other_model } = &mut self.engines[number];
        member.set_process(nodes::start_engine(member.host, number, plan, *is_other_model, Arc::clone(mock)));
    }

    /// Writes a gateway's workers file.
    fn write_list(&mut self, number: usize) -> Result<()> {
        let gateway = &mut self.gateways[number];
        gateway.writes += 1;
        // Each state of the file has a different length: modification times of real files are not simulated.
        let mut text = format!("#{}\n", "-".repeat(gateway.writes));
        for (engine, listed) in self.engines.iter().zip(&gateway.lists) {
            if *listed == Listed::Out {
                continue;
            }
            let address = kernel::host_address(engine.member.host);
            writeln!(text, "[[worker]]\nurl = \"http://{address}:{ENGINE_PORT}\"")?;
            // Workers report their role themselves.
            match (engine.plan.kind, engine.plan.role) {
                (EngineKind::Worker, _) | (_, Role::Both) => {}
                (_, Role::Prefill) => writeln!(text, "role = \"prefill\"")?,
                (_, Role::Decode) => writeln!(text, "role = \"decode\"")?,
            }
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

    pub(crate) fn gateway_count(&self) -> usize {
        self.gateways.len()
    }

    pub(crate) fn engine_count(&self) -> usize {
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

    /// Returns a monitor of the levels of all gateways, workers and stores.
    pub(crate) fn level_monitor(&self, requests_max: u32) -> LevelMonitor {
        let workers = if self.is_reference { 0..self.engines.len() } else { 0..0 };
        LevelMonitor {
            gateways: (0..self.gateways.len() as u8).map(|number| self.admin_address(number)).collect(),
            workers: workers.map(|number| self.engine_address(number)).collect(),
            stores: (0..self.stores.len()).map(|number| self.store_address(number)).collect(),
            key: self.administrators_key(),
            requests_max,
        }
    }

    /// Returns the key of a tenant, if clients need one.
    pub(crate) fn key(&self, tenant: u8) -> Option<&'static str> {
        self.has_keys.then(|| nodes::key(tenant))
    }

    /// Returns the key with which gateways return their state.
    pub(crate) fn administrators_key(&self) -> Option<&'static str> {
        self.has_keys.then(nodes::administrators_key)
    }

    /// Returns the number of times that control services raised the replicas after they had lowered them.
    pub(crate) fn reversals(&self) -> u64 {
        self.deployment.as_ref().map_or(0, Deployment::reversals)
    }

    pub(crate) fn counts(&self) -> ClusterCounts {
        self.counts
    }

    pub(crate) fn tiers(&self) -> Tiers {
        self.tiers
    }

    pub(crate) fn is_reference(&self) -> bool {
        self.is_reference
    }

    pub(crate) fn store_count(&self) -> usize {
        self.stores.len()
    }

    pub(crate) fn store_address(&self, number: usize) -> SocketAddr {
        SocketAddr::from((kernel::host_address(self.stores[number].host), STORE_HTTP_PORT))
    }

    /// Returns the open sockets of a node.
    pub(crate) fn sockets(&self, node: Node) -> Vec<String> {
        self.member(node).map_or_else(Vec::new, |member| kernel::open_sockets(member.process))
    }

    fn host(&self, node: Node) -> HostId {
        self.member(node).map_or(self.client, |member| member.host)
    }

    fn member(&self, node: Node) -> Option<&NodeProcess> {
        match node {
            Node::Client => None,
            Node::Gateway(number) => self.gateways.get(usize::from(number)).map(|gateway| &gateway.member),
            Node::Engine(number) => self.engines.get(usize::from(number)).map(|engine| &engine.member),
            Node::Store(number) => self.stores.get(usize::from(number)),
            Node::Control(number) => self.controls.get(usize::from(number)),
            Node::Api => self.api.as_ref(),
        }
    }

    fn member_mut(&mut self, node: Node) -> Option<&mut NodeProcess> {
        match node {
            Node::Client => None,
            Node::Gateway(number) => {
                self.gateways.get_mut(usize::from(number)).map(|gateway| &mut gateway.member)
            }
            Node::Engine(number) => {
                self.engines.get_mut(usize::from(number)).map(|engine| &mut engine.member)
            }
            Node::Store(number) => self.stores.get_mut(usize::from(number)),
            Node::Control(number) => self.controls.get_mut(usize::from(number)),
            Node::Api => self.api.as_mut(),
        }
    }

    pub(crate) fn kill(&mut self, node: Node, silently: bool) {
        if let Node::Engine(number) = node {
            let mock =
                self.engines[usize::from(number)].mock.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(mock) = &mock {
                mock.unregister();
            }
            // Dropping the mock would run code of a killed process.
            std::mem::forget(mock);
        }
        if let Some(member) = self.member_mut(node) {
            member.is_frozen = false;
            if let Some(Termination::Draining { .. }) = member.termination {
                let restart_at = kernel::now() + RESTARTS_AFTER;
                member.termination = Some(Termination::Ended { restart_at });
            }
            kernel::kill(member.process, silently);
        }
    }

    /// Tells a process to stop. It is killed if it still runs after `kill_after` milliseconds; in any case, a
    /// new process replaces it ([`Self::supervise`]).
    pub(crate) fn terminate(&mut self, node: Node, kill_after: u64) {
        let Some(member) = self.member_mut(node).filter(|member| member.is_alive()) else { return };
        if member.termination.is_some() {
            return;
        }
        let since = kernel::now();
        member.termination = Some(Termination::Draining { since, kill_at: since + kill_after * MILLISECOND });
        match &member.stop {
            Some(stop) => stop.terminate(),
            // Mock engines exit at once, as most engines do.
            None => self.kill(node, false),
        }
    }

    /// Carries out the due steps of stopping processes, and reconciles the Deployment.
    pub(crate) fn supervise(&mut self) -> Result<()> {
        self.reconcile()?;
        let now = kernel::now();
        for node in self.nodes() {
            let Some(member) = self.member_mut(node) else { continue };
            member.note_impairment();
            let is_alive = member.is_alive();
            let has_handle = member.stop.is_some();
            match member.termination {
                Some(Termination::Draining { since, .. })
                    // An impairment of an earlier time is no excuse.
                    if is_alive
                        && now >= since.max(member.impaired_until) + DRAIN.as_nanos() as u64 + ENDS_AFTER_DRAIN =>
                {
                    let what =
                        format!("{node:?} still runs {} s after it was told to stop", (now - since) / SECOND);
                    bail!(Violation::new(Oracle::Drain, what));
                }
                Some(Termination::Draining { kill_at, .. }) if is_alive && now >= kill_at => {
                    self.counts.killed_draining += 1;
                    self.kill(node, false);
                }
                Some(Termination::Draining { .. }) if !is_alive => {
                    member.termination = Some(Termination::Ended { restart_at: now + RESTARTS_AFTER });
                    self.counts.drained += u64::from(has_handle);
                }
                Some(Termination::Ended { restart_at }) if now >= restart_at => self.restart(node),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether [`Self::supervise`] must be called periodically.
    pub(crate) fn needs_supervision(&self) -> bool {
        self.is_scaled() || self.is_restarting()
    }

    /// Whether a process that was told to stop has not been replaced yet.
    pub(crate) fn is_restarting(&self) -> bool {
        self.nodes()
            .into_iter()
            .any(|node| self.member(node).is_some_and(|member| member.termination.is_some()))
    }

    /// Restarts an engine with another model or with its own.
    pub(crate) fn change_model(&mut self, engine: u8, is_other_model: bool) {
        let number = usize::from(engine);
        if self.engines[number].is_other_model == is_other_model {
            return;
        }
        self.kill(Node::Engine(engine), false);
        self.engines[number].is_other_model = is_other_model;
        self.start_engine(number);
    }

    /// Restarts the process of a node, which has ended.
    pub(crate) fn restart(&mut self, node: Node) {
        if self.member(node).is_none_or(NodeProcess::is_alive) {
            return;
        }
        match node {
            Node::Client => {}
            Node::Gateway(number) => {
                let member = &mut self.gateways[usize::from(number)].member;
                member.set_process(nodes::start_gateway(member.host, usize::from(number)));
            }
            Node::Engine(number) => {
                let number = usize::from(number);
                match self.deployment.as_ref().is_none_or(|deployment| deployment.is_pod(number)) {
                    true => self.start_engine(number),
                    // The pod was removed; the next pod in this place starts the engine.
                    false => self.engines[number].member.termination = None,
                }
            }
            Node::Store(number) => {
                let member = &mut self.stores[usize::from(number)];
                member.set_process(nodes::start_store(member.host, number));
            }
            Node::Control(number) => {
                let member = &mut self.controls[usize::from(number)];
                member.set_process(nodes::start_control(member.host, number));
            }
            // The API server is only frozen or cut off, never stopped.
            Node::Api => {}
        }
    }

    pub(crate) fn freeze(&mut self, node: Node, is_frozen: bool) {
        if let Some(member) = self.member_mut(node)
            && kernel::is_alive(member.process)
            && member.is_frozen != is_frozen
        {
            member.note_impairment();
            member.is_frozen = is_frozen;
            member.note_impairment();
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

    pub(crate) fn set_disk(&mut self, node: Node, faults: DiskFaults) {
        if let Some(member) = self.member_mut(node) {
            member.note_impairment();
        }
        kernel::set_disk(self.host(node), faults);
        if let Some(member) = self.member_mut(node) {
            member.note_impairment();
        }
    }

    pub(crate) fn jump(&self, node: Node, millis: i64) {
        kernel::jump_clock(self.host(node), millis * MILLISECOND as i64);
    }

    /// Sets the state of an engine in all workers files: present, draining, or absent.
    pub(crate) fn set_listed(&mut self, engine: u8, state: Listed) -> Result<()> {
        for number in 0..self.gateways.len() {
            if self.gateways[number].lists[usize::from(engine)] != state {
                self.gateways[number].lists[usize::from(engine)] = state;
                self.write_list(number)?;
            }
        }
        Ok(())
    }

    fn nodes(&self) -> Vec<Node> {
        let gateways = (0..self.gateways.len() as u8).map(Node::Gateway);
        let engines = (0..self.engines.len() as u8).map(Node::Engine);
        let stores = (0..self.stores.len() as u8).map(Node::Store);
        let controls = (0..self.controls.len() as u8).map(Node::Control);
        let api = self.api.iter().map(|_| Node::Api);
        let members = gateways.chain(engines).chain(stores).chain(controls).chain(api);
        [Node::Client].into_iter().chain(members).collect()
    }

    /// Ends all faults. Processes that were told to stop still take their time.
    pub(crate) fn heal(&mut self) -> Result<()> {
        let nodes = self.nodes();
        for (index, a) in nodes.iter().enumerate() {
            for b in &nodes[index + 1..] {
                self.set_link(*a, *b, self.usual);
            }
            self.set_disk(*a, DiskFaults::default());
            self.freeze(*a, false);
            self.restart(*a);
        }
        for number in 0..self.engines.len() {
            self.change_model(number as u8, false);
            if let Some(mock) = self.mock(number) {
                mock.heal();
            }
            self.set_listed(number as u8, Listed::In)?;
        }
        Ok(())
    }
}
