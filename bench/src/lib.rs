//! Microbenchmarks. Machines are shared and noisy, so each figure stands beside a limit or a peer measured in the
//! same run, the two in turn, and the median of the rounds is what counts. Peers that are crates of their own are in
//! `peers`, outside this workspace.

mod catalog;
mod engine;
mod events;
mod gateway;
mod index;
mod measure;
mod route;
mod soak;
mod transfer;

pub use gateway::GatewayArgs;

use std::path::PathBuf;
use std::sync::OnceLock;

use clap::{Args, Subcommand};

/// How many allocations the calling thread has made, in a binary that counts them.
pub static ALLOCATIONS: OnceLock<fn() -> u64> = OnceLock::new();

/// Which benchmark, and how.
#[derive(Args)]
pub struct BenchArgs {
    /// Tiny input, to see that everything runs; the numbers mean nothing.
    #[arg(long, global = true)]
    smoke: bool,
    #[command(subcommand)]
    command: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Block writes over shared memory and TCP, beside memcpy.
    Transfer,
    /// The prefix index: stores, look-ups, removals, with readers beside a writer.
    Index {
        /// Work of your own as text, one operation a line, in file order: `S worker parent|- block:sequence …`, `R worker
        /// sequence …`, `Q block …`.
        #[arg(long, value_name = "FILE")]
        workload: Option<PathBuf>,
        /// The Mooncake conversation trace, as one more workload.
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,
        /// How far it grows: so many (worker, block) pairs on 4,096 workers, with their memory and the look-ups in it.
        #[arg(long, value_name = "PAIRS")]
        grow: Option<u64>,
    },
    /// The routing decision: its parts, and the whole of it inside a live gateway under open-loop load.
    Route,
    /// KV events from the wire to the index.
    Events,
    /// Block bookkeeping: match, register, evict.
    Catalog,
    /// Prefill and decode of the built-in model.
    Engine,
    /// What a gateway adds to chats with a mock engine.
    Gateway(GatewayArgs),
    /// Requests through mock engines that fail in every way: each must be answered or cleanly refused, and nothing left.
    Soak {
        /// How many.
        #[arg(long, default_value_t = 1_000_000)]
        requests: u64,
        /// Seed of the draws.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// All of them.
    All,
}

/// Runs a benchmark.
pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    let smoke = args.smoke;
    match args.command {
        Bench::Transfer => transfer::run(smoke),
        Bench::Index { workload: Some(file), .. } => index::run_file(&file),
        Bench::Index { grow: Some(pairs), .. } => index::grow(pairs),
        Bench::Index { workload: None, trace, .. } => index::run(smoke, trace.as_deref()),
        Bench::Route => route::run(smoke),
        Bench::Events => events::run(smoke),
        Bench::Catalog => catalog::run(smoke),
        Bench::Engine => engine::run(smoke),
        Bench::Soak { requests, seed } => soak::run(if smoke { 2000 } else { requests }, seed),
        Bench::Gateway(args) => gateway::run(smoke, &args),
        Bench::All => {
            transfer::run(smoke)?;
            index::run(smoke, None)?;
            route::run(smoke)?;
            events::run(smoke)?;
            catalog::run(smoke)?;
            engine::run(smoke)?;
            gateway::run(smoke, &GatewayArgs::with_defaults())?;
            soak::run(if smoke { 2000 } else { 1_000_000 }, 1)
        }
    }
}
