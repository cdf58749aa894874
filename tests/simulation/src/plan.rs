//! Plan of a run: the nodes, the requests, and the faults with their times. Times without a unit in their
//! name are milliseconds.

use serde::{Deserialize, Serialize};

use crate::answers::Surface;

/// Nodes, settings and steps of one run. The plan of a seed can be reduced to fewer steps and run again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) gateways: u8,
    pub(crate) engines: Vec<EnginePlan>,
    /// Whether gateways exchange the destinations of their requests.
    pub(crate) peers: bool,
    /// Tenants with keys, up to 3; 0: gateways admit all clients.
    #[serde(default)]
    pub(crate) tenants: u8,
    /// Number of control services; if above 0, engines are pods of a Deployment that they scale.
    #[serde(default)]
    pub(crate) controls: u8,
    /// Pods of the Deployment at the start.
    #[serde(default)]
    pub(crate) replicas: u8,
    /// Most requests in progress on a gateway.
    pub(crate) requests_max: u32,
    pub(crate) link: Link,
    /// Tiers of workers; mock engines have none.
    pub(crate) tiers: Tiers,
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct EnginePlan {
    pub(crate) kind: EngineKind,
    pub(crate) role: Role,
    /// KV blocks of the engine.
    pub(crate) blocks: usize,
    /// Time of a step, and of a prompt token, in microseconds.
    pub(crate) step_us: u64,
    pub(crate) token_us: u64,
    /// Whether the engine publishes KV events.
    pub(crate) events: bool,
    /// Whether a decode engine computes missing blocks itself, instead of failing the request.
    #[serde(default)]
    pub(crate) recomputes: bool,
    /// Whether the engine reports its start time, which reveals a restart.
    #[serde(default)]
    pub(crate) tells_start: bool,
}

/// Kind of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EngineKind {
    /// A mock with vLLM's API.
    Vllm,
    /// A mock with SGLang's API.
    Sglang,
    /// Kvasir's worker with the reference engine, its data plane and tiers.
    Worker,
}

/// Phases that the engine computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    Both,
    Prefill,
    Decode,
}

/// Tiers of workers in addition to their pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tiers {
    /// Host memory and disk of each worker, in KiB; 0: no such tier.
    pub(crate) host_kib: usize,
    pub(crate) disk_kib: usize,
    /// Number of stores that workers share.
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
    /// Longest delay, in microseconds.
    pub(crate) delay_us: u64,
    pub(crate) lose_one_in: u64,
    /// Bytes per second; 0: unlimited.
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
    /// Whether no request passes through the node.
    pub(crate) fn is_control_plane(self) -> bool {
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
    /// The process is killed, and a new one starts after this many milliseconds.
    Kill { node: Node, silently: bool, back_after: u64 },
    /// The process gets SIGTERM, and SIGKILL if it still runs after this many milliseconds; then a new one
    /// starts.
    Terminate { node: Node, kill_after: u64 },
    /// An engine restarts with another model, and has it for a time.
    ChangeModel { engine: u8, lasts: u64 },
    /// The process is frozen for a time.
    Freeze { node: Node, lasts: u64 },
    /// The link between two nodes is down for a time.
    Partition { a: Node, b: Node, lasts: u64 },
    /// The link between two nodes is degraded for a time.
    Degrade { a: Node, b: Node, link: Link, lasts: u64 },
    /// Connections between two nodes are cut.
    Cut { a: Node, b: Node, silently: bool },
    /// The wall clock of a node jumps by so many milliseconds.
    Jump { node: Node, millis: i64 },
    /// An engine has a fault for a time, in the mock engine's terms.
    Misbehave { engine: u8, kind: String, probability_percent: u8, millis: u64, tokens: usize, lasts: u64 },
    /// The disk of a worker has faults for a time.
    Disk { node: Node, slow_ms: u64, fail_one_in: u64, rot_one_in: u64, lasts: u64 },
    /// The API server ends all watches.
    CutWatches,
    /// An engine is marked as draining in the workers files (`drains`), or absent from them, for a time.
    Leave { engine: u8, drains: bool, lasts: u64 },
}

impl Action {
    pub(crate) fn is_fault(&self) -> bool {
        !matches!(self, Self::Ask { .. })
    }

    /// Names of all faults.
    pub(crate) const NAMES: [&str; 12] = [
        "kill",
        "stop",
        "another model",
        "freeze",
        "partition",
        "degraded link",
        "cut connections",
        "clock jump",
        "engine's misbehaviour",
        "disk",
        "ended watches",
        "change of the workers file",
    ];

