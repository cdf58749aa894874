//! The whole system on a simulated kernel: a seed determines the run of a cluster, and equal seeds give equal
//! runs.

mod answers;
mod bounds;
mod catalog;
mod client;
mod cluster;
mod deployment;
mod draw;
mod fault_effects;
mod kernel;
mod model;
mod nodes;
mod oracle;
mod plan;
mod quiescence;
mod runner;
mod scenario;
mod shrink;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;

use plan::Plan;
use quiescence::RARELY_COVERED;
use runner::{RunOutput, Runner, Verdict};
use scenario::Summary;

/// Runs clusters of Kvasir on a simulated kernel, with faults that a seed draws.
#[derive(Parser)]
struct Arguments {
    /// Number of seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Run only this seed, and print its steps.
    #[arg(long)]
    seed: Option<u64>,
    /// Run only the plan in this file, to which a failure was saved, and print its steps.
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    plan: Option<PathBuf>,
    /// Run all plans of a folder, which contains earlier failures, or the plan of one file.
    #[arg(long, value_name = "PATH")]
    plans: Option<PathBuf>,
    /// Concurrent runs (default: one for each processor).
    #[arg(long)]
    jobs: Option<usize>,
    /// With one seed or plan: print each step of the kernel.
    #[arg(long)]
    trace: bool,
    /// With one seed or plan: print the nodes' log at this level.
    #[arg(long)]
    log: Option<tracing::Level>,
    /// Print the answers of the reference.
    #[arg(long)]
    catalog: bool,
    /// Continue after a failure, without shrinking.
    #[arg(long, conflicts_with_all = ["seed", "plan"])]
    keep_going: bool,
    /// Stop at a failure without shrinking it.
    #[arg(long)]
    no_shrink: bool,
    /// Run each seed twice, and fail if the runs differ.
    #[arg(long, conflicts_with_all = ["seed", "plan", "plans"])]
    twice: bool,
    /// Print a hash over the traces of all seeds.
    #[arg(long, conflicts_with_all = ["seed", "plan"])]
    hash: bool,
    /// Fail if a part of the system that has a counter was not exercised in any run.
    #[arg(long, conflicts_with_all = ["seed", "plan"])]
    reaches_all: bool,
    /// Change an answer of the reference: every run that asks for it must fail.
    #[arg(long)]
    plant_wrong_answer: bool,
    /// Write the first failing plan, shrunk, to this file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seed", "plan", "keep_going", "no_shrink"])]
    save: Option<PathBuf>,
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
    let mut runner = Runner::new()?;
    if arguments.plant_wrong_answer {
        runner.plant_wrong_answer();
    }
    if arguments.catalog {
        for exchange in runner.catalog().mocks.iter().chain(&runner.catalog().workers).flatten() {
            let (prompt, completion) = (exchange.prompt_tokens, exchange.completion_tokens);
            println!("{prompt} + {completion}: {:?} {}", exchange.answer, exchange.finish_reason);
        }
        return Ok(true);
    }
    if let Some(plan) = alone(arguments)? {
        let output = RunOutput { trace: arguments.trace, steps: !arguments.trace, log: arguments.log };
        let verdict = runner.run_one(&plan, output)?;
        println!("{verdict:#?}");
        return Ok(matches!(verdict, Verdict::Passed(_)));
    }
    match &arguments.plans {
        Some(folder) => run_many(arguments, &runner, saved(folder)?.into_iter()),
        None => {
            run_many(arguments, &runner, (arguments.first..).take(arguments.seeds as usize).map(Plan::draw))
        }
    }
}

/// Returns the plan to run alone, if the arguments name one.
fn alone(arguments: &Arguments) -> Result<Option<Plan>> {
    match (&arguments.plan, arguments.seed) {
        (Some(file), _) => read(file).map(Some),
        (None, Some(seed)) => Ok(Some(Plan::draw(seed))),
        (None, None) => Ok(None),
    }
}

fn read(file: &Path) -> Result<Plan> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    serde_json::from_str(&text).with_context(|| file.display().to_string())
}

fn saved(folder: &Path) -> Result<Vec<Plan>> {
    if folder.is_file() {
        return Ok(vec![read(folder)?]);
    }
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files.iter().map(|file| read(file)).collect()
}

/// Sums over many runs.
#[derive(Default)]
struct Totals {
    passed: u64,
    simulated_nanos: u64,
    turns: u64,
    ends: BTreeMap<String, u64>,
    worked: BTreeMap<String, u64>,
    hash: u64,
    failed: Vec<(Plan, String)>,
}

