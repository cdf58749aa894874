//! The life of blocks in a catalog, hit ratios of its policies, threads that share it.
#![cfg(not(loom))]

#[path = "../bed/mod.rs"]
mod bed;

mod hit_ratio;
mod life;
mod stress;
