//! `kvasir doctor`: shows what this machine offers, which parts Kvasir will use, and the reasons.

mod disk;
mod gpu;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use control_config::Settings;
use dataplane_rails::{NearestPorts, nearest_ports, parse_near};
use dataplane_topology::{Memory, Transports, render};
use dataplane_verbs::{Device, Library};

use crate::path_command;

pub(crate) use disk::{bytes_on_device_of, existing, held_on_device_of, is_block_device};

struct Finding {
    what: &'static str,
    found: String,
    consequence: String,
}

/// Arguments of `kvasir doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// The configuration file. Without a file, the defaults apply.
    #[arg(long, env = "KVASIR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the description of this node for other nodes, for `kvasir explain-path --node`.
    #[arg(long)]
    describe: bool,
    /// Draw the machine: sockets, switches, GPUs and NICs.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Prints one line of finding and one of consequence for each item, then the links and memory with their
/// problems. Nothing is changed.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let settings = path_command::settings(args.config.as_deref())?;
    if args.describe {
        print!("{}", path_command::describe(&settings));
        return Ok(ExitCode::SUCCESS);
    }
    println!("kvasir {} on {}\n", env!("CARGO_PKG_VERSION"), kernel());
    for finding in [
        cores(),
        memory(),
        io_uring(),
        shared_memory(),
        rdma(&settings),
        disk::disk(&settings),
        gpu::gpu(),
        clock(),
    ] {
        println!("{:<14} {}\n{:<14} → {}", finding.what, finding.found, "", finding.consequence);
    }
    println!("\nlinks and memory");
    let topology = path_command::topology(&settings);
    print!("{}", render::doctor(&topology, &path_command::needs(&settings)));
    println!("\nprograms in the kernel");
    for line in dataplane_ebpf::probe() {
        println!("{line}");
    }
    if let Some(file) = &args.svg {
        let (here, needs) = ("host".parse()?, path_command::needs(&settings));
        let drawn = render::explain(&topology, &[], &here, &here, Transports::default(), needs)?;
        std::fs::write(file, drawn.svg).with_context(|| format!("{}", file.display()))?;
        println!("\ndrawn in {}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Returns the number after `name:` in a file like `/proc/meminfo`.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = read(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn kernel() -> String {
    read("/proc/sys/kernel/osrelease")
        .map_or_else(|| "an unknown kernel".to_owned(), |release| format!("Linux {release}"))
}

fn cores() -> Finding {
    let cores = crate::process::available_cores();
    let consequence = if cores >= 6 {
        "gateway and workers of `serve` get cores of their own".to_owned()
    } else {
        "`serve` shares the cores among its processes (own cores from 6 on)".to_owned()
    };
    let avx = if std::arch::is_x86_feature_detected!("avx512f") {
        "AVX-512"
    } else if std::arch::is_x86_feature_detected!("avx2") {
        "AVX2"
    } else {
        "no AVX2"
    };
    Finding { what: "CPU", found: format!("{cores} cores, {avx}"), consequence }
}

fn memory() -> Finding {
    let total = field("/proc/meminfo", "MemTotal").unwrap_or(0) >> 20;
    let free = field("/proc/meminfo", "MemAvailable").unwrap_or(0) >> 20;
    Finding {
        what: "memory",
        found: format!("{free} GiB of {total} GiB available"),
        consequence: "see the memory plan that `serve` prints".to_owned(),
    }
}

fn io_uring() -> Finding {
    let (found, consequence) = match io_uring::IoUring::new(8) {
        Ok(ring) => {
            let mut probe = io_uring::Probe::new();
            let probed = ring.submitter().register_probe(&mut probe).is_ok();
            let has = |name, code| {
                if probed && probe.is_supported(code) { format!(" {name}") } else { String::new() }
            };
            let features = [
                has("sendmsg", io_uring::opcode::SendMsg::CODE),
                has("send_zc", io_uring::opcode::SendZc::CODE),
                has("recv_multishot", io_uring::opcode::RecvMulti::CODE),
                has("uring_cmd", io_uring::opcode::UringCmd16::CODE),
            ];
            (format!("works:{}", features.concat()), "the TCP transport runs on it")
        }
        Err(error) => (format!("not available: {error}"), "the TCP transport is off"),
    };
    Finding { what: "io_uring", found, consequence: consequence.to_owned() }
}

fn shared_memory() -> Finding {
    let made = rustix::fs::memfd_create("kvasir-doctor", rustix::fs::MemfdFlags::ALLOW_SEALING);
    let (found, consequence) = match made {
        Ok(_) => ("sealed memfd works".to_owned(), "workers on this host move blocks through shared memory"),
        Err(errno) => (format!("memfd_create: {errno}"), "workers cannot start: KV slabs need it"),
    };
    Finding { what: "shared memory", found, consequence: consequence.to_owned() }
}

fn rdma(settings: &Settings) -> Finding {
    let devices = Library::load().and_then(|library| Device::names(&library));
    let without = "blocks move by shared memory and TCP".to_owned();
    let (found, consequence) = match devices {
        Ok(names) if !names.is_empty() => {
            let reached = match settings.rdma.listen.ip().is_loopback() {
                true => "rdma.listen is a loopback address: other hosts cannot connect",
                false => "workers on other hosts get their blocks over it",
            };
            (
                format!("libibverbs with {}", names.join(", ")),
                format!("{reached}; {}", chosen(settings, &names)),
            )
        }
        Ok(_) => ("libibverbs, but no device".to_owned(), without),
        Err(error) => (error.to_string(), without),
    };
    Finding { what: "RDMA", found, consequence }
}

/// Returns the ports that a worker started here would use, and the reasons why other ports are not used.
fn chosen(settings: &Settings, names: &[String]) -> String {
    if !settings.rdma.devices.is_empty() {
        return format!("used: {} (rdma.devices)", settings.rdma.devices.join(", "));
    }
    let nearest = parse_near(&settings.rdma.near)
        .map_err(|error| error.to_string())
        .and_then(|near| nearest_ports(near.as_ref(), names).map_err(|error| error.to_string()));
    let NearestPorts { memory, ports, excluded } = match nearest {
        Ok(nearest) if nearest.ports.is_empty() => {
            return format!("used: all, since none is known to be near to {}", words(nearest.memory));
        }
        Ok(nearest) => nearest,
        Err(error) => return error,
    };
    let port = |(device, port): &(String, Option<u8>)| match port {
        Some(port) => format!("{device} port {port}"),
        None => device.clone(),
    };
    let used: Vec<String> = ports.iter().map(port).collect();
    let others = excluded.iter().map(|excluded| format!("; not {}: {}", excluded.rail, excluded.reason));
    format!("used: {}, nearest to {}{}", used.join(", "), words(memory), others.collect::<String>())
}

fn words(memory: Memory) -> String {
    match memory {
        Memory::Gpu(address) => format!("GPU {address}"),
        Memory::Host { numa: Some(node) } => format!("NUMA node {node}"),
        Memory::Host { numa: None } => "host memory".to_owned(),
    }
}

fn clock() -> Finding {
    let source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource").unwrap_or_default();
    let consequence = match source.as_str() {
        "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page" => "reading the time needs no system call",
        _ => "reading the time may need a system call; latencies below 1 us are blurred",
    };
    Finding { what: "clock", found: source, consequence: consequence.to_owned() }
}
