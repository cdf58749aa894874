//! The path that is chosen between fixtures, and the reasons that are given.

use dataplane_topology::render::explain;
use dataplane_topology::{
    Decision, Memory, NodeDescription, NodeRequirements, Request, Topology, Transport, Transports, choose,
    select_local, select_remote,
};

use crate::fixtures::{Machine, dgx, infiniband, plain_vm, soft_roce, two_rails, wrong_socket};

fn describe(topology: &Topology, name: &str) -> NodeDescription {
    let mut description = NodeDescription::of(topology, vec!["10.0.0.9:7001".to_owned()]);
    description.hostname = name.to_owned();
    // As a peer gets it: through the text form.
    NodeDescription::parse(description.encode().as_bytes()).expect("own text")
}

fn decide(local: &Topology, remote: &NodeDescription, source: Memory, target: Memory) -> Decision {
    choose(
        local,
        remote,
        &Request { source, target, transports: Transports::default(), needs: NodeRequirements::default() },
    )
}

fn names(decision: &Decision) -> Vec<String> {
    decision.rails.iter().map(|pair| format!("{}>{}", pair.local.name, pair.remote.name)).collect()
}

const HOST: Memory = Memory::Host { numa: None };

#[test]
fn a_gpu_gets_the_rail_beside_it() {
    let here = dgx("a").read();
    let there = describe(&dgx("b").read(), "node2");
    let decision =
        decide(&here, &there, Memory::Gpu(here.gpus[0].address), Memory::Gpu(here.gpus[6].address));
    assert_eq!(decision.transport, Some(Transport::Rdma));
    assert_eq!(names(&decision), ["mlx5_0:1>mlx5_6:1"]);
    assert!(!decision.staged);
    // A rail of 49.7 GB/s and a GPU link of 63.0 GB/s.
    assert_eq!(decision.limited_by, "the rails");
    assert!((decision.expected_gb_s.expect("known") - 49.68).abs() < 0.1, "{:?}", decision.expected_gb_s);
    assert_eq!(decision.warnings, []);
    let excluded: Vec<&str> = decision.excluded.iter().map(|exclusion| exclusion.rail.as_str()).collect();
    assert_eq!(excluded.len(), 9, "{excluded:?}");
    let reason = |rail: &str| {
        decision
            .excluded
            .iter()
            .find(|exclusion| exclusion.rail == rail)
            .map(|exclusion| exclusion.reason.as_str())
    };
    assert_eq!(reason("mlx5_1:1"), Some("PXB: further than others (PIX)"));
    assert_eq!(reason("mlx5_4:1"), Some("SYS: further than others (PIX)"));
    assert_eq!(reason("mlx5_8:1"), Some("PHB: further than others (PIX)"));
}

fn rails_of(topology: &Topology, gpu: usize) -> Vec<String> {
    let (rails, _) = select_local(topology, Memory::Gpu(topology.gpus[gpu].address));
    rails.into_iter().map(|rail| rail.name).collect()
}

#[test]
fn each_gpu_of_a_dgx_has_a_rail_of_its_own() {
    let topology = dgx("a").read();
    assert_eq!(topology.gpus.len(), 8);
    for gpu in 0..8 {
        assert_eq!(rails_of(&topology, gpu), [format!("mlx5_{gpu}:1")]);
        // The same selection from the node's description.
        let described = describe(&topology, "a");
        let (rails, _) = select_remote(&described, Memory::Gpu(topology.gpus[gpu].address));
        assert_eq!(
            rails.iter().map(|rail| rail.name.as_str()).collect::<Vec<_>>(),
            [format!("mlx5_{gpu}:1")]
        );
    }
}

