//! The same trait over an installed SPDK, for machines where SPDK has the devices already.
//!
//! `library` is the C interface, loaded at run time; [`SpdkEngine`] drives one queue pair of one namespace. Only calls
//! are used whose signatures have been the same since SPDK 19.01, and no structure of SPDK's but the two that it has only
//! room for: options are its defaults, but for their size. `registration` and `bus_error` are about what real SPDK does beside
//! its interface. Tests run against a small library in C that has these functions over a file, and does the same. The calls were run by
//! hand on SPDK 24.01 and 26.05 in a virtual machine with an emulated device, never on a physical one. After a reset that failed
//! the memory of commands in flight is leaked on purpose; see [`SpdkEngine::abandoned_commands`].
//!
//! A machine needs: the device bound to vfio-pci, hugepages and a mount of hugetlbfs (`mount -t hugetlbfs none /dev/hugepages`), an
//! IOMMU of 48 bits for slabs of 4 KiB pages (SPDK before 25.09 takes 2 MiB pages only).

mod bus_error;
mod config;
mod engine;
mod flow;
mod io_engine;
mod library;
mod open;
mod recovery;
mod registration;

pub use config::SpdkConfig;
pub use engine::SpdkEngine;
