//! `kvasir gateway`: runs the gateway process.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use control_config::{Settings, in_force};
use router_engines::key::EngineKeys;
use router_fleet::{Fleet, WorkerSpec};
use router_gateway::{
    Gateway, api_router, router, serve_grpc, serve_picker, serve_picker_health, status_router,
};
use router_tls::{Alpn, PlainListener, TlsListener};
use router_trace::MetricsExporter;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

use crate::config_reload::ConfigReloader;
use crate::discovery::{Discovery, PodArgs};
use crate::ebpf::EbpfPrograms;
use crate::http::{Signals, StopSource};
use crate::roster::Workers;
use crate::tls::CHECK_INTERVAL;
use crate::{GlobalArgs, admin, compose, exposure, http, process, roster, secret, shard, tls};

pub(crate) fn run(
    common: &GlobalArgs,
    listen: Option<SocketAddr>,
    aside: Option<SocketAddr>,
    given: &Workers,
    pods: &PodArgs,
    stop_source: StopSource,
) -> Result<ExitCode> {
    let settings = process::start(common)?;
    let keys = secret::of_engines(&settings, common.supervised, &given.urls())?;
    let workers = roster::workers(&settings, given, &keys)?;
    let discovery = Discovery::new(&settings, pods)?;
    if discovery.is_none() {
        roster::require_workers(&workers)?;
    }
    secret::warn_of_unused(&keys, &workers);
    let listen = listen.unwrap_or(settings.gateway.listen);
    let has_peer_key = compose::peer_key().is_some();
    let admin = admin::address(&settings)?;
    let said = [
        exposure::of_gateway(&settings, listen),
        exposure::of_admin(&settings, admin.as_ref()),
        exposure::of_peers(&settings, has_peer_key),
    ];
    said.iter().flatten().for_each(|said| tracing::warn!("{said}"));
    let access = compose::access(&settings, &workers)?;
    let fleet = roster::fleet(&settings, &access, keys.clone());
    let mut config = compose::gateway(&settings, access, listen)?;
    let requests_max = settings.gateway.requests_max as usize;
    let grpc_listen = grpc_address(&settings)?;
    let [picker_listen, picker_health] = picker_addresses(&settings)?;
    let admin_address = admin.as_ref().and_then(admin::AdminAddress::address);
    let own = [Some(listen), aside, grpc_listen, admin_address, picker_listen, picker_health]
        .into_iter()
        .flatten()
        .map(|address| address.port());
    let own: Vec<u16> = own.collect();
    let programs = EbpfPrograms::attach(&settings, &own, local_ports(&workers))?;
    let server_tls = tls::server(&settings, &[Alpn::Http2, Alpn::Http1])?;
    config.access.server_tls.clone_from(&server_tls);
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        // A gateway of `serve` has no load balancer in front of it.
        let unready_for = if common.supervised { Duration::ZERO } else { settings.drain.unready_for };
        let Signals { mut is_leaving, stop } =
            http::listen_for_stop(stop_source, settings.serve.drain, unready_for)?;
        let listeners = http::bind_shared(listen, threads(&settings), settings.gateway.reuse_port)?;
        let snapshot = fleet.snapshot_file.clone();
        let upstream_tls = config.access.tls.clone();
        let fleet = Fleet::start(fleet, router_gateway::random_number());
        fleet.configure(workers)?;
        let gateway = Gateway::new(config, compose::tuning(&settings), Arc::clone(&fleet));
        let gateway = gateway.map_err(anyhow::Error::msg)?;
        gateway.show_configuration(in_force(&settings, &settings));
        if let Some(discovery) = discovery {
            discovery.start(&gateway, keys.clone()).await?;
        }
        let _metrics = metrics(&settings, &gateway, listen)?;
        let leaver = Arc::clone(&gateway);
        tokio::spawn(async move {
            if is_leaving.wait_for(|leaving| *leaving).await.is_ok() {
                leaver.begin_drain();
            }
        });
        programs.serve(&gateway, requests_max, settings.ebpf.overload_max as u32);
        let live = common.config.clone().map(|path| {
            let (given, pods) = (given.clone(), pods.clone());
            let check = Box::new(move |settings: &Settings| validate_workers(settings, &given, &pods, &keys));
            ConfigReloader::new(path, common.supervised, settings.clone(), check, Arc::clone(&gateway))
        });
        let live = live.map(Arc::new);
        tokio::spawn(reload_on_hangup(Arc::clone(&gateway), live.clone())?);
        if let Some(live) = live {
            tokio::spawn(live.watch());
        }
        if let Some(tls) = upstream_tls {
            tokio::spawn(tls.watch(CHECK_INTERVAL));
        }
        if let Some(tls) = &server_tls {
            tokio::spawn(Arc::clone(tls).watch(CHECK_INTERVAL));
        }
        let grpc = grpc(&settings, &gateway, &stop).await?;
        let picker = picker(&settings, &gateway, &stop).await?;
        if let Some(address) = aside {
            let aside = PlainListener::new(http::bind(address).await?);
            tokio::spawn(http::serve(aside, status_router(Arc::clone(&gateway)), stop.clone()));
        }
        let (routes, administration): (fn(Arc<Gateway>) -> Router, _) = match &admin {
            None => (router, None),
            Some(address) => (
                api_router,
                Some(
                    admin::start(
                        address,
                        &gateway,
                        server_tls.as_ref(),
                        &stop,
                        settings.gateway.write_timeout,
                    )
                    .await?,
                ),
            ),
        };
        let (busy_poll, write_timeout) = (settings.gateway.busy_poll, settings.gateway.write_timeout);
        let start = |listener| {
            let (gateway, stop) = (Arc::clone(&gateway), stop.clone());
            shard::start(listener, server_tls.clone(), gateway, routes, stop, busy_poll, write_timeout)
        };
        let shards: Vec<_> = listeners.into_iter().map(start).collect::<Result<_>>()?;
        for shard in shards {
            shard.ended().await?;
        }
        if let Some(serving) = administration {
            // The task ends after the drain time at the latest. A panic in it has been logged.
            let _ended = serving.await;
        }
        for serving in grpc.into_iter().chain(picker) {
            tokio::select! {
                _ended = serving => {}
                () = http::deadline(stop.clone()) => {}
            }
        }
        if let Some(file) = snapshot {
            fleet.write_snapshot(&file).with_context(|| format!("{}: the snapshot", file.display()))?;
        }
        gateway.finish_traces().await;
        anyhow::Ok(())
    })?;
    // Workers' health tasks may be sleeping; the process does not wait for them.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Sends the gateway's metrics to a collector, if `trace.metrics_interval` is set.
