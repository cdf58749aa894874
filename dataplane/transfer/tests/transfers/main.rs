//! Transfers between nodes: grants, several rails, sharded layouts, registered memory.

mod bonded;
mod grants;
mod registered;
mod sharded;
