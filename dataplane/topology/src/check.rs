//! Checks of one node: what keeps a better path from being used.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::check_links::{gpu_direct, pcie_links, port_warnings};
use crate::network::Interface;
use crate::rdma::{LinkLayer, RdmaDevice, RdmaPort};
use crate::reach::tcp_interface;
use crate::topology::Topology;
use crate::warning::{Code, Warning};

/// Demands of the node's configuration on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRequirements {
    /// Size of the slab that is registered with NICs and put on huge pages.
    pub slab_bytes: u64,
    /// Round-trip time to a peer, for the size of TCP buffers.
    pub round_trip: Duration,
}

/// The defaults: 1 GiB of slab, a round trip of 200 µs.
impl Default for NodeRequirements {
    fn default() -> Self {
        Self { slab_bytes: 1 << 30, round_trip: Duration::from_micros(200) }
    }
}

pub(crate) fn warning(code: Code, cause: impl Into<String>, fix: impl Into<String>) -> Warning {
    Warning { code, cause: cause.into(), fix: fix.into() }
}

/// Returns the conditions of this node that make transfers slower or impossible, by code.
#[must_use]
pub fn check(topology: &Topology, needs: &NodeRequirements) -> Vec<Warning> {
    let mut found = Vec::new();
    for device in &topology.rdma {
        for port in &device.ports {
            port_warnings(topology, device, port, &mut found);
        }
    }
    found.extend(pcie_links(topology));
    found.extend(gpu_direct(topology));
    found.extend(limits(topology, needs));
    found.extend(verbs(topology));
    found.extend(reverse_path(topology));
    found.extend(tcp_buffers(topology, needs));
    found.extend(software(topology));
    found.extend(numa_unknown(topology));
    found.sort_by_key(|warning| warning.code);
    found
}

fn limits(topology: &Topology, needs: &NodeRequirements) -> Vec<Warning> {
    let mut found = Vec::new();
    let mebibytes = |bytes: u64| bytes >> 20;
    if let Some(limit) = topology.host.memlock_bytes
        && limit < needs.slab_bytes
        && topology.host.may_lock_any != Some(true)
        && !topology.rdma.is_empty()
    {
        let cause = format!(
            "{} MiB may be locked, the slab has {} MiB",
            mebibytes(limit),
            mebibytes(needs.slab_bytes)
        );
        found.push(warning(
            Code::MemlockSmall,
            cause,
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; containers: --ulimit memlock=-1)",
        ));
    }
    let free = topology.numa.iter().flat_map(|node| &node.huge_pages);
    let free = free.fold(0_u64, |sum, (size, (free, _))| sum.saturating_add(size.saturating_mul(*free)));
    let known = topology.numa.iter().any(|node| !node.huge_pages.is_empty());
    if known && free < needs.slab_bytes {
        let cause = format!(
            "{} MiB of huge pages are free, the slab has {} MiB",
            mebibytes(free),
            mebibytes(needs.slab_bytes)
        );
        let pages = needs.slab_bytes.div_ceil(2 << 20);
        found.push(warning(Code::HugePagesMissing, cause, format!("sysctl vm.nr_hugepages={pages}")));
    }
    found
}

fn verbs(topology: &Topology) -> Option<Warning> {
    let capable = topology.pci.iter().find(|device| device.can_rdma())?;
    let hardware = topology.rdma.iter().any(|device| !device.software);
    let driver = match capable.vendor {
        Some(0x15b3) => "mlx5_ib",
        Some(0x8086) => "irdma",
        Some(0x14e4) => "bnxt_re",
        Some(0x1d0f) => "efa",
        _ => "iw_cxgb4",
    };
    let missing = match (hardware, topology.host.has_module("ib_uverbs")) {
        (true, true) => return None,
        (true, false) => "ib_uverbs is not loaded",
        (false, _) => "the kernel shows no RDMA device",
    };
    let cause = format!("{} can do RDMA, but {missing}", capable.address);
    Some(warning(Code::VerbsNotLoaded, cause, format!("modprobe -a ib_uverbs {driver}")))
}