#[test]
fn with_a_dead_nic_a_gpu_takes_the_next_nearest_and_nobody_elses_changes() {
    let machine = dgx("a");
    machine.file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    let topology = machine.read();
    assert_eq!(rails_of(&topology, 0), ["mlx5_1:1"], "over the next switch of its host bridge");
    for gpu in 1..8 {
        assert_eq!(rails_of(&topology, gpu), [format!("mlx5_{gpu}:1")]);
    }
    let transports = Transports { shared_memory: false, ..Transports::default() };
    let (from, to) = ("gpu0".parse().expect("a place"), "node2:gpu3".parse().expect("a place"));
    let there = describe(&dgx("b").read(), "node2");
    let explained = explain(&topology, &[there], &from, &to, transports, NodeRequirements::default())
        .expect("both are there");
    let expected = [
        "rail mlx5_1:1 PXB 49.7 GB/s → mlx5_3:1 PIX",
        "not used mlx5_0:1: the port is not active",
        "not used mlx5_4:1: SYS: further than others (PXB)",
    ];
    for line in expected {
        assert!(explained.text.contains(line), "no {line:?} in {}", explained.text);
    }
}

#[test]
fn gpus_beside_the_same_nics_share_them() {
    // (NICs and GPUs under one switch, the NICs of each GPU)
    let cases: [(&[&str], &[&[&str]]); 4] = [
        (&["20", "21", "22"], &[&["mlx5_0:1"], &["mlx5_1:1", "mlx5_2:1"]]),
        (&["20"], &[&["mlx5_0:1"], &["mlx5_0:1"]]),
        (&["20", "21"], &[&["mlx5_0:1"], &["mlx5_0:1"], &["mlx5_1:1"], &["mlx5_1:1"]]),
        (&["20", "21"], &[&["mlx5_0:1"], &["mlx5_0:1"], &["mlx5_1:1"]]),
    ];
    for (nics, rails) in cases {
        let topology = under_one_switch(nics, rails.len());
        for (gpu, rails) in rails.iter().enumerate() {
            assert_eq!(rails_of(&topology, gpu), *rails, "GPU {gpu} beside {nics:?}");
        }
        let (_, excluded) = select_local(&topology, Memory::Gpu(topology.gpus[0].address));
        assert_eq!(excluded.len(), nics.len() - rails[0].len());
        let are_left = excluded.iter().all(|exclusion| exclusion.reason.contains("left to other GPUs"));
        assert!(are_left, "{excluded:?}");
    }
}

fn under_one_switch(nics: &[&str], gpus: usize) -> Topology {
    let machine = Machine::empty();
    machine.host("shared");
    machine.numa(1);
    let port = machine.bridge("pci0000:10", "0000:10:01.0", 0);
    let switch = machine.bridge(&port, "0000:11:00.0", 0);
    for (slot, bus) in nics.iter().enumerate() {
        let lower = machine.bridge(&switch, &format!("0000:12:0{slot}.0"), 0);
        let nic = machine.nic(&lower, &format!("0000:{bus}:00.0"), 0);
        infiniband(&machine, &format!("mlx5_{slot}"), &format!("ib{slot}"), &nic, slot as u32);
    }
    for slot in 0..gpus {
        let lower = machine.bridge(&switch, &format!("0000:12:1{slot}.0"), 0);
        machine.gpu(&lower, &format!("0000:3{slot}:00.0"), 0);
    }
    machine.read()
}

