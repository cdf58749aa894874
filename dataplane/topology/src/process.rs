//! The memory that is nearest to this process: that of its GPU, or host memory of its NUMA node.
//!
//! GPUs are numbered by PCI address, as with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
//!
//! Sources: `/proc/driver/nvidia/gpus/ADDRESS/information`, which a container sees for its own GPUs only;
//! `Cpus_allowed_list` of `/proc/self/status`; `CUDA_VISIBLE_DEVICES` as the CUDA C++ Programming Guide, "Environment
//! Variables", describes it.

use crate::numa::{NODES, NumaNode, ranges};
use crate::pci::PciAddress;
use crate::sysfs::Tree;
use crate::topology::{Memory, Topology};

const GPUS: &str = "proc/driver/nvidia/gpus";
const GPUS_MAX: usize = 64;

/// Kernel information about this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// GPUs that the driver shows to the process, by address, each with its UUID if that is known.
    pub gpus: Vec<(PciAddress, Option<String>)>,
    /// NUMA node of the processors that the process may run on; `None` when they are of several nodes.
    pub numa_node: Option<u32>,
}

pub(crate) fn read(tree: &Tree, nodes: &[NumaNode]) -> Process {
    let gpu = |name: String| {
        let address = name.parse().ok()?;
        let text = tree.text(&format!("{GPUS}/{name}/information")).unwrap_or_default();
        let uuid =
            text.lines().find_map(|line| line.strip_prefix("GPU UUID:")).map(|uuid| uuid.trim().to_owned());
        Some((address, uuid))
    };
    let mut gpus: Vec<_> = tree.names(GPUS).into_iter().take(GPUS_MAX).filter_map(gpu).collect();
    gpus.sort();
    Process { gpus, numa_node: numa_node(tree, nodes) }
}

fn numa_node(tree: &Tree, nodes: &[NumaNode]) -> Option<u32> {
    let status = tree.text("proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let allowed: Vec<(u32, u32)> = ranges(allowed).collect();
    let has_some = |node: &&NumaNode| {
        let list = tree.text(&format!("{NODES}/node{}/cpulist", node.number)).unwrap_or_default();
        ranges(&list).any(|(low, high)| allowed.iter().any(|&(from, to)| from <= high && low <= to))
    };
    let mut nodes = nodes.iter().filter(has_some);
    let node = nodes.next()?;
    nodes.next().is_none().then_some(node.number)
}

impl Topology {
    /// Returns the NUMA node of a host memory, or the one nearest to a GPU; `None` when the machine does not
    /// tell it.
    #[must_use]
    pub fn numa_node_of(&self, memory: Memory) -> Option<&NumaNode> {
        let number = match memory {
            Memory::Gpu(address) => self.gpu(address)?.numa_node,
            Memory::Host { numa } => numa,
        };
        self.numa.iter().find(|node| Some(node.number) == number)
    }

    /// Returns the memory that is nearest to this process: that of its only GPU, or of the first GPU that
    /// `cuda_visible_devices` names; else host memory of its NUMA node, or of any node when the process may
    /// run on several. Which GPU a part of one (MIG) belongs to is known only if its name says so, or if there
    /// is one GPU.
    #[must_use]
    pub fn memory_of_process(&self, cuda_visible_devices: Option<&str>) -> Memory {
        let is_there = |address: &PciAddress| self.gpu(*address).is_some();
        let shown: Vec<(PciAddress, Option<&str>)> = if self.process.gpus.is_empty() {
            self.gpus.iter().map(|gpu| (gpu.address, None)).collect()
        } else {
            self.process.gpus.iter().map(|(address, uuid)| (*address, uuid.as_deref())).collect()
        };
        let gpu = match cuda_visible_devices.map(|list| list.split(',').next().unwrap_or("").trim()) {
            // A part of a GPU (MIG): drivers before 470 name it after the GPU, later ones by a UUID of its own.
            Some(name) if name.starts_with("GPU-") || name.starts_with("MIG-") => {
                let of_gpu = name.trim_start_matches("MIG-").split('/').next().unwrap_or("");
                let is_it = |uuid: &str| of_gpu.len() > "GPU-".len() && uuid.starts_with(of_gpu);
                let named =
                    shown.iter().find(|(_, uuid)| uuid.is_some_and(is_it)).map(|(address, _)| *address);
                named.or_else(|| only(&shown).filter(|_| name.starts_with("MIG-")))
            }
            Some(name) => {
                name.parse().ok().and_then(|number: usize| shown.get(number)).map(|(address, _)| *address)
            }
            None => only(&shown),
        };
        match gpu.filter(is_there) {
            Some(address) => Memory::Gpu(address),
            None => Memory::Host { numa: self.process.numa_node },
        }
    }
}

fn only(gpus: &[(PciAddress, Option<&str>)]) -> Option<PciAddress> {
    match gpus {
        [(address, _)] => Some(*address),
        _ => None,
    }
}
