//! A peer that ends without a goodbye: its device may copy until the kernel has ended its process; until then
//! it stays a peer.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::testing::{LAYOUT, SLOT_BYTES, sleep};
use dataplane_fabric::{Event, Fabric, PeerAccess, PeerId};
use dataplane_ipc::IpcFabric;
use dataplane_memory::testing::{Abilities, CopierDouble, CopyFaults, DeviceDouble, SharingDouble};
use dataplane_memory::{AttachedSlab, DeviceError, DeviceSharing, Slab, SlabLayout};
use dataplane_shm::ShmConfig;

const ADDRESS: &str = "KVASIR_TEST_IPC_ADDRESS";
const PATIENCE: Duration = Duration::from_secs(20);

fn memory() -> Arc<DeviceDouble> {
    DeviceDouble::new(17 * (SLOT_BYTES + 64), Abilities::default())
}

/// A double cannot access the memory of another process, so memory of its own replaces it.
#[derive(Debug)]
struct Anything(SharingDouble);

impl DeviceSharing for Anything {
    fn slab(&self) -> &Arc<Slab> {
        self.0.slab()
    }

    fn export(&self) -> Result<Vec<u8>, DeviceError> {
        self.0.export()
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.0.carries(slab)
    }

    fn attach(&self, _exported: &[u8], layout: SlabLayout) -> Result<AttachedSlab, DeviceError> {
        let slab = Arc::new(Slab::on_device("anything", layout, memory()).expect("a slab"));
        Ok(AttachedSlab { copier: Box::new(CopierDouble::new(1, 64, CopyFaults::default())), slab })
    }
}

fn node(listen: Option<&str>, access: PeerAccess) -> IpcFabric {
    let sharing = Anything(SharingDouble::new(LAYOUT, &memory(), CopyFaults::default()));
    IpcFabric::new(Arc::new(sharing), listen, ShmConfig { access, ..ShmConfig::default() }).expect("a node")
}

/// Runs in a process of its own, started by the test below. After connecting, it closes everything without a
/// goodbye but stays alive.
#[test]
#[ignore = "the other side of an end without a goodbye"]
fn a_peer_that_forgets_itself() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let mut node = node(None, PeerAccess::None);
    let peer = node.connect(&address).expect("connect starts");
    let (mut seen, started) = (Vec::new(), Instant::now());
    while !seen.contains(&Event::Connected { peer }) {
        node.poll(64, &mut seen);
        assert!(started.elapsed() < PATIENCE, "{seen:?}");
    }
    // The descriptors are closed, but the process continues.
    panic!("exec: {}", Command::new("sleep").arg("60").exec());
}

struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // The process may have ended already.
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}

fn is_down(seen: &[Event], peer: PeerId) -> bool {
    seen.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
}

#[test]
fn a_peer_without_a_goodbye_is_a_peer_until_its_process_has_ended() {
    let address = format!("@kvasir-ipc-processes-{}", std::process::id());
    let mut node = node(Some(&address), PeerAccess::Write);
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--ignored", "--exact", "a_peer_that_forgets_itself", "--nocapture"])
        .env(ADDRESS, &address)
        .spawn()
        .expect("run");
    let mut child = Peer(child);
    let (mut seen, started) = (Vec::new(), Instant::now());
    let accepted = loop {
        node.poll(64, &mut seen);
        if let Some(Event::Accepted { peer }) = seen.first() {
            break *peer;
        }
        assert!(started.elapsed() < PATIENCE, "{seen:?}");
    };
    // The child's descriptors are closed once another program runs in it.
    let id = child.0.id();
    let comm = || std::fs::read_to_string(format!("/proc/{id}/comm")).expect("it lives");
    while comm().trim() != "sleep" {
        node.poll(64, &mut seen);
        assert!(started.elapsed() < PATIENCE, "{}", comm());
    }
    // No disconnect is reported, and the node sleeps meanwhile.
    let (started, mut slept) = (Instant::now(), Duration::ZERO);
    while started.elapsed() < Duration::from_millis(800) {
        if node.prepare_wait() {
            let begun = Instant::now();
            sleep(&node, Some(begun + Duration::from_millis(100)));
            slept += begun.elapsed();
        }
        node.poll(64, &mut seen);
    }
    assert!(!is_down(&seen, accepted), "{seen:?}");
    assert!(slept > Duration::from_millis(400), "something keeps it awake: {slept:?}");
    child.0.kill().expect("it lives");
    // The end of the peer's process wakes a sleeper.
    let killed = Instant::now();
    while !is_down(&seen, accepted) {
        if node.prepare_wait() {
            sleep(&node, Some(Instant::now() + PATIENCE));
        }
        node.poll(64, &mut seen);
        assert!(killed.elapsed() < PATIENCE / 2, "{seen:?}");
    }
}
