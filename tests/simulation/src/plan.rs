//! A cluster's life, drawn from a seed: who is there, who asks what, and what goes wrong when.

use serde::{Deserialize, Serialize};

use crate::answers::Surface;
use crate::catalog::{CONVERSATIONS, TURNS};
use crate::kernel::random::Random;

/// Everything that one run does. A plan of a seed can be cut down to fewer steps and run again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) gateways: u8,
    pub(crate) engines: Vec<EnginePlan>,
    /// Gateways tell each other what they have sent where.
    pub(crate) peers: bool,
    /// Tenants with keys; 0 when the gateways let everybody in.
    #[serde(default)]
    pub(crate) tenants: u8,
    /// Control services. Engines are pods of a Deployment then, which they scale, and so many of them are there at first.
    #[serde(default)]
    pub(crate) controls: u8,
    #[serde(default)]
    pub(crate) replicas: u8,
    /// Requests inside a gateway at a time.
    pub(crate) requests_max: u32,
    pub(crate) link: Link,
    /// Of workers; mock engines have none.
    pub(crate) tiers: Tiers,
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct EnginePlan {
    pub(crate) kind: EngineKind,
    pub(crate) role: Role,
    /// KV blocks.
    pub(crate) blocks: usize,
    /// Microseconds of a step, and of a prompt token.
    pub(crate) step_us: u64,
    pub(crate) token_us: u64,
    /// Publishes KV events.
    pub(crate) events: bool,
    /// A decode engine computes the blocks itself that it does not get, instead of failing the request.
    #[serde(default)]
    pub(crate) recomputes: bool,
}

/// EngineKind of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EngineKind {
    /// A mock with vLLM's surface.
    Vllm,
    /// A mock with SGLang's.
    Sglang,
    /// Kvasir's worker with the reference engine, its data plane and tiers.
    Worker,
}

/// Which phases it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    Both,
    Prefill,
    Decode,
}

/// Where workers keep blocks beside their pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tiers {
    /// KiB of host memory and of disk of each worker; 0 is none.
    pub(crate) host_kib: usize,
    pub(crate) disk_kib: usize,
    /// Stores that workers share.
    pub(crate) stores: u8,
}

impl Tiers {
    pub(crate) fn has_host(self) -> bool {
        self.host_kib > 0
    }

    pub(crate) fn has_disk(self) -> bool {
        self.has_host() && self.disk_kib > 0
    }

    pub(crate) fn has_stores(self) -> bool {
        self.has_host() && self.stores > 0
    }
}

/// Delay, loss and rate of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Link {
    /// Longest delay in microseconds.
    pub(crate) delay_us: u64,
    pub(crate) lose_one_in: u64,
    /// Bytes per second; 0 is without end.
    pub(crate) rate: u64,
    pub(crate) split_one_in: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    /// Milliseconds after the cluster is ready.
    pub(crate) at: u64,
    pub(crate) action: Action,
}

/// A node of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Node {
    Client,
    Gateway(u8),
    Engine(u8),
    Store(u8),
    Control(u8),
    /// Kubernetes' API server.
    Api,
}

