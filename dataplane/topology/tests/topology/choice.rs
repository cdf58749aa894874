//! Which path is chosen between fixtures, and with what reasons.

use dataplane_topology::{
    Decision, Memory, Needs, NodeDescription, Request, Topology, Transport, Transports, choose,
};

use crate::fixtures::{dgx, plain_vm, soft_roce, two_rails, wrong_socket};

fn describe(topology: &Topology, name: &str) -> NodeDescription {
    let mut description = NodeDescription::of(topology, vec!["10.0.0.9:7001".to_owned()]);
    description.hostname = name.to_owned();
    // As it arrives: through the text form.
    NodeDescription::parse(description.encode().as_bytes()).expect("own text")
}

fn decide(local: &Topology, remote: &NodeDescription, source: Memory, target: Memory) -> Decision {
    choose(
        local,
        remote,
        &Request { source, target, transports: Transports::default(), needs: Needs::default() },
    )
}

fn names(decision: &Decision) -> Vec<String> {
    decision.rails.iter().map(|pair| format!("{}>{}", pair.local.name, pair.remote.name)).collect()
}

const HOST: Memory = Memory::Host { numa: None };

#[test]
fn a_gpu_gets_the_rails_beside_it() {
    let here = dgx("a").read();
    let there = describe(&dgx("b").read(), "node2");
    let decision =
        decide(&here, &there, Memory::Gpu(here.gpus[0].address), Memory::Gpu(here.gpus[6].address));
    assert_eq!(decision.transport, Some(Transport::Rdma));
    assert_eq!(names(&decision), ["mlx5_0:1>mlx5_6:1", "mlx5_1:1>mlx5_7:1"]);
    assert!(!decision.staged);
    // Two rails of 49.7 GB/s, but one GPU link of 63.0.
    assert_eq!(decision.limited_by, "the GPU's PCIe link");
    assert!((decision.expected_gb_s.expect("known") - 63.0).abs() < 0.1, "{:?}", decision.expected_gb_s);
    assert_eq!(decision.warnings, []);
    let excluded: Vec<&str> = decision.excluded.iter().map(|exclusion| exclusion.rail.as_str()).collect();
    assert_eq!(excluded.len(), 8, "{excluded:?}");
    let reason = |rail: &str| {
        decision
            .excluded
            .iter()
            .find(|exclusion| exclusion.rail == rail)
            .map(|exclusion| exclusion.reason.as_str())
    };
    assert_eq!(reason("mlx5_4:1"), Some("SYS: further than others (PIX)"));
    assert_eq!(reason("mlx5_8:1"), Some("PHB: further than others (PIX)"));
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
        needs: Needs::default(),
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
