//! Hand-offs between devices' memories, through staging slots and directly, over a simulated fabric and
//! over shared memory. With any fault of the network, of a copy or of a sum: blocks that are reported as
//! arrived are byte for byte the ones sent, every transfer ends, and in the end no slot of any memory is
//! held. `long` covers the number of blocks, in any memory.

mod direct;
mod direct_borders;
mod direct_rails;
mod direct_steps;
mod fast_peer;
mod long;
mod rig;
mod runs;
mod staged;
mod staged_borders;
mod staged_steps;
