//! Notation of places: `gpu0`, `0000:17:00.0`, `host`, `host:1`, `mlx5_0`, `node2:gpu0`.

use std::str::FromStr;

use crate::description::NodeDescription;
use crate::error::TopologyError;
use crate::pci::PciAddress;
use crate::topology::{Memory, Topology};

/// A place on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the node; `None`: this node.
    pub node: Option<String>,
    /// The place on the node.
    pub spot: LocalPlace,
}

/// A place without its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalPlace {
    /// A GPU by number.
    Gpu(usize),
    /// A PCI device.
    Pci(PciAddress),
    /// Host memory of one NUMA node or of any.
    Host(Option<u32>),
    /// A device by name: RDMA, network or NVMe.
    Device(String),
}

impl FromStr for Place {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        let wrong = || {
            TopologyError::Place(text.chars().filter(|character| !character.is_control()).take(80).collect())
        };
        if let Some(spot) = spot(text) {
            return Ok(Self { node: None, spot });
        }
        let (node, rest) = text.split_once(':').ok_or_else(wrong)?;
        let plain = |name: &str| {
            !name.is_empty() && name.len() <= 64 && name.bytes().all(|byte| byte.is_ascii_graphic())
        };
        match spot(rest) {
            Some(spot) if plain(node) => Ok(Self { node: Some(node.to_owned()), spot }),
            _ => Err(wrong()),
        }
    }
}

fn spot(text: &str) -> Option<LocalPlace> {
    if let Ok(address) = text.parse() {
        return Some(LocalPlace::Pci(address));
    }
    if text == "host" {
        return Some(LocalPlace::Host(None));
    }
    if let Some(node) = text.strip_prefix("host:") {
        return node.parse().ok().map(|node| LocalPlace::Host(Some(node)));
    }
    if let Some(number) = text.strip_prefix("gpu")
        && let Ok(number) = number.parse()
    {
        return Some(LocalPlace::Gpu(number));
    }
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (!text.is_empty() && text.len() <= 64 && text.bytes().all(name))
        .then(|| LocalPlace::Device(text.to_owned()))
}

/// A resolved place on this node.
pub(crate) enum ResolvedPlace {
    Memory(Memory),
    Device(PciAddress),
}

impl Place {
    /// Resolves the place on this node.
    pub(crate) fn find(&self, topology: &Topology) -> Result<ResolvedPlace, TopologyError> {
        let memory_or_device = |address| match topology.gpu(address) {
            Some(_) => Some(ResolvedPlace::Memory(Memory::Gpu(address))),
            None => topology.pci_device(address).map(|_| ResolvedPlace::Device(address)),
        };
        let found = match &self.spot {
            LocalPlace::Gpu(index) => {
                topology.gpus.get(*index).map(|gpu| ResolvedPlace::Memory(Memory::Gpu(gpu.address)))
            }
            LocalPlace::Pci(address) => memory_or_device(*address),
            LocalPlace::Host(None) => Some(ResolvedPlace::Memory(Memory::Host { numa: None })),
            LocalPlace::Host(Some(node)) => {
                let known = topology.numa.iter().any(|numa| numa.number == *node);
                known.then_some(ResolvedPlace::Memory(Memory::Host { numa: Some(*node) }))
            }
            LocalPlace::Device(name) => device(topology, name).and_then(memory_or_device),
        };
        found.ok_or_else(|| TopologyError::NotThere {
            place: self.spot.to_string(),
            node: "this node".to_owned(),
            known: known(topology),
        })
    }

    /// Returns the memory that the place names on this node.
    ///
    /// # Errors
    /// When the place is on another node, does not exist, or is not a memory.
    pub fn memory(&self, topology: &Topology) -> Result<Memory, TopologyError> {
        if self.node.is_some() {
            return Err(TopologyError::StartsElsewhere(self.to_string()));
        }
        match self.find(topology)? {
            ResolvedPlace::Memory(memory) => Ok(memory),
            ResolvedPlace::Device(_) => Err(TopologyError::NoMemory(self.to_string())),
        }
    }

    /// Resolves the place to a memory of a described node.
    pub(crate) fn find_remote(&self, node: &NodeDescription) -> Result<Memory, TopologyError> {
        let found = match &self.spot {
            LocalPlace::Gpu(index) => node.gpus.get(*index).map(|gpu| Memory::Gpu(gpu.address)),
            LocalPlace::Pci(address) => node.gpu(*address).map(|(_, gpu)| Memory::Gpu(gpu.address)),
            LocalPlace::Host(numa) => Some(Memory::Host { numa: *numa }),
            LocalPlace::Device(_) => None,
        };
        found.ok_or_else(|| TopologyError::NotThere {
            place: self.spot.to_string(),
            node: node.hostname.clone(),
            known: format!("host and {} GPUs", node.gpus.len()),
        })
    }
}

fn device(topology: &Topology, name: &str) -> Option<PciAddress> {
    let rdma = topology.rdma.iter().find(|device| device.name == name).and_then(|device| device.pci);
    let network = || topology.interface(name).and_then(|interface| interface.pci);
    let nvme = || topology.nvme.iter().find(|nvme| nvme.name == name).and_then(|nvme| nvme.pci);
    rdma.or_else(network).or_else(nvme)
}

fn known(topology: &Topology) -> String {
    let gpus = (0..topology.gpus.len()).map(|index| format!("gpu{index}"));
    let numa = topology.numa.iter().map(|node| format!("host:{}", node.number));
    let rdma = topology.rdma.iter().map(|device| device.name.clone());
    let network = topology.interfaces.iter().filter(|interface| interface.pci.is_some());
    let network = network.map(|interface| interface.name.clone());
    let names: Vec<String> = numa.chain(gpus).chain(rdma).chain(network).take(64).collect();
    format!("host, {}", names.join(", "))
}

impl std::fmt::Display for LocalPlace {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gpu(index) => write!(formatter, "gpu{index}"),
            Self::Pci(address) => write!(formatter, "{address}"),
            Self::Host(None) => formatter.write_str("host"),
            Self::Host(Some(node)) => write!(formatter, "host:{node}"),
            Self::Device(name) => formatter.write_str(name),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.node {
            Some(node) => write!(formatter, "{node}:{}", self.spot),
            None => write!(formatter, "{}", self.spot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_written_alike() {
        for text in [
            "gpu0",
            "host",
            "host:1",
            "mlx5_0",
            "eth0",
            "0000:17:00.0",
            "node2:gpu0",
            "node2:host:1",
            "n:0000:17:00.0",
        ] {
            let place: Place = text.parse().expect(text);
            assert_eq!(place.to_string(), text);
        }
        assert_eq!("node2:gpu3".parse::<Place>().map(|place| place.spot), Ok(LocalPlace::Gpu(3)));
        for text in ["", ":", "a b", "node2:", ":gpu0", "host:x y", "gpu0:", "\u{1b}[0m:gpu0"] {
            assert!(text.parse::<Place>().is_err(), "{text}");
        }
    }
}
