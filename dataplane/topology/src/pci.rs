//! PCI devices: identity, link speed and width, and the bridges above them.
//!
//! Source: /sys/bus/pci/devices and the kernel's Documentation/ABI/testing/sysfs-bus-pci. A device's position
//! in the tree is the text of its link, `../../../devices/pci0000:15/0000:15:01.0/…/0000:1b:00.0`: the host
//! bridge, then every bridge on the way down.

use std::fmt;
use std::str::FromStr;

use crate::bandwidth::{pcie_gb_s, pcie_generation};
use crate::pci_config;
use crate::sysfs::Tree;

/// Largest number of bridges above one device that are followed; hardware has about eight.
const DEPTH_MAX: usize = 32;

/// PCI address: domain, bus, device and function. Written `0000:17:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Segment group; above 0xffff for volumes behind Intel VMD.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = ();

    /// Also accepts the short form without the domain, `17:00.0`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let hex = |part: &str, digits: std::ops::RangeInclusive<usize>| {
            let plain = digits.contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            if plain { u32::from_str_radix(part, 16).map_err(|_| ()) } else { Err(()) }
        };
        let (front, function) = text.rsplit_once('.').ok_or(())?;
        let (front, device) = front.rsplit_once(':').ok_or(())?;
        let (domain, bus) = front.rsplit_once(':').unwrap_or(("0000", front));
        let address = Self {
            domain: hex(domain, 4..=8)?,
            bus: u8::try_from(hex(bus, 2..=2)?).map_err(|_| ())?,
            device: u8::try_from(hex(device, 2..=2)?).map_err(|_| ())?,
            function: u8::try_from(hex(function, 1..=1)?).map_err(|_| ())?,
        };
        if address.device < 32 && address.function < 8 { Ok(address) } else { Err(()) }
    }
}

/// Speed and width of the link above a device, current and maximal. Speeds in 10⁶ transfers per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciLink {
    /// Current speed.
    pub speed_mt_s: Option<u32>,
    /// Largest speed of the device.
    pub speed_max_mt_s: Option<u32>,
    /// Lanes in use.
    pub lanes: Option<u32>,
    /// Lanes of the device.
    pub lanes_max: Option<u32>,
}

impl PciLink {
    /// Returns the current bandwidth of one direction, in 10⁹ byte/s.
    #[must_use]
    pub fn gb_s(&self) -> Option<f64> {
        pcie_gb_s(self.speed_mt_s?, self.lanes?)
    }

    /// Returns the bandwidth of one direction at the device's full speed over the lanes in use, in 10⁹
    /// byte/s. An idle GPU lowers its speed to save power and reaches this one under load.
    #[must_use]
    pub fn full_speed_gb_s(&self) -> Option<f64> {
        pcie_gb_s(self.speed_max_mt_s.or(self.speed_mt_s)?, self.lanes?)
    }
}

impl fmt::Display for PciLink {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.speed_mt_s.and_then(pcie_generation), self.lanes) {
            (Some(generation), Some(lanes)) => write!(formatter, "gen{generation} x{lanes}"),
            _ => formatter.write_str("link unknown"),
        }
    }
}

/// One PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// PCI address.
    pub address: PciAddress,
    /// Class, subclass and programming interface: `0x030200` is a GPU without a display.
    pub class: Option<u32>,
    /// Vendor id.
    pub vendor: Option<u16>,
    /// Device id.
    pub device: Option<u16>,
    /// NUMA node; `None` when the firmware does not tell it.
    pub numa_node: Option<u32>,
    /// Link towards the root.
    pub link: PciLink,
    /// Host bridge, like `pci0000:15`.
    pub root: Option<String>,
    /// Bridges above the device, the root port first.
    pub parents: Vec<PciAddress>,
    /// Name of the kernel driver.
    pub driver: Option<String>,
    /// Number of the IOMMU group.
    pub iommu_group: Option<u32>,
    /// For a bridge: whether its Access Control Services send traffic between devices below it up to the
    /// root. Readable by root only; `None` otherwise.
    pub acs_redirects: Option<bool>,
}

impl PciDevice {
    /// Returns class and subclass, like `0x0302`.
    #[must_use]
    pub fn class_code(&self) -> Option<u32> {
        self.class.map(|class| class >> 8)
    }

