//! RDMA devices and their ports.
//!
//! Source: /sys/class/infiniband and the kernel's Documentation/ABI/stable/sysfs-class-infiniband. A software
//! device (rxe, siw) has no PCI device of its own and uses that of its network interface.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use crate::pci::{PciAddress, ancestry};
use crate::sysfs::Tree;

const CLASS: &str = "sys/class/infiniband";
const DEVICES_MAX: usize = 64;
const PORTS_MAX: usize = 16;
const GIDS_MAX: usize = 256;

/// Counters that stay zero on a working link. No other counters are read.
const ERROR_COUNTERS: [&str; 10] = [
    "counters/symbol_error",
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/roce_slow_restart",
];

/// One RDMA device.
#[derive(Clone, Debug, PartialEq)]
pub struct RdmaDevice {
    /// Name, like `mlx5_0`.
    pub name: String,
    /// PCI device; for a software device that of its interface.
    pub pci: Option<PciAddress>,
    /// Whether the CPU does the work (Soft-RoCE, Soft-iWARP).
    pub software: bool,
    /// Network interface of a software device.
    pub parent: Option<String>,
    /// NUMA node; `None` when unknown.
    pub numa_node: Option<u32>,
    /// Globally unique number of the device, as the kernel writes it.
    pub node_guid: Option<String>,
    /// Part number: cards with the same one are of the same type and have the same settings.
    pub board_id: Option<String>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// Ports, by number.
    pub ports: Vec<RdmaPort>,
}

/// One port of an RDMA device.
#[derive(Clone, Debug, PartialEq)]
pub struct RdmaPort {
    /// Port number, from 1.
    pub number: u8,
    /// Logical state.
    pub state: Option<PortState>,
    /// Physical state in the kernel's words: `LinkUp`, `Polling`, `Disabled`.
    pub physical_state: Option<String>,
    /// Signalling rate in 10⁹ bit/s.
    pub rate_gbit_s: Option<f64>,
    /// Lanes in use, from the `4X` of the rate.
    pub lanes: Option<u32>,
    /// Link layer.
    pub link_layer: Option<LinkLayer>,
    /// Addresses of the port's table that are set.
    pub gids: Vec<Gid>,
    /// The network interface of the port.
    pub interface: Option<String>,
    /// Error counters that are not zero.
    pub errors: BTreeMap<String, u64>,
}

/// Logical state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// Link up, not yet configured by a subnet manager.
    Initialize,
    /// Configured, not yet carrying data.
    Armed,
    /// Carries data.
    Active,
    /// Any other state number.
    Unknown(u32),
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// RoCE or iWARP.
    Ethernet,
}

impl LinkLayer {
    /// Returns the name as the kernel writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
        }
    }
}

/// One entry of a port's address table (GID table).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the table.
    pub index: u16,
    /// The address; an IPv4 address is mapped into IPv6.
    pub address: Ipv6Addr,
    /// Protocol that the address is used for.
    pub kind: GidKind,
}

/// Protocol that a GID is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RoCE v1 on Ethernet: the kernel has one word for both.
    InfiniBandOrRoceV1,
    /// RoCE v2: UDP, crosses routers.
    RoceV2,
    /// Another type.
    Unknown,
}

impl Gid {
    /// Whether the address is valid only on its own link.
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        self.address.segments()[0] & 0xffc0 == 0xfe80
    }
}

impl RdmaPort {
    /// Whether the port carries data.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == Some(PortState::Active)
    }

    /// Returns the address to connect with: on Ethernet RoCE v2, IPv4 before global IPv6 before link-local.
    #[must_use]
    pub fn address(&self) -> Option<&Gid> {
        match self.link_layer? {
            LinkLayer::InfiniBand => self.gids.first(),
            LinkLayer::Ethernet => {
                let usable = self.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
                usable.min_by_key(|gid| {
                    (gid.is_link_local(), gid.address.to_ipv4_mapped().is_none(), gid.index)
                })
            }
        }
    }
}

pub(crate) fn read_all(tree: &Tree) -> Vec<RdmaDevice> {
    tree.names(CLASS).into_iter().take(DEVICES_MAX).map(|name| read(tree, name)).collect()
}

