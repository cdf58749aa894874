//! `kvasir-bench`: the same benchmarks as `kvasir bench`, in a binary that also counts allocations.

#![forbid(unsafe_code)]

use bench::{ALLOCATIONS, BenchArgs};
use clap::Parser;
use tests_allocations::{Counting, Counts};

/// Microbenchmarks of Kvasir.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> std::process::ExitCode {
    // Set once, here.
    let _first = ALLOCATIONS.set(|| Counts::of_this_thread().allocations);
    bench::exit_code(bench::run(Cli::parse().args))
}
