//! `kvasir serve`: runs the gateway and the workers as child processes, restarts those that exit, and starts
//! and stops workers as the planner decides.
//!
//! Each child has its own process group, so that Ctrl-C reaches only this process and shutdown is ordered:
//! the gateway drains first, then the workers stop. Children are killed when their parent exits (a death
//! signal).

mod local_fleet;
mod scaling;
mod service;
mod status_line;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control_config::Settings;
use router_engines::client::EngineClient;
use tokio::signal::unix::{SignalKind, signal};

use crate::serve::local_fleet::{LocalFleet, free_address};
use crate::serve::scaling::Scaling;
use crate::serve::service::Secrets;
use crate::serve::status_line::Status;
use crate::{GlobalArgs, compose, memory_plan, process};

/// Interval between two polls of the children.
const WATCH_PERIOD: Duration = Duration::from_millis(20);
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Time after the drain in which the gateway writes its snapshot and sends its last traces.
const GATEWAY_ENDS_WITHIN: Duration = Duration::from_secs(6);
/// Time in which workers stop. They have nothing to drain once the gateway has exited.
const WORKERS_STOP_WITHIN: Duration = Duration::from_secs(5);
/// Exits of one process, before all processes were ready once, after which `serve` gives up.
const FAILED_STARTS_MAX: u32 = 3;

pub(crate) fn run(common: &GlobalArgs, listen: Option<SocketAddr>) -> Result<ExitCode> {
    let settings = process::start(common)?;
    let planner = &settings.planner;
    if planner.spares > 0 {
        bail!("planner.spares is for `kvasir control`: the workers of `kvasir serve` cannot be put to sleep");
    }
    if planner.mode == "act" && planner.actuator != "processes" {
        let actuator = &planner.actuator;
        bail!("planner.actuator = \"{actuator}\" is for `kvasir control`; `kvasir serve` acts by processes");
    }
    let workers = scaling::workers_max(&settings);
    print!("{}", memory_plan::render(&settings, workers)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(supervise(common, &settings, listen.unwrap_or(settings.gateway.listen)))
}

async fn supervise(common: &GlobalArgs, settings: &Settings, listen: SocketAddr) -> Result<ExitCode> {
    // Bound before any child is started, so that an address in use is reported clearly.
    let probe = TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    // The address with the actual port, if port 0 was given.
    let listen = probe.local_addr()?;
    drop(probe);
    // With TLS, client keys or an administrators' listener, this process would have no access to its own
    // gateway. It uses a separate listener, and authenticates with the key that gateways of a fleet use among
    // themselves.
    let is_tls = !settings.tls.certificate_file.is_empty();
    let has_admin_listener = !settings.gateway.admin_listen.is_empty();
    let aside = if is_tls || has_admin_listener { Some(free_address()?) } else { None };
    if !settings.gateway.peers.is_empty() && compose::peer_key().is_none() {
        tracing::warn!(
            "`gateway.peers` is set and {} is not: no peer has the key of this run",
            compose::PEER_KEY
        );
    }
    let secrets = Secrets::new(settings)?;
    let mut fleet = LocalFleet::new(common, settings, listen, aside, &secrets)?;
    let asked = aside.unwrap_or(listen);
    let client = EngineClient::new(&format!("http://{asked}"), None).with_peer_key(Some(&secrets.peer_key));
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut reload_files = signal(SignalKind::hangup())?;
    let mut watch = tokio::time::interval(WATCH_PERIOD);
    let mut scaling = Scaling::new(settings, client.clone(), &secrets.peer_key)?;
    let mut status = Status::new(client);
    let started = Instant::now();
    let mut is_ready = false;
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            // Only the gateway has files to reload and logs to reopen.
            _ = reload_files.recv() => fleet.gateway.signal(rustix::process::Signal::HUP),
            _ = watch.tick() => {}
        }
        fleet.watch()?;
        if is_ready {
            status.show().await;
            if let Some(scaling) = &mut scaling {
                scaling.tick(&mut fleet).await;
            }
        } else if status.all_ready().await {
            is_ready = true;
            announce(settings, listen, &fleet);
        } else if let Some((name, ends)) = fleet.failed(FAILED_STARTS_MAX) {
            drain(&mut fleet, settings).await;
            anyhow::bail!("{name} ended {ends} times before it was ready; the reason is in its log above");
        } else if started.elapsed() > READY_WITHIN {
            anyhow::bail!("not ready after {} s; try --log info", READY_WITHIN.as_secs());
        }
    }
    eprintln!("\nDraining (Ctrl-C again stops at once) …");
    let again = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    tokio::select! {
        () = again => {
            fleet.services().for_each(|service| service.signal(rustix::process::Signal::KILL));
            Ok(ExitCode::from(130))
        }
        () = drain(&mut fleet, settings) => Ok(ExitCode::SUCCESS),
    }
}

async fn drain(fleet: &mut LocalFleet<'_>, settings: &Settings) {
    for (index, service) in fleet.services().enumerate() {
        // The gateway is stopped first and waits for its requests; it gets slightly longer than the drain
        // time.
        let within =
            if index == 0 { settings.serve.drain + GATEWAY_ENDS_WITHIN } else { WORKERS_STOP_WITHIN };
        if !service.stop(within).await {
            eprintln!("{} did not stop in time and was killed", service.name);
        }
    }
}

fn announce(settings: &Settings, listen: SocketAddr, fleet: &LocalFleet<'_>) {
    let names = fleet.names();
    let model = compose::model_name(settings);
    let tls = !settings.tls.certificate_file.is_empty();
    // The unspecified address is not a destination.
    let host = if listen.ip().is_unspecified() { "localhost".to_owned() } else { listen.ip().to_string() };
    let host = if listen.is_ipv6() && host.contains(':') { format!("[{host}]") } else { host };
    let base = format!("{}://{host}:{}", if tls { "https" } else { "http" }, listen.port());
    println!("\nRunning: {}", names.join(", "));
    let watch = match settings.gateway.admin_listen.as_str() {
        "" => format!("watch it at {base}/kvasir/ or with `kvasir top {base}`"),
        place => format!("its page and metrics are on {place}"),
    };
    println!("OpenAI API at {base}/v1 (model {model}); {watch}. Try:\n");
    let authority = if tls { format!(" --cacert {}", settings.tls.certificate_file) } else { String::new() };
    let own = if settings.tls.client_certificate == "required" {
        " --cert CLIENT.pem --key CLIENT.key"
    } else {
        ""
    };
    let key = if compose::is_closed(settings) { " -H \"authorization: Bearer $KVASIR_KEY\"" } else { "" };
    println!(
        "curl -N{authority}{own} {base}/v1/chat/completions{key} -H 'content-type: application/json' -d \
         '{{\"model\":\"{model}\",\"stream\":true,\"seed\":3,\"max_tokens\":48,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'\n",
    );
    // Flushed at once for readers of a pipe.
    let _closed = std::io::stdout().flush();
}