fn read(tree: &Tree, name: String) -> RdmaDevice {
    let path = format!("{CLASS}/{name}");
    let file = |leaf: &str| format!("{path}/{leaf}");
    let link = tree.link(&path).unwrap_or_default();
    let own = ancestry(&link).1.pop();
    let parent = tree.label(&file("parent"));
    let lent = || {
        tree.link(&format!("sys/class/net/{}", plain(parent.as_deref()?)?))
            .and_then(|link| ancestry(&link).1.pop())
    };
    let ports = tree.names(&file("ports"));
    let ports = ports.into_iter().filter_map(|number| number.parse().ok()).take(PORTS_MAX);
    RdmaDevice {
        pci: own.or_else(lent),
        software: own.is_none() && link.contains("/virtual/"),
        numa_node: tree.numa_node(&file("device/numa_node")),
        node_guid: tree.label(&file("node_guid")),
        board_id: tree.label(&file("board_id")),
        firmware: tree.label(&file("fw_ver")),
        ports: ports.map(|number| read_port(tree, &path, parent.as_deref(), number)).collect(),
        parent,
        name,
    }
}

/// Returns the name if it is a single path component.
fn plain(name: &str) -> Option<&str> {
    (!name.is_empty() && !name.contains('/') && name != "." && name != "..").then_some(name)
}

fn read_port(tree: &Tree, device: &str, parent: Option<&str>, number: u8) -> RdmaPort {
    let file = |leaf: &str| format!("{device}/ports/{number}/{leaf}");
    let rate = tree.label(&file("rate"));
    let lanes = rate.as_deref().and_then(|rate| rate.split_once('(')?.1.split_once('X')?.0.parse().ok());
    let link_layer = match tree.label(&file("link_layer")).as_deref() {
        Some("InfiniBand") => Some(LinkLayer::InfiniBand),
        Some("Ethernet") => Some(LinkLayer::Ethernet),
        _ => None,
    };
    let errors = ERROR_COUNTERS.iter().filter_map(|&name| {
        let count = tree.number::<u64>(&file(name))?;
        let short = name.rsplit('/').next()?;
        (count > 0).then(|| (short.to_owned(), count))
    });
    RdmaPort {
        number,
        state: tree.label(&file("state")).and_then(|state| parse_state(&state)),
        physical_state: tree.label(&file("phys_state")).map(|state| match state.split_once(": ") {
            Some((_, words)) => words.to_owned(),
            None => state,
        }),
        rate_gbit_s: rate.as_deref().and_then(parse_rate),
        lanes,
        link_layer,
        gids: read_gids(tree, &file("gids"), &file("gid_attrs/types")),
        interface: tree.label(&file("gid_attrs/ndevs/0")).or_else(|| parent.map(str::to_owned)).or_else(
            || {
                tree.names(&format!("{device}/device/net"))
                    .into_iter()
                    .nth(usize::from(number.saturating_sub(1)))
            },
        ),
        errors: errors.collect(),
    }
}

/// `4: ACTIVE`
fn parse_state(text: &str) -> Option<PortState> {
    Some(match text.split(':').next()?.trim().parse().ok()? {
        1 => PortState::Down,
        2 => PortState::Initialize,
        3 => PortState::Armed,
        4 => PortState::Active,
        other => PortState::Unknown(other),
    })
}

/// Parses `400 Gb/sec (4X NDR)`; a rate that no link has is rejected.
fn parse_rate(text: &str) -> Option<f64> {
    let rate: f64 = text.split_whitespace().next()?.parse().ok()?;
    (rate > 0.0 && rate <= 100_000.0).then_some(rate)
}

fn read_gids(tree: &Tree, addresses: &str, kinds: &str) -> Vec<Gid> {
    let indices =
        tree.names(addresses).into_iter().filter_map(|name| name.parse::<u16>().ok()).take(GIDS_MAX);
    let read = |index: u16| {
        let address: Ipv6Addr = tree.label(&format!("{addresses}/{index}"))?.parse().ok()?;
        // An entry without an interface identifier is empty; its type cannot be read either.
        let identifier: u128 = address.to_bits() & u128::from(u64::MAX);
        (identifier != 0).then(|| Gid {
            index,
            address,
            kind: match tree.label(&format!("{kinds}/{index}")).as_deref() {
                Some("IB/RoCE v1") => GidKind::InfiniBandOrRoceV1,
                Some("RoCE v2") => GidKind::RoceV2,
                _ => GidKind::Unknown,
            },
        })
    };
    indices.filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_and_rates() {
        assert_eq!(parse_state("4: ACTIVE"), Some(PortState::Active));
        assert_eq!(parse_state("9: NEW"), Some(PortState::Unknown(9)));
        assert_eq!(parse_state("ACTIVE"), None);
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)"), Some(2.5));
        for text in ["", "-1 Gb/sec", "nan", "inf", "1e300 Gb/sec", "Unknown"] {
            assert_eq!(parse_rate(text), None, "{text}");
        }
    }
}
