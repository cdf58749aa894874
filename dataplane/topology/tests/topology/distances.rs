//! Distances and bandwidths of the fixtures.

use dataplane_topology::{Distance, Memory, PortState, Topology};

use crate::fixtures::{dgx, plain_vm, soft_roce, wrong_socket};

fn between(topology: &Topology, gpu: usize, nic: &str) -> Distance {
    let gpu = topology.pci_device(topology.gpus[gpu].address).expect("GPU");
    let rdma = topology.rdma.iter().find(|rdma| rdma.name == nic).expect(nic);
    topology.distance(gpu, topology.pci_device(rdma.pci.expect("address")).expect("NIC"))
}

#[test]
fn the_matrix_of_a_dgx() {
    let machine = dgx("a");
    let topology = machine.read();
    assert_eq!(
        (topology.gpus.len(), topology.rdma.len(), topology.nvme.len(), topology.numa.len()),
        (8, 10, 2, 2)
    );
    for (gpu, nic, expected) in [
        (0, "mlx5_0", Distance::Pix),
        (0, "mlx5_1", Distance::Pxb),
        (0, "mlx5_8", Distance::Phb),
        (0, "mlx5_2", Distance::Node),
        (0, "mlx5_4", Distance::Sys),
        (0, "mlx5_9", Distance::Sys),
        (7, "mlx5_7", Distance::Pix),
        (7, "mlx5_6", Distance::Pxb),
        (7, "mlx5_9", Distance::Node),
        (4, "mlx5_9", Distance::Phb),
        (7, "mlx5_0", Distance::Sys),
    ] {
        assert_eq!(between(&topology, gpu, nic), expected, "gpu{gpu} {nic}");
    }
    let (left, right) = (&topology.pci[0], &topology.pci[topology.pci.len() - 1]);
    assert_eq!(topology.distance(left, right), topology.distance(right, left));
    assert_eq!(topology.distance(left, left), Distance::Pix);
}

#[test]
fn one_deeper_side_makes_it_several_switches() {
    let machine = dgx("a");
    let top = "pci0000:10/0000:10:01.0/0000:11:00.0";
    machine.gpu(&format!("{top}/0000:12:02.0"), "0000:2f:00.0", 0);
    let topology = machine.read();
    assert_eq!(topology.gpus[2].address.to_string(), "0000:2f:00.0");
    assert_eq!(between(&topology, 2, "mlx5_0"), Distance::Pxb);
    let (gpu, nic) = (&topology.gpus[2], topology.rdma[0].pci.expect("address"));
    let find = |address| topology.pci_device(address).expect("there");
    assert_eq!(topology.distance(find(nic), find(gpu.address)), Distance::Pxb);
}

#[test]
fn host_memory_is_near_its_own_socket() {
    let topology = dgx("a").read();
    let nic = topology.pci_device(topology.rdma[0].pci.expect("address")).expect("NIC");
    for (numa, expected) in [(Some(0), Distance::Phb), (Some(1), Distance::Sys), (None, Distance::Phb)] {
        assert_eq!(topology.distance_to_memory(Memory::Host { numa }, nic), Some(expected), "{numa:?}");
    }
}

#[test]
fn two_nodes_of_one_socket_are_near() {
    let machine = dgx("a");
    machine.file("sys/devices/system/cpu/cpu56/topology/physical_package_id", "0\n");
    let topology = machine.read();
    let nic = topology.pci_device(topology.rdma[0].pci.expect("address")).expect("NIC");
    assert_eq!(topology.distance_to_memory(Memory::Host { numa: Some(1) }, nic), Some(Distance::Node));
}

#[test]
fn the_narrowest_link_counts() {
    let machine = dgx("a");
    // The link between the top switch and the leaf of gpu0, and gpu0 idle.
    machine.file("sys/bus/pci/devices/0000:13:00.0/current_link_speed", "16.0 GT/s PCIe\n");
    machine.file("sys/bus/pci/devices/0000:15:00.0/current_link_speed", "2.5 GT/s PCIe\n");
    machine.file("sys/bus/pci/devices/0000:14:00.0/current_link_speed", "2.5 GT/s PCIe\n");
    let topology = machine.read();
    let gpu = Memory::Gpu(topology.gpus[0].address);
    let ceiling = |nic: usize, memory| {
        let nic = topology.pci_device(topology.rdma[nic].pci.expect("address")).expect("NIC");
        topology.pcie_ceiling_gb_s(nic, memory).expect("known").round()
    };
    assert_eq!(
        ceiling(0, gpu),
        63.0,
        "below the leaf the slow link does not matter, nor that the GPU sleeps"
    );
    assert_eq!(ceiling(1, gpu), 32.0, "from another leaf it does, seen from the GPU's side");
    assert_eq!(ceiling(0, Memory::Gpu(topology.gpus[1].address)), 32.0, "and from the NIC's side");
    assert_eq!(ceiling(0, Memory::Host { numa: None }), 32.0, "to host memory it does");
    assert_eq!(ceiling(2, Memory::Host { numa: None }), 63.0);
}

#[test]
fn devices_are_read_whole() {
    let topology = dgx("a").read();
    let port = &topology.rdma[0].ports[0];
    assert_eq!((port.state, port.rate_gbit_s, port.lanes), (Some(PortState::Active), Some(400.0), Some(4)));
    assert_eq!(port.physical_state.as_deref(), Some("LinkUp"));
    assert_eq!(port.interface.as_deref(), Some("ib0"));
    assert_eq!(topology.rdma[0].firmware.as_deref(), Some("28.39.2048"));
    assert_eq!(topology.nvme[1].numa_node, Some(1));
    let storage = &topology.rdma[8].ports[0];
    assert_eq!(storage.gids.len(), 4);
    assert_eq!(storage.address().map(|gid| gid.index), Some(3));
    assert_eq!(wrong_socket().read().interfaces[0].subnets.len(), 1);
}

#[test]
fn virtual_devices_have_their_places() {
    let topology = plain_vm().read();
    assert!(topology.rdma.is_empty() && topology.gpus.is_empty());
    assert_eq!(topology.interfaces[0].pci.map(|pci| pci.to_string()).as_deref(), Some("0000:00:03.0"));
    assert_eq!(topology.interfaces[0].speed_mbit_s, None);
    let topology = soft_roce().read();
    assert!(topology.rdma[0].software);
    assert_eq!(topology.rdma[0].pci, topology.interfaces[0].pci);
    assert_eq!(topology.rdma[0].ports[0].interface.as_deref(), Some("eth0"));
}