fn metrics(
    settings: &Settings,
    gateway: &Arc<Gateway>,
    listen: SocketAddr,
) -> Result<Option<MetricsExporter>> {
    let interval = settings.trace.metrics_interval;
    let Some(config) = compose::trace(settings, listen)?.filter(|_| !interval.is_zero()) else {
        return Ok(None);
    };
    let gateway = Arc::downgrade(gateway);
    let render = move || gateway.upgrade().map(|gateway| gateway.metrics_text());
    Ok(Some(MetricsExporter::start(&config, interval, render)?))
}

/// Returns the workers of these settings, or an error if a start with them would fail, as far as the settings
/// alone show it.
fn validate_workers(
    settings: &Settings,
    given: &Workers,
    pods: &PodArgs,
    keys: &EngineKeys,
) -> Result<Vec<WorkerSpec>> {
    let workers = roster::workers(settings, given, keys)?;
    if Discovery::new(settings, pods)?.is_none() {
        roster::require_workers(&workers)?;
    }
    grpc_address(settings)?;
    picker_addresses(settings)?;
    admin::address(settings)?;
    compose::tokens(settings)?;
    Ok(workers)
}

fn grpc_address(settings: &Settings) -> Result<Option<SocketAddr>> {
    let address = |listen: String| {
        listen.parse().with_context(|| format!("gateway.grpc_listen: {listen:?} is no IP:PORT"))
    };
    compose::some(&settings.gateway.grpc_listen).map(address).transpose()
}

/// Returns the ports of the workers on this host.
fn local_ports(workers: &[WorkerSpec]) -> Vec<u16> {
    let address = |worker: &WorkerSpec| {
        let (_, rest) = worker.url.split_once("://")?;
        rest.trim_end_matches('/').replace("localhost:", "127.0.0.1:").parse::<SocketAddr>().ok()
    };
    let local = workers.iter().filter_map(address).filter(|address| address.ip().is_loopback());
    local.map(|address| address.port()).collect()
}

