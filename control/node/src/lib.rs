//! `kvasir`: one binary, several roles. This crate is the composition root: the only place that knows every
//! other crate, chooses hardware and transports, and turns settings into configurations.
//!
//! A library, so that a simulation can run several nodes in one process; `main.rs` is the binary.

mod admin;
mod block_feed;
mod compose;
mod config_command;
mod config_reload;
mod control_role;
mod credentials;
mod deep_check;
mod deploy_command;
mod discovery;
mod doctor;
mod ebpf;
mod engine_processes;
mod engine_watch;
mod etcd;
mod exposure;
mod gateway_role;
mod http;
mod inspect_command;
mod key_command;
mod manual;
mod memory_plan;
mod mock_command;
mod path_command;
mod plan_command;
mod planning;
mod policy_plot;
mod process;
mod profile_command;
mod rails;
mod register_command;
mod replay_command;
mod roster;
mod secret;
mod serve;
mod shard;
mod store_role;
mod store_values;
mod tiers;
mod tls;
mod top_command;
mod worker_role;
mod workers_command;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

pub use crate::http::{StopSignal, StopSource};

/// A data-plane appliance for LLM inference clusters.
#[derive(Parser)]
#[command(name = "kvasir", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Args, Clone)]
struct GlobalArgs {
    /// The configuration file. Without a file, the defaults apply.
    #[arg(long, env = "KVASIR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Log level: error, warn, info, debug, or per module as in `info,router_events=debug`.
    #[arg(long, default_value = "warn", value_name = "LEVEL")]
    log: String,
    /// Log format: text, or one JSON object per line.
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT")]
    log_format: LogFormat,
    /// Stop when the parent process has exited (set by `serve` for its children).
    #[arg(long, hide = true)]
    supervised: bool,
    /// Run on these cores only, as in `0-3,8`.
    #[arg(long, value_name = "CORES")]
    cores: Option<String>,
}

/// Format of log lines.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Run a gateway and prefill and decode workers on this machine.
    Serve {
        #[command(flatten)]
        common: GlobalArgs,
        /// Address of the gateway (default: `gateway.listen` of the configuration).
        #[arg(long, value_name = "IP:PORT")]
        listen: Option<SocketAddr>,
    },
    /// Run the OpenAI gateway.
    Gateway {
        #[command(flatten)]
        common: GlobalArgs,
        /// Address of the gateway (default: `gateway.listen` of the configuration).
        #[arg(long, value_name = "IP:PORT")]
        listen: Option<SocketAddr>,
        /// Address of a second listener without encryption (set by `serve`, which queries the gateway's
        /// status on it).
        #[arg(long, hide = true, value_name = "IP:PORT")]
        aside: Option<SocketAddr>,
        #[command(flatten)]
        workers: roster::Workers,
        #[command(flatten)]
        pods: discovery::PodArgs,
    },
    /// Run one worker with the reference engine.
    Worker {
        #[command(flatten)]
        common: GlobalArgs,
        /// Phases that the worker computes.
        #[arg(long, value_enum)]
        role: Role,
        /// Address of the worker's HTTP API (default: `worker.listen` of the configuration).
        #[arg(long, value_name = "IP:PORT")]
        listen: Option<SocketAddr>,
        /// Threads for matrix products (default: `engine.threads` of the configuration).
        #[arg(long)]
        threads: Option<usize>,
        /// Name of the worker among workers with the same configuration, for its folder of the disk tier (set
        /// by `serve`).
        #[arg(long, hide = true)]
        instance: Option<String>,
    },
    /// Plan how many workers there should be behind running gateways.
    Control(control_role::ControlArgs),
    /// Show how many workers a demand needs, and why.
    Plan {
        #[command(subcommand)]
        command: plan_command::PlanCommand,
    },
    /// Measure a running engine, and print the `[planner]` values for it.
    Profile(profile_command::ProfileArgs),
    /// Deploy a model and its workers from one description.
    Deploy {
        #[command(subcommand)]
        command: deploy_command::DeployCommand,
    },
    /// Store blocks for workers on other nodes: a pool of host memory over the data plane, and the Redis
    /// protocol over memory and disk.
    Store {
        #[command(flatten)]
        common: GlobalArgs,
        /// Address of `/metrics` and `/health` (default: `store.http` of the configuration).
        #[arg(long, value_name = "IP:PORT")]
        listen: Option<SocketAddr>,
    },
    /// Run mock engines with simulated time and without a model, which behave like real engines.
    Mock(mock_command::MockArgs),
    /// Watch a gateway in the terminal.
    Top(top_command::TopArgs),
    /// Show the workers of a running gateway, add or remove one.
    Workers(workers_command::WorkersArgs),
    /// Drain a worker: it gets no new requests, and its running requests continue.
    Drain(workers_command::DrainArgs),
    /// Register an engine in etcd while it answers, so that gateways find it.
    Register(register_command::RegisterArgs),
    /// Manage keys of clients.
    Key {
        #[command(subcommand)]
        command: key_command::KeyCommand,
    },
    /// Check and explain the configuration.
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Show what this machine offers and which parts Kvasir will use.
    Doctor(doctor::DoctorArgs),
    /// Show the path that bytes take between two endpoints, and the reason: `kvasir explain-path gpu0
    /// node2:gpu0`.
    ExplainPath(path_command::PathArgs),
    /// Run microbenchmarks.
    #[cfg(feature = "bench")]
    Bench(bench::BenchArgs),
    /// Run microbenchmarks; this build has none (feature `bench`).
    #[cfg(not(feature = "bench"))]
    #[command(disable_help_flag = true)]
    Bench {
        /// The benchmark and its options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Inspect captures of engines.
    Inspect {
        #[command(subcommand)]
        command: inspect_command::InspectCommand,
    },
    /// Replay a trace.
    Replay(replay_command::ReplayArgs),
    /// Print the completion script of a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write the pages of all commands into a folder.
    Man {
        /// Existing folder for the pages: `kvasir.1`, `kvasir-serve.1`, …
        folder: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a configuration file. Every problem is listed with its line.
    Check {
        /// The configuration file.
        #[arg(env = "KVASIR_CONFIG")]
        file: PathBuf,
        /// Also check what the file names: files, folders, permissions, free space on disks.
        #[arg(long)]
        deep: bool,
    },
    /// Explain a key or a section, for example `router.temperature`. Without a name, explain all.
    Explain {
        /// `section` or `section.key`.
        name: Option<String>,
    },
    /// Print a document generated from the declarations of the keys.
    Schema {
        /// Format of the document.
        #[arg(long, value_enum, default_value = "json")]
        format: SchemaFormat,
    },
}

#[derive(ValueEnum, Clone, Copy)]
enum SchemaFormat {
    /// JSON schema, for editors.
    Json,
    /// The reference documentation.
    Markdown,
    /// A commented example file.
    Example,
}

/// Phases that a worker computes.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Prefills prompts and sends their blocks to decode workers.
    Prefill,
    /// Decodes; prefills only short prompts itself.
    Decode,
    /// Prefills and decodes; never fetches blocks from another worker.
    Both,
}