    /// Whether the device is a network device whose driver family can do RDMA.
    #[must_use]
    pub fn can_rdma(&self) -> bool {
        let network = self.class.is_some_and(|class| class >> 16 == 0x02);
        let driver = self.driver.as_deref().unwrap_or_default();
        match self.vendor {
            Some(0x15b3 | 0x1425) => network,
            Some(0x1d0f) => self.device.is_some_and(|device| device & 0xfff0 == 0xefa0),
            Some(0x8086) => network && driver == "ice",
            Some(0x14e4) => network && driver == "bnxt_en",
            _ => false,
        }
    }
}

pub(crate) fn read_all(tree: &Tree) -> Vec<PciDevice> {
    const DEVICES: &str = "sys/bus/pci/devices";
    let mut devices: Vec<PciDevice> = tree
        .names(DEVICES)
        .into_iter()
        .filter_map(|name| Some(read(tree, &format!("{DEVICES}/{name}"), name.parse().ok()?)))
        .collect();
    devices.sort_by_key(|device| device.address);
    devices
}

fn read(tree: &Tree, path: &str, address: PciAddress) -> PciDevice {
    let file = |name: &str| format!("{path}/{name}");
    let id = |name: &str| tree.hex(&file(name)).and_then(|id| u16::try_from(id).ok());
    let (root, mut parents) = tree.link(path).map(|link| ancestry(&link)).unwrap_or_default();
    // The last address of the link must be the device itself, else the parents are not trusted.
    let trusted = parents.pop() == Some(address) && !parents.contains(&address);
    let class = tree.hex(&file("class"));
    let bridge = class.is_some_and(|class| class >> 8 == 0x0604);
    PciDevice {
        address,
        class,
        vendor: id("vendor"),
        device: id("device"),
        numa_node: tree.numa_node(&file("numa_node")),
        link: read_link(tree, path),
        root: root.filter(|_| trusted),
        parents: if trusted { parents } else { Vec::new() },
        driver: tree.link_name(&file("driver")),
        iommu_group: tree.link_name(&file("iommu_group")).and_then(|group| group.parse().ok()),
        acs_redirects: if bridge { pci_config::acs_redirects(tree, path) } else { None },
    }
}

fn read_link(tree: &Tree, path: &str) -> PciLink {
    // "32.0 GT/s PCIe", "Unknown"; the width of a link that is down is 0 or 255.
    let speed = |name: &str| {
        let label = tree.label(&format!("{path}/{name}"))?;
        let gigatransfers: f64 = label.split_whitespace().next()?.parse().ok()?;
        let speed = (gigatransfers * 1000.0).round() as u32;
        pcie_generation(speed).map(|_| speed)
    };
    let lanes = |name: &str| tree.number(&format!("{path}/{name}")).filter(|lanes| (1..=32).contains(lanes));
    PciLink {
        speed_mt_s: speed("current_link_speed"),
        speed_max_mt_s: speed("max_link_speed"),
        lanes: lanes("current_link_width"),
        lanes_max: lanes("max_link_width"),
    }
}

/// Returns the host bridge and the PCI addresses in the text of a link, from the top.
pub(crate) fn ancestry(link: &str) -> (Option<String>, Vec<PciAddress>) {
    let mut root = None;
    let mut addresses = Vec::new();
    for part in link.split('/') {
        if let Some(bus) = part.strip_prefix("pci")
            && bus.len() <= 16
            && bus.contains(':')
            && bus.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':')
        {
            // VMD nests a second host bridge in the first one; the inner one counts.
            root = Some(part.to_owned());
            addresses.clear();
        } else if let Ok(address) = part.parse()
            && addresses.len() <= DEPTH_MAX
        {
            addresses.push(address);
        }
    }
    (root, addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_alike() {
        for text in ["0000:17:00.0", "10000:e1:1f.7"] {
            assert_eq!(text.parse::<PciAddress>().map(|address| address.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("17:00.0".parse::<PciAddress>(), "0000:17:00.0".parse());
        for text in
            ["", "0", "17:00", "0000:17:20.0", "0000:17:00.8", "0000:+7:00.0", "0000:170:00.0", "é:é:é.é"]
        {
            assert_eq!(text.parse::<PciAddress>(), Err(()), "{text}");
        }
    }

    #[test]
    fn ancestry_takes_the_innermost_host_bridge() {
        let (root, chain) = ancestry(
            "../../../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0/10000:e1:00.0/nvme/nvme0",
        );
        assert_eq!(root.as_deref(), Some("pci10000:e0"));
        assert_eq!(chain.len(), 2);
        assert_eq!(ancestry("../../devices/virtual/net/lo"), (None, Vec::new()));
    }
}
