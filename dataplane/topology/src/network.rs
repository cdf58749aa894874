//! Network interfaces, their directly connected subnets, and the settings of TCP.
//!
//! Source: /sys/class/net (Documentation/ABI/testing/sysfs-class-net), /proc/net/route, /proc/sys/net
//! (Documentation/networking/ip-sysctl.rst).

use std::net::Ipv4Addr;

use crate::pci::{PciAddress, ancestry};
use crate::sysfs::Tree;

const CLASS: &str = "sys/class/net";
const INTERFACES_MAX: usize = 1024;
const ROUTES_MAX: usize = 4096;

/// One network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Speed in 10⁶ bit/s; `None` for a virtual interface or one without a link.
    pub speed_mbit_s: Option<u32>,
    /// Largest packet (MTU) in bytes.
    pub mtu_bytes: Option<u32>,
    /// Operational state: `up`, `down`, `unknown`.
    pub state: Option<String>,
    /// NUMA node; `None` when unknown.
    pub numa_node: Option<u32>,
    /// Name of the kernel driver.
    pub driver: Option<String>,
    /// PCI device of the interface, also through virtio.
    pub pci: Option<PciAddress>,
    /// Reverse-path filter in effect (the larger of the values of `all` and of the interface): 0 off, 1
    /// strict, 2 loose.
    pub reverse_path_filter: Option<u32>,
    /// Directly connected IPv4 networks.
    pub subnets: Vec<Subnet>,
}

impl Interface {
    /// Whether the kernel reports the interface as up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.state.as_deref() == Some("up")
    }
}

/// An IPv4 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// First address of the network.
    pub network: Ipv4Addr,
    /// Length of the prefix in bits.
    pub prefix_bits: u8,
}

impl Subnet {
    /// Whether the network contains an address.
    #[must_use]
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix_bits.min(32))).unwrap_or(0);
        address.to_bits() & mask == self.network.to_bits() & mask
    }
}

pub(crate) fn read_all(tree: &Tree) -> Vec<Interface> {
    let routes = tree.text("proc/net/route").map(|text| parse_routes(&text)).unwrap_or_default();
    let filter = |name: &str| tree.number::<u32>(&format!("proc/sys/net/ipv4/conf/{name}/rp_filter"));
    let all = filter("all");
    let read = |name: String| {
        let file = |leaf: &str| format!("{CLASS}/{name}/{leaf}");
        Interface {
            // The kernel reports -1, or refuses the read, where there is no speed.
            speed_mbit_s: tree
                .number::<u32>(&file("speed"))
                .filter(|&speed| speed > 0 && speed < 100_000_000),
            mtu_bytes: tree.number(&file("mtu")),
            state: tree.label(&file("operstate")),
            numa_node: tree.numa_node(&file("device/numa_node")),
            driver: tree.link_name(&file("device/driver")),
            pci: tree.link(&format!("{CLASS}/{name}")).and_then(|link| ancestry(&link).1.pop()),
            reverse_path_filter: filter(&name).max(all),
            subnets: routes
                .iter()
                .filter(|(interface, _)| *interface == name)
                .map(|(_, subnet)| *subnet)
                .collect(),
            name,
        }
    };
    tree.names(CLASS)
        .into_iter()
        .take(INTERFACES_MAX)
        .filter(|name| name != "bonding_masters")
        .map(read)
        .collect()
}

/// Returns the routes without a gateway. Columns: interface, destination, gateway, flags, …, mask; addresses
/// in hexadecimal with the first octet last.
fn parse_routes(text: &str) -> Vec<(String, Subnet)> {
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().take(8).collect();
        let number = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok().map(u32::swap_bytes);
        let (network, gateway, mask) = (number(1)?, number(2)?, number(7)?);
        (gateway == 0 && mask != 0).then(|| {
            let prefix_bits = mask.leading_ones() as u8;
            (fields[0].to_owned(), Subnet { network: Ipv4Addr::from_bits(network), prefix_bits })
        })
    };
    text.lines().skip(1).take(ROUTES_MAX).filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connected_routes_give_subnets() {
        let text = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
            eth0\t00000000\t010010AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
            eth0\t000010AC\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
            short\t12\nbad\tzz\tzz\tzz\t0\t0\t0\tzz\n";
        let routes = parse_routes(text);
        assert_eq!(
            routes,
            [("eth0".to_owned(), Subnet { network: Ipv4Addr::new(172, 16, 0, 0), prefix_bits: 24 })]
        );
        assert!(routes[0].1.contains(Ipv4Addr::new(172, 16, 0, 9)));
        assert!(!routes[0].1.contains(Ipv4Addr::new(172, 16, 1, 9)));
        assert!(Subnet { network: Ipv4Addr::UNSPECIFIED, prefix_bits: 0 }.contains(Ipv4Addr::BROADCAST));
    }
}