impl Role {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Runs a command line, whose first argument is the program's name. An invalid command line, `--help` and
/// `--version` end the process.
pub fn run<A: Into<OsString> + Clone>(arguments: impl IntoIterator<Item = A>) -> ExitCode {
    run_with_stop_source(arguments, StopSource::Process)
}

/// Runs a command line as [`run`] does. A gateway, a worker, a store and a control service take their stop
/// signals from `stop_source`; other commands ignore it.
pub fn run_with_stop_source<A: Into<OsString> + Clone>(
    arguments: impl IntoIterator<Item = A>,
    stop_source: StopSource,
) -> ExitCode {
    let outcome = match Cli::parse_from(arguments).command {
        Command::Serve { common, listen } => serve::run(&common, listen),
        Command::Gateway { common, listen, aside, workers, pods } => {
            gateway_role::run(&common, listen, aside, &workers, &pods, stop_source)
        }
        Command::Worker { common, role, listen, threads, instance } => {
            worker_role::run(&common, role, listen, threads, instance.as_deref(), stop_source)
        }
        Command::Control(args) => control_role::run(&args, stop_source),
        Command::Plan { command } => plan_command::run(&command),
        Command::Profile(args) => profile_command::run(&args),
        Command::Deploy { command } => deploy_command::run(&command),
        Command::Store { common, listen } => store_role::run(&common, listen, stop_source),
        Command::Key { command } => key_command::run(&command),
        Command::Top(args) => top_command::execute(&args),
        Command::Workers(args) => workers_command::workers(&args),
        Command::Drain(args) => workers_command::drain(&args),
        Command::Register(args) => register_command::run(&args),
        Command::Mock(args) => mock_command::run(&args),
        Command::Config { command } => config_command::run(command),
        Command::Doctor(args) => doctor::run(&args),
        Command::ExplainPath(args) => path_command::run(&args),
        #[cfg(feature = "bench")]
        Command::Bench(args) => Ok(bench::exit_code(bench::run(args))),
        #[cfg(not(feature = "bench"))]
        Command::Bench { args } => Err(without_benchmarks(&args)),
        Command::Inspect { command } => inspect_command::run(command),
        Command::Replay(args) => replay_command::run(&args),
        Command::Completions { shell } => manual::completions(Cli::command(), shell),
        Command::Man { folder } => manual::pages(Cli::command(), folder.as_deref()),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kvasir: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(feature = "bench"))]
fn without_benchmarks(args: &[OsString]) -> anyhow::Error {
    let args: Vec<_> = args.iter().map(|argument| argument.to_string_lossy()).collect();
    anyhow::anyhow!(
        "this build has no benchmarks; in the sources: cargo run --release -p bench -- {}",
        args.join(" ")
    )
}
