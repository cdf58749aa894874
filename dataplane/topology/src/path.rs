//! The choice of a path for one pair of memories: shared memory, then RDMA rails, then TCP.
//!
//! A pure function of what was read here and what the peer said of itself. Each path that was not taken has
//! its reason, so that "why is this slow" is answered by the same code that decided.

use crate::check::{Needs, check};
use crate::check_pair::pair_warnings;
use crate::description::NodeDescription;
use crate::rail::{Exclusion, Rail};
use crate::reach::{rdma, same_host, shared_memory, tcp};
use crate::topology::{Memory, Topology};
use crate::warning::{Code, Warning};

/// A way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Memory that both processes map.
    SharedMemory,
    /// One or more RDMA rails.
    Rdma,
    /// Sockets.
    Tcp,
}

impl Transport {
    /// In the order of preference.
    pub const ALL: [Self; 3] = [Self::SharedMemory, Self::Rdma, Self::Tcp];

    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared memory",
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
        }
    }
}

/// Which transports may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transports {
    /// Shared memory.
    pub shared_memory: bool,
    /// RDMA.
    pub rdma: bool,
    /// TCP.
    pub tcp: bool,
}

impl Default for Transports {
    fn default() -> Self {
        Self { shared_memory: true, rdma: true, tcp: true }
    }
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Memory on this node.
    pub source: Memory,
    /// Memory on the other node.
    pub target: Memory,
    /// What the configuration allows.
    pub transports: Transports,
    /// What the node needs.
    pub needs: Needs,
}

/// One local rail and the peer's rail that it is connected to.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// Ours.
    pub local: Rail,
    /// The peer's.
    pub remote: Rail,
    /// The slower of the two.
    pub expected_gb_s: Option<f64>,
}

/// A path and why it was taken or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// Which.
    pub transport: Transport,
    /// Whether it would work.
    pub possible: bool,
    /// What it should give.
    pub expected_gb_s: Option<f64>,
    /// Why it was chosen, or why not.
    pub reason: String,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The transport, `None` when nothing works.
    pub transport: Option<Transport>,
    /// What it should give; `None` where files do not tell.
    pub expected_gb_s: Option<f64>,
    /// What limits it, in words.
    pub limited_by: &'static str,
    /// Whether bytes of a GPU are copied through host memory on the way.
    pub staged: bool,
    /// The rails of RDMA, the best first; empty for other transports.
    pub rails: Vec<Pair>,
    /// RDMA ports that are not used, on this node.
    pub excluded: Vec<Exclusion>,
    /// The interface of TCP.
    pub interface: Option<String>,
    /// All transports in the order of preference, the chosen one among them.
    pub alternatives: Vec<Alternative>,
    /// What keeps a better path from being used, or makes this one slower.
    pub warnings: Vec<Warning>,
}

/// Decides how bytes get from a memory of this node to a memory of another, which may be on the same host.
#[must_use]
pub fn choose(local: &Topology, remote: &NodeDescription, request: &Request) -> Decision {
    let here = NodeDescription::of(local, Vec::new());
    let shared = shared_memory(local, &here, remote, request);
    let rdma = rdma(local, &here, remote, request);
    let (interface, tcp) = tcp(local, &here, remote, request);
    let mut alternatives = vec![shared, rdma.alternative, tcp];
    let chosen = alternatives.iter().position(|alternative| alternative.possible);
    if let Some(chosen) = chosen {
        let (name, reason) =
            (alternatives[chosen].transport.name(), preference(alternatives[chosen].transport));
        for (index, alternative) in alternatives.iter_mut().enumerate() {
            alternative.reason = match (index == chosen, alternative.possible) {
                (true, _) => format!("chosen: {}", alternative.reason),
                (false, true) => format!("would work ({}), but {name} {reason}", alternative.reason),
                (false, false) => continue,
            };
        }
    }
    let transport = chosen.map(|index| alternatives[index].transport);
    let over_rdma = transport == Some(Transport::Rdma);
    let mut decision = Decision {
        transport,
        expected_gb_s: chosen.and_then(|index| alternatives[index].expected_gb_s),
        limited_by: match transport {
            Some(Transport::Rdma) => rdma.limited_by,
            Some(Transport::SharedMemory) => {
                "the copy in memory, which files do not tell: `kvasir bench transfer`"
            }
            Some(Transport::Tcp) => "the interface or, more often, the CPU",
            None => "nothing works",
        },
        staged: match transport {
            Some(Transport::Rdma) => rdma.staged,
            _ => [request.source, request.target].iter().any(|memory| matches!(memory, Memory::Gpu(_))),
        },
        rails: if over_rdma { rdma.pairs } else { Vec::new() },
        excluded: rdma.excluded,
        interface: interface.filter(|_| transport == Some(Transport::Tcp)),
        alternatives,
        warnings: Vec::new(),
    };
    decision.warnings = warnings(local, &here, remote, request, &decision);
    decision
}

fn preference(chosen: Transport) -> &'static str {
    match chosen {
        Transport::SharedMemory => "keeps the bytes on the host and copies them once",
        Transport::Rdma => "needs no CPU and no copy",
        Transport::Tcp => "is preferred",
    }
}

/// The node's warnings that bear on this decision, and those of the pair.
fn warnings(
    local: &Topology,
    here: &NodeDescription,
    remote: &NodeDescription,
    request: &Request,
    decision: &Decision,
) -> Vec<Warning> {
    let gpu = [request.source, request.target].iter().any(|memory| matches!(memory, Memory::Gpu(_)));
    let bears = |warning: &Warning| match warning.code {
        Code::HugePagesMissing => true,
        Code::TcpBuffersSmall => decision.transport == Some(Transport::Tcp) && !same_host(here, remote),
        Code::GpuDirectUnusable | Code::IommuTranslates | Code::AcsRedirects => {
            gpu && request.transports.rdma && decision.transport != Some(Transport::SharedMemory)
        }
        _ => request.transports.rdma && decision.transport != Some(Transport::SharedMemory),
    };
    let mut warnings: Vec<Warning> = check(local, &request.needs).into_iter().filter(bears).collect();
    warnings.extend(pair_warnings(local, here, remote, request, decision));
    warnings.sort_by_key(|warning| (std::cmp::Reverse(warning.code.severity()), warning.code));
    warnings
}
