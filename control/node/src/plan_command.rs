//! `kvasir plan`: sizes a fleet for a demand, replays demand through scaling policies, and explains the decisions
//! of a running planner.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use control_planner::{
    CAPACITY_OF, Capacity, Comparison, Engine, LEVEL_WINDOW, Lengths, Request, ServiceLevel, Setup,
    WorkerRole, compare, forecast_error,
};
use serde_json::Value;
use tools_workload::{azure, mooncake};

use crate::credentials::Credentials;
use crate::policy_plot::plot;
use crate::{planning, process};

#[derive(Subcommand)]
pub(crate) enum PlanCommand {
    /// Show the decisions of a running gateway's planner, and the reasons.
    Explain {
        /// The gateway, as HOST:PORT or https://HOST:PORT.
        #[arg(default_value = "127.0.0.1:8000")]
        gateway: String,
        #[command(flatten)]
        credentials: Credentials,
    },
    /// Replay recorded demand through scaling policies in simulation: the headroom is chosen on the first half of
    /// the trace, the policies are compared on the second half.
    Replay(ReplayArgs),
    /// Show how many workers a demand needs, with combined workers and with separate prefill and decode
    /// workers.
    Size(SizeArgs),
}

/// Service level of the fleet; step times, limits and `down_after` come from `[planner]`. A replay uses no
/// seasons, and clears queued requests within one minute.
#[derive(Args)]
struct FleetArgs {
    /// The configuration file. Without a file, the defaults apply.
    #[arg(long, env = "KVASIR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Time to first token, in seconds (default: `planner.ttft`).
    #[arg(long, value_name = "SECONDS")]
    ttft: Option<f64>,
    /// Mean inter-token latency, in seconds (default: `planner.itl`).
    #[arg(long, value_name = "SECONDS")]
    itl: Option<f64>,
}

#[derive(Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    fleet: FleetArgs,
    /// Trace file: Mooncake's JSON lines, or Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Fewest workers (default: `planner.decode_min`).
    #[arg(long)]
    min: Option<u32>,
    /// Most workers (default: `planner.decode_max`).
    #[arg(long)]
    max: Option<u32>,
    /// Seconds that a worker takes to start (default: `planner.start_time`).
    #[arg(long, value_name = "SECONDS")]
    start_time: Option<f64>,
    /// Factor by which the trace runs faster than recorded.
    #[arg(long, default_value_t = 1.0)]
    speedup: f64,
    /// Path of an SVG plot of attainment over workers.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct SizeArgs {
    #[command(flatten)]
    fleet: FleetArgs,
    /// Trace file: Mooncake's JSON lines, or Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "output", "rate"])]
    trace: Option<PathBuf>,
    /// Prompt tokens of a request, if no trace is given.
    #[arg(long, default_value_t = 4000.0)]
    prompt: f64,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 1000.0)]
    output: f64,
    /// Requests per second.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
}

pub(crate) fn run(command: &PlanCommand) -> Result<ExitCode> {
    match command {
        PlanCommand::Explain { gateway, credentials } => explain(gateway, credentials),
        PlanCommand::Replay(arguments) => replay(arguments),
        PlanCommand::Size(arguments) => size(arguments),
    }
}

fn explain(gateway: &str, credentials: &Credentials) -> Result<ExitCode> {
    let client = credentials.client(gateway)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let told = runtime.block_on(client.get("/kvasir/plan"));
    let told =
        told.with_context(|| format!("{gateway}: no plan; `kvasir serve` and `kvasir control` make one"))?;
    let plan: Value = serde_json::from_slice(&told).context("the gateway's answer is no JSON")?;
    for pool in plan["pools"].as_array().into_iter().flatten() {
        println!(
            "{} ({} ready, {} starting, {} draining, {} asleep)",
            pool["text"].as_str().unwrap_or_default(),
            pool["ready"],
            pool["starting"],
            pool["draining"],
            pool["sleeping"]
        );
    }
    for pool in plan["pools"].as_array().into_iter().flatten() {
        let trials = pool["trials"].as_array().filter(|trials| !trials.is_empty());
        let Some(trials) = trials else { continue };
        println!(
            "{}: recorded demand, replayed in simulation (utilisation: in time, workers):",
            pool["pool"].as_str().unwrap_or_default()
        );
        for trial in trials {
            let number = |at: usize| trial[at].as_f64().unwrap_or(0.0);
            let mark = if trial[0] == pool["utilisation"] { "  <- in force" } else { "" };
            println!("  {:.2}: {:.1} %, {:.2}{mark}", number(0), 100.0 * number(1), number(2));
        }
    }
    for change in plan["changes"].as_array().into_iter().flatten() {
        println!("  {} -> {}: {}", change["from"], change["to"], change["text"].as_str().unwrap_or_default());
    }
    Ok(ExitCode::SUCCESS)
}

