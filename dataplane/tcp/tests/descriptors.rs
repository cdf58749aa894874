//! A node that runs out of descriptors rests, and goes on accepting when there are some again. Alone in its file,
//! because the limit is the whole process's.

mod nodes;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use dataplane_tcp::TcpConfig;
use nodes::{PATIENCE, listening, pool};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn accepting_rests_while_descriptors_are_out() {
    let mut node = listening(&pool(4096, 1), TcpConfig::default());
    let address = node.listening_on().expect("bound");
    let counters = node.counters();
    let mut events = Vec::new();
    node.poll(1, &mut events);
    let waiting: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(address).expect("connect")).collect();
    let before = getrlimit(Resource::Nofile);
    // No descriptor beyond those that are open.
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).expect("limit");
    let (start, calls) = (Instant::now(), counters.system_calls.get());
    while start.elapsed() < Duration::from_millis(450) {
        node.poll(16, &mut events);
    }
    let (pauses, calls) = (counters.accept_pauses.get(), counters.system_calls.get() - calls);
    println!("{pauses} pauses and {calls} system calls in 450 ms");
    assert!((2..=6).contains(&pauses), "{pauses} pauses of 100 ms");
    assert!(calls < 40, "{calls} system calls: it spins");
    setrlimit(Resource::Nofile, before).expect("limit");
    drop(waiting);
    let start = Instant::now();
    while counters.refused_handshakes.get() < 4 {
        node.poll(16, &mut events);
        assert!(start.elapsed() < PATIENCE, "it does not accept any more");
    }
}
