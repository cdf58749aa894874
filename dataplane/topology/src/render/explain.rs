//! The answer of `kvasir explain-path A B`.

use std::fmt::Write as _;

use crate::bandwidth::show_gb_s;
use crate::check::NodeRequirements;
use crate::description::NodeDescription;
use crate::distance::Distance;
use crate::error::TopologyError;
use crate::path::{Decision, Request, Transport, Transports, choose};
use crate::pci::PciAddress;
use crate::place::{Place, ResolvedPlace};
use crate::render::outline::{Kind, Marks, Node, build};
use crate::render::svg;
use crate::topology::{Memory, Topology};

/// Explanation of the path between two places.
#[derive(Debug)]
pub struct Explanation {
    /// The explanation in words, with the tree below.
    pub text: String,
    /// The explanation as a picture.
    pub svg: String,
    /// The chosen path; `None` when one end is a device and not a memory.
    pub decision: Option<Decision>,
}

/// Explains the path from a place on this node to another place, on this node or on a described node.
///
/// Two memories are connected by the path that [`choose`] returns. With a device (a NIC, a disk) at one end
/// only the PCIe path is explained.
///
/// # Errors
/// When a place is malformed, does not exist, or is on a node that is not described.
pub fn explain(
    topology: &Topology,
    others: &[NodeDescription],
    from: &Place,
    to: &Place,
    transports: Transports,
    needs: NodeRequirements,
) -> Result<Explanation, TopologyError> {
    if from.node.is_some() {
        return Err(TopologyError::StartsElsewhere(from.to_string()));
    }
    let source = from.find(topology)?;
    let (remote, target) = match &to.node {
        Some(name) => {
            let node = others.iter().find(|node| node.hostname == *name);
            let node = node.cloned().ok_or_else(|| TopologyError::NodeUnknown(name.clone()))?;
            let memory = to.find_remote(&node)?;
            (node, ResolvedPlace::Memory(memory))
        }
        // Another process of this node: it listens on the loopback address.
        None => (NodeDescription::of(topology, vec!["127.0.0.1".to_owned()]), to.find(topology)?),
    };
    match (source, target) {
        (ResolvedPlace::Memory(source), ResolvedPlace::Memory(target)) => {
            let decision = choose(topology, &remote, &Request { source, target, transports, needs });
            let here = to.node.is_none();
            Ok(memories(topology, from, to, [Some(source), here.then_some(target)], decision))
        }
        (source, target) => Ok(devices(topology, from, to, source, target)),
    }
}

fn memories(
    topology: &Topology,
    from: &Place,
    to: &Place,
    ends: [Option<Memory>; 2],
    decision: Decision,
) -> Explanation {
    let mut marks = Marks::default();
    for memory in ends.into_iter().flatten() {
        mark_memory(&mut marks, memory);
    }
    for pair in &decision.rails {
        if let Some(address) = pair.local.pci {
            marks.devices.insert(address, Some(show_gb_s(pair.local.expected_gb_s)));
        }
    }
    let interface = decision.interface.as_deref().and_then(|name| topology.interface(name));
    if let Some(address) = interface.and_then(|interface| interface.pci) {
        marks.devices.insert(address, Some(show_gb_s(decision.expected_gb_s)));
    }
    let tree = build(topology, &marks);
    let name = decision.transport.map_or("nothing works", Transport::name);
    let title = format!("{from} → {to}: {name}, {}", show_gb_s(decision.expected_gb_s));
    let mut text = format!("{title}\n");
    // Writing to a string cannot fail.
    let _ = describe(&mut text, &decision);
    let mut notes: Vec<String> =
        decision.rails.iter().map(|pair| format!("{} → {}", pair.local, pair.remote)).collect();
    notes.extend(decision.warnings.iter().map(|warning| format!("{} {}", warning.code, warning.cause)));
    text.push('\n');
    print_tree(&mut text, &tree);
    Explanation { text, svg: svg::draw(&tree, &title, &notes), decision: Some(decision) }
}

fn mark_memory(marks: &mut Marks, memory: Memory) {
    match memory {
        Memory::Gpu(address) => {
            marks.devices.insert(address, None);
        }
        Memory::Host { .. } => marks.memory = Some(memory),
    }
}

