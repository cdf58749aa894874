//! A node that sleeps on its descriptors is woken by everything that concerns it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use dataplane_fabric::testing::pool;
use dataplane_fabric::{Event, Fabric, WorkRequest};
use dataplane_tcp::{TcpConfig, TcpFabric};
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

const ROUNDS: u32 = 2000;

/// Sleeps until there is something; panics when nothing wakes it.
fn sleep(fabric: &mut TcpFabric, what: &str) {
    if !fabric.prepare_wait() {
        return;
    }
    let mut descriptors = Vec::new();
    fabric.wait_descriptors(&mut descriptors);
    let mut polled: Vec<PollFd<'_>> = descriptors.iter().map(|it| PollFd::new(it, PollFlags::IN)).collect();
    let patience = Timespec { tv_sec: 5, tv_nsec: 0 };
    let ready = rustix::event::poll(&mut polled, Some(&patience)).expect("poll");
    assert!(ready > 0, "nothing woke the node: {what}");
}

fn wait_for(fabric: &mut TcpFabric, what: &str, mut want: impl FnMut(&Event) -> bool) -> Event {
    let mut events = Vec::new();
    loop {
        // One at a time, so that none is lost behind the one that is awaited.
        fabric.poll(1, &mut events);
        match events.pop() {
            Some(event) if want(&event) => return event,
            Some(_) => {}
            None => sleep(fabric, what),
        }
    }
}

#[test]
fn messages_and_ends_wake_a_sleeping_node() {
    let (pool_a, pool_b) = (pool("a"), pool("b"));
    let mut a = TcpFabric::new(Arc::clone(pool_a.slab()), None, TcpConfig::default()).expect("a");
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    // Made here and driven there.
    let mut b = TcpFabric::new(Arc::clone(pool_b.slab()), listen, TcpConfig::default()).expect("b");
    let address = b.listening_on().expect("bound").to_string();
    let echo = thread::spawn(move || {
        let Event::Accepted { peer } =
            wait_for(&mut b, "accept", |event| matches!(event, Event::Accepted { .. }))
        else {
            return;
        };
        for _ in 0..ROUNDS {
            wait_for(&mut b, "a message", |event| matches!(event, Event::Message { .. }));
            b.post(WorkRequest::message(peer, Box::new([2]))).expect("room");
            b.flush();
        }
        wait_for(&mut b, "the end", |event| matches!(event, Event::PeerDown { .. }));
    });
    let peer = a.connect(&address).expect("address");
    wait_for(&mut a, "connected", |event| *event == Event::Connected { peer });
    for _ in 0..ROUNDS {
        a.post(WorkRequest::message(peer, Box::new([1]))).expect("room");
        a.flush();
        wait_for(&mut a, "an answer", |event| matches!(event, Event::Message { .. }));
    }
    drop(a);
    echo.join().expect("echo");
}
