//! Rails: RDMA ports as candidates for one memory, and the rule that selects among them.
//!
//! For host memory: the usable ports of the nearest distance class, also those one class further when they
//! are as fast, and of these the ones with at least half the rate of the fastest. A slow rail would delay
//! every transfer that is cut into equal slices; a far rail takes bandwidth that a nearer memory needs.
//!
//! For a GPU: the nearest class only. Where several GPUs are equally near to the same ports, each gets its
//! share of the ports, in the order of the GPUs' addresses. On a machine with a NIC beside each GPU, each GPU
//! thus has a rail of its own, and no transfer of one GPU waits behind those of another.

use std::net::Ipv6Addr;

use crate::bandwidth::{infiniband_gb_s, least, path_mtu_of_roce, roce_gb_s, show_gb_s};
use crate::description::NodeDescription;
use crate::distance::Distance;
use crate::network::Interface;
use crate::pci::PciAddress;
use crate::rdma::{LinkLayer, RdmaDevice, RdmaPort};
use crate::topology::{Memory, Topology};

/// One RDMA port as a candidate for one memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rail {
    /// Device and port, like `mlx5_0:1`.
    pub name: String,
    /// Device and port number on this node; `None` for a rail of another node.
    pub port: Option<(String, u8)>,
    /// Globally unique number of the device.
    pub guid: Option<String>,
    /// Whether the port carries data.
    pub active: bool,
    /// Whether the CPU does the work (Soft-RoCE, Soft-iWARP).
    pub software: bool,
    /// Link layer; `None` when unknown.
    pub layer: Option<LinkLayer>,
    /// Address to connect with.
    pub address: Option<Ipv6Addr>,
    /// Prefix length of the port's subnet, in bits.
    pub prefix_bits: Option<u8>,
    /// Signalling rate in 10⁹ bit/s.
    pub rate_gbit_s: Option<f64>,
    /// Bandwidth of the port or its PCIe path to the memory, whichever is smaller, in 10⁹ byte/s.
    pub ceiling_gb_s: Option<f64>,
    /// The ceiling, reduced by the factor of the distance to the memory, in 10⁹ byte/s.
    pub expected_gb_s: Option<f64>,
    /// PCI device; `None` on another node.
    pub pci: Option<PciAddress>,
    /// NUMA node; `None` when unknown.
    pub numa: Option<u32>,
    /// Distance to the memory; `None` when unknown.
    pub distance: Option<Distance>,
}

/// A port that was not selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exclusion {
    /// Device and port, like `mlx5_0:1`.
    pub rail: String,
    /// Reason why the port was not selected.
    pub reason: String,
}

impl Rail {
    /// Whether two rails are in the same subnet.
    #[must_use]
    pub fn shares_subnet(&self, other: &Self) -> bool {
        let (Some(left), Some(right)) = (self.address, other.address) else { return false };
        let bits = self.prefix_bits.into_iter().chain(other.prefix_bits).max().unwrap_or(128).min(128);
        let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
        self.layer == other.layer && left.to_bits() & mask == right.to_bits() & mask
    }

    /// Whether packets can get from this rail to `other`: within a subnet, or on Ethernet through routers.
    #[must_use]
    pub fn reaches(&self, other: &Self) -> bool {
        let routable = |rail: &Self| {
            rail.layer == Some(LinkLayer::Ethernet)
                && rail.address.is_some_and(|address| address.segments()[0] & 0xffc0 != 0xfe80)
        };
        self.shares_subnet(other) || routable(self) && routable(other)
    }

    fn unusable(&self) -> Option<&'static str> {
        match (self.active, self.layer, self.address) {
            (false, ..) => Some("the port is not active"),
            (_, None, _) => Some("its link layer is unknown"),
            (_, Some(LinkLayer::Ethernet), None) => Some("it has no RoCE v2 address"),
            (_, Some(LinkLayer::InfiniBand), None) => Some("it has no address"),
            _ => None,
        }
    }
}

/// Returns all ports of this node as candidates for a memory.
#[must_use]
pub fn local_rails(topology: &Topology, memory: Memory) -> Vec<Rail> {
    let ports = topology.rdma.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    ports.map(|(device, port)| local_rail(topology, memory, device, port)).collect()
}