fn describe(text: &mut String, decision: &Decision) -> std::fmt::Result {
    writeln!(text, "  limited by {}", decision.limited_by)?;
    if decision.staged {
        writeln!(text, "  bytes of GPU memory are copied through host memory")?;
    }
    for pair in &decision.rails {
        let end = show_gb_s(pair.expected_gb_s);
        writeln!(text, "  rail {} → {}: {end}", pair.local, pair.remote)?;
    }
    for exclusion in &decision.excluded {
        writeln!(text, "  not used {}: {}", exclusion.rail, exclusion.reason)?;
    }
    for (rank, alternative) in decision.alternatives.iter().enumerate() {
        writeln!(text, "  {}. {}: {}", rank + 1, alternative.transport.name(), alternative.reason)?;
    }
    for warning in &decision.warnings {
        writeln!(text, "  warn: {warning}")?;
    }
    Ok(())
}

fn devices(
    topology: &Topology,
    from: &Place,
    to: &Place,
    source: ResolvedPlace,
    target: ResolvedPlace,
) -> Explanation {
    let mut marks = Marks::default();
    for found in [&source, &target] {
        match found {
            ResolvedPlace::Memory(memory) => mark_memory(&mut marks, *memory),
            ResolvedPlace::Device(address) => {
                marks.devices.insert(*address, None);
            }
        }
    }
    let (distance, ceiling) = match (&source, &target) {
        (ResolvedPlace::Memory(memory), ResolvedPlace::Device(address))
        | (ResolvedPlace::Device(address), ResolvedPlace::Memory(memory)) => {
            between(topology, *memory, *address)
        }
        (ResolvedPlace::Device(left), ResolvedPlace::Device(right)) => {
            // The device takes the role of a GPU: both are peers on the bus.
            between(topology, Memory::Gpu(*left), *right)
        }
        (ResolvedPlace::Memory(_), ResolvedPlace::Memory(_)) => (None, None),
    };
    let tree = build(topology, &marks);
    let name = distance.map_or("distance unknown", Distance::name);
    let words = distance.map_or("", Distance::words);
    let title = format!("{from} ↔ {to}: {name}, PCIe {}", show_gb_s(ceiling));
    let mut text = format!("{title}\n  {name}: {words}\n\n");
    print_tree(&mut text, &tree);
    Explanation { text, svg: svg::draw(&tree, &title, &[]), decision: None }
}

fn between(topology: &Topology, memory: Memory, address: PciAddress) -> (Option<Distance>, Option<f64>) {
    let Some(device) = topology.pci_device(address) else { return (None, None) };
    (topology.distance_to_memory(memory, device), topology.pcie_ceiling_gb_s(device, memory))
}

/// Prints the tree, with the path marked by `*` in the margin; subtrees without a part of the path are only
/// counted.
fn print_tree(text: &mut String, system: &Node) {
    let _ = writeln!(text, "{} {}", margin(system), system.title);
    print_children(text, system, "");
}

fn margin(node: &Node) -> &'static str {
    if node.on_path { "*" } else { " " }
}

fn print_children(text: &mut String, node: &Node, indent: &str) {
    for (index, child) in node.children.iter().enumerate() {
        let last = index + 1 == node.children.len();
        let branch = if last { "└─" } else { "├─" };
        let badge = child.badge.as_ref().map(|badge| format!("  ◀ {badge}")).unwrap_or_default();
        let folded = !touched(child) && !child.children.is_empty() && child.kind != Kind::System;
        let inside = if folded { format!("  ({})", contents(child)) } else { String::new() };
        let _ = writeln!(
            text,
            "{} {indent}{branch} {}  {}{inside}{badge}",
            margin(child),
            child.title,
            child.detail
        );
        if !folded {
            print_children(text, child, &format!("{indent}{}", if last { "   " } else { "│  " }));
        }
    }
}

fn touched(node: &Node) -> bool {
    node.on_path || node.marked || node.children.iter().any(touched)
}

/// `4 GPUs, 5 NICs`
fn contents(node: &Node) -> String {
    fn tally(node: &Node, kind: Kind) -> usize {
        usize::from(node.kind == kind) + node.children.iter().map(|child| tally(child, kind)).sum::<usize>()
    }
    let kinds = [(Kind::Gpu, "GPU"), (Kind::Nic, "NIC"), (Kind::Disk, "disk"), (Kind::Other, "other")];
    let counts = kinds.iter().filter_map(|(kind, name)| match tally(node, *kind) {
        0 => None,
        1 => Some(format!("1 {name}")),
        count => Some(format!("{count} {name}s")),
    });
    counts.collect::<Vec<_>>().join(", ")
}
