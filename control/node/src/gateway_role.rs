//! `kvasir gateway`.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use control_config::Settings;
use router_engines::dialect::Role;
use router_gateway::{Fleet, Gateway, WorkerConfig, router};

use crate::{Common, compose, http, process};

/// Workers as the command line names them.
#[derive(Args, Clone, Default)]
pub(crate) struct Workers {
    /// URL of a worker; may be given several times.
    #[arg(long = "worker", value_name = "URL")]
    workers: Vec<String>,
    /// URL of a worker that computes prompts for decode workers, when its engine does not say so itself (vLLM).
    #[arg(long = "prefill-worker", value_name = "URL")]
    prefill: Vec<String>,
    /// URL of a worker that generates from prompts computed elsewhere, when its engine does not say so itself.
    #[arg(long = "decode-worker", value_name = "URL")]
    decode: Vec<String>,
}

/// The workers of the command line, or of the configuration if it names none.
fn workers(settings: &Settings, given: &Workers) -> Result<Vec<WorkerConfig>> {
    let gateway = &settings.gateway;
    let from = if given.workers.len() + given.prefill.len() + given.decode.len() > 0 {
        [&given.workers, &given.prefill, &given.decode]
    } else {
        [&gateway.workers, &gateway.prefill_workers, &gateway.decode_workers]
    };
    let mut all: Vec<WorkerConfig> = Vec::new();
    for (urls, role) in from.into_iter().zip([None, Some(Role::Prefill), Some(Role::Decode)]) {
        for url in urls {
            let is_http = url.strip_prefix("http://").is_some_and(|rest| !rest.is_empty());
            if !is_http {
                bail!("{url:?} is no URL of a worker: it must be http://HOST:PORT");
            }
            if all.iter().any(|other| other.url == *url) {
                bail!("{url} is named twice");
            }
            all.push(WorkerConfig { url: url.clone(), role });
        }
    }
    if all.is_empty() {
        bail!("no workers: give --worker URL, or `gateway.workers` in the configuration");
    }
    Ok(all)
}

pub(crate) fn run(common: &Common, listen: Option<SocketAddr>, given: &Workers) -> Result<ExitCode> {
    let settings = process::start(common)?;
    let workers = workers(&settings, given)?;
    let (text, has_tokenizer) = compose::gateway_text(&settings)?;
    let config = compose::gateway(&settings, workers, &text, has_tokenizer);
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listener = http::bind(listen.unwrap_or(settings.gateway.listen)).await?;
        let snapshot = config.snapshot_file.clone();
        let fleet = Fleet::start(&config);
        let gateway = Gateway::new(config, text, Arc::clone(&fleet)).map_err(anyhow::Error::msg)?;
        http::serve(listener, router(gateway), settings.serve.drain).await?;
        if let Some(file) = snapshot {
            fleet.write_snapshot(&file).with_context(|| format!("{}: the snapshot", file.display()))?;
        }
        anyhow::Ok(())
    })?;
    // Watchers of workers may be asleep: nobody waits for them.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}
