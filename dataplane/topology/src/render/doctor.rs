//! The facts of `kvasir doctor` about links and memory: one line each.

use std::fmt;

use crate::bandwidth::show_gb_s;
use crate::check::{NodeRequirements, check, ports_by_layer};
use crate::distance::Distance;
use crate::host::{GpuDirect, Iommu};
use crate::rail::local_rails;
use crate::rdma::{GidKind, RdmaDevice, RdmaPort};
use crate::topology::{Memory, Topology};
use crate::warning::Severity;

/// Rating of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In use, or as it should be.
    Ok,
    /// Works, but slower than it could.
    Warn,
    /// Absent or unusable; Kvasir runs without it.
    Off,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Rating.
    pub state: State,
    /// Subject, in one or two words.
    pub what: String,
    /// Observation.
    pub found: String,
}

impl fmt::Display for Fact {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Ok => "ok:",
            State::Warn => "warn:",
            State::Off => "off:",
        };
        write!(formatter, "{state:<5} {:<13} {}", self.what, self.found)
    }
}

/// Returns all facts as text, one per line.
#[must_use]
pub fn doctor(topology: &Topology, needs: &NodeRequirements) -> String {
    facts(topology, needs).iter().map(|fact| format!("{fact}\n")).collect()
}

/// Returns all facts, the warnings last.
#[must_use]
pub fn facts(topology: &Topology, needs: &NodeRequirements) -> Vec<Fact> {
    let mut facts = Vec::new();
    let mut add = |state, what: &str, found: String| facts.push(Fact { state, what: what.to_owned(), found });
    numa(topology, &mut add);
    gpus(topology, &mut add);
    rdma(topology, &mut add);
    network(topology, &mut add);
    host(topology, &mut add);
    for warning in check(topology, needs) {
        let state = if warning.code.severity() == Severity::Note { State::Ok } else { State::Warn };
        add(state, &warning.code.to_string(), format!("{}; fix: {}", warning.cause, warning.fix));
    }
    facts
}

