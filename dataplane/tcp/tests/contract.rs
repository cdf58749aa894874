//! The contract of fabrics, over loopback, with one and with several connections per peer.

use std::net::SocketAddr;
use std::sync::Arc;

use dataplane_fabric::testing::{Pair, conformance, pool};
use dataplane_fabric::{ConnectError, Fabric};
use dataplane_tcp::{TcpConfig, TcpError, TcpFabric};

fn conforms(config: &TcpConfig) {
    conformance(&mut || {
        let (pool_a, pool_b) = (pool("a"), pool("b"));
        let a = TcpFabric::new(Arc::clone(pool_a.slab()), None, config.clone()).expect("a");
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        // The side that is connected to follows the other's number of connections.
        let b = TcpFabric::new(Arc::clone(pool_b.slab()), listen, TcpConfig::default()).expect("b");
        let address_of_b = b.listening_on().expect("bound").to_string();
        let tick = Box::new(|| {});
        Pair { a: Some(Box::new(a)), b: Some(Box::new(b)), pool_a, pool_b, address_of_b, tick }
    });
}

#[test]
fn one_connection_conforms() {
    conforms(&TcpConfig { connections_per_peer: 1, ..TcpConfig::default() });
}

#[test]
fn several_connections_conform() {
    for connections_per_peer in [2, 3, 8] {
        conforms(&TcpConfig { connections_per_peer, ..TcpConfig::default() });
    }
}

#[test]
fn copying_always_conforms() {
    conforms(&TcpConfig { zero_copy_from: None, ..TcpConfig::default() });
}

#[test]
fn small_socket_buffers_conform() {
    let (send_buffer_bytes, receive_buffer_bytes) = (8 << 10, 8 << 10);
    let config = TcpConfig { send_buffer_bytes, receive_buffer_bytes, ..TcpConfig::default() };
    conforms(&config);
    conforms(&TcpConfig { connections_per_peer: 4, ..config });
}

#[test]
fn addresses_and_settings_are_checked() {
    let slab = Arc::clone(pool("a").slab());
    let mut fabric = TcpFabric::new(Arc::clone(&slab), None, TcpConfig::default()).expect("fabric");
    assert!(matches!(fabric.connect("nowhere"), Err(ConnectError::Address { .. })));
    let config = TcpConfig { connections_per_peer: 9, ..TcpConfig::default() };
    assert!(matches!(TcpFabric::new(slab, None, config), Err(TcpError::Config { .. })));
}
