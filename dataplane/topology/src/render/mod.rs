//! Text and picture of a topology and of a decision.
//!
//! `outline` reduces PCI addresses to a few boxes (NUMA node, host bridge, switch, device) and marks those on
//! a path; [`explain()`] prints them as a tree, `svg` draws them, [`doctor()`] lists facts. All names come
//! from files and were made printable when they were read.

mod doctor;
mod explain;
mod outline;
mod svg;

pub use doctor::{Fact, State, doctor, facts};
pub use explain::{Explanation, explain};