fn active_roce(topology: &Topology) -> impl Iterator<Item = &RdmaPort> {
    let ports = topology.rdma.iter().flat_map(|device| &device.ports);
    ports.filter(|port| port.is_active() && port.link_layer == Some(LinkLayer::Ethernet))
}

fn reverse_path(topology: &Topology) -> Option<Warning> {
    let interfaces: Vec<&Interface> =
        active_roce(topology).filter_map(|port| topology.interface(port.interface.as_deref()?)).collect();
    let strict = interfaces.iter().find(|interface| {
        let shares = |other: &&&Interface| {
            other.name != interface.name
                && other.subnets.iter().any(|subnet| interface.subnets.contains(subnet))
        };
        interface.reverse_path_filter == Some(1) && interfaces.iter().any(|other| shares(&other))
    })?;
    let name = &strict.name;
    let cause = format!("{name} shares its subnet with another RoCE port and filters strictly");
    let fix = format!(
        "sysctl net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.{name}.rp_filter=2 (and arp_ignore=1, \
            arp_announce=2)"
    );
    Some(warning(Code::ReversePathStrict, cause, fix))
}

fn tcp_buffers(topology: &Topology, needs: &NodeRequirements) -> Option<Warning> {
    let interface = tcp_interface(topology)?;
    let speed = interface.speed_mbit_s?;
    let in_flight = (f64::from(speed) * 1e6 / 8.0 * needs.round_trip.as_secs_f64()) as u64;
    let (receive, send) = topology.host.tcp_buffer_max_bytes;
    let smallest = receive?.min(send?);
    // The kernel's bookkeeping takes part of a buffer: half of the buffer holds payload.
    if smallest / 2 >= in_flight {
        return None;
    }
    let want = in_flight.saturating_mul(2).next_power_of_two();
    let cause = format!(
        "{} at {} Gbit/s has {} KiB in flight over {} us, TCP buffers end at {} KiB",
        interface.name,
        speed / 1000,
        in_flight >> 10,
        needs.round_trip.as_micros(),
        smallest >> 10
    );
    let fix = format!(
        "sysctl 'net.ipv4.tcp_rmem=4096 131072 {want}' 'net.ipv4.tcp_wmem=4096 65536 {want}' \
            net.core.rmem_max={want} net.core.wmem_max={want}"
    );
    Some(warning(Code::TcpBuffersSmall, cause, fix))
}

fn software(topology: &Topology) -> Option<Warning> {
    let device = topology.rdma.iter().find(|device| device.software)?;
    let hardware = topology.rdma.iter().any(|device| !device.software);
    let cause = format!("{} is a software device", device.name);
    (!hardware).then(|| {
        warning(
            Code::SoftwareRdma,
            cause,
            "for speed turn RDMA off, so that TCP is used, or install an RDMA NIC",
        )
    })
}

fn numa_unknown(topology: &Topology) -> Vec<Warning> {
    if topology.numa.len() < 2 {
        return Vec::new();
    }
    let unknown = topology.rdma.iter().filter(|device| {
        let pci = device.pci.and_then(|address| topology.pci_device(address));
        !device.software && device.numa_node.is_none() && pci.is_none_or(|nic| nic.numa_node.is_none())
    });
    let build = |device: &RdmaDevice| {
        let cause = format!("{} has no NUMA node", device.name);
        warning(
            Code::NumaUnknown,
            cause,
            "update the BIOS (ACPI _PXM), or give the hypervisor's guest a PCIe topology",
        )
    };
    unknown.map(build).collect()
}

/// Returns the number of active ports by link layer, for `doctor`.
pub(crate) fn ports_by_layer(topology: &Topology) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for port in topology.rdma.iter().flat_map(|device| &device.ports).filter(|port| port.is_active()) {
        *counts.entry(port.link_layer.map_or("unknown", LinkLayer::name)).or_insert(0) += 1;
    }
    counts
}
