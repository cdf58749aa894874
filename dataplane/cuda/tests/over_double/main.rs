//! The crate over the double of the driver. One process can have one double, so tests that need another kind of process have
//! files of their own: without a driver (`absent.rs`), with an old one (`old_driver.rs`), with memory that is leaked
//! (`unknown_end.rs`), with counted allocations (`allocations.rs`).

#[path = "../double/mod.rs"]
mod double;

mod copier;
mod copies;
mod faithful;
mod foreign;
mod kernels;
mod memory;
