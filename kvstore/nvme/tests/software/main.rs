//! The driver over the software controller: the suite of the trait, faults, and what the hot path may not do.

#![forbid(unsafe_code)]

mod allocation;
mod chaos;
mod conformance;
mod faults;
mod rig;
mod start;
mod waiting;
