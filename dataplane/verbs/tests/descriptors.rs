//! The process runs out of descriptors: accepting pauses and does not spin. A process of its own, since it
//! changes the process's limit.

mod support;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use dataplane_verbs::VerbsConfig;
use dataplane_verbs::testing::SoftwareDevice;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::{Two, small};

#[test]
fn accepting_pauses_when_descriptors_run_out() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let config = VerbsConfig { handshake_timeout: Duration::from_millis(100), ..small() };
    let mut two = Two::new(device_a.open().expect("a"), device_b.open().expect("b"), config.clone(), config);
    let address = two.b.listening_on().expect("listening");
    let callers: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(address).expect("backlog")).collect();
    let before = getrlimit(Resource::Nofile);
    // The directory listing uses a descriptor itself.
    let used = support::descriptor_count() as u64 - 1;
    setrlimit(Resource::Nofile, Rlimit { current: Some(used), ..before }).expect("a lower limit");
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(350) {
        two.step();
    }
    let pauses = two.b.metrics().accept_pauses;
    two.write_and_wait(1, 64);
    setrlimit(Resource::Nofile, before).expect("the old limit");
    assert!((1..=6).contains(&pauses), "{pauses} attempts in 350 ms");
    two.until("the callers are served and, as they say nothing, dropped", |two| {
        // The remaining connection is the peer's.
        two.b.metrics().handshakes_failed == callers.len() as u64 && two.b.connection_count() == 1
    });
    // While the listener pauses, it does not wake a sleeping thread.
    let mut events = Vec::new();
    while !two.b.prepare_wait() {
        two.b.poll(64, &mut events);
    }
    assert!(!support::sleep_on(&two.b, Duration::from_millis(50)), "something keeps it awake");
}
