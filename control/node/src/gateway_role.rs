//! `kvasir gateway`.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use router_gateway::{Fleet, Gateway, router};

use crate::{Common, compose, http, process};

pub(crate) fn run(common: &Common, listen: Option<SocketAddr>, workers: Vec<String>) -> Result<ExitCode> {
    let settings = process::start(common)?;
    let workers = if workers.is_empty() { settings.gateway.workers.clone() } else { workers };
    if workers.is_empty() {
        bail!("no workers: give --worker URL, or `gateway.workers` in the configuration");
    }
    let config = compose::gateway(&settings, workers);
    let text = compose::model_text(&settings)?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listener = http::bind(listen.unwrap_or(settings.gateway.listen)).await?;
        let snapshot = config.snapshot_file.clone();
        let fleet = Fleet::start(&config);
        let gateway = Gateway::new(config, text, Arc::clone(&fleet));
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
