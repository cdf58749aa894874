//! `kvasir replay`.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use router_policy::{Policy, Strategy};
use tools_replay::worker::WorkerModel;
use tools_replay::{Setup, report, simulate};
use tools_workload::mooncake;

/// Arguments of `kvasir replay`.
#[derive(Args)]
pub(crate) struct ReplayArgs {
    /// Replay in a simulated fleet (the only mode so far).
    #[arg(long)]
    simulate: bool,
    /// Trace file: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`
    /// (512-token blocks).
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Number of workers.
    #[arg(long, default_value_t = 8)]
    workers: usize,
    /// Blocks (of 512 tokens) in each worker's pool.
    #[arg(long, default_value_t = WorkerModel::default().pool_blocks)]
    pool_blocks: usize,
    /// Prompt tokens that a worker computes per second, one prompt at a time.
    #[arg(long, default_value_t = 1.0 / WorkerModel::default().per_token)]
    tokens_per_second: f64,
    /// Policies to compare, separated by commas (default: all).
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    policies: Vec<String>,
    /// Factors by which the trace runs faster than recorded, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    speedups: Vec<f64>,
    /// Repetitions of the trace, each with different prompts.
    #[arg(long, default_value_t = 1)]
    repeat: usize,
    /// Random seed. Equal seeds give equal runs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Path of an SVG plot of times to first token over the load.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<ExitCode> {
    if !args.simulate {
        bail!("only simulation is there: add --simulate");
    }
    if args.workers == 0 || args.pool_blocks == 0 || args.repeat == 0 {
        bail!("--workers, --pool-blocks and --repeat must be at least 1");
    }
    if args.speedups.iter().chain([&args.tokens_per_second]).any(|value| !value.is_finite() || *value <= 0.0)
    {
        bail!("--speedups and --tokens-per-second must be above 0");
    }
    let policies = strategies(&args.policies)?;
    let trace = mooncake::read(&args.trace)?;
    let last = trace.last().with_context(|| format!("{}: the trace is empty", args.trace.display()))?;
    println!(
        "{}: {} requests in {} s, {} time(s); {} workers of {} blocks, {:.0} tokens/s each; seed {}",
        args.trace.display(),
        trace.len(),
        last.timestamp / 1000,
        args.repeat,
        args.workers,
        args.pool_blocks,
        args.tokens_per_second,
        args.seed
    );
    println!("{}", report::header());
    let started = Instant::now();
    let mut outcomes = Vec::new();
    for &speedup in &args.speedups {
        for &strategy in &policies {
            let setup = Setup {
                workers: args.workers,
                model: WorkerModel {
                    pool_blocks: args.pool_blocks,
                    per_token: 1.0 / args.tokens_per_second,
                    ..WorkerModel::default()
                },
                policy: Policy { strategy, ..Policy::default() },
                speedup,
                repeat: args.repeat,
                seed: args.seed,
            };
            let shows = std::io::stderr().is_terminal();
            let outcome = simulate(&setup, &trace, |share| {
                if shows {
                    eprint!("\r{} at {speedup}x: {:3.0} %  ", strategy.name(), 100.0 * share);
                }
            })?;
            if shows {
                eprint!("\r{:40}\r", "");
            }
            println!("{}", report::line(&outcome));
            std::io::stdout().flush()?;
            outcomes.push(outcome);
        }
    }
    println!("{} simulations in {:.1} s", outcomes.len(), started.elapsed().as_secs_f64());
    if let Some(file) = &args.plot {
        let title = format!("{} workers, {} requests", args.workers, trace.len() * args.repeat);
        report::plot(file, &title, &outcomes)?;
        println!("plot: {}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn strategies(names: &[String]) -> Result<Vec<Strategy>> {
    if names.is_empty() {
        return Ok(Strategy::ALL.to_vec());
    }
    let known = || Strategy::ALL.map(Strategy::name).join(", ");
    let named = |name: &String| {
        Strategy::from_name(name).with_context(|| format!("{name:?} is no policy; there are: {}", known()))
    };
    names.iter().map(named).collect()
}
