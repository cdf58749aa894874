//! What one node tells another about itself, so that both choose the same rails.

use std::net::Ipv6Addr;

use crate::distance::Distance;
use crate::host::GpuDirect;
use crate::pci::PciAddress;
use crate::rail::local_rails;
use crate::rdma::LinkLayer;
use crate::topology::{Memory, Topology};
use crate::wire;

/// One node as another sees it. Its text form is that of [`NodeDescription::encode`].
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NodeDescription {
    /// The host's name, for people.
    pub hostname: String,
    /// Equal for all nodes on one running kernel.
    pub boot_id: Option<String>,
    /// Equal for all nodes of one kernel that see the same shared directory.
    pub shared_directory_id: Option<String>,
    /// Its GPUs, by address.
    pub gpus: Vec<DescribedGpu>,
    /// Its active RDMA ports.
    pub rails: Vec<DescribedRail>,
    /// Where its TCP transport listens.
    pub tcp_addresses: Vec<String>,
}

/// One GPU of a described node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedGpu {
    /// Where it is.
    pub address: PciAddress,
    /// Its NUMA node.
    pub numa: Option<u32>,
    /// Whether NICs reach its memory.
    pub direct: bool,
    /// What its own PCIe link carries, in 10⁶ byte/s.
    pub link_mb_s: Option<u64>,
}

/// One active port of a described node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedRail {
    /// Device and port, like `mlx5_0:1`.
    pub name: String,
    /// Globally unique number of the device.
    pub guid: Option<String>,
    /// What is on the wire.
    pub layer: LinkLayer,
    /// The address that connections go to.
    pub address: Ipv6Addr,
    /// Length of the prefix that its subnet shares.
    pub prefix_bits: Option<u8>,
    /// Signalling rate in 10⁶ bit/s.
    pub rate_mbit_s: Option<u64>,
    /// What the port and the PCIe link above it carry, in 10⁶ byte/s.
    pub ceiling_mb_s: Option<u64>,
    /// Its NUMA node.
    pub numa: Option<u32>,
    /// Whether the CPU does the work.
    pub software: bool,
    /// The distance to each of the node's GPUs, in their order.
    pub gpu_distances: Vec<Distance>,
}

impl NodeDescription {
    /// Describes the node that was read. More rails or GPUs than a description holds are left out. The shared
    /// directory is `/dev/shm`; set [`NodeDescription::shared_directory_id`] where another one is used.
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
                    topology.pci_device(gpu.address).and_then(|device| device.link.awake_gb_s()),
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

    /// The GPU with this number.
    #[must_use]
    pub fn gpu(&self, address: PciAddress) -> Option<(usize, &DescribedGpu)> {
        self.gpus.iter().enumerate().find(|(_, gpu)| gpu.address == address)
    }
}
