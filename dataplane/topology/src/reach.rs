//! Each transport by itself: whether it would work between two memories, and its expected bandwidth.

use crate::bandwidth::{least, show_gb_s, tcp_gb_s};
use crate::description::NodeDescription;
use crate::network::Interface;
use crate::path::{Alternative, RailPair, Request, Transport};
use crate::rail::{Exclusion, Rail, select_local, select_remote};
use crate::topology::{Memory, Topology};

pub(crate) fn same_host(here: &NodeDescription, remote: &NodeDescription) -> bool {
    here.boot_id.is_some() && here.boot_id == remote.boot_id
}

fn off(transport: Transport) -> Alternative {
    impossible(transport, "turned off in the configuration".to_owned())
}

fn impossible(transport: Transport, reason: String) -> Alternative {
    Alternative { transport, possible: false, expected_gb_s: None, reason }
}

pub(crate) fn shared_memory(
    local: &Topology,
    here: &NodeDescription,
    remote: &NodeDescription,
    request: &Request,
) -> Alternative {
    let transport = Transport::SharedMemory;
    if !request.transports.shared_memory {
        return off(transport);
    }
    if !same_host(here, remote) {
        return impossible(transport, format!("{} is another host (its boot id differs)", remote.hostname));
    }
    if here.shared_directory_id.is_none() || here.shared_directory_id != remote.shared_directory_id {
        let show = |id: &Option<String>| id.clone().unwrap_or_else(|| "unknown".to_owned());
        let (ours, theirs) = (show(&here.shared_directory_id), show(&remote.shared_directory_id));
        return impossible(
            transport,
            format!("the same host, but another shared directory ({ours} here, {theirs} there)"),
        );
    }
    // Between host memories the speed of the copy decides, and no file tells it.
    let link = |memory| match memory {
        Memory::Gpu(address) => local.pci_device(address).and_then(|gpu| gpu.link.full_speed_gb_s()),
        Memory::Host { .. } => None,
    };
    Alternative {
        transport,
        possible: true,
        expected_gb_s: least([link(request.source), link(request.target)]),
        reason: "both are on one host and see one shared directory".to_owned(),
    }
}

/// Result of the RDMA check.
pub(crate) struct Rdma {
    pub(crate) alternative: Alternative,
    pub(crate) pairs: Vec<RailPair>,
    pub(crate) excluded: Vec<Exclusion>,
    pub(crate) staged: bool,
    pub(crate) limited_by: &'static str,
}

pub(crate) fn rdma(
    local: &Topology,
    here: &NodeDescription,
    remote: &NodeDescription,
    request: &Request,
) -> Rdma {
    let (source, source_staged, source_link) = reachable(here, request.source);
    let (target, target_staged, target_link) = reachable(remote, request.target);
    let (ours, mut excluded) = select_local(local, source);
    let (theirs, _) = select_remote(remote, target);
    let refused = if !request.transports.rdma {
        Some("turned off in the configuration".to_owned())
    } else if local.rdma.is_empty() {
        Some("this node has no RDMA device".to_owned())
    } else if ours.is_empty() {
        Some("this node has no usable RDMA port".to_owned())
    } else if theirs.is_empty() {
        Some(format!("{} has no usable RDMA port", remote.hostname))
    } else {
        None
    };
    let staged = source_staged || target_staged;
    if let Some(reason) = refused {
        let alternative = impossible(Transport::Rdma, reason);
        return Rdma { alternative, pairs: Vec::new(), excluded, staged, limited_by: "" };
    }
    let pairs = match_rails(ours, theirs, &mut excluded);
    let rails = pairs.iter().map(|pair| pair.expected_gb_s).sum::<Option<f64>>();
    let expected_gb_s = rails.and_then(|rails| least([Some(rails), source_link, target_link]));
    let limited_by = if expected_gb_s == rails { "the rails" } else { "the GPU's PCIe link" };
    let alternative = if pairs.is_empty() {
        impossible(Transport::Rdma, format!("no port of {} is on a fabric with one of ours", remote.hostname))
    } else {
        let count = if pairs.len() == 1 { "1 rail".to_owned() } else { format!("{} rails", pairs.len()) };
        let reason = format!("{count}, {}", show_gb_s(expected_gb_s));
        Alternative { transport: Transport::Rdma, possible: true, expected_gb_s, reason }
    };
    Rdma { alternative, pairs, excluded, staged, limited_by }
}