impl FleetArgs {
    /// Returns the planner's settings, the engine and the service level.
    fn read(&self) -> Result<(control_config::PlannerSettings, Engine, ServiceLevel)> {
        let settings = process::read(self.config.as_deref(), false)?.planner;
        let level = planning::level(&settings);
        let level = ServiceLevel {
            ttft: self.ttft.unwrap_or(level.ttft),
            itl: self.itl.unwrap_or(level.itl),
            ..level
        };
        ensure!(level.ttft > 0.0 && level.itl > 0.0, "--ttft and --itl must be above 0");
        let engine = planning::engine(&settings);
        Ok((settings, engine, level))
    }
}

/// Reads a trace. Azure's traces begin with a header line.
fn read_trace(path: &Path, speedup: f64) -> Result<Vec<Request>> {
    ensure!(speedup.is_finite() && speedup > 0.0, "--speedup must be above 0");
    let head = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let is_azure = head.trim_start_matches('\u{feff}').starts_with(azure::HEADINGS);
    drop(head);
    let request = |at: f64, prompt: usize, output: usize| {
        Request::new(at / speedup, Lengths { prompt: prompt as f64, cached: 0.0, output: output as f64 })
    };
    let requests: Vec<Request> = if is_azure {
        azure::read(path)?.iter().map(|line| request(line.at, line.prompt, line.output)).collect()
    } else {
        let lines = mooncake::read(path)?;
        let line = |line: &mooncake::Request| {
            request(line.timestamp as f64 / 1e3, line.input_length, line.output_length)
        };
        lines.iter().map(line).collect()
    };
    if requests.is_empty() {
        bail!("{}: the trace is empty", path.display());
    }
    Ok(requests)
}