impl Node {
    /// Whether no request passes through it.
    fn is_aside(self) -> bool {
        matches!(self, Self::Control(_) | Self::Api)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Action {
    Ask {
        gateway: u8,
        conversation: usize,
        turn: usize,
        streams: bool,
        leaves_after: Option<u64>,
        pause: u64,
        #[serde(default)]
        tenant: u8,
        #[serde(default)]
        surface: Surface,
    },
    /// The process ends, and another one starts after so many milliseconds.
    Kill { node: Node, silently: bool, back_after: u64 },
    /// The process gets SIGTERM, and SIGKILL after so many milliseconds if it is there still; then another one starts.
    Terminate { node: Node, back_after: u64 },
    /// An engine starts again with another model, and for a time has that.
    ChangeModel { engine: u8, lasts: u64 },
    /// The process is stopped for a time.
    Freeze { node: Node, lasts: u64 },
    /// Nothing gets through between two nodes for a time.
    Partition { a: Node, b: Node, lasts: u64 },
    /// The link between two nodes is bad for a time.
    Degrade { a: Node, b: Node, link: Link, lasts: u64 },
    /// Connections between two nodes are cut.
    Cut { a: Node, b: Node, silently: bool },
    /// The wall clock of a node jumps by so many milliseconds.
    Jump { node: Node, millis: i64 },
    /// An engine misbehaves for a time, in the mock engine's own words.
    Misbehave { engine: u8, kind: String, probability_percent: u8, millis: u64, tokens: usize, lasts: u64 },
    /// The disk of an engine or a store misbehaves for a time.
    Disk { node: Node, slow_ms: u64, fail_one_in: u64, rot_one_in: u64, lasts: u64 },
    /// The API server ends all watches.
    CutWatches,
    /// An engine leaves the list of workers for a time.
    Leave { engine: u8, drains: bool, lasts: u64 },
}

impl Action {
    pub(crate) fn is_fault(&self) -> bool {
        !matches!(self, Self::Ask { .. })
    }
}

const MISBEHAVIOURS: [&str; 12] = [
    "slow",
    "hang",
    "stall",
    "die_mid_stream",
    "refuse",
    "refuse",
    "error",
    "overloaded",
    "corrupt",
    "drop_events",
    "slow_health",
    "slow_metrics",
];

fn link(random: &mut Random) -> Link {
    Link {
        delay_us: *random.pick(&[50, 50, 300, 3000, 40_000]),
        lose_one_in: *random.pick(&[0, 0, 0, 200, 30]),
        rate: *random.pick(&[0, 0, 50_000_000, 300_000]),
        split_one_in: *random.pick(&[0, 0, 16, 3]),
    }
}

fn draw_mocks(random: &mut Random) -> (Vec<EnginePlan>, Tiers) {
    let roles = match random.below(4) {
        0 => draw_pairs(random),
        _ => vec![Role::Both; random.between(1, 4) as usize],
    };
    let all_events = !random.one_in(4);
    // Blocks go from one engine to another of the same kind only.
    let kind = if random.one_in(4) { EngineKind::Sglang } else { EngineKind::Vllm };
    let recomputes = random.one_in(2);
    let are_pairs = roles.iter().any(|role| *role != Role::Both);
    let engine = |role: Role| EnginePlan {
        kind: match random.one_in(4) {
            true if !are_pairs => EngineKind::Sglang,
            false if !are_pairs => EngineKind::Vllm,
            _ => kind,
        },
        role,
        blocks: *random.pick(&[160, 400, 4096]),
        step_us: *random.pick(&[0, 2_000, 10_000, 30_000]),
        token_us: *random.pick(&[0, 20, 200]),
        events: all_events || !random.one_in(3),
        recomputes,
    };
    (roles.into_iter().map(engine).collect(), Tiers { host_kib: 0, disk_kib: 0, stores: 0 })
}

/// Engines of which some compute prompts and others go on with them.
fn draw_pairs(random: &mut Random) -> Vec<Role> {
    match random.below(3) {
        0 => vec![Role::Prefill, Role::Decode],
        1 => vec![Role::Prefill, Role::Decode, Role::Decode],
        _ => vec![Role::Prefill, Role::Prefill, Role::Decode],
    }
}

fn draw_workers(random: &mut Random) -> (Vec<EnginePlan>, Tiers) {
    let roles = if random.one_in(4) { vec![Role::Both; 2] } else { draw_pairs(random) };
    let blocks = *random.pick(&[48, 64, 160]);
    let engine = |role: Role| EnginePlan {
        kind: EngineKind::Worker,
        role,
        blocks,
        step_us: 0,
        token_us: 0,
        events: true,
        recomputes: true,
    };
    let tiers = Tiers {
        host_kib: *random.pick(&[0, 64, 64, 512]),
        disk_kib: *random.pick(&[0, 2048, 8192]),
        stores: *random.pick(&[0, 0, 1, 2]),
    };
    (roles.into_iter().map(engine).collect(), tiers)
}

/// Milliseconds within which an engine that was stopped is back, and until the next one is touched.
const UPDATE_BACK: u64 = 4_000;
const UPDATE_GAP: u64 = 3_000;

impl Plan {
    /// Whether the engines are workers with the reference engine.
    pub(crate) fn is_reference(&self) -> bool {
        self.engines.iter().any(|engine| engine.kind == EngineKind::Worker)
    }

    /// Whether some engines compute prompts and others go on with them.
    pub(crate) fn has_pairs(&self) -> bool {
        self.engines.iter().any(|engine| engine.role != Role::Both)
    }

    /// The plan of a seed.
    pub(crate) fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x706c_616e);
        let gateways = *random.pick(&[1, 1, 2]);
        let (engines, tiers) =
            if random.one_in(3) { draw_workers(&mut random) } else { draw_mocks(&mut random) };
        let quiet = Link { delay_us: 50, lose_one_in: 0, rate: 0, split_one_in: 0 };
        let link = if random.one_in(3) { link(&mut random) } else { quiet };
        let peers = gateways > 1 && !random.one_in(3);
        let requests_max = *random.pick(&[4096, 4096, 4]);
        let tenants = *random.pick(&[0, 0, 2, 3]);
        let steps = Vec::new();
        let mut plan = Self {
            seed,
            gateways,
            engines,
            peers,
            tenants,
            controls: 0,
            replicas: 0,
            requests_max,
            link,
            tiers,
            steps,
        };
        if random.one_in(4) && !plan.is_reference() && !plan.has_pairs() {
            plan.controls = random.between(1, 2) as u8;
            plan.replicas = random.between(1, plan.engines.len() as u64) as u8;
            // The control service has no key of an administrator.
            plan.tenants = 0;
        }
        let lasts = *random.pick(&[4_000, 15_000, 60_000]);
        plan.draw_questions(&mut random, lasts);
        // One run in eight has no faults: everything must succeed then.
        if !random.one_in(8) {
            plan.draw_faults(&mut random, lasts);
        }
        if !plan.has_faults() {
            plan.requests_max = 4096;
        }
        plan.steps.sort_by_key(|step| step.at);
        plan
    }

