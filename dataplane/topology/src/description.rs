//! Node description: the data that nodes exchange, so that both choose the same rails.

use std::net::Ipv6Addr;

use crate::distance::Distance;
use crate::host::GpuDirect;
use crate::pci::PciAddress;
use crate::rail::local_rails;
use crate::rdma::LinkLayer;
use crate::topology::{Memory, Topology};
use crate::wire;

/// A node as described to other nodes. [`NodeDescription::encode`] gives its text form.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NodeDescription {
    /// Host name, for messages.
    pub hostname: String,
    /// Boot id of the kernel, equal for all nodes on one running kernel.
    pub boot_id: Option<String>,
    /// Id of the shared directory, equal for all nodes of one kernel that see the same directory.
    pub shared_directory_id: Option<String>,
    /// GPUs, by address.
    pub gpus: Vec<DescribedGpu>,
    /// Active RDMA ports.
    pub rails: Vec<DescribedRail>,
    /// Addresses that the node's TCP transport listens on.
    pub tcp_addresses: Vec<String>,
}

/// One GPU of a described node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedGpu {
    /// PCI address.
    pub address: PciAddress,
    /// NUMA node; `None` when unknown.
    pub numa: Option<u32>,
    /// Whether NICs can access the GPU's memory.
    pub direct: bool,
    /// Bandwidth of the GPU's own PCIe link, in 10⁶ byte/s.
    pub link_mb_s: Option<u64>,
}

/// One active RDMA port of a described node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedRail {
    /// Device and port, like `mlx5_0:1`.
    pub name: String,
    /// Globally unique number of the device.
    pub guid: Option<String>,
    /// Link layer of the port.
    pub layer: LinkLayer,
    /// Address that peers connect to.
    pub address: Ipv6Addr,
    /// Prefix length of the port's subnet, in bits.
    pub prefix_bits: Option<u8>,
    /// Signalling rate in 10⁶ bit/s.
    pub rate_mbit_s: Option<u64>,
    /// Bandwidth of the port and the PCIe link above it, whichever is smaller, in 10⁶ byte/s.
    pub ceiling_mb_s: Option<u64>,
    /// NUMA node; `None` when unknown.
    pub numa: Option<u32>,
    /// Whether the CPU does the work (Soft-RoCE, Soft-iWARP).
    pub software: bool,
    /// Distance to each of the node's GPUs, in the order of `gpus`.
    pub gpu_distances: Vec<Distance>,
}

impl NodeDescription {
    /// Describes the node that was read. Rails and GPUs beyond the limits of a description are left out. The
    /// shared directory is `/dev/shm`; set [`NodeDescription::shared_directory_id`] where another one is
    /// used.
    #[must_use]
    pub fn of(topology: &Topology, tcp_addresses: Vec<String>) -> Self {
        let megabytes = |value: Option<f64>| value.map(|value| (value * 1000.0) as u64);
        let gpus: Vec<DescribedGpu> = topology
            .gpus
            .iter()
            .take(wire::GPUS_MAX)
            .map(|gpu| DescribedGpu {
                address: gpu.address,
                numa: gpu.numa_node,
                direct: !matches!(topology.gpu_direct(gpu), GpuDirect::Unusable(_)),
                link_mb_s: megabytes(
                    topology.pci_device(gpu.address).and_then(|device| device.link.full_speed_gb_s()),
                ),
            })
            .collect();
        let rails = local_rails(topology, Memory::Host { numa: None });
        let named = rails.into_iter().filter(|rail| wire::is_word(&rail.name));
        let rails = named.filter_map(|rail| {
            let nic = rail.pci.and_then(|address| topology.pci_device(address));
            let near =
                gpus.iter().map(|gpu| Some(topology.distance(topology.pci_device(gpu.address)?, nic?)));
            Some(DescribedRail {
                layer: rail.layer.filter(|_| rail.active)?,
                address: rail.address?,
                guid: rail.guid.filter(|guid| wire::is_word(guid)),
                prefix_bits: rail.prefix_bits,
                rate_mbit_s: rail.rate_gbit_s.map(|rate| (rate * 1000.0) as u64),
                ceiling_mb_s: megabytes(rail.ceiling_gb_s),
                numa: topology.node_of(rail.numa),
                software: rail.software,
                gpu_distances: near.map(|distance| distance.unwrap_or(Distance::Sys)).collect(),
                name: rail.name,
            })
        });
        let rails = rails.take(wire::RAILS_MAX).collect();
        let known = |value: &Option<String>| value.clone().filter(|text| wire::is_word(text));
        Self {
            hostname: known(&topology.host.hostname).unwrap_or_else(|| "unknown".to_owned()),
            boot_id: known(&topology.host.boot_id),
            shared_directory_id: known(&topology.host.shared_directory_id),
            rails,
            gpus,
            tcp_addresses: tcp_addresses
                .into_iter()
                .filter(|address| wire::is_word(address))
                .take(wire::TCP_ADDRESSES_MAX)
                .collect(),
        }
    }

    /// Returns the GPU at a PCI address, and its index.
    #[must_use]
    pub fn gpu(&self, address: PciAddress) -> Option<(usize, &DescribedGpu)> {
        self.gpus.iter().enumerate().find(|(_, gpu)| gpu.address == address)
    }
}
