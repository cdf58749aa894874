//! Distance between a NIC and a memory, in the classes of `nvidia-smi topo -m`.

use std::fmt;
use std::str::FromStr;

use crate::numa;
use crate::pci::PciDevice;
use crate::topology::{Memory, Topology};

/// Distance class, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// At most one PCIe switch between them.
    Pix,
    /// Several PCIe switches, but no host bridge.
    Pxb,
    /// Through a host bridge: two root ports of one. Also a NIC and the host memory of its own NUMA node.
    Phb,
    /// Through several host bridges of one NUMA node. For host memory: another NUMA node of the same socket.
    Node,
    /// Through the interconnect between sockets.
    Sys,
}

impl Distance {
    /// All classes, the nearest first.
    pub const ALL: [Self; 5] = [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// Returns the name that nvidia-smi uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }

    /// Returns a description in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Pix => "at most one PCIe switch",
            Self::Pxb => "several PCIe switches",
            Self::Phb => "the host bridge",
            Self::Node => "host bridges of one NUMA node or socket",
            Self::Sys => "the interconnect between sockets",
        }
    }

    /// Returns the share of the bandwidth that is left over this distance. The values are for planning and
    /// were not measured: below a switch nothing is lost, root complexes forward between devices more slowly
    /// than to memory, and the link between sockets is shared with all other traffic.
    #[must_use]
    pub fn factor(self, gpu_memory: bool) -> f64 {
        match (self, gpu_memory) {
            (Self::Pix | Self::Pxb, _) | (Self::Phb | Self::Node, false) => 1.0,
            (Self::Phb, true) => 0.8,
            (Self::Node | Self::Sys, true) => 0.5,
            (Self::Sys, false) => 0.7,
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Distance {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|distance| distance.name() == text).ok_or(())
    }
}

impl Topology {
    /// Returns the distance between two PCI devices.
    #[must_use]
    pub fn distance(&self, left: &PciDevice, right: &PciDevice) -> Distance {
        if left.address == right.address {
            return Distance::Pix;
        }
        if left.root.is_some() && left.root == right.root {
            let shared =
                left.parents.iter().zip(&right.parents).take_while(|(left, right)| left == right).count();
            if shared == 0 {
                return Distance::Phb;
            }
            // Below the deepest common bridge, one bridge is that switch's own lower port.
            let below = |device: &PciDevice| device.parents.len() - shared;
            return if below(left) <= 1 && below(right) <= 1 { Distance::Pix } else { Distance::Pxb };
        }
        match (self.node_of(left.numa_node), self.node_of(right.numa_node)) {
            (Some(left), Some(right)) if left == right => Distance::Node,
            _ => Distance::Sys,
        }
    }

    /// Returns the distance between a memory and a PCI device; `None` for a GPU that is not present.
    #[must_use]
    pub fn distance_to_memory(&self, memory: Memory, device: &PciDevice) -> Option<Distance> {
        match memory {
            Memory::Gpu(address) => Some(self.distance(self.pci_device(address)?, device)),
            Memory::Host { numa } => Some(match (self.node_of(numa), self.node_of(device.numa_node)) {
                (Some(memory), Some(nic)) if memory == nic => Distance::Phb,
                (Some(memory), Some(nic)) if numa::same_socket(&self.numa, memory, nic) => Distance::Node,
                // Memory of no particular node: the same class for every NIC.
                (None, _) => Distance::Phb,
                _ => Distance::Sys,
            }),
        }
    }

    /// Returns the NUMA node; on a machine with one node every device belongs to it, even if the firmware
    /// leaves it out.
    pub(crate) fn node_of(&self, numa: Option<u32>) -> Option<u32> {
        match self.numa.as_slice() {
            [] => Some(numa.unwrap_or(0)),
            [only] => Some(only.number),
            _ => numa,
        }
    }
}
