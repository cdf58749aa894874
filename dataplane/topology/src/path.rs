//! The choice of a path for one pair of memories: shared memory, then RDMA rails, then TCP.
//!
//! The choice is a pure function of the local topology and the peer's description. Each path that was not
//! taken has its reason, so that the code that decides also explains why a transfer is slow.

use crate::check::{NodeRequirements, check};
use crate::check_pair::pair_warnings;
use crate::description::NodeDescription;
use crate::rail::{Exclusion, Rail};
use crate::reach::{rdma, same_host, shared_memory, tcp};
use crate::topology::{Memory, Topology};
use crate::warning::{Code, Warning};

/// A transport between two memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Memory that both processes map.
    SharedMemory,
    /// One or more RDMA rails.
    Rdma,
    /// TCP sockets.
    Tcp,
}

impl Transport {
    /// All transports, the preferred one first.
    pub const ALL: [Self; 3] = [Self::SharedMemory, Self::Rdma, Self::Tcp];

    /// Returns the name for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared memory",
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
        }
    }
}

/// Transports that the configuration allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transports {
    /// Whether shared memory may be used.
    pub shared_memory: bool,
    /// Whether RDMA may be used.
    pub rdma: bool,
    /// Whether TCP may be used.
    pub tcp: bool,
}

impl Default for Transports {
    fn default() -> Self {
        Self { shared_memory: true, rdma: true, tcp: true }
    }
}

/// Input of [`choose`]: the two memories and what limits the choice.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Memory on this node.
    pub source: Memory,
    /// Memory on the other node.
    pub target: Memory,
    /// Transports that the configuration allows.
    pub transports: Transports,
    /// Slab size and round-trip time of the node, for the warnings.
    pub needs: NodeRequirements,
}

/// A local rail and the peer's rail that it connects to.
#[derive(Clone, Debug, PartialEq)]
pub struct RailPair {
    /// Rail of this node.
    pub local: Rail,
    /// Rail of the peer.
    pub remote: Rail,
    /// Expected bandwidth of the slower rail, in 10⁹ byte/s.
    pub expected_gb_s: Option<f64>,
}

/// One transport, with the reason why it was chosen or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The transport.
    pub transport: Transport,
    /// Whether the transport would work.
    pub possible: bool,
    /// Expected bandwidth in 10⁹ byte/s; `None`: unknown.
    pub expected_gb_s: Option<f64>,
    /// Reason why the transport was or was not chosen.
    pub reason: String,
}

/// The chosen path.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The chosen transport; `None` when none works.
    pub transport: Option<Transport>,
    /// Expected bandwidth in 10⁹ byte/s; `None` when the kernel's files do not tell it.
    pub expected_gb_s: Option<f64>,
    /// The bottleneck, in words.
    pub limited_by: &'static str,
    /// Whether bytes of a GPU are copied through host memory.
    pub staged: bool,
    /// The RDMA rails, the best first; empty for other transports.
    pub rails: Vec<RailPair>,
    /// RDMA ports of this node that are not used.
    pub excluded: Vec<Exclusion>,
    /// Network interface of TCP; `None` for other transports.
    pub interface: Option<String>,
    /// All transports in the order of preference, including the chosen one.
    pub alternatives: Vec<Alternative>,
    /// Warnings that explain why a better path is not used or why this one is slow.
    pub warnings: Vec<Warning>,
}

/// Decides the path from a memory of this node to a memory of another node, which may be on the same host.
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

/// Returns the node's warnings that affect this decision, and the warnings about the pair of nodes.
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
