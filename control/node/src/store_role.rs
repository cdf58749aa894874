//! `kvasir store`: a node that stores blocks for workers on other nodes, and named values for clients of the
//! Redis protocol.
//!
//! One process has two services, each with its own store: a pool that engines' and workers' stores reach over
//! the data plane with one-sided reads (`store.pool` of memory), and values behind the Redis protocol
//! (`host_tier` of memory). Both are divided into slots of `store.slot`. The disk (`disk_tier`) belongs to
//! the values or, if the Redis protocol is off, to the pool. Values are identified by name, not by content,
//! and are not shared with other nodes, so the tiers of other nodes are refused here. Gateways query the
//! pool's blocks at `store.http` (`block_feed`).

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use control_config::Settings;
use kvstore_remote::{PoolConfig, PoolCounters, PoolServer, PoolService};
use kvstore_resp::{Listen, Password, RespConfig, RespCounters, Server};
use kvstore_store::{Store, StorePool};
use router_engines::exposition;
use router_tls::PlainListener;
use xxhash_rust::xxh3::xxh3_64;

use crate::block_feed::BlockFeed;
use crate::http::StopSource;
use crate::store_values::StoredValues;
use crate::tiers::{self, Blocks, TierCounters};
use crate::{GlobalArgs, compose, exposure, http, process, rails, worker_role};

/// Blocks that hold values have no tokens; no plan is ever requested.
const TOKENS: u32 = 1;

