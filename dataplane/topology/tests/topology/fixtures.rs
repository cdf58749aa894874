//! Machines made of files: what `/sys` and `/proc` look like on boxes that we do not have.
//!
//! Layout as in the kernel: devices live under `sys/devices`, everything else is a relative symbolic link.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use dataplane_topology::Topology;

/// A directory that stands for `/` and is removed in the end.
pub(crate) struct Machine {
    root: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// One PCI function to be made.
pub(crate) struct Pci<'a> {
    /// Below `sys/devices`: host bridge and bridges, like `pci0000:10/0000:10:01.0`.
    pub(crate) parent: &'a str,
    pub(crate) address: &'a str,
    pub(crate) class: &'a str,
    pub(crate) vendor: &'a str,
    pub(crate) device: &'a str,
    pub(crate) numa: i32,
    /// Speed as the kernel writes it.
    pub(crate) speed: &'a str,
    pub(crate) lanes: u32,
}

/// One RDMA port to be made.
pub(crate) struct Port<'a> {
    pub(crate) name: &'a str,
    /// Below `sys/devices`.
    pub(crate) device: &'a str,
    pub(crate) layer: &'a str,
    pub(crate) rate: &'a str,
    pub(crate) gids: &'a [(&'a str, &'a str)],
    pub(crate) board: &'a str,
    pub(crate) interface: &'a str,
}

impl Machine {
    pub(crate) fn empty() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        // A machine is about a thousand small files: on a disk the tests take twenty times as long.
        let memory = PathBuf::from("/dev/shm");
        let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let root = parent.join(format!("kvasir-topology-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).expect("temporary directory");
        Self { root }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn read(&self) -> Topology {
        Topology::read(&self.root)
    }

    pub(crate) fn file(&self, path: &str, bytes: impl AsRef<[u8]>) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        let _ = fs::remove_file(&path);
        fs::write(path, bytes).expect("file");
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        let _ = fs::remove_file(&path);
        symlink(target, path).expect("link");
    }

    pub(crate) fn remove(&self, path: &str) {
        let path = self.root.join(path);
        if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(path).expect("directory");
        } else {
            fs::remove_file(path).expect("file");
        }
    }

    pub(crate) fn host(&self, boot_id: &str) {
        self.file("proc/sys/kernel/random/boot_id", boot_id);
        self.file("proc/sys/kernel/hostname", "fixture\n");
        self.file("proc/sys/kernel/osrelease", "5.15.0-1042-generic\n");
        self.file(
            "proc/self/limits",
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory      \
               unlimited            unlimited            bytes\n",
        );
        self.file("proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\n");
        self.file(
            "proc/self/mountinfo",
            "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=8388608k\n",
        );
        self.file("proc/sys/net/core/rmem_max", "134217728\n");
        self.file("proc/sys/net/core/wmem_max", "134217728\n");
        self.file("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t67108864\n");
        self.file("proc/sys/net/ipv4/tcp_wmem", "4096\t65536\t67108864\n");
        self.file("proc/sys/net/ipv4/tcp_congestion_control", "cubic\n");
        self.file("proc/sys/net/ipv4/conf/all/rp_filter", "0\n");
        self.file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        self.file("sys/kernel/iommu_groups/0/type", "identity\n");
        self.file(
            "proc/net/route",
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n",
        );
        for module in ["ib_uverbs", "mlx5_ib", "nvidia", "nvidia_peermem"] {
            self.file(&format!("sys/module/{module}/refcnt"), "1\n");
        }
    }

    pub(crate) fn numa(&self, count: u32) {
        for node in 0..count {
            let path = format!("sys/devices/system/node/node{node}");
            let first = node * 56;
            self.file(&format!("{path}/cpulist"), format!("{first}-{}\n", first + 55));
            self.file(
                &format!("sys/devices/system/cpu/cpu{first}/topology/physical_package_id"),
                format!("{node}\n"),
            );
            let distances: Vec<&str> =
                (0..count).map(|other| if other == node { "10" } else { "21" }).collect();
            self.file(&format!("{path}/distance"), distances.join(" "));
            self.file(&format!("{path}/meminfo"), format!("Node {node} MemTotal:  1056669484 kB\n"));
            self.file(&format!("{path}/hugepages/hugepages-2048kB/free_hugepages"), "2048\n");
            self.file(&format!("{path}/hugepages/hugepages-2048kB/nr_hugepages"), "2048\n");
        }
    }

