//! Microbenchmarks. Machines are shared and noisy, so each figure stands beside a limit or a peer measured in
//! the same run, the two in turn, and the median of the rounds is reported. Peers that are crates of their own
//! are in `peers`, outside this workspace.

mod catalog;
mod churn;
mod disk;
mod engine;
mod events;
mod gateway;
pub mod gpu;
mod hand_off;
mod index;
mod measure;
mod rails;
mod report;
mod results;
mod route;
mod scaling;
mod size;
mod soak;
mod tier;
pub mod transfer;
mod transfer_soak;

pub use gateway::GatewayArgs;
use measure::RoundsArgs;
use transfer::TransferArgs;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{Args, Subcommand};

/// Returns the number of allocations of the calling thread, in a binary that counts them.
pub static ALLOCATIONS: OnceLock<fn() -> u64> = OnceLock::new();

/// The benchmark and its options.
#[derive(Args)]
pub struct BenchArgs {
    /// Tiny input, to check that everything runs; the numbers mean nothing.
    #[arg(long, global = true)]
    smoke: bool,
    #[command(flatten)]
    output: results::OutputArgs,
    #[command(subcommand)]
    command: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Latency, bandwidth and rate of transfers over shared memory, TCP and RDMA, beside memcpy or perftest.
    Transfer(Box<TransferArgs>),
    /// Many hand-offs between two nodes: time of one round of the thread that carries them.
    HandOff(hand_off::HandOffArgs),
    /// The prefix index: stores, look-ups, removals, with readers beside a writer.
    Index {
        /// A workload as text, one operation a line, in file order: `S worker parent|- block:sequence …`,
        /// `R worker sequence …`, `Q block …`.
        #[arg(long, value_name = "FILE")]
        workload: Option<PathBuf>,
        /// The Mooncake conversation trace, as one more workload.
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,
        /// Grow the index to this many (worker, block) pairs on 4,096 workers; report its memory and its look-ups.
        #[arg(long, value_name = "PAIRS", conflicts_with = "rounds")]
        grow: Option<u64>,
        #[command(flatten)]
        rounds: RoundsArgs,
    },
    /// The routing decision: its parts, and the whole of it inside a live gateway under open-loop load.
    Route(RoundsArgs),
    /// Scaling policies beside each other, in simulation: attainment and workers on six shapes of demand.
    Scaling,
    /// KV events from the wire to the index.
    Events(RoundsArgs),
    /// Block bookkeeping: match, register, evict.
    Catalog(RoundsArgs),
    /// Reads and writes of blocks on a disk, by size, depth and engine, beside fio on the same file.
    Disk(Box<disk::DiskArgs>),
    /// The tiers behind a worker's pool: their gain for conversations, that they are never worse than
    /// recomputing, and that no data is lost, left over or wrong after a long time.
    Tier(Box<tier::TierArgs>),
    /// Prefill and decode of the built-in model.
    Engine(RoundsArgs),
    /// Overhead that a gateway adds to chats with a mock engine.
    Gateway(GatewayArgs),
    /// Copies to, from and on a GPU, and the layout kernels, beside plain copies of the same bytes.
    Gpu(gpu::GpuArgs),
    /// Requests through mock engines with all kinds of faults: each must be answered or cleanly refused, and no
    /// resource left in use.
    Soak {
        /// Number of requests.
        #[arg(long, default_value_t = 1_000_000)]
        requests: u64,
        /// Seed of the draws.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Requests while the roster changes all the time: none may fail, and the index must equal the truth at the end.
    Churn {
        /// Length of the run in seconds.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// Changes of the roster per second.
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=1000))]
        changes: u64,
        /// Requests per second.
        #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        rate: u64,
        /// Seed of the draws.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Random hand-offs between processes, with cancellations, short deadlines and killed peers; every byte is compared.
    TransferSoak {
        /// Length of the run in seconds.
        #[arg(long, default_value_t = 1800)]
        seconds: u64,
        /// Seed of the draws.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// The transports of each peer: `shm`, `tcp`, `rdma:DEVICE`; several are bonded.
        #[arg(long, default_value = transfer_soak::PEERS)]
        peers: String,
        /// Mean number of seconds after which a peer is killed.
        #[arg(long, default_value_t = 6.0)]
        life: f64,
    },
    /// A peer process of the transfer soak.
    #[command(hide = true)]
    TransferNode {
        /// Transports of the peer.
        #[arg(long)]
        transports: String,
        /// Path of the peer's socket.
        #[arg(long)]
        socket: PathBuf,
        /// Heads of the peer: the first, and their number.
        #[arg(long, value_parser = transfer_soak::parse_heads)]
        heads: dataplane_transfer::HeadRange,
    },
    /// All benchmarks.
    All,
    /// Draw files of results (`--json`) into one HTML page.
    Report(report::ReportArgs),
}

