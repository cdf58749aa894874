//! Real transports bonded: the contract of every fabric, over shared memory and TCP together and over each alone.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_fabric::testing::{Pair, conformance, pool};
use dataplane_memory::Slab;
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_tcp::{TcpConfig, TcpFabric};
use dataplane_transfer::{Bond, BondConfig, Rail};

type AnyFabric = Box<dyn Fabric + Send>;

/// A bond over these transports and the address that reaches it.
fn bond(transports: &[&str], slab: &Arc<Slab>, seed: u64) -> (Bond<AnyFabric>, String) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let mut address = Vec::new();
    let mut rails: Vec<Rail<AnyFabric>> = Vec::new();
    for (rank, transport) in transports.iter().enumerate() {
        let slab = Arc::clone(slab);
        let fabric: AnyFabric = if *transport == "shm" {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("@kvasir-rails-{}-{number}", std::process::id());
            address.push(format!("shm:{name}"));
            Box::new(ShmFabric::new(slab, Some(&name), ShmConfig::default()).expect("shm"))
        } else {
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            let fabric = TcpFabric::new(slab, Some(any), TcpConfig::default()).expect("tcp");
            address.push(format!("tcp:{}", fabric.listening_on().expect("bound")));
            Box::new(fabric)
        };
        rails.push(Rail { fabric, rank: rank as u8 });
    }
    let config = BondConfig { seed, slice_bytes: 20_000, ..BondConfig::default() };
    (Bond::new(rails, config, Box::new(Instant::now)), address.join(","))
}

#[test]
fn bonded_transports_keep_the_contract() {
    for transports in [&["shm"][..], &["tcp"], &["shm", "tcp"], &["tcp", "shm"]] {
        conformance(&mut || {
            let (pool_a, pool_b) = (pool("a"), pool("b"));
            let (a, _) = bond(transports, pool_a.slab(), 1);
            let (b, address_of_b) = bond(transports, pool_b.slab(), 2);
            let tick = Box::new(|| {});
            Pair { a: Some(Box::new(a)), b: Some(Box::new(b)), pool_a, pool_b, address_of_b, tick }
        });
        println!("ok: {} bonded", transports.join(" and "));
    }
}
