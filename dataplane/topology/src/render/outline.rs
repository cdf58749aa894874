//! The outline of a node: NUMA node, host bridge, switch, device. PCIe ports are left out.
//!
//! A PCIe switch is two layers of bridges to the kernel: one upper port, then a lower port per device. Below
//! a root port every second bridge of a chain is therefore a switch; the others only lead to it.

use std::collections::BTreeMap;

use crate::bandwidth::show_gb_s;
use crate::pci::{PciAddress, PciDevice};
use crate::topology::{Memory, Topology};

/// Kind of hardware that a box stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    System,
    Numa,
    HostBridge,
    Switch,
    Gpu,
    Nic,
    Disk,
    Other,
}

/// One box with the boxes inside it.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    pub(crate) title: String,
    pub(crate) detail: String,
    /// Whether the box is an end of the path.
    pub(crate) marked: bool,
    /// Whether the path touches the box.
    pub(crate) on_path: bool,
    /// Bandwidth to print on the box.
    pub(crate) badge: Option<String>,
    pub(crate) children: Vec<Node>,
}

impl Node {
    fn new(kind: Kind, title: String, detail: String) -> Self {
        Self { kind, title, detail, marked: false, on_path: false, badge: None, children: Vec::new() }
    }
}

/// The ends of a path on this node, and the text to print on each.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    pub(crate) devices: BTreeMap<PciAddress, Option<String>>,
    pub(crate) memory: Option<Memory>,
}

/// Largest number of device boxes; further devices are not drawn.
const DEVICES_MAX: usize = 256;

pub(crate) fn build(topology: &Topology, marks: &Marks) -> Node {
    let mut system = Node::new(
        Kind::System,
        topology.host.hostname.clone().unwrap_or_else(|| "this node".to_owned()),
        String::new(),
    );
    for (number, mut node) in numa_nodes(topology) {
        node.marked = match marks.memory {
            Some(Memory::Host { numa }) => numa == number && numa.is_some() || topology.numa.len() < 2,
            _ => false,
        };
        system.children.push(node);
    }
    let mut numbers: Vec<Option<u32>> = topology.numa.iter().map(|node| Some(node.number)).collect();
    for device in endpoints(topology).into_iter().take(DEVICES_MAX) {
        let numa = topology.node_of(device.numa_node).filter(|numa| numbers.contains(&Some(*numa)));
        let index = numbers.iter().position(|number| *number == numa).unwrap_or_else(|| {
            numbers.push(numa);
            system.children.push(Node::new(Kind::Numa, "NUMA node unknown".to_owned(), String::new()));
            numbers.len() - 1
        });
        let mut leaf = leaf(topology, device);
        if let Some(badge) = marks.devices.get(&device.address) {
            leaf.marked = true;
            leaf.badge.clone_from(badge);
        }
        insert(&mut system.children[index], topology, device, leaf);
    }
    mark_path(&mut system);
    system
}

fn numa_nodes(topology: &Topology) -> Vec<(Option<u32>, Node)> {
    let nodes = topology.numa.iter().map(|node| {
        let memory = node.memory_bytes.map(|bytes| format!(", {} GiB", bytes >> 30)).unwrap_or_default();
        let socket = node.socket.map(|socket| format!("socket {socket}, ")).unwrap_or_default();
        let detail = format!("{socket}{} CPUs{memory}", node.processors);
        (Some(node.number), Node::new(Kind::Numa, format!("NUMA node {}", node.number), detail))
    });
    nodes.collect()
}

/// Returns the GPUs, NICs and disks. Devices that are neither source nor sink of blocks are not drawn.
fn endpoints(topology: &Topology) -> Vec<&PciDevice> {
    let wanted = |device: &&PciDevice| {
        let address = Some(device.address);
        topology.gpu(device.address).is_some()
            || topology.rdma.iter().any(|rdma| rdma.pci == address)
            || topology.interfaces.iter().any(|interface| interface.pci == address)
            || topology.nvme.iter().any(|nvme| nvme.pci == address)
    };
    topology.pci.iter().filter(wanted).collect()
}

fn leaf(topology: &Topology, device: &PciDevice) -> Node {
    let address = Some(device.address);
    let link = match device.link.gb_s() {
        Some(gb_s) => format!("{} {}", device.link, show_gb_s(Some(gb_s))),
        None => device.link.to_string(),
    };
    if let Some(index) = topology.gpus.iter().position(|gpu| Some(gpu.address) == address) {
        return Node::new(Kind::Gpu, format!("gpu{index}"), format!("{} {link}", device.address));
    }
    let rdma = topology.rdma.iter().filter(|rdma| rdma.pci == address);
    let mut names: Vec<&str> = rdma.map(|rdma| rdma.name.as_str()).collect();
    let network = topology.interfaces.iter().filter(|interface| interface.pci == address);
    names.extend(network.map(|interface| interface.name.as_str()));
    if names.is_empty() {
        let disk = topology.nvme.iter().find(|nvme| nvme.pci == address);
        let (kind, name) = disk.map_or((Kind::Other, "device"), |disk| (Kind::Disk, disk.name.as_str()));
        return Node::new(kind, name.to_owned(), format!("{} {link}", device.address));
    }
    Node::new(Kind::Nic, names.join(" "), format!("{} {link}", device.address))
}

fn insert(numa: &mut Node, topology: &Topology, device: &PciDevice, leaf: Node) {
    let root = device.root.clone().unwrap_or_else(|| "PCI, place unknown".to_owned());
    let mut node = child(numa, Kind::HostBridge, &root, "host bridge");
    for switch in device.parents.iter().skip(1).step_by(2) {
        let link = topology.pci_device(*switch).map(|switch| format!("switch, {} up", switch.link));
        node = child(node, Kind::Switch, &switch.to_string(), link.as_deref().unwrap_or("switch"));
    }
    node.children.push(leaf);
}

/// Returns the child with this title, and creates it if it is missing.
fn child<'a>(node: &'a mut Node, kind: Kind, title: &str, detail: &str) -> &'a mut Node {
    let index = node.children.iter().position(|child| child.kind == kind && child.title == title);
    let index = index.unwrap_or_else(|| {
        node.children.push(Node::new(kind, title.to_owned(), detail.to_owned()));
        node.children.len() - 1
    });
    &mut node.children[index]
}

/// Marks the smallest tree that connects all ends.
fn mark_path(system: &mut Node) {
    let ends = count(system);
    if ends > 0 {
        mark(system, ends);
    }
}

fn count(node: &Node) -> usize {
    usize::from(node.marked) + node.children.iter().map(count).sum::<usize>()
}

fn mark(node: &mut Node, ends: usize) {
    let mine = count(node);
    let one_child_has_all = node.children.iter().any(|child| count(child) == ends);
    node.on_path = mine > 0 && !one_child_has_all;
    for child in &mut node.children {
        mark(child, ends);
    }
}
