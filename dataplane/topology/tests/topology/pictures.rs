//! The output for operators: text and pictures.

use dataplane_topology::{
    NodeDescription, NodeRequirements, Place, TopologyError, Transports,
    render::{self, Explanation},
};

use crate::fixtures::{Machine, dgx, plain_vm, wrong_socket};

fn explain(
    machine: &Machine,
    others: &[NodeDescription],
    from: &str,
    to: &str,
) -> Result<Explanation, TopologyError> {
    let place = |text: &str| text.parse::<Place>();
    render::explain(
        &machine.read(),
        others,
        &place(from)?,
        &place(to)?,
        Transports::default(),
        NodeRequirements::default(),
    )
}

fn node2() -> NodeDescription {
    let description = NodeDescription::of(&dgx("b").read(), vec!["10.0.0.2:7001".to_owned()]);
    NodeDescription { hostname: "node2".to_owned(), ..description }
}

#[test]
fn the_path_is_marked_and_only_the_path() {
    let explanation = explain(&dgx("a"), &[node2()], "gpu0", "node2:gpu3").expect("explained");
    let marked: Vec<&str> = explanation.text.lines().filter(|line| line.starts_with('*')).collect();
    let holds = |name: &str| marked.iter().any(|line| line.contains(name));
    assert!(holds("gpu0  ") && holds("mlx5_0 ") && !holds("mlx5_1 "), "{}", explanation.text);
    assert!(!holds("gpu1") && !holds("NUMA") && !holds("mlx5_4"), "{}", explanation.text);
    assert!(explanation.text.starts_with("gpu0 → node2:gpu3: RDMA, 49.7 GB/s\n"), "{}", explanation.text);
    assert!(
        explanation.text.contains("NUMA node 1") && explanation.text.contains("(4 GPUs, 5 NICs, 1 disk)")
    );
    assert_eq!(explanation.svg.matches("class=\"b gpu").count(), 8);
    assert_eq!(explanation.svg.matches("class=\"b nic end\"").count(), 1);
    assert_eq!(explanation.svg.matches("<rect").count(), explanation.svg.matches("/>").count());
}

#[test]
fn devices_are_explained_by_distance() {
    for (from, to, start) in [
        ("gpu0", "mlx5_0", "gpu0 ↔ mlx5_0: PIX, PCIe 63.0 GB/s"),
        ("mlx5_0", "mlx5_4", "mlx5_0 ↔ mlx5_4: SYS, PCIe 63.0 GB/s"),
        ("host:1", "nvme0", "host:1 ↔ nvme0: SYS, PCIe 7.9 GB/s"),
        ("0000:16:00.0", "gpu1", "0000:16:00.0 ↔ gpu1: PXB, PCIe 63.0 GB/s"),
    ] {
        let explanation = explain(&dgx("a"), &[], from, to).expect("explained");
        assert_eq!(explanation.text.lines().next(), Some(start));
        assert!(explanation.decision.is_none());
    }
}

#[test]
fn what_is_not_there_is_named_with_what_is() {
    let machine = wrong_socket();
    let error = explain(&machine, &[], "gpu7", "host").expect_err("one GPU").to_string();
    assert_eq!(error, "'gpu7' is not on this node; there are: host, host:0, host:1, gpu0, mlx5_0, ens1");
    assert!(matches!(explain(&machine, &[], "host", "node9:host"), Err(TopologyError::NodeUnknown(_))));
    assert!(matches!(explain(&machine, &[], "node9:host", "host"), Err(TopologyError::StartsElsewhere(_))));
    assert!(matches!(
        explain(&machine, &[node2()], "host", "node2:mlx5_0"),
        Err(TopologyError::NotThere { .. })
    ));
}

#[test]
fn doctor_has_one_line_per_fact() {
    let text = render::doctor(&dgx("a").read(), &NodeRequirements::default());
    assert_eq!(text.lines().filter(|line| line.starts_with("ok:   RDMA ")).count(), 11, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("ok:   GPU ")).count(), 8, "{text}");
    assert!(!text.contains("warn:") && !text.contains("unknown"), "{text}");
    let text = render::doctor(&plain_vm().read(), &NodeRequirements::default());
    assert!(text.contains("off:  RDMA          no device") && text.contains("off:  GPU"), "{text}");
}
