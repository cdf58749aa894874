//! The whole system on a simulated kernel: a seed is a cluster's life, and an equal seed is an equal life.

mod catalog;
mod client;
mod cluster;
mod kernel;
mod life;
mod model;
mod plan;
mod runner;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;

use plan::Plan;
use runner::{Runner, Verdict, Watching};

/// Runs clusters of Kvasir on a simulated kernel, under faults that a seed draws.
#[derive(Parser)]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// One seed alone, told as a story.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs at a time (default: one for each processor).
    #[arg(long)]
    jobs: Option<usize>,
    /// With `--seed`: prints each step of the kernel.
    #[arg(long)]
    trace: bool,
    /// With `--seed`: prints what nodes log at this level.
    #[arg(long)]
    log: Option<tracing::Level>,
    /// Prints the reference's answers.
    #[arg(long)]
    catalog: bool,
    /// Goes on after a failure.
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("kvasir-simulation: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let runner = Runner::new()?;
    if arguments.catalog {
        for exchange in runner.catalog().mocks.iter().chain(&runner.catalog().workers).flatten() {
            println!("{} + {}: {:?} {}", exchange.prompt_tokens, exchange.completion_tokens, exchange.answer, exchange.finish_reason);
        }
        return Ok(true);
    }
    if let Some(seed) = arguments.seed {
        let plan = Plan::draw(seed);
        let watching = Watching { prints_trace: arguments.trace, tells: !arguments.trace, log: arguments.log };
        let verdict = runner.run_one(&plan, watching)?;
        println!("{verdict:#?}");
        return Ok(matches!(verdict, Verdict::Passed(_)));
    }
    let jobs = arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let plans = (arguments.first..arguments.first + arguments.seeds).map(Plan::draw);
    let (began, mut failed, mut passed) = (Instant::now(), Vec::new(), 0_u64);
    let (mut simulated, mut ends) = (0, BTreeMap::<String, u64>::new());
    runner.run_all(plans, jobs, |plan, verdict| {
        match verdict {
            Verdict::Passed(summary) => {
                passed += 1;
                simulated += summary.simulated_nanos;
                for (end, count) in summary.ends {
                    *ends.entry(end).or_default() += count;
                }
            }
            Verdict::Failed(reason) => {
                println!("seed {}: {reason}", plan.seed);
                failed.push(plan.seed);
            }
        }
        Ok(arguments.keep_going || failed.is_empty())
    })?;
    let took = began.elapsed().as_secs_f64();
    println!(
        "{passed} seeds passed, {} failed; {:.2} simulated hours in {took:.1} s with {jobs} at a time: {:.2} hours a minute on \
         each; exchanges {ends:?}",
        failed.len(),
        simulated as f64 / 3.6e12,
        simulated as f64 / 3.6e12 / (took / 60.0) / jobs as f64,
    );
    Ok(failed.is_empty())
}
