//! Plans drawn from seeds. A change in the order of draws changes the plan of every seed.

use crate::answers::Surface;
use crate::catalog::{CONVERSATIONS, TURNS};
use crate::kernel::random::Random;
use crate::plan::{
    Action, EngineKind, EnginePlan, Link, Node, Plan, Role, Step, Tiers, UPDATE_BACK, UPDATE_GAP,
};

/// Kinds of faults; a run has some of them and lacks the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FaultKind {
    Kill,
    Freeze,
    Partition,
    Degrade,
    Cut,
    Misbehave,
    /// Clocks that jump, and changes of the list of workers.
    ClockOrList,
    Disk,
    Terminate,
    RollingUpdate,
    ChangeModel,
}

impl FaultKind {
    const ALL: [Self; 11] = [
        Self::Kill,
        Self::Freeze,
        Self::Partition,
        Self::Degrade,
        Self::Cut,
        Self::Misbehave,
        Self::ClockOrList,
        Self::Disk,
        Self::Terminate,
        Self::RollingUpdate,
        Self::ChangeModel,
    ];

    fn is_possible(self, plan: &Plan) -> bool {
        match self {
            Self::Misbehave => !plan.is_reference(),
            Self::ChangeModel => !plan.is_reference() && plan.controls == 0,
            // Pods are not listed in files, and their Deployment decides which of them run.
            Self::RollingUpdate => plan.controls == 0,
            Self::Disk => plan.tiers.has_disk(),
            _ => true,
        }
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
    // Blocks move only between engines of the same kind.
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
        tells_start: !random.one_in(3),
    };
    (roles.into_iter().map(engine).collect(), Tiers { host_kib: 0, disk_kib: 0, stores: 0 })
}

/// Returns the roles of engines, some of which prefill while others decode.
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
        tells_start: true,
    };
    let tiers = Tiers {
        host_kib: *random.pick(&[0, 64, 64, 512]),
        disk_kib: *random.pick(&[0, 2048, 8192]),
        stores: *random.pick(&[0, 0, 1, 2]),
    };
    (roles.into_iter().map(engine).collect(), tiers)
}

impl Plan {
    /// Draws the plan of a seed.
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
            // The control service has no administrator's key.
            plan.tenants = 0;
        }
        let lasts = *random.pick(&[4_000, 15_000, 60_000]);
        plan.draw_questions(&mut random, lasts);
        // One run in eight has no faults: every request must then succeed.
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
        // With few conversations, each returns often: its blocks are found in tiers.
        let conversations = *random.pick(&[CONVERSATIONS as u64, 4]);
        let mut turns = [0; CONVERSATIONS];
        let mut times: Vec<u64> = (0..count).map(|_| random.below(lasts)).collect();
        if random.one_in(3) {
            // All requests arrive within 50 ms.
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
        let kinds = FaultKind::ALL.into_iter().filter(|kind| random.one_in(3) && kind.is_possible(self));
        let kinds: Vec<FaultKind> = kinds.collect();
        if kinds.is_empty() {
            return;
        }
        for _ in 0..random.between(1, 8) {
            let at = random.below(lasts);
            let duration = *random.pick(&[50, 700, 4_000, 20_000]);
            match *random.pick(&kinds) {
                FaultKind::RollingUpdate => self.update_one_by_one(at, *random.pick(&[500, 3_000, 12_000])),
                kind => {
                    let action = self.draw_action(kind, duration, random);
                    self.steps.push(Step { at, action });
                }
            }
        }
    }

    fn draw_misbehaviour(&self, random: &mut Random) -> &'static str {
        match *random.pick(&MISBEHAVIOURS) {
            // An SGLang prefill server takes no direct request, which would reveal the loss of its last
            // event.
            "drop_events" if self.has_pairs() && self.engines[0].kind == EngineKind::Sglang => "slow",
            kind => kind,
        }
    }

    fn draw_action(&self, kind: FaultKind, duration: u64, random: &mut Random) -> Action {
        match kind {
            FaultKind::Kill => {
                Action::Kill { node: self.node(random), silently: random.one_in(3), back_after: duration }
            }
            FaultKind::Freeze => {
                let is_api = self.controls > 0 && random.one_in(3);
                let node = if is_api { Node::Api } else { self.node(random) };
                Action::Freeze { node, lasts: duration }
            }
            FaultKind::Partition => {
                let (a, b) = self.neighbours(random);
                Action::Partition { a, b, lasts: duration }
            }
            FaultKind::Degrade => {
                let (a, b) = self.neighbours(random);
                Action::Degrade { a, b, link: link(random), lasts: duration }
            }
            FaultKind::Cut => {
                let (a, b) = self.neighbours(random);
                Action::Cut { a, b, silently: random.one_in(3) }
            }
            FaultKind::Misbehave => Action::Misbehave {
                engine: random.below(self.engines.len() as u64) as u8,
                kind: self.draw_misbehaviour(random).to_owned(),
                probability_percent: *random.pick(&[10, 50, 100]),
                millis: *random.pick(&[5, 200, 3_000, 20_000]),
                tokens: *random.pick(&[0, 1, 3, 5, 12, 24]),
                lasts: duration,
            },
            FaultKind::Disk => Action::Disk {
                node: Node::Engine(random.below(self.engines.len() as u64) as u8),
                slow_ms: *random.pick(&[0, 0, 5, 300, 5_000]),
                fail_one_in: *random.pick(&[0, 0, 20, 2]),
                rot_one_in: *random.pick(&[0, 10, 2, 1]),
                // Disks are read rarely, so their faults last longer.
                lasts: duration * 20,
            },
            FaultKind::Terminate => {
                // In one case of three, the process gets less time than its drain may take.
                let kill_after = if random.one_in(3) { duration } else { duration + 90_000 };
                Action::Terminate { node: self.node(random), kill_after }
            }
            FaultKind::ChangeModel => {
                Action::ChangeModel { engine: random.below(self.engines.len() as u64) as u8, lasts: duration }
            }
            FaultKind::ClockOrList if random.one_in(3) => {
                let size = *random.pick(&[1_000, 60_000, 86_400_000]);
                let millis = if random.one_in(2) { size } else { -size };
                Action::Jump { node: self.node(random), millis }
            }
            FaultKind::ClockOrList if self.controls > 0 => Action::CutWatches,
            FaultKind::ClockOrList | FaultKind::RollingUpdate => Action::Leave {
                engine: random.below(self.engines.len() as u64) as u8,
                drains: random.one_in(2),
                lasts: duration,
            },
        }
    }

    /// Draws a rolling update of the engines: each one drains, is told to stop, and is back before the next
    /// one is stopped.
    fn update_one_by_one(&mut self, begins: u64, drains_for: u64) {
        for engine in 0..self.engines.len() as u8 {
            let lasts = drains_for + UPDATE_BACK;
            let at = begins + u64::from(engine) * (lasts + UPDATE_GAP);
            self.steps.push(Step { at, action: Action::Leave { engine, drains: true, lasts } });
            let action = Action::Terminate { node: Node::Engine(engine), kill_after: 1_000 };
            self.steps.push(Step { at: at + drains_for, action });
        }
    }
}
