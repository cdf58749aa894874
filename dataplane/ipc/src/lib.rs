//! Device memory that processes of one host share, as a fabric: blocks go from one GPU's memory to another's, over NVLink or PCIe,
//! and touch neither the host's memory nor a network card.
//!
//! ```text
//! post(Write) ─▶ Copier ──── device slot ═══ copy engine ═══▶ peer's device slot
//! post(Send), immediates ─▶ held back until the copies before them are over ─▶ shared-memory rings ─▶ peer
//! ```
//!
//! Peers connect over shared memory ([`ShmFabric`](dataplane_shm::ShmFabric)), with its handshake and secret,
//! and exchange the driver's handles of their slabs ([`DeviceSharing`](dataplane_memory::DeviceSharing);
//! CUDA's is an IPC handle). A thread attaches the peer's slab, which takes milliseconds. From then on a
//! write or read is a copy by the device, and a message or immediate follows in the rings once the copies
//! that were posted before it in its lane have ended.
//!
//! Limits:
//! * A peer can read and write every slot of the slab, and generations are not checked
//!   ([`Fabric::checks_generations`](dataplane_fabric::Fabric::checks_generations)).
//! * No event reports the end of a copy: a thread with copies in flight polls.
//! * A copy that was started cannot be cancelled.
//!   [`Fabric::disconnect`](dataplane_fabric::Fabric::disconnect) starts no more, and the end is reported to
//!   the peer when the last copy has ended.
//!
//! **End of a connection.** Each side says goodbye when its copies have ended and the peer's memory is
//! closed; a connection has ended when both have. Dropping a node waits half a second for that, and does not
//! free memory that a peer may still write to. A peer that dies says no goodbye, and its copies may still be
//! running when its socket closes: the end is reported once the kernel has ended the process (`SO_PEERPIDFD`,
//! Linux 6.5, or pidfd_open(2)), which closes its driver first. A peer whose end cannot be awaited is not
//! admitted.
//!
//! Per operation: no lock, no system call of this crate's own, and no allocation except for messages, once
//! its queues have grown. Driven by one thread.

#![forbid(unsafe_code)]

mod attach;
mod connections;
mod counters;
mod fabric;
mod lane;
mod peer;
mod wire;

pub use counters::IpcCounters;
pub use fabric::{IpcError, IpcFabric};

/// Fuzzing: decodes a message of a peer.
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub fn fuzz_wire(bytes: &[u8]) {
    wire::fuzz(bytes);
}