/// Returns the memory that a NIC accesses: the GPU's own, or host memory near the GPU when NICs cannot access
/// the GPU's.
fn reachable(node: &NodeDescription, memory: Memory) -> (Memory, bool, Option<f64>) {
    let Memory::Gpu(address) = memory else { return (memory, false, None) };
    match node.gpu(address) {
        Some((_, gpu)) => {
            let link = gpu.link_mb_s.map(|megabytes| megabytes as f64 / 1000.0);
            if gpu.direct { (memory, false, link) } else { (Memory::Host { numa: gpu.numa }, true, link) }
        }
        None => (Memory::Host { numa: None }, true, None),
    }
}

/// Pairs each local rail with one of the peer's: one in the same subnet if there is one, else one that it
/// reaches.
fn match_rails(ours: Vec<Rail>, mut theirs: Vec<Rail>, excluded: &mut Vec<Exclusion>) -> Vec<RailPair> {
    let mut pairs = Vec::new();
    for local in ours {
        let near = theirs.iter().position(|remote| local.shares_subnet(remote));
        let Some(index) = near.or_else(|| theirs.iter().position(|remote| local.reaches(remote))) else {
            let reason = "no free rail of the peer is on its fabric".to_owned();
            excluded.push(Exclusion { rail: local.name, reason });
            continue;
        };
        let remote = theirs.remove(index);
        let expected_gb_s = least([local.expected_gb_s, remote.expected_gb_s]);
        pairs.push(RailPair { local, remote, expected_gb_s });
    }
    pairs
}

/// Returns the interface for TCP: the fastest that is up and has a PCI device.
pub(crate) fn tcp_interface(topology: &Topology) -> Option<&Interface> {
    let up = topology.interfaces.iter().filter(|interface| interface.is_up() && interface.pci.is_some());
    // Takes the first of equally fast interfaces, so that the choice does not depend on their number.
    up.min_by_key(|interface| std::cmp::Reverse(interface.speed_mbit_s))
}

pub(crate) fn tcp(
    local: &Topology,
    here: &NodeDescription,
    remote: &NodeDescription,
    request: &Request,
) -> (Option<String>, Alternative) {
    let transport = Transport::Tcp;
    if !request.transports.tcp {
        return (None, off(transport));
    }
    if remote.tcp_addresses.is_empty() {
        return (None, impossible(transport, format!("{} listens at no TCP address", remote.hostname)));
    }
    if same_host(here, remote) {
        let reason = "loopback".to_owned();
        return (
            Some("lo".to_owned()),
            Alternative { transport, possible: true, expected_gb_s: None, reason },
        );
    }
    let interface = tcp_interface(local);
    let link = interface.and_then(|interface| {
        tcp_gb_s(f64::from(interface.speed_mbit_s?) / 1000.0, interface.mtu_bytes.unwrap_or(1500))
    });
    let nic = interface.and_then(|interface| local.pci_device(interface.pci?));
    // Sockets read host memory; for a GPU's bytes that is the copy near the GPU.
    let memory = match request.source {
        Memory::Gpu(address) => Memory::Host { numa: local.gpu(address).and_then(|gpu| gpu.numa_node) },
        host @ Memory::Host { .. } => host,
    };
    let pcie = nic.and_then(|nic| local.pcie_ceiling_gb_s(nic, memory));
    let distance = nic.and_then(|nic| local.distance_to_memory(memory, nic));
    let name = interface.map(|interface| interface.name.clone());
    let expected_gb_s = link
        .and_then(|link| least([Some(link), pcie]))
        .map(|ceiling| ceiling * distance.map_or(1.0, |distance| distance.factor(false)));
    let wire = expected_gb_s.map_or_else(
        || "speed unknown".to_owned(),
        |gb_s| format!("at most {gb_s:.1} GB/s, less by the CPU"),
    );
    let reason = format!("{}, {wire}", name.as_deref().unwrap_or("interface unknown"));
    (name, Alternative { transport, possible: true, expected_gb_s, reason })
}
