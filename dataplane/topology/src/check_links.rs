//! Checks of ports and PCIe links: causes that slow a NIC down or keep it from a GPU's memory.

use crate::bandwidth::{path_mtu_of_roce, pcie_generation};
use crate::check::warning;
use crate::host::{GpuDirect, Iommu};
use crate::pci::PciDevice;
use crate::rdma::{Gid, GidKind, LinkLayer, PortState, RdmaDevice, RdmaPort};
use crate::topology::Topology;
use crate::warning::{Code, Warning};

pub(crate) fn port_warnings(
    topology: &Topology,
    device: &RdmaDevice,
    port: &RdmaPort,
    found: &mut Vec<Warning>,
) {
    let name = format!("{}:{}", device.name, port.number);
    let interface = port.interface.as_deref().and_then(|name| topology.interface(name));
    let interface_name = port.interface.as_deref().unwrap_or("INTERFACE");
    if !port.is_active() {
        let physical = port.physical_state.as_deref().unwrap_or("unknown");
        let fix = match (port.state, physical, port.link_layer) {
            (Some(PortState::Initialize | PortState::Armed), _, Some(LinkLayer::InfiniBand)) => {
                "start a subnet manager: systemctl start opensm (or on the switch)".to_owned()
            }
            (_, "Disabled", _) => format!("ip link set {interface_name} up"),
            (_, "Polling", _) => "check cable, transceiver and the switch's port".to_owned(),
            _ => format!("ip link set {interface_name} up; check the cable; see ibstat {}", device.name),
        };
        found.push(warning(Code::PortDown, format!("{name} is not active (physical state {physical})"), fix));
        return;
    }
    found.extend(port_rate(topology, device, port, &name));
    if port.link_layer != Some(LinkLayer::Ethernet) {
        return;
    }
    let routable = |kind| move |gid: &&Gid| gid.kind == kind && !gid.is_link_local();
    if !port.gids.iter().any(|gid| routable(GidKind::RoceV2)(&gid)) {
        let cause = if port.gids.iter().any(|gid| gid.kind == GidKind::RoceV2) {
            format!("{name} has only a link-local RoCE v2 address")
        } else {
            format!("{name} has no RoCE v2 address")
        };
        found.push(warning(
            Code::NoRoutableGid,
            cause,
            format!(
                "ip addr add ADDRESS/PREFIX dev \
            {interface_name}; if only v1 remains: echo RoCE v2 into default_roce_mode (rdma_cm configfs)"
            ),
        ));
    }
    if let Some(mtu) = interface.and_then(|interface| interface.mtu_bytes)
        && path_mtu_of_roce(mtu) != Some(4096)
    {
        let path = path_mtu_of_roce(mtu).map_or_else(|| "no".to_owned(), |path| format!("a {path} byte"));
        let cause = format!("{interface_name} has MTU {mtu}, so {name} gets {path} path MTU instead of 4096");
        found.push(warning(
            Code::MtuSmall,
            cause,
            format!("ip link set {interface_name} mtu 9000, on the switch as well"),
        ));
    }
}

fn port_rate(topology: &Topology, device: &RdmaDevice, port: &RdmaPort, name: &str) -> Option<Warning> {
    let rate = port.rate_gbit_s?;
    let fix = "check cable and transceiver; force the speed: ethtool -s INTERFACE speed N, or \
        mlxlink -d DEVICE --speeds";
    // Sysfs does not contain a port's highest rate; cards with the same part number have the same one.
    let twin = |other: &&RdmaDevice| device.board_id.is_some() && other.board_id == device.board_id;
    let twins =
        topology.rdma.iter().filter(twin).flat_map(|device| &device.ports).filter(|port| port.is_active());
    let best = twins.filter_map(|port| port.rate_gbit_s).fold(0.0, f64::max);
    if best > rate {
        let cause = format!("{name} runs at {rate:.0} Gbit/s, others of its card type at {best:.0}");
        return Some(warning(Code::PortSlow, cause, fix));
    }
    let narrow = port.lanes == Some(1) && port.link_layer == Some(LinkLayer::InfiniBand);
    narrow.then(|| warning(Code::PortSlow, format!("{name} runs on one lane ({rate:.0} Gbit/s)"), fix))
}