#[test]
fn a_process_works_beside_its_gpu_or_its_processors() {
    let machine = dgx("a");
    let limited = |list: &str| {
        let status = format!("Name:\tx\nCapEff:\t0000000000000000\nCpus_allowed_list:\t{list}\n");
        machine.file("proc/self/status", status);
        machine.read()
    };
    for (processors, numa) in [("0-111", None), ("56-60", Some(1)), ("0-3,8", Some(0)), ("", None)] {
        assert_eq!(limited(processors).memory_of_process(None), Memory::Host { numa }, "{processors}");
    }
    let topology = limited("0-111");
    // The NUMA node of a GPU, with its processors.
    for (gpu, node) in [(0, 0), (3, 0), (4, 1), (7, 1)] {
        let near = topology.numa_node_of(Memory::Gpu(topology.gpus[gpu].address)).expect("known");
        let node_of_host = topology.numa_node_of(Memory::Host { numa: Some(node) });
        assert_eq!((near.number, Some(near)), (node, node_of_host), "gpu{gpu}");
        assert!(!near.cpus.is_empty());
    }
    assert_eq!(topology.numa_node_of(Memory::Host { numa: None }), None);
    let gpu = |number: usize| Memory::Gpu(topology.gpus[number].address);
    for (variable, memory) in [
        (Some("3"), gpu(3)),
        (Some("5,6"), gpu(5)),
        (Some("8"), Memory::Host { numa: None }),
        (Some(""), Memory::Host { numa: None }),
        (Some("-1"), Memory::Host { numa: None }),
        (Some("GPU-aa"), Memory::Host { numa: None }),
    ] {
        assert_eq!(topology.memory_of_process(variable), memory, "{variable:?}");
    }
    // A container that is shown two of the GPUs, and then one.
    let show = |number: usize| {
        let address = topology.gpus[number].address.to_string();
        let text = format!("Model: \t NVIDIA H100\nGPU UUID: \t GPU-aaaa-{number}\n");
        machine.file(&format!("proc/driver/nvidia/gpus/{address}/information"), text);
    };
    show(6);
    for variable in [None, Some("MIG-GPU-aaaa-6/1/0"), Some("MIG-2b5c9a48-4dd2-5b5c-a1f8-6e8a2ff3a9a1")] {
        assert_eq!(machine.read().memory_of_process(variable), gpu(6), "the only one: {variable:?}");
    }
    show(2);
    let topology = machine.read();
    for (variable, memory) in [
        (None, Memory::Host { numa: None }),
        (Some("0"), gpu(2)),
        (Some("1"), gpu(6)),
        (Some("GPU-aaaa-6"), gpu(6)),
        (Some("MIG-GPU-aaaa-6/1/0"), gpu(6)),
        (Some("MIG-2b5c9a48-4dd2-5b5c-a1f8-6e8a2ff3a9a1"), Memory::Host { numa: None }),
        (Some("MIG-GPU-/1/0"), Memory::Host { numa: None }),
        (Some("GPU-"), Memory::Host { numa: None }),
    ] {
        assert_eq!(topology.memory_of_process(variable), memory, "{variable:?}");
    }
}

#[test]
fn host_memory_gets_the_rails_of_its_socket() {
    let here = dgx("a").read();
    let there = describe(&dgx("b").read(), "node2");
    let decision = decide(&here, &there, Memory::Host { numa: Some(1) }, Memory::Host { numa: Some(0) });
    assert_eq!(
        names(&decision),
        ["mlx5_4:1>mlx5_0:1", "mlx5_5:1>mlx5_1:1", "mlx5_6:1>mlx5_2:1", "mlx5_7:1>mlx5_3:1"]
    );
    assert!((decision.expected_gb_s.expect("known") - 4.0 * 49.68).abs() < 0.1);
    let slow = decision.excluded.iter().find(|exclusion| exclusion.rail == "mlx5_9:1").expect("storage NIC");
    assert_eq!(slow.reason, "100 Gbit/s is less than half of 400 Gbit/s");
}

#[test]
fn one_host_shares_memory_unless_it_cannot() {
    let here = dgx("a").read();
    let mut there = describe(&here, "same");
    let decision = decide(&here, &there, HOST, HOST);
    assert_eq!((decision.transport, decision.expected_gb_s), (Some(Transport::SharedMemory), None));
    assert!(decision.alternatives[1].possible && decision.alternatives[1].reason.starts_with("would work"));
    let request = Request {
        source: HOST,
        target: HOST,
        transports: Transports { shared_memory: false, ..Transports::default() },
        needs: NodeRequirements::default(),
    };
    assert_eq!(choose(&here, &there, &request).transport, Some(Transport::Rdma));
    there.shared_directory_id = Some("0:99:/".to_owned());
    let decision = decide(&here, &there, HOST, HOST);
    assert_eq!(decision.transport, Some(Transport::Rdma));
    assert!(
        decision.alternatives[0].reason.contains("another shared directory"),
        "{}",
        decision.alternatives[0].reason
    );
}

#[test]
fn an_unknown_boot_is_never_the_same_host() {
    let machine = plain_vm();
    machine.remove("proc/sys/kernel/random/boot_id");
    let here = machine.read();
    let decision = decide(&here, &describe(&here, "other"), HOST, HOST);
    assert_eq!(decision.transport, Some(Transport::Tcp));
}