    fn draw_questions(&mut self, random: &mut Random, lasts: u64) {
        let count = *random.pick(&[6, 15, 30]);
        let (leaves, slow) = (random.one_in(2), random.one_in(3));
        let has_surfaces = random.one_in(3);
        // Few conversations come back often: their blocks are found in tiers.
        let conversations = *random.pick(&[CONVERSATIONS as u64, 4]);
        let mut turns = [0; CONVERSATIONS];
        let mut times: Vec<u64> = (0..count).map(|_| random.below(lasts)).collect();
        if random.one_in(3) {
            // All at once.
            times.iter_mut().for_each(|at| *at %= 50);
        }
        times.sort_unstable();
        for at in times {
            let conversation = random.below(conversations) as usize;
            let turn = turns[conversation];
            turns[conversation] = (turn + 1) % TURNS;
            let leaves_after = (leaves && random.one_in(4)).then(|| random.between(1, 2_000));
            let pause = if slow && random.one_in(4) { random.between(1, 400) } else { 0 };
            let gateway = random.below(u64::from(self.gateways)) as u8;
            let streams = random.one_in(2);
            let tenant = random.below(u64::from(self.tenants.max(1))) as u8;
            let surface = match has_surfaces && random.one_in(2) {
                true => *random.pick(&[Surface::Messages, Surface::Responses]),
                false => Surface::Chat,
            };
            let action =
                Action::Ask { gateway, conversation, turn, streams, leaves_after, pause, tenant, surface };
            self.steps.push(Step { at, action });
        }
    }

    fn node(&self, random: &mut Random) -> Node {
        let gateways = (0..self.gateways).map(Node::Gateway);
        let engines = (0..self.engines.len() as u8).map(Node::Engine);
        let stores = (0..self.tiers.stores).map(Node::Store);
        let nodes = gateways.chain(engines).chain(stores).chain((0..self.controls).map(Node::Control));
        *random.pick(&nodes.collect::<Vec<Node>>())
    }

    fn neighbours(&self, random: &mut Random) -> (Node, Node) {
        let gateway = Node::Gateway(random.below(u64::from(self.gateways)) as u8);
        if self.controls > 0 && random.one_in(2) {
            let control = Node::Control(random.below(u64::from(self.controls)) as u8);
            return *random.pick(&[(Node::Api, gateway), (Node::Api, control), (control, gateway)]);
        }
        match random.below(4) {
            0 => (Node::Client, gateway),
            1 if self.gateways == 2 => (Node::Gateway(0), Node::Gateway(1)),
            1 | 2 if self.is_reference() => {
                let engine = random.below(self.engines.len() as u64) as u8;
                match self.tiers.stores {
                    stores if stores > 0 && random.one_in(2) => {
                        (Node::Engine(engine), Node::Store(random.below(u64::from(stores)) as u8))
                    }
                    _ => (Node::Engine(engine), Node::Engine((engine + 1) % self.engines.len() as u8)),
                }
            }
            _ => (gateway, Node::Engine(random.below(self.engines.len() as u64) as u8)),
        }
    }

