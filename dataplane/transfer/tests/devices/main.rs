//! Hand-offs between devices' memories, through staging slots and directly, over a simulated fabric and over shared
//! memory. Whatever goes wrong on the way, in the network, in a copy or in a sum: what is reported as arrived is byte for
//! byte what was sent, every transfer ends, and in the end no slot of any memory is held by anybody. `long` is about the
//! number of blocks, wherever they lie.

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