/// Length of a smoke run.
const CHURN_SMOKE_SECONDS: u64 = 5;

/// Runs a benchmark, writes its results, and compares them with those of an earlier run.
pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    args.output.check()?;
    if !matches!(args.command, Bench::Report(_) | Bench::TransferNode { .. }) {
        println!("{}", results::Header::of_this_machine().line());
    }
    let measured = measure_all(args.command, args.smoke);
    // A benchmark that fails loses no results of those before it.
    let written = args.output.finish();
    measured.and(written)
}

fn measure_all(command: Bench, smoke: bool) -> anyhow::Result<()> {
    match command {
        Bench::Transfer(args) => run_transfer(&args, smoke),
        Bench::HandOff(args) => hand_off::run(&args, smoke),
        Bench::Index { workload: Some(file), .. } => index::run_file(&file),
        Bench::Index { grow: Some(pairs), .. } => index::grow(pairs),
        Bench::Index { workload: None, trace, rounds, .. } => index::run(smoke, trace.as_deref(), rounds),
        Bench::Route(rounds) => route::run(smoke, rounds),
        Bench::Events(rounds) => events::run(smoke, rounds),
        Bench::Scaling => scaling::run(smoke),
        Bench::Catalog(rounds) => catalog::run(smoke, rounds),
        Bench::Disk(args) => disk::run(&args, smoke),
        Bench::Tier(args) => tier::run(smoke, &args),
        Bench::Engine(rounds) => engine::run(smoke, rounds),
        Bench::Soak { requests, seed } => soak::run(if smoke { 2000 } else { requests }, seed),
        Bench::Churn { seconds, changes, rate, seed } => {
            churn::run(if smoke { CHURN_SMOKE_SECONDS } else { seconds }, changes, rate, seed)
        }
        Bench::TransferSoak { seconds, seed, peers, life } => {
            let life = std::time::Duration::from_secs_f64(life.clamp(0.1, 3600.0));
            transfer_soak::run(if smoke { 5 } else { seconds }, seed, &peers, life)
        }
        Bench::TransferNode { transports, socket, heads } => {
            transfer_soak::run_node(&transports, &socket, heads)
        }
        Bench::Gpu(args) => gpu::run(smoke, &args),
        Bench::Report(args) => report::run(&args),
        Bench::Gateway(args) => gateway::run(smoke, &args),
        Bench::All => {
            run_transfer(&TransferArgs::with_defaults(), smoke)?;
            hand_off::run(&hand_off::HandOffArgs::with_defaults(), smoke)?;
            index::run(smoke, None, RoundsArgs::default())?;
            route::run(smoke, RoundsArgs::default())?;
            scaling::run(smoke)?;
            events::run(smoke, RoundsArgs::default())?;
            catalog::run(smoke, RoundsArgs::default())?;
            disk::run(&disk::DiskArgs::with_defaults(), smoke)?;
            engine::run(smoke, RoundsArgs::default())?;
            tier::run(smoke, &tier::TierArgs::default())?;
            gateway::run(smoke, &GatewayArgs::with_defaults())?;
            gpu::run_if_present(smoke)?;
            soak::run(if smoke { 2000 } else { 1_000_000 }, 1)?;
            churn::run(if smoke { CHURN_SMOKE_SECONDS } else { 600 }, 50, 500, 1)
        }
    }
}

fn run_transfer(args: &TransferArgs, smoke: bool) -> anyhow::Result<()> {
    let rails = rails::MachineRails::new(&args.devices, args.gid_index)?;
    transfer::run(args, &rails, smoke, ALLOCATIONS.get().copied()).map(drop)
}

/// Returns the exit code of a benchmark: 0 for success, 3 for results that are worse than the baseline, 77 for a missing device or
/// program, 1 for a failure.
#[must_use]
pub fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<transfer::Unavailable>() => {
            eprintln!("{error}");
            ExitCode::from(transfer::EXIT_UNAVAILABLE)
        }
        Err(error) if error.is::<results::Slower>() => {
            eprintln!("{error}");
            ExitCode::from(results::EXIT_SLOWER)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
