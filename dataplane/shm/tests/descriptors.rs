//! A node that runs out of descriptors pauses accepting, sleeps meanwhile, and continues when some are free
//! again. A file of its own: the limit applies to the whole process.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::testing::pool;
use dataplane_fabric::wait::{Notifier, WaitPolicy, Waiter};
use dataplane_fabric::{Event, Fabric};
use dataplane_shm::{ShmConfig, ShmFabric};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn without_descriptors_accepting_pauses_and_goes_on() {
    let name = format!("kvasir-shm-descriptors-{}", std::process::id());
    let address = format!("@{name}");
    let (pool_a, pool_b) = (pool("a"), pool("b"));
    let mut a = ShmFabric::new(Arc::clone(pool_a.slab()), None, ShmConfig::default()).expect("a");
    let mut b = ShmFabric::new(Arc::clone(pool_b.slab()), Some(&address), ShmConfig::default()).expect("b");
    let to_b = a.connect(&address).expect("connect");
    let raw = SocketAddr::from_abstract_name(&name).expect("name");
    let waiter = Waiter::new(Notifier::new().expect("an eventfd"), WaitPolicy::default());
    let _silent: Vec<UnixStream> = (0..8).map(|_| UnixStream::connect_addr(&raw).expect("connect")).collect();

    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum: before.maximum }).expect("limit");
    let start = Instant::now();
    let mut events = Vec::new();
    let (mut loops, mut slept) = (0_u32, Duration::ZERO);
    while start.elapsed() < Duration::from_millis(450) {
        loops += 1;
        if b.prepare_wait() {
            let from = Instant::now();
            waiter.sleep(&b, Some(from + Duration::from_millis(500)));
            slept += from.elapsed();
        }
        b.poll(16, &mut events);
    }
    setrlimit(Resource::Nofile, before).expect("limit");
    let counters = b.counters().snapshot();
    let pauses = counters.iter().find(|(name, ..)| *name == "accept_pauses").map_or(0, |(.., value)| *value);
    println!("450 ms without descriptors: {loops} loops, {slept:?} asleep, {pauses} pauses");
    assert!((1..=8).contains(&pauses), "{pauses} pauses");
    assert!(slept > Duration::from_millis(300) && loops < 50, "{loops} loops, {slept:?} asleep");
    assert_eq!(events, []);

    let until = Instant::now() + Duration::from_secs(5);
    while !events.contains(&Event::Connected { peer: to_b }) {
        assert!(Instant::now() < until, "accepting does not go on: {events:?}");
        if b.prepare_wait() {
            waiter.sleep(&b, Some(Instant::now() + Duration::from_millis(20)));
        }
        b.poll(16, &mut events);
        a.poll(16, &mut events);
    }
}