    /// Name of the fault; `None` for a request.
    pub(crate) fn name(&self) -> Option<&'static str> {
        let number = match self {
            Self::Ask { .. } => return None,
            Self::Kill { .. } => 0,
            Self::Terminate { .. } => 1,
            Self::ChangeModel { .. } => 2,
            Self::Freeze { .. } => 3,
            Self::Partition { .. } => 4,
            Self::Degrade { .. } => 5,
            Self::Cut { .. } => 6,
            Self::Jump { .. } => 7,
            Self::Misbehave { .. } => 8,
            Self::Disk { .. } => 9,
            Self::CutWatches => 10,
            Self::Leave { .. } => 11,
        };
        Some(Self::NAMES[number])
    }

    /// Whether a request may pass through the affected node or link.
    pub(crate) fn affects_requests(&self) -> bool {
        match self {
            Self::Ask { .. } | Self::CutWatches => false,
            Self::Kill { node, .. } | Self::Terminate { node, .. } | Self::Freeze { node, .. } => {
                !node.is_control_plane()
            }
            Self::Partition { a, b, .. } | Self::Degrade { a, b, .. } | Self::Cut { a, b, .. } => {
                !a.is_control_plane() && !b.is_control_plane()
            }
            Self::Jump { .. }
            | Self::Misbehave { .. }
            | Self::Disk { .. }
            | Self::Leave { .. }
            | Self::ChangeModel { .. } => true,
        }
    }

    /// Whether gateways may miss changes of pods because of the action.
    pub(crate) fn hits_api_server(&self) -> bool {
        match self {
            Self::Freeze { node, .. } => *node == Node::Api,
            Self::Partition { a, b, .. } | Self::Degrade { a, b, .. } => [*a, *b].contains(&Node::Api),
            _ => false,
        }
    }

    /// Whether a gateway may have to refuse a request, or break its stream, because of the action.
    pub(crate) fn fails_requests(&self) -> bool {
        match self {
            // Requests in a gateway that is told to stop end normally, and later ones find no listener.
            Self::Terminate { node: Node::Gateway(_), .. } | Self::Jump { .. } => false,
            Self::Misbehave { kind, .. } => kind != "drop_events",
            _ => self.affects_requests(),
        }
    }

    /// Whether no packet reports the end of the connections that the action ends.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Self::Kill { silently: true, .. } | Self::Cut { silently: true, .. })
    }

    /// Duration of an action that ends by itself, in milliseconds.
    pub(crate) fn lasts(&self) -> Option<u64> {
        match self {
            Self::Kill { back_after: lasts, .. }
            | Self::ChangeModel { lasts, .. }
            | Self::Freeze { lasts, .. }
            | Self::Partition { lasts, .. }
            | Self::Degrade { lasts, .. }
            | Self::Misbehave { lasts, .. }
            | Self::Disk { lasts, .. }
            | Self::Leave { lasts, .. } => Some(*lasts),
            // `Cluster::supervise` restarts a process that was told to stop.
            Self::Ask { .. }
            | Self::Cut { .. }
            | Self::CutWatches
            | Self::Jump { .. }
            | Self::Terminate { .. } => None,
        }
    }

    /// Longest duration of the action and of its undoing, in milliseconds.
    pub(crate) fn lasts_at_most(&self) -> u64 {
        match self {
            Self::Terminate { kill_after, .. } => kill_after + BACK_WITHIN,
            other => other.lasts().unwrap_or(0),
        }
    }
}

/// Longest time from the end of a `kill_after` until the process is back, in milliseconds.
pub(crate) const BACK_WITHIN: u64 = 10_000;

/// Milliseconds within which a stopped engine is back, and until the next one is stopped.
pub(crate) const UPDATE_BACK: u64 = 4_000;
pub(crate) const UPDATE_GAP: u64 = 3_000;

impl Plan {
    /// Whether the engines are workers with the reference engine.
    pub(crate) fn is_reference(&self) -> bool {
        self.engines.iter().any(|engine| engine.kind == EngineKind::Worker)
    }

    /// Whether some engines prefill and others decode.
    pub(crate) fn has_pairs(&self) -> bool {
        self.engines.iter().any(|engine| engine.role != Role::Both)
    }

    /// Whether no action of the plan affects a client.
    pub(crate) fn has_no_client_fault(&self) -> bool {
        if self.controls > 0 {
            self.hits_only_control_plane()
        } else {
            !self.has_faults() || self.is_rolling_update()
        }
    }

    /// Whether no request passes through the affected nodes and links.
    fn hits_only_control_plane(&self) -> bool {
        self.steps.iter().all(|step| !step.action.affects_requests())
    }

    /// Whether the only faults are drains, stops and returns, one after another, of engines that can replace
    /// each other.
    fn is_rolling_update(&self) -> bool {
        if self.engines.len() < 2 || self.has_pairs() {
            return false;
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