    /// Makes a function and returns its path below `sys/devices`.
    pub(crate) fn pci(&self, pci: &Pci<'_>) -> String {
        let below = format!("{}/{}", pci.parent, pci.address);
        let path = format!("sys/devices/{below}");
        let lanes = pci.lanes;
        for (name, text) in [
            ("class", pci.class),
            ("vendor", pci.vendor),
            ("device", pci.device),
            ("numa_node", &pci.numa.to_string()),
            ("current_link_speed", pci.speed),
            ("max_link_speed", pci.speed),
            ("current_link_width", &lanes.to_string()),
            ("max_link_width", &lanes.to_string()),
        ] {
            self.file(&format!("{path}/{name}"), format!("{text}\n"));
        }
        let driver = match pci.vendor {
            "0x15b3" => "mlx5_core",
            "0x10de" => "nvidia",
            "0x1af4" => "virtio-pci",
            _ => "pcieport",
        };
        self.link(&format!("{path}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
        self.link(&format!("sys/bus/pci/devices/{}", pci.address), &format!("../../../devices/{below}"));
        below
    }

    pub(crate) fn bridge(&self, parent: &str, address: &str, numa: i32) -> String {
        let (class, vendor, device) = ("0x060400", "0x1000", "0xc030");
        self.pci(&Pci { parent, address, class, vendor, device, numa, speed: "32.0 GT/s PCIe", lanes: 16 })
    }

    pub(crate) fn gpu(&self, parent: &str, address: &str, numa: i32) -> String {
        let (class, vendor, device) = ("0x030200", "0x10de", "0x2330");
        self.pci(&Pci { parent, address, class, vendor, device, numa, speed: "32.0 GT/s PCIe", lanes: 16 })
    }

    pub(crate) fn nic(&self, parent: &str, address: &str, numa: i32) -> String {
        let (class, vendor, device) = ("0x020700", "0x15b3", "0x1021");
        self.pci(&Pci { parent, address, class, vendor, device, numa, speed: "32.0 GT/s PCIe", lanes: 16 })
    }

    pub(crate) fn port(&self, port: &Port<'_>) {
        let path = format!("sys/devices/{}/infiniband/{}", port.device, port.name);
        self.link(
            &format!("sys/class/infiniband/{}", port.name),
            &format!("../../devices/{}/infiniband/{}", port.device, port.name),
        );
        self.link(&format!("{path}/device"), "../..");
        self.file(&format!("{path}/node_guid"), format!("b83f:d203:00ab:{:04x}\n", port.name.len()));
        self.file(&format!("{path}/board_id"), port.board);
        self.file(&format!("{path}/fw_ver"), "28.39.2048\n");
        let port_path = format!("{path}/ports/1");
        for (name, text) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", port.rate),
            ("link_layer", port.layer),
        ] {
            self.file(&format!("{port_path}/{name}"), format!("{text}\n"));
        }
        for index in 0..8 {
            let (address, kind) =
                port.gids.get(index).unwrap_or(&("0000:0000:0000:0000:0000:0000:0000:0000", ""));
            self.file(&format!("{port_path}/gids/{index}"), format!("{address}\n"));
            self.file(&format!("{port_path}/gid_attrs/types/{index}"), kind);
        }
        self.file(&format!("{port_path}/gid_attrs/ndevs/0"), port.interface);
    }

    pub(crate) fn interface(&self, name: &str, device: &str, speed: &str, mtu: u32) {
        let path = format!("sys/devices/{device}/net/{name}");
        self.link(&format!("sys/class/net/{name}"), &format!("../../devices/{device}/net/{name}"));
        self.link(&format!("{path}/device"), "../..");
        for (file, text) in [("speed", speed), ("mtu", &mtu.to_string()), ("operstate", "up")] {
            self.file(&format!("{path}/{file}"), format!("{text}\n"));
        }
        self.file(&format!("proc/sys/net/ipv4/conf/{name}/rp_filter"), "2\n");
    }
}

/// Two sockets; on each two host bridges with a switch over two leaf switches, each leaf with a GPU and a
/// 400 Gbit/s InfiniBand NIC; a 100 Gbit/s Ethernet NIC for storage and an NVMe disk per socket.
pub(crate) fn dgx(boot_id: &str) -> Machine {
    let machine = Machine::empty();
    machine.host(boot_id);
    machine.numa(2);
    let mut rails = 0;
    for (index, bus) in [0x10_u32, 0x50, 0x90, 0xd0].into_iter().enumerate() {
        let numa = i32::try_from(index / 2).expect("small");
        let at = |offset: u32, slot: u32| format!("0000:{:02x}:{slot:02x}.0", bus + offset);
        let root = format!("pci0000:{bus:02x}");
        let port = machine.bridge(&root, &at(0, 1), numa);
        let top = machine.bridge(&port, &at(1, 0), numa);
        for leaf in 0..2 {
            let base = 3 + leaf * 8;
            let lower = machine.bridge(&top, &at(2, leaf), numa);
            let switch = machine.bridge(&lower, &at(base, 0), numa);
            let gpu_port = machine.bridge(&switch, &at(base + 1, 0), numa);
            let nic_port = machine.bridge(&switch, &at(base + 1, 1), numa);
            machine.gpu(&gpu_port, &at(base + 2, 0), numa);
            let nic = machine.nic(&nic_port, &at(base + 3, 0), numa);
            infiniband(&machine, &format!("mlx5_{rails}"), &format!("ib{rails}"), &nic, rails);
            rails += 1;
        }
        let second = machine.bridge(&root, &at(0, 2), numa);
        if index % 2 == 0 {
            storage(&machine, &second, &at(0x18, 0), numa);
        } else {
            disk(&machine, &second, &at(0x18, 0), numa);
        }
    }
    machine
}

pub(crate) fn infiniband(machine: &Machine, name: &str, interface: &str, device: &str, number: u32) {
    let gid = format!("fe80:0000:0000:0000:b83f:d203:00ab:{number:04x}");
    let (layer, rate, board) = ("InfiniBand", "400 Gb/sec (4X NDR)", "MT_0000000838");
    machine.port(&Port { name, device, layer, rate, gids: &[(&gid, "IB/RoCE v1")], board, interface });
    machine.interface(interface, device, "400000", 2044);
}

fn storage(machine: &Machine, parent: &str, address: &str, numa: i32) {
    let (class, vendor, device) = ("0x020000", "0x15b3", "0x101d");
    let nic = machine.pci(&Pci {
        parent,
        address,
        class,
        vendor,
        device,
        numa,
        speed: "16.0 GT/s PCIe",
        lanes: 16,
    });
    let name = format!("mlx5_{}", 8 + numa);
    let interface = format!("ens{}", 8 + numa);
    machine.interface(&interface, &nic, "100000", 9000);
    roce(
        machine,
        &name,
        &interface,
        &nic,
        &format!("0000:0000:0000:0000:0000:ffff:0a09:000{}", numa + 1),
        "100 Gb/sec (4X EDR)",
    );
}

fn disk(machine: &Machine, parent: &str, address: &str, numa: i32) {
    let (class, vendor, device) = ("0x010802", "0x144d", "0xa824");
    let disk =
        machine.pci(&Pci { parent, address, class, vendor, device, numa, speed: "16.0 GT/s PCIe", lanes: 4 });
    machine.link(&format!("sys/class/nvme/nvme{numa}"), &format!("../../devices/{disk}/nvme/nvme{numa}"));
    machine.file(&format!("sys/devices/{disk}/nvme/nvme{numa}/model"), "SAMSUNG MZQL23T8HCLS\n");
    machine.file(&format!("sys/devices/{disk}/nvme/nvme{numa}/numa_node"), format!("{numa}\n"));
}

/// A RoCE v2 port with v1 and link-local entries beside the address, as a driver lists them.
pub(crate) fn roce(machine: &Machine, name: &str, interface: &str, device: &str, address: &str, rate: &str) {
    let local = "fe80:0000:0000:0000:0ac0:ebff:fe00:0001";
    let gids = [(local, "IB/RoCE v1"), (local, "RoCE v2"), (address, "IB/RoCE v1"), (address, "RoCE v2")];
    machine.port(&Port {
        name,
        device,
        layer: "Ethernet",
        rate,
        gids: &gids,
        board: "MT_0000000359",
        interface,
    });
}

/// A GPU on socket 0, the only NIC on socket 1.
pub(crate) fn wrong_socket() -> Machine {
    let machine = Machine::empty();
    machine.host("wrong-socket");
    machine.numa(2);
    let left = machine.bridge("pci0000:10", "0000:10:01.0", 0);
    machine.gpu(&left, "0000:11:00.0", 0);
    let right = machine.bridge("pci0000:90", "0000:90:01.0", 1);
    let nic = machine.nic(&right, "0000:91:00.0", 1);
    machine.interface("ens1", &nic, "200000", 9000);
    machine.file("proc/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\nens1\t0000010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n");
    roce(&machine, "mlx5_0", "ens1", &nic, "0000:0000:0000:0000:0000:ffff:0a01:0001", "200 Gb/sec (4X HDR)");
    machine
}

/// Two RoCE rails in one subnet, one per socket, no GPU.
pub(crate) fn two_rails() -> Machine {
    let machine = Machine::empty();
    machine.host("two-rails");
    machine.numa(1);
    let mut routes =
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n".to_owned();
    for rail in 0..2 {
        let port = machine.bridge("pci0000:10", &format!("0000:10:0{}.0", rail + 1), 0);
        let nic = machine.nic(&port, &format!("0000:1{}:00.0", rail + 1), 0);
        let interface = format!("ens{rail}");
        machine.interface(&interface, &nic, "200000", 9000);
        let address = format!("0000:0000:0000:0000:0000:ffff:0a01:000{}", rail + 1);
        roce(&machine, &format!("mlx5_{rail}"), &interface, &nic, &address, "200 Gb/sec (4X HDR)");
        routes.push_str(&format!("{interface}\t0000010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"));
    }
    machine.file("proc/net/route", routes);
    machine
}

/// A guest with a virtio NIC of no known speed.
pub(crate) fn plain_vm() -> Machine {
    let machine = Machine::empty();
    machine.host("plain-vm");
    machine.numa(1);
    let (class, vendor, device) = ("0x020000", "0x1af4", "0x1041");
    let nic = machine.pci(&Pci {
        parent: "pci0000:00",
        address: "0000:00:03.0",
        class,
        vendor,
        device,
        numa: -1,
        speed: "Unknown",
        lanes: 0,
    });
    machine.interface("eth0", &format!("{nic}/virtio2"), "-1", 1500);
    for module in ["ib_uverbs", "mlx5_ib", "nvidia", "nvidia_peermem"] {
        machine.remove(&format!("sys/module/{module}"));
    }
    machine
}

/// The same with Soft-RoCE on its NIC.
pub(crate) fn soft_roce() -> Machine {
    let machine = plain_vm();
    machine.file("sys/module/ib_uverbs/refcnt", "1\n");
    machine.file("sys/class/net/eth0/mtu", "9000\n");
    let (name, device, interface) = ("rxe0", "virtual", "eth0");
    roce(&machine, name, interface, device, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "2.5 Gb/sec (1X SDR)");
    machine.remove("sys/devices/virtual/infiniband/rxe0/device");
    machine.remove("sys/devices/virtual/infiniband/rxe0/board_id");
    machine.file("sys/devices/virtual/infiniband/rxe0/parent", "eth0\n");
    machine
}