pub(crate) fn pcie_links(topology: &Topology) -> Vec<Warning> {
    let mut found = Vec::new();
    let nics = topology.rdma.iter().filter_map(|device| Some((device.name.clone(), device.pci?)));
    let gpus = topology.gpus.iter().enumerate().map(|(index, gpu)| (format!("gpu{index}"), gpu.address));
    let mut seen = Vec::new();
    for (name, address) in nics.chain(gpus) {
        let Some(device) = topology.pci_device(address) else { continue };
        if seen.contains(&address) {
            continue;
        }
        seen.push(address);
        let link = device.link;
        // An idle GPU lowers its speed to save power, so only missing lanes count.
        let slow = link.speed_mt_s < link.speed_max_mt_s
            && link.speed_mt_s.is_some()
            && topology.gpu(address).is_none();
        let narrow = link.lanes < link.lanes_max && link.lanes.is_some();
        if slow || narrow {
            found.push(pcie_link(topology, &name, device));
        }
    }
    found
}

fn pcie_link(topology: &Topology, name: &str, device: &PciDevice) -> Warning {
    let show = |speed: Option<u32>, lanes: Option<u32>| {
        let generation =
            speed.and_then(pcie_generation).map_or_else(|| "?".to_owned(), |found| found.to_string());
        format!("gen{generation} x{}", lanes.map_or_else(|| "?".to_owned(), |lanes| lanes.to_string()))
    };
    let link = device.link;
    let now = show(link.speed_mt_s, link.lanes);
    let most = show(link.speed_max_mt_s, link.lanes_max);
    let slot =
        device.parents.last().and_then(|&parent| topology.pci_device(parent)).map(|parent| parent.link);
    let slot_is_full = slot.is_some_and(|slot| {
        slot.speed_max_mt_s.is_some()
            && slot.speed_max_mt_s <= link.speed_mt_s
            && slot.lanes_max <= link.lanes
    });
    let cause = format!("{name} ({}) runs at PCIe {now}, it is capable of {most}", device.address);
    let fix = if slot_is_full {
        format!("the slot gives no more; move the card to a {most} slot")
    } else {
        "reseat the card or its riser; check the slot's speed and bifurcation in the BIOS".to_owned()
    };
    warning(Code::PcieSlow, cause, fix)
}

pub(crate) fn gpu_direct(topology: &Topology) -> Vec<Warning> {
    let mut found = Vec::new();
    let hardware = topology.rdma.iter().filter(|device| !device.software).filter_map(|device| device.pci);
    let nics: Vec<&PciDevice> = hardware.filter_map(|address| topology.pci_device(address)).collect();
    if topology.gpus.is_empty() || nics.is_empty() {
        return found;
    }
    let unusable = topology.gpus.iter().find_map(|gpu| match topology.gpu_direct(gpu) {
        GpuDirect::Unusable(reason) => Some(reason),
        GpuDirect::DmaBuf | GpuDirect::PeerMemory => None,
    });
    if let Some(reason) = unusable {
        let fix = "modprobe nvidia_peermem, or the open kernel modules of the driver on Linux 5.12 or later";
        found.push(warning(Code::GpuDirectUnusable, reason, fix));
    }
    if topology.host.iommu == Iommu::Translating {
        let fix = "boot with iommu=pt (and intel_iommu=on or amd_iommu=on)";
        found.push(warning(Code::IommuTranslates, "IOMMU groups are of type DMA", fix));
    }
    let gpus = topology.gpus.iter().filter_map(|gpu| topology.pci_device(gpu.address));
    let mut bridges: Vec<_> = gpus.chain(nics).flat_map(|device| device.parents.iter().skip(1)).collect();
    bridges.sort();
    bridges.dedup();
    bridges.retain(|&&bridge| {
        topology.pci_device(bridge).is_some_and(|bridge| bridge.acs_redirects == Some(true))
    });
    if let Some(first) = bridges.first() {
        let cause = format!("{} switch ports above GPUs and NICs redirect, {first} the first", bridges.len());
        let fix = format!("setpci -s {first} ECAP_ACS+6.w=0000 (each one, at boot), or ACS off in the BIOS");
        found.push(warning(Code::AcsRedirects, cause, fix));
    }
    found
}
