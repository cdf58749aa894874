//! Slots in a device's memory are refused where the fabric is made.

use std::sync::Arc;

use dataplane_memory::testing::{Abilities, DeviceDouble};
use dataplane_memory::{Slab, SlabLayout};
use dataplane_tcp::{TcpConfig, TcpError, TcpFabric};

#[test]
fn slots_in_device_memory_are_refused() {
    let layout = SlabLayout { slot_bytes: 4096, slot_count: 2 };
    let memory = DeviceDouble::new(layout.slots_bytes(), Abilities { dma_buf: true, peer_memory: true });
    let slab = Arc::new(Slab::on_device("device", layout, memory).expect("slab"));
    let refused = TcpFabric::new(slab, None, TcpConfig::default()).err().expect("no socket reaches them");
    assert!(matches!(refused, TcpError::DeviceMemory), "{refused}");
    assert!(refused.to_string().ends_with("stage them through a slab in host memory"), "{refused}");
}