fn local_rail(topology: &Topology, memory: Memory, device: &RdmaDevice, port: &RdmaPort) -> Rail {
    let pci = device.pci.and_then(|address| topology.pci_device(address));
    let interface = port.interface.as_deref().and_then(|name| topology.interface(name));
    let distance = pci.and_then(|nic| topology.distance_to_memory(memory, nic));
    let pcie = pci.and_then(|nic| topology.pcie_ceiling_gb_s(nic, memory));
    let ceiling_gb_s = least([pcie, link_gb_s(port, interface)]);
    let address = port.address();
    let prefix_bits = address.and_then(|gid| match port.link_layer? {
        LinkLayer::InfiniBand => Some(64),
        LinkLayer::Ethernet => {
            let Some(address) = gid.address.to_ipv4_mapped() else { return Some(64) };
            let subnet = interface?.subnets.iter().find(|subnet| subnet.contains(address))?;
            Some(96 + subnet.prefix_bits)
        }
    });
    Rail {
        name: format!("{}:{}", device.name, port.number),
        port: Some((device.name.clone(), port.number)),
        guid: device.node_guid.clone(),
        active: port.is_active(),
        software: device.software,
        layer: port.link_layer,
        address: address.map(|gid| gid.address),
        prefix_bits,
        rate_gbit_s: port.rate_gbit_s,
        ceiling_gb_s,
        expected_gb_s: over_distance(ceiling_gb_s, distance, memory),
        pci: device.pci,
        numa: device.numa_node.or_else(|| pci?.numa_node),
        distance,
    }
}

fn link_gb_s(port: &RdmaPort, interface: Option<&Interface>) -> Option<f64> {
    let rate = port.rate_gbit_s?;
    Some(match port.link_layer? {
        LinkLayer::InfiniBand => infiniband_gb_s(rate),
        LinkLayer::Ethernet => {
            let mtu = interface.and_then(|interface| path_mtu_of_roce(interface.mtu_bytes?));
            roce_gb_s(rate, mtu.unwrap_or(4096))
        }
    })
}

fn over_distance(ceiling: Option<f64>, distance: Option<Distance>, memory: Memory) -> Option<f64> {
    Some(ceiling? * distance.map_or(1.0, |distance| distance.factor(matches!(memory, Memory::Gpu(_)))))
}

/// Returns the ports of a described node as candidates for a memory of it.
#[must_use]
pub fn remote_rails(node: &NodeDescription, memory: Memory) -> Vec<Rail> {
    let described = node.rails.iter();
    let build = |rail: &crate::description::DescribedRail| {
        let distance = match memory {
            Memory::Gpu(address) => {
                node.gpu(address).and_then(|(index, _)| rail.gpu_distances.get(index).copied())
            }
            Memory::Host { numa } => Some(match (numa, rail.numa) {
                (Some(memory), Some(nic)) if memory != nic => Distance::Sys,
                _ => Distance::Phb,
            }),
        };
        let ceiling_gb_s = rail.ceiling_mb_s.map(|megabytes| megabytes as f64 / 1000.0);
        Rail {
            name: rail.name.clone(),
            port: None,
            guid: rail.guid.clone(),
            active: true,
            software: rail.software,
            layer: Some(rail.layer),
            address: Some(rail.address),
            prefix_bits: rail.prefix_bits,
            rate_gbit_s: rail.rate_mbit_s.map(|megabits| megabits as f64 / 1000.0),
            ceiling_gb_s,
            expected_gb_s: over_distance(ceiling_gb_s, distance, memory),
            pci: None,
            numa: rail.numa,
            distance,
        }
    };
    described.map(build).collect()
}

/// Selects this node's rails for a memory, the best first, and returns the reason for each excluded one.
#[must_use]
pub fn select_local(topology: &Topology, memory: Memory) -> (Vec<Rail>, Vec<Exclusion>) {
    let gpus: Vec<PciAddress> = topology.gpus.iter().map(|gpu| gpu.address).collect();
    select_among(memory, &gpus, |memory| local_rails(topology, memory))
}

/// Selects the rails of a described node for a memory of it, as that node does for itself.
#[must_use]
pub fn select_remote(node: &NodeDescription, memory: Memory) -> (Vec<Rail>, Vec<Exclusion>) {
    let gpus: Vec<PciAddress> = node.gpus.iter().map(|gpu| gpu.address).collect();
    select_among(memory, &gpus, |memory| remote_rails(node, memory))
}

