//! Machines whose files are broken, huge, looping or gone.

use std::fs;
use std::path::{Path, PathBuf};

use dataplane_topology::{
    Memory, NodeDescription, NodeRequirements, Request, Topology, Transports, check, choose, render,
};

use crate::fixtures::{Machine, dgx, wrong_socket};

/// Runs everything that looks at a topology.
fn exercise(topology: &Topology) {
    let needs = NodeRequirements::default();
    let there = NodeDescription::of(topology, vec!["a:1".to_owned()]);
    assert_eq!(NodeDescription::parse(there.encode().as_bytes()).as_ref(), Ok(&there));
    let text = render::doctor(topology, &needs);
    assert!(text.lines().all(|line| line.is_ascii() && !line.contains('\u{1b}')), "{text}");
    let warnings = check(topology, &needs);
    assert!(warnings.len() <= 4 * (topology.rdma.len() * 16 + topology.pci.len()) + 16);
    let memories =
        topology.gpus.iter().map(|gpu| Memory::Gpu(gpu.address)).chain([Memory::Host { numa: None }]);
    for source in memories.take(3) {
        let request = Request { source, target: source, transports: Transports::default(), needs };
        let decision = choose(topology, &there, &request);
        assert_eq!(decision.alternatives.len(), 3);
    }
    let host = "host".parse().expect("place");
    let explanation = render::explain(topology, &[], &host, &host, Transports::default(), needs)
        .expect("host is always there");
    assert!(explanation.svg.ends_with("</svg>\n") && explanation.svg.is_char_boundary(0));
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("directory") {
        let path = entry.expect("entry").path();
        if path.is_symlink() || path.is_file() {
            found.push(path);
        } else if path.is_dir() {
            files(&path, found);
        }
    }
    found.sort();
}

#[test]
fn an_empty_root_is_a_machine_without_anything() {
    let topology = Machine::empty().read();
    assert_eq!(topology, Topology { host: topology.host.clone(), ..Topology::default() });
    exercise(&topology);
    exercise(&Topology::read(Path::new("/nonexistent")));
}

#[test]
fn random_bytes_in_any_file() {
    let seed = 0x0dd5_eed5;
    println!("seed {seed:#x}");
    let mut random = fastrand::Rng::with_seed(seed);
    for (machine, rounds) in [(dgx("a"), 8), (wrong_socket(), 40)] {
        let mut paths = Vec::new();
        files(machine.root(), &mut paths);
        paths.retain(|path| !path.is_symlink());
        for _ in 0..rounds {
            let mut undo = Vec::new();
            for path in &paths {
                if random.usize(..3) == 0 {
                    let old = fs::read(path).expect("file");
                    fs::write(path, damage(&mut random, &old)).expect("file");
                    undo.push((path, old));
                }
            }
            exercise(&machine.read());
            for (path, old) in undo {
                fs::write(path, old).expect("file");
            }
        }
    }
}

fn damage(random: &mut fastrand::Rng, old: &[u8]) -> Vec<u8> {
    match random.usize(..5) {
        0 => (0..random.usize(..200)).map(|_| random.u8(..)).collect(),
        1 => Vec::new(),
        2 => b"-9223372036854775808\n".to_vec(),
        3 => b"18446744073709551615 4294967295 1e308 0-4294967295\n".to_vec(),
        _ => old.iter().map(|&old| if random.usize(..8) == 0 { random.u8(..) } else { old }).collect(),
    }
}

#[test]
fn links_that_loop_or_lead_astray() {
    let machine = dgx("a");
    machine.link("sys/bus/pci/devices/0000:15:00.0", "0000:15:00.0");
    machine.link("sys/bus/pci/devices/0000:16:00.0", "../../../devices/pci0000:10/0000:99:00.0");
    machine.link("sys/bus/pci/devices/0000:26:00.0", "/etc");
    machine.link("sys/class/infiniband/mlx5_0", "mlx5_1");
    machine.link("sys/class/infiniband/mlx5_1", "mlx5_0");
    let deep = "0000:01:00.0/".repeat(5_000 / 13 * 8 / 10);
    machine
        .link("sys/bus/pci/devices/0000:1d:00.0", &format!("../../../devices/pci0000:10/{deep}0000:1d:00.0"));
    machine.link("sys/class/net/ib0", "../../../../../../../../../../etc/passwd");
    machine.link("proc/self/limits", "/dev/zero");
    let topology = machine.read();
    let looped = topology.pci_device("0000:15:00.0".parse().expect("address")).expect("listed");
    assert_eq!((looped.class, looped.root.as_deref()), (None, None));
    let liar = topology.pci_device("0000:16:00.0".parse().expect("address")).expect("listed");
    assert_eq!(liar.root, None, "a link that ends at another address is not believed");
    assert_eq!(topology.host.memlock_bytes, None, "a device is not read");
    exercise(&topology);
}

#[test]
fn files_that_are_pipes_directories_or_huge() {
    let machine = wrong_socket();
    let pipe = machine.root().join("sys/bus/pci/devices/0000:91:00.0/class");
    fs::remove_file(&pipe).expect("file");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    machine.remove("sys/bus/pci/devices/0000:91:00.0/vendor");
    machine.file("sys/bus/pci/devices/0000:91:00.0/vendor/inside", "x");
    let huge = fs::File::create(machine.root().join("proc/cmdline")).expect("file");
    huge.set_len(1 << 40).expect("sparse");
    let huge = fs::File::create(machine.root().join("proc/net/route")).expect("file");
    huge.set_len(1 << 40).expect("sparse");
    for number in 0..5_000 {
        machine.link(&format!("sys/class/nvme/nvme{number}"), "nowhere");
        machine.link(&format!("sys/class/infiniband/x{number}"), "nowhere");
    }
    let topology = machine.read();
    assert!(topology.nvme.len() <= 256 && topology.rdma.len() <= 64);
    exercise(&topology);
}

#[test]
fn a_file_that_vanishes_is_unknown() {
    let machine = wrong_socket();
    let mut paths = Vec::new();
    files(machine.root(), &mut paths);
    assert!(paths.len() > 90, "{}", paths.len());
    let whole = machine.read();
    let mut changed = 0;
    for path in &paths {
        let aside = machine.root().join("aside");
        fs::rename(path, &aside).expect("file");
        let topology = machine.read();
        changed += usize::from(topology != whole);
        exercise(&topology);
        fs::rename(&aside, path).expect("file");
    }
    assert_eq!(machine.read(), whole);
    assert!(changed > 50, "{changed} of {} files matter", paths.len());
}