#[test]
fn without_rdma_tcp_is_left_and_without_an_address_nothing() {
    let here = plain_vm().read();
    let mut there = describe(&dgx("b").read(), "node2");
    let decision = decide(&here, &there, HOST, HOST);
    assert_eq!((decision.transport, decision.expected_gb_s), (Some(Transport::Tcp), None));
    assert_eq!(decision.interface.as_deref(), Some("eth0"));
    assert_eq!(decision.alternatives[1].reason, "this node has no RDMA device");
    there.tcp_addresses.clear();
    assert_eq!(decide(&here, &there, HOST, HOST).transport, None);
}

#[test]
fn soft_roce_is_used_only_without_hardware() {
    let here = soft_roce().read();
    let there = describe(&here, "node2");
    let there = NodeDescription { boot_id: Some("other".to_owned()), ..there };
    let decision = decide(&here, &there, HOST, HOST);
    assert_eq!(names(&decision), ["rxe0:1>rxe0:1"]);
    let machine = two_rails();
    machine.file("sys/devices/virtual/infiniband/rxe0/ports/1/state", "4: ACTIVE");
    machine.file("sys/devices/virtual/infiniband/rxe0/ports/1/link_layer", "Ethernet");
    machine.file("sys/devices/virtual/infiniband/rxe0/ports/1/gids/0", "::ffff:10.1.0.9");
    machine.file("sys/devices/virtual/infiniband/rxe0/ports/1/gid_attrs/types/0", "RoCE v2");
    machine.link("sys/class/infiniband/rxe0", "../../devices/virtual/infiniband/rxe0");
    let here = machine.read();
    let decision = decide(&here, &NodeDescription { boot_id: None, ..describe(&here, "x") }, HOST, HOST);
    assert_eq!(names(&decision), ["mlx5_0:1>mlx5_0:1", "mlx5_1:1>mlx5_1:1"]);
    assert!(decision.excluded.iter().any(|exclusion| exclusion.reason.contains("software")));
}

#[test]
fn gpu_bytes_are_staged_where_nics_cannot_reach_them() {
    let machine = dgx("a");
    machine.remove("sys/module/nvidia_peermem");
    machine.file("proc/sys/kernel/osrelease", "5.4.0");
    let here = machine.read();
    let there = describe(&dgx("b").read(), "node2");
    let decision = decide(&here, &there, Memory::Gpu(here.gpus[0].address), HOST);
    assert!(decision.staged);
    assert_eq!(decision.transport, Some(Transport::Rdma));
    assert_eq!(decision.rails.len(), 4, "all rails of the GPU's socket: the bytes are in host memory");
}

#[test]
fn a_rail_of_half_the_rate_stays_one_of_less_goes() {
    for (rate, rails) in [("100 Gb/sec (4X EDR)", 2), ("56 Gb/sec (4X FDR)", 1)] {
        let machine = two_rails();
        machine.file("sys/class/infiniband/mlx5_1/ports/1/rate", rate);
        let here = machine.read();
        let there = NodeDescription { boot_id: None, ..describe(&two_rails().read(), "x") };
        assert_eq!(decide(&here, &there, HOST, HOST).rails.len(), rails, "{rate}");
    }
}

#[test]
fn fabrics_do_not_mix() {
    let here = wrong_socket().read();
    let mut there = describe(&dgx("b").read(), "node2");
    there.rails.retain(|rail| rail.name.as_str() < "mlx5_8");
    let decision = decide(&here, &there, HOST, HOST);
    assert_eq!(decision.transport, Some(Transport::Tcp), "Ethernet here, InfiniBand there");
    // 200 Gbit/s with MTU 9000.
    assert!((decision.expected_gb_s.expect("known") - 24.75).abs() < 0.01, "{:?}", decision.expected_gb_s);
}

#[test]
fn a_peer_that_lies_is_survived() {
    let here = dgx("a").read();
    let mut there = describe(&dgx("b").read(), "node2");
    for rail in &mut there.rails {
        rail.gpu_distances.clear();
        rail.address = "fe80::dead".parse().expect("address");
        rail.prefix_bits = Some(255);
        rail.ceiling_mb_s = Some(u64::MAX);
        rail.rate_mbit_s = None;
    }
    let decision =
        decide(&here, &there, Memory::Gpu(here.gpus[0].address), Memory::Gpu(here.gpus[0].address));
    assert_eq!(decision.transport, Some(Transport::Tcp), "no subnet is shared under that prefix");
}