pub(crate) fn run(
    common: &GlobalArgs,
    listen: Option<SocketAddr>,
    stop_source: StopSource,
) -> Result<ExitCode> {
    let mut settings = process::start(common)?;
    settings.store.http = listen.unwrap_or(settings.store.http);
    let has_secret = dataplane_rails::shared_key(&settings.transfer.secret_file)?.is_secret();
    if let Some(said) = exposure::of_store(&settings, has_secret) {
        tracing::warn!("{said}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(keep(&settings, stop_source))?;
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// The running services, for the metrics.
#[derive(Default)]
struct Running {
    pool: Option<Pool>,
    values: Option<(Arc<Store>, TierCounters, Arc<RespCounters>)>,
}

/// The pool: its thread, its store and their counters.
struct Pool {
    service: PoolService,
    counters: Arc<PoolCounters>,
    store: Arc<Store>,
    tiers: TierCounters,
    feed: Arc<BlockFeed>,
}

async fn keep(settings: &Settings, stop_source: StopSource) -> Result<()> {
    let mut running = Running::default();
    if settings.store.pool.0 > 0 {
        running.pool = Some(pool(settings)?);
    }
    let stop = http::stop_signals(stop_source, settings.serve.drain)?;
    let mut serving = None;
    if !settings.store.resp.is_empty() {
        let (server, store, counters) = values(settings).await?;
        running.values = Some((store, counters, server.counters()));
        let mut stopping = stop.clone();
        serving = Some(tokio::spawn(server.run(async move {
            // The sender exists as long as the process.
            let _gone = stopping.wait_for(Option::is_some).await;
        })));
    }
    ensure!(
        running.pool.is_some() || running.values.is_some(),
        "store.pool is \"0 B\" and store.resp is empty: there is nothing to do"
    );
    let listener = http::bind(settings.store.http).await?;
    println!("Metrics on http://{}/metrics", listener.local_addr()?);
    let running = Arc::new(running);
    let (shown, asked) = (Arc::clone(&running), Arc::clone(&running));
    let mut router = Router::new();
    if let Some(pool) = &running.pool {
        router = pool.feed.router();
        let (feed, mut stopping) = (Arc::clone(&pool.feed), stop.clone());
        tokio::spawn(async move {
            // The sender exists as long as the process.
            let _gone = stopping.wait_for(Option::is_some).await;
            feed.close();
        });
    }
    let router = router.route("/health", get(move || std::future::ready(health(&asked)))).route(
        "/metrics",
        get(move || std::future::ready(([(CONTENT_TYPE, exposition::CLASSIC)], metrics(&shown)))),
    );
    http::serve(PlainListener::new(listener), router, stop).await;
    if let Some(serving) = serving {
        serving.await?;
    }
    // Flushes the disk writes of blocks and values to stable storage.
    let stores =
        [running.values.as_ref().map(|(store, ..)| store), running.pool.as_ref().map(|pool| &pool.store)];
    stores.into_iter().flatten().for_each(|store| store.close());
    Ok(())
}

fn pool(settings: &Settings) -> Result<Pool> {
    let slot_bytes = settings.store.slot.0 as usize;
    // A slot has whole pages.
    let slots = settings.store.pool.0 as usize / slot_bytes.next_multiple_of(4096);
    ensure!(
        slots > 0,
        "store.pool is {}, less than store.slot, which is {}",
        settings.store.pool,
        settings.store.slot
    );
    let has_disk = settings.store.resp.is_empty();
    ensure!(
        !has_disk || settings.disk_tier.capacity.0 == 0 || settings.disk_tier.write == "through",
        "disk_tier.write is \"back\", but a pool evicts without writing first: set it to \"through\""
    );
    let blocks = Blocks {
        bytes: slot_bytes,
        tokens: TOKENS,
        fingerprint: xxh3_64(format!("blocks of other nodes in slots of {slot_bytes} bytes").as_bytes()),
        host_slots: slots,
        pages: compose::pages(settings),
        instance: None,
    };
    let mut settings_of_pool = without_planning(settings);
    // Each block is offered once, and stays on this node.
    settings_of_pool.disk_tier.write_frequency = 1;
    settings_of_pool.remote_tier.nodes.clear();
    settings_of_pool.object_tier.url.clear();
    if !has_disk {
        settings_of_pool.disk_tier.capacity.0 = 0;
    }
    let (news, moves) = std::sync::mpsc::channel();
    let tell = move |moved| {
        // The receiver exists as long as the store runs.
        let _unheard = news.send(moved);
    };
    let opened = tiers::open(&settings_of_pool, &blocks, tell)
        .with_context(|| "the pool's store; a disk of the Redis protocol's values cannot be a pool's, nor the other way round")?
        .context("store.pool has no slot")?;
    let name = &settings.store.name;
    let feed = BlockFeed::start(name, tiers::fresh_id(), &opened.survivors, moves)?;
    let rails = rails::open_server(settings, opened.store.slab(), settings.store.listen)?;
    let counters = Arc::new(PoolCounters::default());
    let config = PoolConfig { lease: settings.store.lease, ..PoolConfig::default() };
    let blocks = StorePool::new(Arc::clone(&opened.store));
    let server = PoolServer::new(rails.bond, blocks, config, Arc::clone(&counters))?;
    let service = PoolService::start(server, rails::thread_policy(settings)?)?;
    println!(
        "A pool of {slots} slots of {}; one of these goes into `remote_tier.nodes`:",
        settings.store.slot
    );
    for address in rails.address.notation() {
        println!("  \"{}={address}\"", settings.store.name);
    }
    let [_, disk_slots] = opened.store.slots();
    if disk_slots > 0 {
        println!("Below it a disk of {disk_slots} slots, with {} blocks from before", opened.survivors.len());
    }
    Ok(Pool { service, counters, store: opened.store, tiers: opened.counters, feed })
}

/// Settings of a store without prefetching and tenant shares: neither values nor pool blocks have tenants or
/// conversations here.
fn without_planning(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.host_tier.tenant_share = 1.0;
    settings.host_tier.prefetch = false;
    settings
}

async fn values(settings: &Settings) -> Result<(Server<StoredValues>, Arc<Store>, TierCounters)> {
    let slot_bytes = settings.store.slot.0 as usize;
    ensure!(
        settings.remote_tier.nodes.is_empty() && settings.object_tier.url.is_empty(),
        "remote_tier and object_tier are for workers: values of the Redis protocol stay on this node"
    );
    ensure!(
        settings.disk_tier.write_frequency == 1,
        "disk_tier.write_frequency must be 1 for the Redis protocol: each SET is new"
    );
    let blocks = Blocks {
        bytes: slot_bytes,
        tokens: TOKENS,
        fingerprint: xxh3_64(format!("named values in slots of {slot_bytes} bytes").as_bytes()),
        host_slots: settings.host_tier.capacity.0 as usize / slot_bytes,
        pages: compose::pages(settings),
        instance: None,
    };
    // Value blocks are not announced to gateways.
    let opened = tiers::open(&without_planning(settings), &blocks, |_| {})?
        .context("store.resp is set, and host_tier.capacity holds not even one store.slot")?;
    let config = resp_config(settings)?;
    let values = StoredValues::new(Arc::clone(&opened.store), slot_bytes, opened.survivors);
    let server = Server::bind(values, config).await?;
    for bound in server.bound() {
        println!("The Redis protocol on {bound}");
    }
    Ok((server, opened.store, opened.counters))
}

fn resp_config(settings: &Settings) -> Result<RespConfig> {
    let mut listen = Vec::with_capacity(settings.store.resp.len());
    let mut is_remote = false;
    for text in &settings.store.resp {
        let place = match text.strip_prefix("unix:") {
            Some(path) => Listen::Unix(PathBuf::from(path)),
            None => Listen::Tcp(text.parse().with_context(|| {
                format!("store.resp: \"{text}\" is neither like `127.0.0.1:7379` nor like `unix:/path`")
            })?),
        };
        is_remote |= matches!(&place, Listen::Tcp(SocketAddr::V4(at)) if !at.ip().is_loopback())
            || matches!(&place, Listen::Tcp(SocketAddr::V6(at)) if !at.ip().is_loopback());
        listen.push(place);
    }
    let password = match settings.store.resp_password_file.as_str() {
        "" => None,
        path => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("store.resp_password_file = \"{path}\""))?;
            let text = text.trim_end_matches(['\r', '\n']);
            ensure!(!text.is_empty(), "store.resp_password_file = \"{path}\" is empty");
            let mode = std::fs::metadata(path)?.permissions().mode();
            ensure!(
                mode & 0o007 == 0,
                "store.resp_password_file = \"{path}\" can be read by all users (chmod 600)"
            );
            Some(Password::new(text))
        }
    };
    ensure!(
        !is_remote || password.is_some(),
        "store.resp names an address other than loopback, which needs store.resp_password_file"
    );
    Ok(RespConfig {
        listen,
        allow_remote: is_remote,
        password,
        allow_flush: true,
        renamed: renamed(&settings.store.resp_rename)?,
        drain: settings.serve.drain,
        ..RespConfig::default()
    })
}

/// Parses the renamed commands. The server validates the names.
fn renamed(settings: &[String]) -> Result<Vec<(String, String)>> {
    let pair = |text: &String| {
        let (from, to) = text.split_once('=').with_context(|| {
            format!("store.resp_rename: \"{text}\" is neither like `FLUSHALL=NEW-NAME` nor like `FLUSHALL=`")
        })?;
        Ok((from.trim().to_owned(), to.trim().to_owned()))
    };
    settings.iter().map(pair).collect()
}

fn health(running: &Running) -> (StatusCode, &'static str) {
    if running.pool.as_ref().is_some_and(|pool| pool.service.has_stopped()) {
        return (StatusCode::SERVICE_UNAVAILABLE, "the pool's thread has ended");
    }
    let of_pool = running.pool.as_ref().map(|pool| &pool.store);
    let stores = running.values.as_ref().map(|(store, ..)| store).into_iter().chain(of_pool);
    if stores.into_iter().any(|store| !store.is_alive()) {
        return (StatusCode::SERVICE_UNAVAILABLE, "the store's thread has ended");
    }
    (StatusCode::OK, "ok")
}

fn metrics(running: &Running) -> String {
    let mut out = String::new();
    if let Some(pool) = &running.pool {
        for (name, help, value) in pool.counters.snapshot() {
            exposition::metric(&mut out, &format!("kvasir_pool_{name}"), help, value);
        }
        // If the process serves values, these metric names are used for the values' store.
        if running.values.is_none() {
            worker_role::store_metrics(&mut out, &pool.store);
            pool.tiers.render(&mut out);
        }
    }
    if let Some((store, tiers, resp)) = &running.values {
        worker_role::store_metrics(&mut out, store);
        tiers.render(&mut out);
        for (name, help, value) in resp.snapshot() {
            exposition::metric(&mut out, &format!("kvasir_resp_{name}"), help, value);
        }
    }
    exposition::process(&mut out, env!("CARGO_PKG_VERSION"));
    exposition::classic(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_redis_protocol_are_renamed_or_turned_off_by_the_configuration() {
        let of = |text: &str| renamed(&[text.to_owned()]);
        assert_eq!(of("FLUSHALL = x").expect("a pair"), [("FLUSHALL".to_owned(), "x".to_owned())]);
        assert_eq!(of("FLUSHDB=").expect("a pair"), [("FLUSHDB".to_owned(), String::new())]);
        assert!(of("FLUSHDB").expect_err("no pair").to_string().contains("resp_rename"));
        let mut settings = Settings::default();
        settings.store.resp_rename = vec!["FLUSHALL=".to_owned()];
        let config = resp_config(&settings).expect("in range");
        config.check().expect("a command that there is");
        assert_eq!(config.renamed.len(), 1);
    }
}