fn select_among(
    memory: Memory,
    gpus: &[PciAddress],
    candidates: impl Fn(Memory) -> Vec<Rail>,
) -> (Vec<Rail>, Vec<Exclusion>) {
    let Memory::Gpu(address) = memory else { return select(candidates(memory), 1) };
    let nearest = |address| select(candidates(Memory::Gpu(address)), 0);
    let (picked, mut excluded) = nearest(address);
    let sharers = sharers(address, &picked, gpus, nearest);
    let number = sharers.iter().position(|&gpu| gpu == address).unwrap_or(0);
    let border = |number: usize| number * picked.len() / sharers.len().max(1);
    let first = border(number);
    let share = first..border(number + 1).max(first + 1);
    let mut own = Vec::new();
    for (index, rail) in picked.into_iter().enumerate() {
        if share.contains(&index) {
            own.push(rail);
        } else {
            let reason = "as near, and left to other GPUs that are as near to it".to_owned();
            excluded.push(Exclusion { rail: rail.name, reason });
        }
    }
    (own, excluded)
}

/// Returns the GPUs whose nearest ports are exactly these, at the same distance. A GPU that falls back to
/// these ports from further away gets no share.
fn sharers(
    address: PciAddress,
    picked: &[Rail],
    gpus: &[PciAddress],
    nearest: impl Fn(PciAddress) -> (Vec<Rail>, Vec<Exclusion>),
) -> Vec<PciAddress> {
    let distance = |rails: &[Rail]| rails.first().and_then(|rail| rail.distance);
    let is_sharer = |&gpu: &PciAddress| {
        let (other, _) = nearest(gpu);
        gpu == address
            || other.len() == picked.len()
                && distance(&other) == distance(picked)
                && other.iter().all(|rail| picked.iter().any(|ours| ours.name == rail.name))
    };
    gpus.iter().copied().filter(is_sharer).collect()
}

/// Selects the candidates of the nearest class, and of `classes_more` further classes those that are as fast.
fn select(candidates: Vec<Rail>, classes_more: usize) -> (Vec<Rail>, Vec<Exclusion>) {
    let mut excluded = Vec::new();
    let hardware = candidates.iter().any(|rail| rail.unusable().is_none() && !rail.software);
    let usable = keep(candidates, &mut excluded, |rail| match rail.unusable() {
        Some(reason) => Err(reason.to_owned()),
        None if rail.software && hardware => Err("it is done in software and there is hardware".to_owned()),
        None => Ok(()),
    });
    let rank = |rail: &Rail| rail.distance.map_or(Distance::ALL.len(), |distance| distance as usize);
    let rate = |rail: &Rail| rail.rate_gbit_s.unwrap_or(0.0);
    let Some(nearest) = usable.iter().map(rank).min() else { return (Vec::new(), excluded) };
    let fastest_near = usable.iter().filter(|rail| rank(rail) <= nearest).map(rate).fold(0.0, f64::max);
    let near = keep(usable, &mut excluded, |rail| {
        let far = rail.distance.map_or("unknown", Distance::name);
        let near = Distance::ALL.get(nearest).map_or("unknown", |distance| distance.name());
        match rank(rail) - nearest {
            0 => Ok(()),
            more if more <= classes_more && rate(rail) == fastest_near => Ok(()),
            more if more <= classes_more => {
                Err(format!("{far}, and not as fast as the nearer ones ({near})"))
            }
            _ => Err(format!("{far}: further than others ({near})")),
        }
    });
    let top = near.iter().map(rate).fold(0.0, f64::max);
    let mut picked = keep(near, &mut excluded, |rail| {
        if rate(rail) * 2.0 >= top {
            return Ok(());
        }
        Err(format!("{:.0} Gbit/s is less than half of {top:.0} Gbit/s", rate(rail)))
    });
    picked.sort_by(|left, right| rank(left).cmp(&rank(right)).then(rate(right).total_cmp(&rate(left))));
    (picked, excluded)
}

fn keep(
    rails: Vec<Rail>,
    excluded: &mut Vec<Exclusion>,
    test: impl Fn(&Rail) -> Result<(), String>,
) -> Vec<Rail> {
    let mut kept = Vec::new();
    for rail in rails {
        match test(&rail) {
            Ok(()) => kept.push(rail),
            Err(reason) => excluded.push(Exclusion { rail: rail.name, reason }),
        }
    }
    kept
}

/// Format for pictures: `mlx5_0:1 PIX 49.0 GB/s`.
impl std::fmt::Display for Rail {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let distance = self.distance.map_or("distance unknown", Distance::name);
        write!(formatter, "{} {distance} {}", self.name, show_gb_s(self.expected_gb_s))
    }
}