/// Returns the number of serving threads.
fn threads(settings: &Settings) -> usize {
    match settings.gateway.threads {
        0 => process::available_cores(),
        threads => threads as usize,
    }
}

/// Starts the KServe gRPC service, if `gateway.grpc_listen` is set.
async fn grpc(
    settings: &Settings,
    gateway: &Arc<Gateway>,
    stop: &http::Stop,
) -> Result<Option<JoinHandle<()>>> {
    let Some(address) = grpc_address(settings)? else { return Ok(None) };
    let listener = http::bind(address).await?;
    let mut stop = stop.clone();
    let stopped = async move { drop(stop.wait_for(Option::is_some).await) };
    let gateway = Arc::clone(gateway);
    let write_timeout = settings.gateway.write_timeout;
    let serving = match tls::server(settings, &[Alpn::Http2])? {
        None => {
            let listener = PlainListener::new(listener).with_write_timeout(write_timeout);
            tokio::spawn(serve_grpc(listener, gateway, stopped))
        }
        Some(tls) => {
            tokio::spawn(Arc::clone(&tls).watch(CHECK_INTERVAL));
            let listener = TlsListener::new(listener, tls).with_write_timeout(write_timeout);
            tokio::spawn(serve_grpc(listener, gateway, stopped))
        }
    };
    Ok(Some(serving))
}

/// Returns the addresses of the endpoint picker and of its health service.
fn picker_addresses(settings: &Settings) -> Result<[Option<SocketAddr>; 2]> {
    let address = |key: &str, listen: &String| -> Result<Option<SocketAddr>> {
        let parse =
            |listen: String| listen.parse().with_context(|| format!("{key}: {listen:?} is no IP:PORT"));
        compose::some(listen).map(parse).transpose()
    };
    let picker = &settings.picker;
    Ok([address("picker.listen", &picker.listen)?, address("picker.health_listen", &picker.health_listen)?])
}

/// Starts the endpoint picker, if `picker.listen` is set.
async fn picker(
    settings: &Settings,
    gateway: &Arc<Gateway>,
    stop: &http::Stop,
) -> Result<Option<JoinHandle<()>>> {
    let [listen, health] = picker_addresses(settings)?;
    let stopped = || {
        let mut stop = stop.clone();
        async move { drop(stop.wait_for(Option::is_some).await) }
    };
    if let Some(address) = health {
        let listener = PlainListener::new(http::bind(address).await?);
        tokio::spawn(serve_picker_health(listener, Arc::clone(gateway), stopped()));
    }
    let Some(address) = listen else { return Ok(None) };
    let listener = http::bind(address).await?;
    let (gateway, requests_max) = (Arc::clone(gateway), settings.picker.requests_max as usize);
    let write_timeout = settings.gateway.write_timeout;
    let serving = match tls::picker(settings)? {
        None => {
            let listener = PlainListener::new(listener).with_write_timeout(write_timeout);
            tokio::spawn(serve_picker(listener, gateway, requests_max, stopped()))
        }
        Some(tls) => {
            if settings.picker.tls == "gateway" {
                tokio::spawn(Arc::clone(&tls).watch(CHECK_INTERVAL));
            }
            let listener = TlsListener::new(listener, tls).with_write_timeout(write_timeout);
            tokio::spawn(serve_picker(listener, gateway, requests_max, stopped()))
        }
    };
    Ok(Some(serving))
}

/// On SIGHUP, reads files again and reopens the audit log, as log rotation requires.
fn reload_on_hangup(
    gateway: Arc<Gateway>,
    live: Option<Arc<ConfigReloader>>,
) -> Result<impl Future<Output = ()>> {
    let mut reload_files = signal(SignalKind::hangup())?;
    Ok(async move {
        while reload_files.recv().await.is_some() {
            tracing::info!("SIGHUP: reading files again");
            let (gateway, live) = (Arc::clone(&gateway), live.clone());
            let read = move || {
                gateway.reload_files();
                if let Some(live) = live {
                    live.read();
                }
            };
            // A panic in it has been logged.
            let _read = tokio::task::spawn_blocking(read).await;
        }
    })
}