fn replay(arguments: &ReplayArgs) -> Result<ExitCode> {
    let (settings, engine, level) = arguments.fleet.read()?;
    let requests = read_trace(&arguments.trace, arguments.speedup)?;
    let setup = Setup {
        engine,
        believed: engine,
        role: WorkerRole::Both,
        level,
        min: arguments.min.unwrap_or(settings.decode_min as u32).max(1),
        max: arguments.max.unwrap_or(settings.decode_max as u32),
        start_time: arguments.start_time.unwrap_or(settings.start_time.as_secs_f64()),
        down_after: settings.down_after.as_secs_f64(),
        seasons: Vec::new(),
    };
    ensure!(setup.min <= setup.max, "--min is above --max");
    ensure!(setup.start_time >= 0.0 && setup.start_time.is_finite(), "--start-time must not be below 0");
    let seconds = requests.last().map_or(0.0, |request| request.at);
    println!(
        "{}: {} requests in {seconds:.0} s, simulated; TTFT {} s, ITL {} s, {:.1} % wanted; {} to {} workers that start in \
         {:.0} s; no prefix cache",
        arguments.trace.display(),
        requests.len(),
        level.ttft,
        level.itl,
        100.0 * level.attainment,
        setup.min,
        setup.max,
        setup.start_time,
    );
    let started = Instant::now();
    let half = seconds / 2.0;
    let lengths: Vec<Lengths> = requests.iter().map(Request::lengths).collect();
    let capacity = Capacity::new(engine, WorkerRole::Both, level).of(&lengths, setup.max.min(CAPACITY_OF));
    println!("each of a few workers serves {capacity:.2} requests/s of this mix in time");
    print_forecast_errors(&requests);
    let Comparison { rows, chosen, trials } = compare(&setup, &requests, capacity, half);
    println!("{:<38}{:>10}{:>10}{:>7}", "policy, on the second half", "attained", "workers", "peak");
    for row in &rows {
        println!("{:<38}{:>8.1} %{:>10.2}{:>7}", row.name, 100.0 * row.attained, row.mean_workers, row.peak);
    }
    println!("headroom, on the first half (utilisation: attained, workers):");
    for trial in &trials {
        let mark = if (trial.utilisation - chosen.utilisation).abs() < 1e-9 { "  <- chosen" } else { "" };
        println!(
            "  {:.2}: {:.1} %, {:.2}{mark}",
            trial.utilisation,
            100.0 * trial.attained,
            trial.mean_workers
        );
    }
    println!(
        "planner.utilisation = {}   # {:.1} s of simulation",
        chosen.utilisation,
        started.elapsed().as_secs_f64()
    );
    if let Some(file) = &arguments.plot {
        plot(file, &format!("{} (simulated)", arguments.trace.display()), &rows)?;
        println!("plot: {}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the error of the planner's forecast, which takes the rate of the last seconds for the next seconds,
/// and that of a rate over five minutes, which is better for steady demand and slower after a step.
fn print_forecast_errors(requests: &[Request]) {
    let arrivals: Vec<f64> = requests.iter().map(|request| request.at).collect();
    println!("demand of the next seconds, forecast by a rate of the last ones; errors over demand (WAPE):");
    for window in [LEVEL_WINDOW, 300.0] {
        for ahead in [30.0, 60.0] {
            if let Some(error) = forecast_error(&arrivals, window, ahead) {
                println!("  of the next {ahead:.0} s by the last {window:.0} s: {:.1} %", 100.0 * error);
            }
        }
    }
}

fn size(arguments: &SizeArgs) -> Result<ExitCode> {
    /// Window in which the busiest part of a trace is searched, in seconds.
    const WINDOW: f64 = 60.0;
    let (settings, engine, level) = arguments.fleet.read()?;
    let requests = match &arguments.trace {
        Some(trace) => read_trace(trace, 1.0)?,
        None => {
            let is_above = |value: f64| value.is_finite() && value > 0.0;
            let lengths = Lengths { prompt: arguments.prompt, cached: 0.0, output: arguments.output };
            ensure!(
                [arguments.prompt, arguments.output, arguments.rate].into_iter().all(is_above),
                "--prompt, --output and --rate must be above 0"
            );
            vec![Request::new(0.0, lengths)]
        }
    };
    let lengths: Vec<Lengths> = requests.iter().map(Request::lengths).collect();
    let seconds = requests.last().map_or(1.0, |request| request.at.max(1.0));
    let mean = requests.len() as f64 / seconds;
    let rates: Vec<(&str, f64)> = match &arguments.trace {
        None => vec![("asked for", arguments.rate)],
        Some(_) => vec![("mean", mean), ("busiest minute", busiest(&requests, WINDOW))],
    };
    let utilisation = settings.utilisation;
    let of = |role| Capacity::new(engine, role, level).of(&lengths, CAPACITY_OF);
    let (both, prefill, decode) = (of(WorkerRole::Both), of(WorkerRole::Prefill), of(WorkerRole::Decode));
    println!(
        "each of a few workers serves in time (TTFT {} s, ITL {} s, {:.1} %): both phases {both:.2} requests/s, prefill alone \
         {prefill:.2}, decode alone {decode:.2}; simulated from [planner] step times",
        level.ttft,
        level.itl,
        100.0 * level.attainment
    );
    if both <= 0.0 && (prefill <= 0.0 || decode <= 0.0) {
        bail!("no number of workers keeps this service level: even one request alone is late");
    }
    let gpus = settings.gpus.max(1);
    for (name, rate) in rates {
        let workers = |capacity: f64| match capacity > 0.0 {
            true => format!("{}", (rate / capacity / utilisation - 0.02).ceil().max(1.0)),
            false => "no number of".to_owned(),
        };
        println!(
            "{name}, {rate:.2} requests/s, used to {:.0} %: {} workers that do both, or {} prefill and {} decode; {gpus} GPU(s) \
             each",
            100.0 * utilisation,
            workers(both),
            workers(prefill),
            workers(decode)
        );
    }
    pareto(&engine, &lengths);
    Ok(ExitCode::SUCCESS)
}

/// Returns the requests per second of the busiest window.
fn busiest(requests: &[Request], window: f64) -> f64 {
    let most = requests
        .iter()
        .enumerate()
        .map(|(first, request)| requests.partition_point(|other| other.at < request.at + window) - first);
    most.max().unwrap_or(0) as f64 / window
}

/// Prints tokens per second of one user and of a worker by batch size, for a decode worker halfway through
/// its answers.
fn pareto(engine: &Engine, lengths: &[Lengths]) {
    let mean = |of: fn(&Lengths) -> f64| lengths.iter().map(of).sum::<f64>() / lengths.len() as f64;
    let context = mean(|lengths| lengths.prompt) + mean(|lengths| lengths.output) / 2.0;
    println!("{:>8}{:>22}{:>24}", "batch", "tokens/s of a user", "tokens/s of a worker");
    let mut batch = 1.0;
    while batch <= engine.running_max as f64 && (batch * context <= engine.kv_tokens || batch <= 1.0) {
        let step = engine.step.decode(batch, batch * context);
        println!("{batch:>8}{:>22.1}{:>24.0}", 1.0 / step, batch / step);
        batch *= 2.0;
    }
}
