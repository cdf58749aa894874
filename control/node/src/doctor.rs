//! `kvasir doctor`: what this machine offers, what Kvasir will use of it, and why.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

struct Finding {
    what: &'static str,
    found: String,
    consequence: String,
}

/// Prints one line of finding and one of consequence for each item. Looks only; changes nothing.
pub(crate) fn run() -> Result<ExitCode> {
    println!("kvasir {} on {}\n", env!("CARGO_PKG_VERSION"), kernel());
    for finding in [
        cores(),
        memory(),
        huge_pages(),
        memlock(),
        io_uring(),
        shared_memory(),
        rdma(),
        gpu(),
        ebpf(),
        clock(),
    ] {
        println!("{:<14} {}\n{:<14} → {}", finding.what, finding.found, "", finding.consequence);
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The number behind `name:` in a file like `/proc/meminfo`.
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

fn huge_pages() -> Finding {
    let free = field("/proc/meminfo", "HugePages_Free").unwrap_or(0);
    let size = field("/proc/meminfo", "Hugepagesize").unwrap_or(0) / 1024;
    let consequence = if free > 0 && size == 2 {
        "KV slabs that fit use them".to_owned()
    } else {
        "KV slabs use 4 KiB pages; for 2 MiB ones: sysctl vm.nr_hugepages=N".to_owned()
    };
    Finding { what: "huge pages", found: format!("{free} free, {size} MiB each"), consequence }
}

fn memlock() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    let found = limit.current.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes / 1024));
    let consequence = match limit.current {
        None => "enough to register any slab with a NIC",
        Some(_) => "registering slabs with a NIC may need more (ulimit -l unlimited); nothing needs it yet",
    };
    Finding { what: "memlock", found, consequence: consequence.to_owned() }
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
        Err(error) => (format!("not available: {error}"), "the TCP transport is off; shared memory remains"),
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

fn rdma() -> Finding {
    let devices: Vec<String> = fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect();
    let library = has_library("libibverbs.so.1");
    let found = match (devices.is_empty(), library) {
        (true, false) => "no device, no libibverbs".to_owned(),
        (true, true) => "libibverbs, but no device".to_owned(),
        (false, _) => format!("{} (libibverbs: {})", devices.join(", "), if library { "yes" } else { "no" }),
    };
    Finding {
        what: "RDMA",
        found,
        consequence: "not used: this version has no RDMA transport yet".to_owned(),
    }
}

fn gpu() -> Finding {
    let node = Path::new("/dev/nvidiactl").exists();
    let found = match (node, has_library("libcuda.so.1")) {
        (true, true) => "an NVIDIA driver and libcuda",
        (true, false) => "an NVIDIA driver, but no libcuda",
        (false, true) => "libcuda, but no device",
        (false, false) => "none",
    };
    let consequence = "not used: the reference engine computes on the CPU, KV lives in host memory";
    Finding { what: "GPU", found: found.to_owned(), consequence: consequence.to_owned() }
}

/// Whether the loader finds a library; it is looked up, its initialisers run, and it is unloaded again.
fn has_library(name: &str) -> bool {
    // SAFETY: the initialisers of libibverbs and libcuda only set up their own state and may run in any process.
    let library = unsafe { libloading::Library::new(name) };
    library.is_ok()
}

fn ebpf() -> Finding {
    const CAP_NET_ADMIN: u64 = 12;
    const CAP_BPF: u64 = 39;
    let btf = Path::new("/sys/kernel/btf/vmlinux").exists();
    let status = read("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    let has = |capability: u64| effective >> capability & 1 == 1;
    let found = format!(
        "kernel types: {}, CAP_BPF: {}, CAP_NET_ADMIN: {}",
        yes(btf),
        yes(has(CAP_BPF)),
        yes(has(CAP_NET_ADMIN))
    );
    Finding { what: "eBPF", found, consequence: "not used: this version has no eBPF programs yet".to_owned() }
}

fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

fn clock() -> Finding {
    let source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource").unwrap_or_default();
    let consequence = match source.as_str() {
        "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page" => "reading the time needs no system call",
        _ => "reading the time may need a system call; latencies below 1 us are blurred",
    };
    Finding { what: "clock", found: source, consequence: consequence.to_owned() }
}
