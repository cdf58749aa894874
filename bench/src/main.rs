//! `kvasir-bench`: microbenchmarks. Machines are shared and noisy, so each figure stands beside a limit or a
//! peer measured in the same run, the two in turn, and the median of the rounds is what counts.

mod catalog;
mod engine;
mod gateway;

mod measure;
mod transfer;

use clap::{Parser, Subcommand};

/// Microbenchmarks of Kvasir.
#[derive(Parser)]
struct Cli {
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
    /// Prefix look-ups and the whole routing decision, beside a map per worker.
    Index,
    /// Block bookkeeping: match, register, evict.
    Catalog,
    /// Prefill and decode of the built-in model.
    Engine,
    /// What the gateway adds to a streamed completion.
    Gateway,
    /// All of them.
    All,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    match cli.command {
        Bench::Transfer => transfer::run(cli.smoke),
        Bench::Index => Ok(()),
        Bench::Catalog => catalog::run(cli.smoke),
        Bench::Engine => engine::run(cli.smoke),
        Bench::Gateway => gateway::run(cli.smoke),
        Bench::All => {
            transfer::run(cli.smoke)?;

            catalog::run(cli.smoke)?;
            engine::run(cli.smoke)?;
            gateway::run(cli.smoke)
        }
    }
}
