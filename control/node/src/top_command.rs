//! `kvasir top`: shows a gateway and its workers in the terminal and, with `--kernel`, kernel statistics of
//! the engines on this machine.

use std::io::IsTerminal;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use http::Method;
use router_engines::client::EngineClient;
use serde_json::{Map, Value, json};
use tools_top::{TopConfig, View, once, run};

use crate::credentials::Credentials;
use crate::engine_watch::{EngineWatch, table};

/// Size of a frame when the output is not a terminal, in columns and rows.
const FRAME: (u16, u16) = (120, 40);
/// Time limit for the gateway's answer; a slower gateway is queried again at the next sample.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Arguments of `kvasir top`.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// The gateway, as HOST:PORT or https://HOST:PORT.
    #[arg(default_value = "127.0.0.1:8000", value_name = "GATEWAY")]
    gateway: String,
    #[command(flatten)]
    credentials: Credentials,
    /// Interval between two samples, in milliseconds.
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    interval: u64,
    /// Print one frame as text and exit. This is the default if the output is not a terminal.
    #[arg(long)]
    once: bool,
    /// View to show first, or, with --once, the only one: overview, workers, latency, pools, transfers or
    /// decisions.
    #[arg(long, default_value = "overview", value_parser = view, value_name = "VIEW")]
    view: View,
    /// Show why engines on this machine are slow: how long their requests, threads and disk reads wait,
    /// measured by eBPF programs that are detached when this command ends. Needs root, or CAP_BPF,
    /// CAP_PERFMON and CAP_SYS_PTRACE, and the host's PID namespace.
    #[arg(long)]
    kernel: bool,
    /// With --kernel: an engine as HOST:PORT, in addition to the gateway's workers. May be given several
    /// times.
    #[arg(long = "engine", value_name = "HOST:PORT", requires = "kernel")]
    engines: Vec<String>,
    /// With --kernel: also report the samples to the gateway, for its page and its planner.
    #[arg(long, requires = "kernel")]
    tell: bool,
}

fn view(name: &str) -> Result<View, String> {
    let names = || View::ALL.map(|view| view.title().to_lowercase()).join(", ");
    View::from_name(name).ok_or_else(|| format!("not one of {}", names()))
}

pub(crate) fn execute(arguments: &TopArgs) -> Result<ExitCode> {
    if arguments.kernel {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(watch(arguments));
    }
    let config = TopConfig {
        gateway: arguments.gateway.clone(),
        key: arguments.credentials.key()?,
        tls: arguments.credentials.tls(&arguments.gateway)?,
        interval: Duration::from_millis(arguments.interval),
        view: arguments.view,
    };
    if arguments.once || !std::io::stdout().is_terminal() {
        println!("{}", once(config, FRAME.0, FRAME.1)?);
    } else {
        run(config)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a table of engines after each interval.
async fn watch(arguments: &TopArgs) -> Result<ExitCode> {
    let gateway = arguments.credentials.client(&arguments.gateway)?;
    let mut watch = EngineWatch::attach().context("--kernel")?;
    let (interval, mut is_first) = (Duration::from_millis(arguments.interval.max(100)), true);
    loop {
        let mut names = arguments.engines.clone();
        match workers(&gateway).await {
            Ok(workers) => names.extend(workers),
            Err(error) if names.is_empty() && is_first => {
                return Err(
                    error.context("the gateway's workers; --engine HOST:PORT names engines without one")
                );
            }
            Err(_) => {}
        }
        watch.set(resolved(&names).await);
        if std::mem::take(&mut is_first) {
            // The first sample starts the watch.
            if watch.sample()?.is_empty() {
                bail!("none of these engines is on this machine: {}", names.join(", "));
            }
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            _ = tokio::signal::ctrl_c() => return Ok(ExitCode::SUCCESS),
        }
        let samples = watch.sample()?;
        print!("{}", table(&samples));
        if arguments.tell {
            let told: Map<String, Value> =
                samples.iter().map(|sample| (sample.name.clone(), sample.to_json())).collect();
            let body = json!({ "workers": told }).to_string();
            let asked = gateway.ask(Method::POST, "/kvasir/kernel", body.into());
            // A gateway that restarts gets the next sample.
            match tokio::time::timeout(ANSWER_WITHIN, asked).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => eprintln!("--tell: {error}"),
                Err(_) => eprintln!("--tell: the gateway does not answer"),
            }
        }
        if arguments.once {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Returns the names of a gateway's workers.
async fn workers(gateway: &EngineClient) -> Result<Vec<String>> {
    let asked = tokio::time::timeout(ANSWER_WITHIN, gateway.get("/kvasir/workers")).await;
    let told: Value = serde_json::from_slice(&asked.context("no answer")??)?;
    let names = told["workers"].as_array().into_iter().flatten();
    Ok(names.filter_map(|worker| worker["name"].as_str().map(str::to_owned)).collect())
}

/// Resolves the engines' addresses; names without an address are left out.
async fn resolved(names: &[String]) -> Vec<(String, (IpAddr, u16))> {
    let mut all = Vec::new();
    for name in names {
        let with_port = if name.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
            name.clone()
        } else {
            format!("{name}:80")
        };
        if let Ok(mut found) = tokio::net::lookup_host(with_port).await
            && let Some(address) = found.next()
        {
            all.push((name.clone(), (address.ip(), address.port())));
        }
    }
    all
}
