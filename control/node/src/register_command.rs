//! `kvasir register`: registers an engine in etcd while it answers, so that gateways find it.
//!
//! The engine is queried every few seconds. Its key is written on the first answer, deleted when the engine
//! has not answered for `--deregister-after`, and written again when it answers. On SIGTERM and SIGINT the engine
//! is marked as draining, and the key is deleted after `--drain`.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use control_etcd::{EtcdError, Registration, Worker};
use router_engines::client::EngineClient;
use router_engines::upstream::Upstream;
use tokio::signal::unix::{SignalKind, signal};

use crate::etcd::Etcd;
use crate::{GlobalArgs, process, secret, tls};

/// Interval between two queries of the engine, and the longest wait for an answer.
const ASK_EVERY: Duration = Duration::from_secs(2);
const ANSWER_MAX: Duration = Duration::from_secs(2);

#[derive(Args)]
pub(crate) struct RegisterArgs {
    #[command(flatten)]
    common: GlobalArgs,
    /// URL of the engine as gateways reach it, as http://HOST:PORT.
    url: String,
    /// A member of etcd, as http://HOST:PORT. May be given several times (default: `etcd.endpoints`).
    #[arg(long = "etcd", value_name = "URL")]
    endpoints: Vec<String>,
    /// Name of the engine's key (default: HOST:PORT).
    #[arg(long)]
    name: Option<String>,
    /// Role of the engine: prefill, decode or both (default: as the engine reports).
    #[arg(long)]
    role: Option<String>,
    /// Pool that the engine belongs to.
    #[arg(long)]
    pool: Option<String>,
    /// Model that the engine serves, for a pool that is chosen by model name.
    #[arg(long)]
    model: Option<String>,
    /// Version of the deployment: prefill and decode workers of different generations are not paired.
    #[arg(long)]
    generation: Option<String>,
    /// Seconds without an answer after which the key is deleted.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    deregister_after: u64,
    /// Seconds between the notice to gateways and the deletion of the key.
    #[arg(long, default_value_t = 2, value_name = "SECONDS")]
    drain: u64,
}

pub(crate) fn run(arguments: &RegisterArgs) -> Result<ExitCode> {
    let mut settings = process::start(&arguments.common)?;
    if !arguments.endpoints.is_empty() {
        settings.etcd.endpoints.clone_from(&arguments.endpoints);
    }
    let Some(etcd) = Etcd::new(&settings)? else {
        bail!("no endpoint of etcd is named, neither by --etcd nor by etcd.endpoints");
    };
    let worker = Worker {
        url: arguments.url.trim_end_matches('/').to_owned(),
        role: arguments.role.clone(),
        pool: arguments.pool.clone(),
        model: arguments.model.clone(),
        generation: arguments.generation.clone(),
        ..Worker::default()
    };
    // Parsed in the same way as by gateways.
    let worker = Worker::parse(worker.to_value().as_bytes()).map_err(anyhow::Error::msg)?;
    let (_, address) = worker.url.split_once("://").unwrap_or_default();
    let name = arguments.name.clone().unwrap_or_else(|| address.to_owned());
    ensure!(!name.is_empty() && !name.contains(char::is_whitespace), "--name {name:?} is no name of a key");
    let upstream = tls::upstream(&settings, &[&worker.url])?;
    let key = secret::variable(secret::ENGINE_KEY)?;
    let engine = EngineClient::over(&Upstream::with_key(&worker.url, upstream.as_ref(), key.as_ref()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let registration = Registration::new(etcd.client()?, &etcd.prefix, &name, worker);
        register(arguments, &engine, registration).await
    })
}

/// Keeps the engine registered until a stop signal.
async fn register(
    arguments: &RegisterArgs,
    engine: &EngineClient,
    mut registration: Registration,
) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let deregister_after = Duration::from_secs(arguments.deregister_after);
    let mut questions = tokio::time::interval(ASK_EVERY);
    questions.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Time since which the engine has not answered, and whether its key should exist.
    let (mut silent_since, mut is_wanted) = (Some(Instant::now()), false);
    let mut problem = None;
    say(format_args!("waits for {} to answer", engine.base()));
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = questions.tick() => {
                if answers(engine).await {
                    silent_since = None;
                    is_wanted = true;
                } else {
                    let since = *silent_since.get_or_insert_with(Instant::now);
                    if is_wanted && since.elapsed() >= deregister_after {
                        is_wanted = false;
                        match registration.remove().await {
                            Ok(()) => say(format_args!("{} removed: the engine has not answered for {deregister_after:?}", registration.key())),
                            Err(error) => tracing::warn!("{error}; the key will be removed when its lease ends"),
                        }
                    }
                }
            }
            () = registration.due(), if is_wanted => match registration.renew().await {
                Ok(is_written) => {
                    if is_written {
                        say(format_args!("{} written", registration.key()));
                    }
                    problem = None;
                }
                Err(error @ EtcdError::Taken(_)) => return Err(error.into()),
                Err(error) => {
                    let said = error.to_string();
                    if problem.as_ref() != Some(&said) {
                        tracing::warn!("{said}; trying again");
                        problem = Some(said);
                    }
                }
            },
        }
    }
    if !is_wanted {
        return Ok(ExitCode::SUCCESS);
    }
    registration.drain().await.context("gateways cannot be told that the engine takes no more requests")?;
    say(format_args!("{} takes no more requests", registration.key()));
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs(arguments.drain)) => {}
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    registration.remove().await?;
    say(format_args!("{} removed", registration.key()));
    Ok(ExitCode::SUCCESS)
}

/// Prints a line. A closed output does not end the registration.
fn say(line: std::fmt::Arguments<'_>) {
    let _nobody_reads = writeln!(std::io::stdout(), "{line}");
}

/// Whether the engine is up. A sleeping engine may not answer health checks (SGLang) and still counts as up.
async fn answers(engine: &EngineClient) -> bool {
    answers_at(engine, "/health").await || answers_at(engine, "/v1/models").await
}

async fn answers_at(engine: &EngineClient, path: &str) -> bool {
    let asked = tokio::time::timeout(ANSWER_MAX, engine.status(path)).await;
    // An engine that requires a key, or has no such route, is up.
    matches!(asked, Ok(Ok(status)) if status.as_u16() < 500)
}