impl Totals {
    fn take(&mut self, plan: &Plan, verdict: Verdict) {
        match verdict {
            Verdict::Failed(reason) => {
                println!("seed {}: {reason}", plan.seed);
                self.failed.push((plan.clone(), reason));
            }
            Verdict::Passed(summary) => {
                self.passed += 1;
                self.simulated_nanos += summary.simulated_nanos;
                self.turns += summary.turns;
                // Runs end in any order, so their hashes are summed.
                self.hash = self.hash.wrapping_add(summary.hash.wrapping_mul(plan.seed | 1));
                for (sums, counts) in [(&mut self.ends, summary.ends), (&mut self.worked, summary.worked)] {
                    for (name, count) in counts {
                        *sums.entry(name).or_default() += count;
                    }
                }
            }
        }
    }
}

fn run_many(arguments: &Arguments, runner: &Runner, plans: impl Iterator<Item = Plan>) -> Result<bool> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = arguments.jobs.unwrap_or(processors);
    let (began, mut totals) = (Instant::now(), Totals::default());
    let mut runs: HashMap<u64, Summary> = HashMap::new();
    let twice = if arguments.twice { 2 } else { 1 };
    let plans = plans.flat_map(|plan| std::iter::repeat_n(plan, twice));
    runner.run_all(plans, jobs, |plan, verdict| {
        if let Verdict::Passed(summary) = &verdict
            && arguments.twice
        {
            let other = runs.entry(plan.seed).or_insert_with(|| summary.clone());
            if other != summary {
                let reason = format!(
                    "[simulator] two runs differ: their traces are {:016x} and {:016x}",
                    other.hash, summary.hash
                );
                totals.take(plan, Verdict::Failed(reason));
                return Ok(arguments.keep_going);
            }
        }
        totals.take(plan, verdict);
        if (totals.passed + totals.failed.len() as u64).is_multiple_of(PROGRESS_EVERY) {
            eprintln!("{} seeds after {:.0} s", totals.passed, began.elapsed().as_secs_f64());
        }
        Ok(arguments.keep_going || totals.failed.is_empty())
    })?;
    report_totals(arguments, &totals, began.elapsed().as_secs_f64(), jobs);
    if let Some((plan, reason)) = totals.failed.first()
        && !(arguments.keep_going || arguments.no_shrink)
    {
        report_failure(arguments, runner, plan, reason)?;
    }
    let idle =
        totals.worked.iter().filter(|(name, count)| **count == 0 && !RARELY_COVERED.contains(&name.as_str()));
    let idle: Vec<&String> = idle.map(|(name, _)| name).collect();
    if totals.passed + totals.failed.len() as u64 == 0 {
        println!("no plan was run: pass --seeds above 0, or --plans with a folder that has plans");
        return Ok(false);
    }
    if arguments.reaches_all && !idle.is_empty() {
        println!("never reached: {idle:?}");
        return Ok(false);
    }
    Ok(totals.failed.is_empty())
}

/// Runs between two progress messages.
const PROGRESS_EVERY: u64 = 1000;

fn report_totals(arguments: &Arguments, totals: &Totals, seconds: f64, jobs: usize) {
    let hours = totals.simulated_nanos as f64 / 3.6e12;
    println!(
        "{} seeds passed, {} failed; {hours:.2} simulated hours and {} turns in {seconds:.1} s with {jobs} at a time: {:.2} hours a \
         minute on one core",
        totals.passed,
        totals.failed.len(),
        totals.turns,
        hours / (seconds / 60.0) / jobs as f64,
    );
    println!("exchanges {:?}", totals.ends);
    println!("worked {:?}", totals.worked);
    if arguments.hash {
        println!("hash of all traces {:016x}", totals.hash);
    }
}

/// Shrinks a failure and prints its steps.
fn report_failure(arguments: &Arguments, runner: &Runner, plan: &Plan, reason: &str) -> Result<()> {
    println!("shrinking the {} steps of seed {}", plan.steps.len(), plan.seed);
    let (plan, reason) = shrink::shrink(runner, plan, reason)?;
    println!("shrunk to {} of them, and it fails still: {reason}", plan.steps.len());
    println!(
        "{} gateways, {:?}, peers {}, {:?}, {:?}",
        plan.gateways, plan.engines, plan.peers, plan.link, plan.tiers
    );
    runner.run_one(&plan, RunOutput { steps: true, ..RunOutput::default() })?;
    if let Some(file) = &arguments.save {
        std::fs::write(file, serde_json::to_string_pretty(&plan)?)
            .with_context(|| file.display().to_string())?;
        println!("written to {}: run it with --plan", file.display());
    } else {
        println!("to keep this plan: --first {} --seeds 1 --save FILE", plan.seed);
    }
    Ok(())
}
