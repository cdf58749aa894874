//! Each warning is raised by the machine that deserves it and by no healthy one.

use dataplane_topology::{
    Code, Memory, NodeDescription, NodeRequirements, Request, Transports, Warning, check, choose,
};

use crate::fixtures::{Machine, dgx, plain_vm, soft_roce, two_rails, wrong_socket};

const HOST: Memory = Memory::Host { numa: None };

fn codes(warnings: &[Warning]) -> Vec<Code> {
    warnings.iter().map(|warning| warning.code).collect()
}

fn acs_config() -> Vec<u8> {
    let mut config = vec![0; 4096];
    config[0x100..0x104].copy_from_slice(&(0x000d_u32 | 1 << 16).to_le_bytes());
    config[0x106] = 0x1d;
    config
}

/// A machine, what breaks it, and what must then be found.
type Case = (Code, fn() -> Machine, fn(&Machine));

fn healthy() -> Machine {
    dgx("a")
}

const NODE_CASES: [Case; 16] = [
    (Code::PortDown, healthy, |machine| {
        machine.file("sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN");
        machine.file("sys/class/infiniband/mlx5_3/ports/1/phys_state", "3: Disabled");
    }),
    (Code::PortSlow, healthy, |machine| {
        machine.file("sys/class/infiniband/mlx5_3/ports/1/rate", "200 Gb/sec (2X NDR)");
    }),
    (Code::PortSlow, healthy, |machine| {
        for number in 0..8 {
            machine.file(&format!("sys/class/infiniband/mlx5_{number}/ports/1/rate"), "100 Gb/sec (1X NDR)");
        }
    }),
    (Code::PcieSlow, healthy, |machine| {
        machine.file("sys/bus/pci/devices/0000:16:00.0/current_link_speed", "8.0 GT/s PCIe")
    }),
    (Code::PcieSlow, healthy, |machine| {
        machine.file("sys/bus/pci/devices/0000:15:00.0/current_link_width", "8")
    }),
    (Code::NoRoutableGid, two_rails, |machine| {
        for index in [1, 3] {
            machine
                .file(&format!("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/{index}"), "IB/RoCE v1");
        }
    }),
    (Code::MtuSmall, two_rails, |machine| machine.file("sys/class/net/ens0/mtu", "1500")),
    (Code::GpuDirectUnusable, healthy, |machine| {
        machine.remove("sys/module/nvidia_peermem");
        machine.file("proc/sys/kernel/osrelease", "5.4.0-150-generic");
    }),
    (Code::MemlockSmall, healthy, |machine| {
        machine.file(
            "proc/self/limits",
            "Max locked memory         8388608              8388608              bytes\n",
        );
    }),
    (Code::VerbsNotLoaded, healthy, |machine| machine.remove("sys/module/ib_uverbs")),
    (Code::IommuTranslates, healthy, |machine| machine.file("sys/kernel/iommu_groups/7/type", "DMA-FQ")),
    (Code::AcsRedirects, healthy, |machine| {
        machine.file("sys/bus/pci/devices/0000:14:00.0/config", acs_config())
    }),
    (Code::HugePagesMissing, two_rails, |machine| {
        machine.file("sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "511");
    }),
    (Code::ReversePathStrict, two_rails, |machine| {
        machine.file("proc/sys/net/ipv4/conf/ens1/rp_filter", "1")
    }),
    (Code::TcpBuffersSmall, two_rails, |machine| {
        machine.file("proc/sys/net/ipv4/tcp_rmem", "4096 131072 6291456")
    }),
    (Code::NumaUnknown, wrong_socket, |machine| {
        machine.file("sys/bus/pci/devices/0000:91:00.0/numa_node", "-1")
    }),
];

#[test]
fn each_fault_of_a_node_is_found_and_nothing_else() {
    for (index, (code, build, break_it)) in NODE_CASES.into_iter().enumerate() {
        let machine = build();
        assert_eq!(codes(&check(&machine.read(), &NodeRequirements::default())), [], "case {index}: healthy");
        break_it(&machine);
        let found = check(&machine.read(), &NodeRequirements::default());
        let mut found_codes = codes(&found);
        found_codes.dedup();
        assert_eq!(found_codes, [code], "case {index}: {found:?}");
        assert!(!found[0].fix.is_empty() && !found[0].cause.is_empty());
        assert_eq!(found[0].to_string().split(' ').next(), Some(code.to_string().as_str()));
    }
}

#[test]
fn a_card_without_its_driver_is_noticed() {
    let machine = two_rails();
    machine.remove("sys/class/infiniband");
    assert_eq!(codes(&check(&machine.read(), &NodeRequirements::default())), [Code::VerbsNotLoaded]);
}

#[test]
fn soft_roce_is_noted() {
    assert_eq!(codes(&check(&soft_roce().read(), &NodeRequirements::default())), [Code::SoftwareRdma]);
    assert_eq!(codes(&check(&plain_vm().read(), &NodeRequirements::default())), []);
}

#[test]
fn who_may_lock_any_memory_is_not_warned() {
    let machine = dgx("a");
    machine.file("proc/self/limits", "Max locked memory         65536  65536  bytes\n");
    machine.file("proc/self/status", "CapEff:\t0000000000004000\n");
    assert_eq!(codes(&check(&machine.read(), &NodeRequirements::default())), []);
}

/// Warnings that only a decision shows.
fn pair(local: &Machine, remote: &NodeDescription, source: Memory) -> Vec<Code> {
    let request = Request {
        source,
        target: HOST,
        transports: Transports::default(),
        needs: NodeRequirements::default(),
    };
    codes(&choose(&local.read(), remote, &request).warnings)
}

fn described(machine: &Machine, boot_id: &str) -> NodeDescription {
    let description = NodeDescription::of(&machine.read(), vec!["10.0.0.2:7001".to_owned()]);
    NodeDescription { boot_id: Some(boot_id.to_owned()), ..description }
}

#[test]
fn pairs_show_what_nodes_do_not() {
    let far = wrong_socket();
    let gpu = Memory::Gpu(far.read().gpus[0].address);
    let there = described(&far, "other");
    assert_eq!(pair(&far, &there, gpu), [Code::GpuFar]);
    assert_eq!(pair(&far, &there, Memory::Host { numa: Some(0) }), [Code::MemoryFar]);
    assert_eq!(pair(&far, &there, Memory::Host { numa: Some(1) }), []);

    let rails = two_rails();
    let there = described(&rails, "other");
    assert_eq!(pair(&rails, &there, HOST), []);
    let mut apart = there.clone();
    apart.rails.clear();
    apart.rails = described(&dgx("x"), "other").rails;
    apart.rails.truncate(8);
    assert_eq!(pair(&rails, &apart, HOST), [Code::NoCommonFabric]);

    let mut container = described(&rails, "two-rails");
    container.shared_directory_id = Some("0:99:/".to_owned());
    assert_eq!(pair(&rails, &container, HOST), [Code::SharedDirectoryDiffers]);

    let routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
        ens0\t0000010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
        ens1\t0000020A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
    rails.file("proc/net/route", routes);
    rails.file("sys/class/infiniband/mlx5_1/ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a02:0002");
    assert_eq!(pair(&rails, &described(&rails, "other"), HOST), [Code::RailsDiffer]);
}

#[test]
fn codes_are_distinct_and_all_are_tested() {
    let mut numbers: Vec<u8> = Code::ALL.iter().map(|&code| code as u8).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=20).collect::<Vec<u8>>());
    assert!(Code::ALL.iter().all(|code| code.doc().ends_with('.')));
    assert_eq!(Code::PortDown.to_string(), "KV-NET-01");
    let elsewhere = [
        Code::GpuFar,
        Code::MemoryFar,
        Code::NoCommonFabric,
        Code::SharedDirectoryDiffers,
        Code::RailsDiffer,
        Code::SoftwareRdma,
    ];
    for code in Code::ALL {
        assert!(
            NODE_CASES.iter().any(|case| case.0 == *code) || elsewhere.contains(code),
            "{code} has no test"
        );
    }
}
