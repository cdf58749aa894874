//! The hardware topology of one node.

use std::path::Path;

use crate::host::{self, GpuDirect, Host};
use crate::network::{self, Interface};
use crate::numa::{self, NumaNode};
use crate::pci::{self, PciAddress, PciDevice, ancestry};
use crate::process::{self, Process};
use crate::rdma::{self, RdmaDevice};
use crate::sysfs::Tree;

/// A memory that holds bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Host memory, of one NUMA node or of any node.
    Host {
        /// Number of the NUMA node; `None`: any.
        numa: Option<u32>,
    },
    /// Memory of the GPU at this address.
    Gpu(PciAddress),
}

/// Vendor of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuVendor {
    /// NVIDIA.
    Nvidia,
    /// AMD.
    Amd,
}

/// One GPU. GPUs are numbered by PCI address, as CUDA does with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// PCI address.
    pub address: PciAddress,
    /// Vendor.
    pub vendor: GpuVendor,
    /// NUMA node; `None` when unknown.
    pub numa_node: Option<u32>,
}

/// One NVMe controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvme {
    /// Name, like `nvme0`.
    pub name: String,
    /// Model name.
    pub model: Option<String>,
    /// PCI device; `None` for a controller over a network.
    pub pci: Option<PciAddress>,
    /// NUMA node; `None` when unknown.
    pub numa_node: Option<u32>,
}

/// The hardware and kernel settings of one node. Missing files leave fields `None` and lists empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    /// Kernel limits and settings.
    pub host: Host,
    /// All PCI functions, by address.
    pub pci: Vec<PciDevice>,
    /// GPUs, by address.
    pub gpus: Vec<Gpu>,
    /// RDMA devices, by name.
    pub rdma: Vec<RdmaDevice>,
    /// Network interfaces, by name.
    pub interfaces: Vec<Interface>,
    /// NVMe controllers, by name.
    pub nvme: Vec<Nvme>,
    /// NUMA nodes, by number.
    pub numa: Vec<NumaNode>,
    /// GPUs and NUMA node of this process.
    pub process: Process,
}

impl Topology {
    /// Reads `sys` and `proc` below `root`, which is `/` except in tests. Cannot fail.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let tree = Tree::new(root);
        let pci = pci::read_all(&tree);
        let numa = numa::read_all(&tree);
        Self {
            host: host::read(&tree),
            gpus: pci.iter().filter_map(gpu).collect(),
            rdma: rdma::read_all(&tree),
            interfaces: network::read_all(&tree),
            nvme: read_nvme(&tree),
            process: process::read(&tree, &numa),
            numa,
            pci,
        }
    }

    /// Returns the PCI function at an address.
    #[must_use]
    pub fn pci_device(&self, address: PciAddress) -> Option<&PciDevice> {
        let index = self.pci.binary_search_by_key(&address, |device| device.address).ok()?;
        self.pci.get(index)
    }

    /// Returns the GPU at an address.
    #[must_use]
    pub fn gpu(&self, address: PciAddress) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.address == address)
    }

    /// Returns a network interface by name.
    #[must_use]
    pub fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.name == name)
    }

    /// Returns the way in which a NIC can access the memory of a GPU.
    #[must_use]
    pub fn gpu_direct(&self, gpu: &Gpu) -> GpuDirect {
        self.host.gpu_direct(gpu.vendor == GpuVendor::Amd)
    }

    /// Returns the bandwidth of the narrowest PCIe link between a device and a memory, in 10⁹ byte/s. Unknown
    /// links are left out; `None` when all are unknown.
    #[must_use]
    pub fn pcie_ceiling_gb_s(&self, device: &PciDevice, memory: Memory) -> Option<f64> {
        let other = match memory {
            Memory::Gpu(address) => self.pci_device(address),
            Memory::Host { .. } => None,
        };
        let own =
            crate::bandwidth::least([device.link.gb_s(), other.and_then(|gpu| gpu.link.full_speed_gb_s())]);
        // From both ends up to their common bridge; from host memory, up to the root.
        let top: &[PciAddress] = other.map_or(&[], |gpu| &gpu.parents);
        let bridges = bridges_below(device, top)
            .chain(other.into_iter().flat_map(|gpu| bridges_below(gpu, &device.parents)));
        let bridges = bridges.map(|bridge| self.pci_device(bridge)?.link.gb_s());
        crate::bandwidth::least(bridges.chain([own]))
    }
}

/// Returns the bridges above a device that are not also above the other end. The lower port right above a
/// device is left out: it reports the device's own link, which is in a power-saving state while the device
/// is.
fn bridges_below<'a>(
    device: &'a PciDevice,
    others: &'a [PciAddress],
) -> impl Iterator<Item = PciAddress> + 'a {
    device.parents.iter().rev().skip(1).copied().take_while(|bridge| !others.contains(bridge))
}

fn gpu(device: &PciDevice) -> Option<Gpu> {
    let vendor = match (device.vendor?, device.class_code()?) {
        (0x10de, 0x0300 | 0x0302) => GpuVendor::Nvidia,
        // Instinct cards are "display, other" or "processing accelerator".
        (0x1002, 0x0300 | 0x0302 | 0x0380 | 0x1200) => GpuVendor::Amd,
        _ => return None,
    };
    Some(Gpu { address: device.address, vendor, numa_node: device.numa_node })
}

fn read_nvme(tree: &Tree) -> Vec<Nvme> {
    const CLASS: &str = "sys/class/nvme";
    const CONTROLLERS_MAX: usize = 256;
    let read = |name: String| Nvme {
        model: tree.label(&format!("{CLASS}/{name}/model")),
        pci: tree.link(&format!("{CLASS}/{name}")).and_then(|link| ancestry(&link).1.pop()),
        numa_node: tree.numa_node(&format!("{CLASS}/{name}/numa_node")),
        name,
    };
    tree.names(CLASS).into_iter().take(CONTROLLERS_MAX).map(read).collect()
}