fn show<T: fmt::Display>(value: Option<T>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

fn gibibytes(bytes: u64) -> String {
    if bytes < 1 << 30 { format!("{} MiB", bytes >> 20) } else { format!("{} GiB", bytes >> 30) }
}

fn numa(topology: &Topology, add: &mut impl FnMut(State, &str, String)) {
    if topology.numa.is_empty() {
        add(State::Off, "NUMA", "no node is listed; memory is taken as one".to_owned());
    }
    for node in &topology.numa {
        let pages = node
            .huge_pages
            .iter()
            .map(|(size, (free, all))| format!(", {free} of {all} huge pages of {} free", gibibytes(*size)));
        let memory = show(node.memory_bytes.map(gibibytes));
        let found = format!(
            "node {}, socket {}, {} CPUs, {memory}{}",
            node.number,
            show(node.socket),
            node.processors,
            pages.collect::<String>()
        );
        add(State::Ok, "NUMA", found);
    }
}

fn gpus(topology: &Topology, add: &mut impl FnMut(State, &str, String)) {
    if topology.gpus.is_empty() {
        add(State::Off, "GPU", "none; KV lives in host memory".to_owned());
    }
    for (index, gpu) in topology.gpus.iter().enumerate() {
        let Some(device) = topology.pci_device(gpu.address) else { continue };
        let rails = local_rails(topology, Memory::Gpu(gpu.address));
        let nearest = rails
            .iter()
            .filter(|rail| rail.active && rail.distance.is_some())
            .min_by_key(|rail| rail.distance);
        let near = nearest.map_or_else(
            || "no NIC".to_owned(),
            |rail| format!("nearest {} {}", rail.name, rail.distance.map_or("unknown", Distance::name)),
        );
        let (state, direct) = match topology.gpu_direct(gpu) {
            GpuDirect::DmaBuf => (State::Ok, "GPUDirect by dma-buf"),
            GpuDirect::PeerMemory => (State::Ok, "GPUDirect by peer memory"),
            GpuDirect::Unusable(_) => (State::Warn, "no GPUDirect"),
        };
        let found = format!(
            "gpu{index} {}, NUMA {}, {}, {} awake, {near}, {direct}",
            gpu.address,
            show(topology.node_of(gpu.numa_node)),
            device.link,
            show_gb_s(device.link.full_speed_gb_s())
        );
        add(state, "GPU", found);
    }
}

fn rdma(topology: &Topology, add: &mut impl FnMut(State, &str, String)) {
    if topology.rdma.is_empty() {
        add(State::Off, "RDMA", "no device; blocks move by shared memory and TCP".to_owned());
    }
    for device in &topology.rdma {
        for port in &device.ports {
            let state = if port.is_active() { State::Ok } else { State::Off };
            add(state, "RDMA", rdma_port(topology, device, port));
        }
    }
    let counts = ports_by_layer(topology);
    if counts.len() > 1 {
        let counts: Vec<String> = counts.iter().map(|(layer, count)| format!("{count} {layer}")).collect();
        add(State::Ok, "RDMA", format!("active ports: {}", counts.join(", ")));
    }
}

fn rdma_port(topology: &Topology, device: &RdmaDevice, port: &RdmaPort) -> String {
    let rail = local_rails(topology, Memory::Host { numa: None });
    let name = format!("{}:{}", device.name, port.number);
    let rail = rail.into_iter().find(|rail| rail.name == name);
    let layer = port.link_layer.map_or("link layer unknown", crate::rdma::LinkLayer::name);
    let kind = if device.software { ", software" } else { "" };
    let link = device
        .pci
        .and_then(|address| topology.pci_device(address))
        .map(|nic| format!(", {} {}", nic.address, nic.link));
    let address = port.address().map(|gid| {
        let kind = if gid.kind == GidKind::RoceV2 { "RoCE v2 " } else { "" };
        format!(", {kind}{}", gid.address.to_canonical())
    });
    let errors = port.errors.iter().map(|(name, count)| format!(", {name} {count}"));
    let state = if port.is_active() {
        String::new()
    } else {
        format!(", not active ({})", port.physical_state.as_deref().unwrap_or("unknown"))
    };
    format!(
        "{name} {layer}{kind}, {} Gbit/s{}, NUMA {}, {}{}{}{state}{}",
        show(port.rate_gbit_s),
        link.unwrap_or_default(),
        show(topology.node_of(rail.as_ref().and_then(|rail| rail.numa))),
        show_gb_s(rail.and_then(|rail| rail.ceiling_gb_s)),
        port.interface.as_ref().map(|interface| format!(", {interface}")).unwrap_or_default(),
        address.unwrap_or_default(),
        errors.collect::<String>(),
    )
}

fn network(topology: &Topology, add: &mut impl FnMut(State, &str, String)) {
    for interface in topology.interfaces.iter().filter(|interface| interface.pci.is_some()) {
        let state = if interface.is_up() { State::Ok } else { State::Off };
        let speed = interface.speed_mbit_s.map_or_else(
            || "speed unknown".to_owned(),
            |speed| {
                if speed < 1000 { format!("{speed} Mbit/s") } else { format!("{} Gbit/s", speed / 1000) }
            },
        );
        let found = format!(
            "{} {}, {speed}, MTU {}, driver {}, NUMA {}",
            interface.name,
            show(interface.state.as_deref()),
            show(interface.mtu_bytes),
            show(interface.driver.as_deref()),
            show(topology.node_of(interface.numa_node)),
        );
        add(state, "network", found);
    }
    for nvme in &topology.nvme {
        let found = format!(
            "{} {}, NUMA {}",
            nvme.name,
            show(nvme.model.as_deref()),
            show(topology.node_of(nvme.numa_node))
        );
        add(State::Ok, "NVMe", found);
    }
}

fn host(topology: &Topology, add: &mut impl FnMut(State, &str, String)) {
    let host = &topology.host;
    let shared = format!(
        "/dev/shm of {}, directory {}",
        show(host.shared_directory_bytes.map(gibibytes)),
        show(host.shared_directory_id.as_deref())
    );
    add(if host.shared_directory_id.is_some() { State::Ok } else { State::Off }, "shared memory", shared);
    let limit = host
        .memlock_bytes
        .map(|bytes| if bytes == u64::MAX { "unlimited".to_owned() } else { gibibytes(bytes) });
    let exempt = if host.may_lock_any == Some(true) { ", and this process may exceed it" } else { "" };
    add(State::Ok, "memlock", format!("{}{exempt}", show(limit)));
    let iommu = match host.iommu {
        Iommu::Off => "off",
        Iommu::Passthrough => "on, addresses pass unchanged",
        Iommu::Translating => "on, addresses are translated",
        Iommu::Unknown => "unknown",
    };
    add(State::Ok, "IOMMU", iommu.to_owned());
    let buffers = |(receive, send): (Option<u64>, Option<u64>)| {
        format!("{} / {} KiB", show(receive.map(|bytes| bytes >> 10)), show(send.map(|bytes| bytes >> 10)))
    };
    let found = format!(
        "buffers (receive / send) up to {}, asked for {}, {}",
        buffers(host.tcp_buffer_max_bytes),
        buffers(host.socket_buffer_max_bytes),
        show(host.congestion_control.as_deref())
    );
    add(State::Ok, "TCP", found);
    add(State::Ok, "huge pages", format!("transparent: {}", show(host.transparent_huge_pages.as_deref())));
}