    fn draw_faults(&mut self, random: &mut Random, lasts: u64) {
        // Swarm testing (Groce et al., ISSTA 2012): each run has some kinds of faults and lacks others.
        let kinds = (0..11).filter(|kind| {
            random.one_in(3)
                && !([5, 10].contains(kind) && self.is_reference())
                // Pods are not listed in files, and their Deployment decides which of them are there.
                && !([9, 10].contains(kind) && self.controls > 0)
                && (*kind != 7 || self.tiers.has_disk())
        });
        let kinds: Vec<u64> = kinds.collect();
        if kinds.is_empty() {
            return;
        }
        for _ in 0..random.between(1, 8) {
            let at = random.below(lasts);
            let duration = *random.pick(&[50, 700, 4_000, 20_000]);
            let action = match *random.pick(&kinds) {
                0 => {
                    Action::Kill { node: self.node(random), silently: random.one_in(3), back_after: duration }
                }
                1 => {
                    let is_api = self.controls > 0 && random.one_in(3);
                    let node = if is_api { Node::Api } else { self.node(random) };
                    Action::Freeze { node, lasts: duration }
                }
                2 => {
                    let (a, b) = self.neighbours(random);
                    Action::Partition { a, b, lasts: duration }
                }
                3 => {
                    let (a, b) = self.neighbours(random);
                    Action::Degrade { a, b, link: link(random), lasts: duration }
                }
                4 => {
                    let (a, b) = self.neighbours(random);
                    Action::Cut { a, b, silently: random.one_in(3) }
                }
                5 => Action::Misbehave {
                    engine: random.below(self.engines.len() as u64) as u8,
                    kind: (*random.pick(&MISBEHAVIOURS)).to_owned(),
                    probability_percent: *random.pick(&[10, 50, 100]),
                    millis: *random.pick(&[5, 200, 3_000, 20_000]),
                    tokens: *random.pick(&[0, 1, 3, 5, 12, 24]),
                    lasts: duration,
                },
                7 => Action::Disk {
                    node: Node::Engine(random.below(self.engines.len() as u64) as u8),
                    slow_ms: *random.pick(&[0, 0, 5, 300, 5_000]),
                    fail_one_in: *random.pick(&[0, 0, 20, 2]),
                    rot_one_in: *random.pick(&[0, 10, 2, 1]),
                    // Disks are read now and then only.
                    lasts: duration * 20,
                },
                8 => {
                    // One time in three what has to drain gets less time than it may take.
                    let back_after = if random.one_in(3) { duration } else { duration + 90_000 };
                    Action::Terminate { node: self.node(random), back_after }
                }
                9 => {
                    self.update_one_by_one(at, *random.pick(&[500, 3_000, 12_000]));
                    continue;
                }
                10 => Action::ChangeModel {
                    engine: random.below(self.engines.len() as u64) as u8,
                    lasts: duration,
                },
                _ if random.one_in(3) => {
                    let size = *random.pick(&[1_000, 60_000, 86_400_000]);
                    let millis = if random.one_in(2) { size } else { -size };
                    Action::Jump { node: self.node(random), millis }
                }
                _ if self.controls > 0 => Action::CutWatches,
                _ => Action::Leave {
                    engine: random.below(self.engines.len() as u64) as u8,
                    drains: random.one_in(2),
                    lasts: duration,
                },
            };
            self.steps.push(Step { at, action });
        }
    }

    /// A rolling update of the engines: each one drains, is told to stop, and comes back before the next one is touched.
    fn update_one_by_one(&mut self, begins: u64, drains_for: u64) {
        for engine in 0..self.engines.len() as u8 {
            let lasts = drains_for + UPDATE_BACK;
            let at = begins + u64::from(engine) * (lasts + UPDATE_GAP);
            self.steps.push(Step { at, action: Action::Leave { engine, drains: true, lasts } });
            let action = Action::Terminate { node: Node::Engine(engine), back_after: 1_000 };
            self.steps.push(Step { at: at + drains_for, action });
        }
    }

    /// Whether nothing of this is felt by clients: engines that can stand in for each other drain, are stopped, and come
    /// back, one after another.
    pub(crate) fn interrupts_nothing(&self) -> bool {
        if self.controls > 0 {
            // No request passes through what is hit.
            return self.steps.iter().all(|step| match &step.action {
                Action::Ask { .. } | Action::CutWatches => true,
                Action::Kill { node, .. } | Action::Terminate { node, .. } | Action::Freeze { node, .. } => {
                    node.is_aside()
                }
                Action::Partition { a, b, .. } | Action::Degrade { a, b, .. } | Action::Cut { a, b, .. } => {
                    a.is_aside() || b.is_aside()
                }
                _ => false,
            });
        }
        if self.engines.len() < 2 || self.has_pairs() {
            return !self.has_faults();
        }
        let drained = |step: &Step| match step.action {
            Action::Leave { engine, drains: true, lasts } => Some((step.at, step.at + lasts, engine)),
            _ => None,
        };
        let mut drained: Vec<(u64, u64, u8)> = self.steps.iter().filter_map(drained).collect();
        drained.sort_unstable();
        let overlap = drained.windows(2).any(|two| two[1].0 < two[0].1 + UPDATE_GAP);
        !overlap
            && self.steps.iter().all(|step| match step.action {
                Action::Ask { .. } | Action::Leave { drains: true, .. } => true,
                Action::Terminate { node: Node::Engine(stopped), .. } => {
                    drained.iter().any(|(begins, ends, engine)| {
                        *engine == stopped && step.at > *begins && step.at + UPDATE_BACK <= *ends
                    })
                }
                _ => false,
            })
    }

    pub(crate) fn has_faults(&self) -> bool {
        self.steps.iter().any(|step| step.action.is_fault())
    }
}
