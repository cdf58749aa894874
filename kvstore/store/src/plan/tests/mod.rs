//! The promises of plans, in simulation.

mod groups;
mod promise;
mod sweep;
pub(super) mod testing;
