//! NUMA nodes: their processors, memory, distances and huge pages.
//!
//! Source: /sys/devices/system/node (Documentation/ABI/stable/sysfs-devices-node). Distances are those of the
//! firmware's table: 10 is local.

use std::collections::BTreeMap;

use crate::sysfs::Tree;

pub(crate) const NODES: &str = "sys/devices/system/node";
const NODES_MAX: usize = 64;

/// Nodes nearer than this distance belong to one socket where the sockets themselves are unknown.
const DISTANCE_OTHER_SOCKET: u32 = 20;

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Node number.
    pub number: u32,
    /// Processor package (socket) of the node's first processor.
    pub socket: Option<u32>,
    /// The processors of the node, as the kernel lists them: `0-55,112-167`.
    pub cpus: String,
    /// Number of processors.
    pub processors: u64,
    /// Size of the memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Distance to each node, in the order of the node numbers.
    pub distances: Vec<u32>,
    /// Page size in bytes → (free, all).
    pub huge_pages: BTreeMap<u64, (u64, u64)>,
}

pub(crate) fn read_all(tree: &Tree) -> Vec<NumaNode> {
    let numbers = tree.names(NODES).into_iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    let mut nodes: Vec<NumaNode> = numbers.take(NODES_MAX).map(|number| read(tree, number)).collect();
    nodes.sort_by_key(|node| node.number);
    nodes
}

fn read(tree: &Tree, number: u32) -> NumaNode {
    let path = format!("{NODES}/node{number}");
    let cpus = tree.text(&format!("{path}/cpulist")).unwrap_or_default().trim().to_owned();
    let (first, processors) = parse_list(&cpus);
    let package =
        |cpu: u32| tree.number(&format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"));
    let distances = tree.label(&format!("{path}/distance")).unwrap_or_default();
    let pages = tree.names(&format!("{path}/hugepages")).into_iter().filter_map(|name| {
        let kilobytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let count = |leaf: &str| tree.number(&format!("{path}/hugepages/{name}/{leaf}"));
        Some((kilobytes.checked_mul(1024)?, (count("free_hugepages")?, count("nr_hugepages")?)))
    });
    NumaNode {
        number,
        socket: first.and_then(package),
        cpus,
        processors,
        memory_bytes: tree.text(&format!("{path}/meminfo")).and_then(|text| memory_total(&text)),
        distances: distances.split_whitespace().map_while(|word| word.parse().ok()).collect(),
        huge_pages: pages.collect(),
    }
}

/// Parses `Node 0 MemTotal:       65964584 kB`.
fn memory_total(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let kilobytes: u64 = line.split_once("MemTotal:")?.1.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Returns the first processor of a list like `0-55,112-167`, and the number of processors.
fn parse_list(list: &str) -> (Option<u32>, u64) {
    let mut first = None;
    let mut count = 0_u64;
    for (low, high) in ranges(list) {
        first = first.or(Some(low));
        count += u64::from(high - low) + 1;
    }
    (first, count)
}

/// Returns the first and last processor of each range of a list.
pub(crate) fn ranges(list: &str) -> impl Iterator<Item = (u32, u32)> + '_ {
    list.trim().split(',').filter_map(|part| {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let (low, high) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
        (low <= high).then_some((low, high))
    })
}

/// Whether two nodes are on the same socket.
pub(crate) fn same_socket(nodes: &[NumaNode], left: u32, right: u32) -> bool {
    if left == right {
        return true;
    }
    let find = |number: u32| nodes.iter().position(|node| node.number == number);
    let (Some(from), Some(to)) = (find(left), find(right)) else { return false };
    match (nodes[from].socket, nodes[to].socket) {
        (Some(left), Some(right)) => left == right,
        _ => nodes[from].distances.get(to).is_some_and(|&distance| distance < DISTANCE_OTHER_SOCKET),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_lists() {
        for (list, expected) in [
            ("0-55,112-167", (Some(0), 112)),
            ("3", (Some(3), 1)),
            ("", (None, 0)),
            ("9-2,x-y,,5", (Some(5), 1)),
            ("0-4294967295,0-4294967295", (Some(0), 2 << 32)),
        ] {
            assert_eq!(parse_list(list), expected, "{list}");
        }
        assert_eq!(memory_total("Node 0 MemTotal:  1024 kB\nNode 0 MemFree: 1 kB"), Some(1 << 20));
        assert_eq!(memory_total("MemTotal: 99999999999999999999 kB"), None);
    }
}
