//! `kvasir serve`: gateway and workers as child processes, watched and restarted.
//!
//! The children get process groups of their own, so that Ctrl-C reaches this process alone and shutdown has an
//! order: the gateway drains first, then the workers stop. Children die with their parent (a death signal).

use std::io::{IsTerminal, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use control_config::Settings;
use router_engines::client::EngineClient;
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::{Common, LogFormat, Role, compose, memory_plan, process};

/// A child that lived this long starts again without a long pause.
const STABLE_AFTER: Duration = Duration::from_secs(30);
const STATUS_PERIOD: Duration = Duration::from_secs(1);
/// How often the children are looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(20);
/// A gateway that hangs must not keep this process from its signals.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
const READY_WITHIN: Duration = Duration::from_secs(120);
/// After the drain a gateway writes its snapshot and sends its last traces.
const GATEWAY_ENDS_WITHIN: Duration = Duration::from_secs(6);
/// Workers have nothing to drain once the gateway is gone.
const WORKERS_STOP_WITHIN: Duration = Duration::from_secs(5);
/// How often a process may end before everything was ready once. More means that it cannot start at all.
const FAILED_STARTS_MAX: u32 = 3;
/// Cores for each process below which none are pinned.
const CORES_EACH_MIN: usize = 2;

pub(crate) fn run(common: &Common, listen: Option<SocketAddr>) -> Result<ExitCode> {
    let settings = process::start(common)?;
    let workers = settings.serve.prefill_workers + settings.serve.decode_workers;
    print!("{}", memory_plan::render(&settings, workers)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(supervise(common, &settings, listen.unwrap_or(settings.gateway.listen)))
}

/// How to start a child, and its present process.
struct Service {
    name: String,
    arguments: Vec<String>,
    /// What it shows to the gateway's closed routes, and the gateway to other gateways.
    peer_key: String,
    child: Option<Child>,
    started: Instant,
    pause: Duration,
    start_at: Instant,
    /// How often it has ended.
    ends: u32,
}

impl Service {
    fn new(name: String, arguments: Vec<String>, peer_key: &str, settings: &Settings) -> Self {
        let now = Instant::now();
        Self {
            name,
            arguments,
            peer_key: peer_key.to_owned(),
            child: None,
            started: now,
            pause: settings.serve.restart_pause,
            start_at: now,
            ends: 0,
        }
    }

    fn start(&mut self) -> Result<()> {
        let program = std::env::current_exe().context("the path of this program")?;
        let child = Command::new(program)
            .args(&self.arguments)
            .env(compose::PEER_KEY, &self.peer_key)
            .stdin(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", self.name))?;
        self.child = Some(child);
        self.started = Instant::now();
        Ok(())
    }

    /// Starts the child when it is time, notes its end, and plans its restart.
    fn watch(&mut self, settings: &Settings) -> Result<()> {
        match &mut self.child {
            None if Instant::now() >= self.start_at => self.start(),
            None => Ok(()),
            Some(child) => {
                if let Some(status) = child.try_wait()? {
                    self.child = None;
                    self.ends += 1;
                    if self.started.elapsed() > STABLE_AFTER {
                        self.pause = settings.serve.restart_pause;
                    }
                    eprintln!(
                        "\r{} ended ({status}); starting it again in {} ms",
                        self.name,
                        self.pause.as_millis()
                    );
                    self.start_at = Instant::now() + self.pause;
                    self.pause = (self.pause * 2).min(settings.serve.restart_pause_max);
                }
                Ok(())
            }
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let id =
            self.child.as_ref().and_then(Child::id).and_then(|id| rustix::process::Pid::from_raw(id as i32));
        if let Some(id) = id {
            // A child that has just ended needs no signal.
            let _ended = rustix::process::kill_process(id, signal);
        }
    }

    /// Asks the child to stop and waits; false when it had to be killed.
    async fn stop(&mut self, within: Duration) -> bool {
        self.signal(rustix::process::Signal::TERM);
        let Some(child) = &mut self.child else { return true };
        if tokio::time::timeout(within, child.wait()).await.is_ok() {
            return true;
        }
        // Its end is certain now; nothing more can be done about a failure here.
        let _killed = child.kill().await;
        false
    }
}

fn free_address() -> Result<SocketAddr> {
    let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port")?;
    Ok(probe.local_addr()?)
}

/// Cores for process `index` of `count`, when there are enough.
fn cores_of(settings: &Settings, index: usize, count: usize) -> Option<(String, usize)> {
    let cores = process::available_cores();
    if !settings.serve.pin_cores || cores < count * CORES_EACH_MIN {
        return None;
    }
    let (first, after) = (cores * index / count, cores * (index + 1) / count);
    Some((format!("{first}-{}", after - 1), after - first))
}

fn services(
    common: &Common,
    settings: &Settings,
    listen: SocketAddr,
    aside: Option<SocketAddr>,
    peer_key: &str,
) -> Result<Vec<Service>> {
    let mut inherited: Vec<String> = vec!["--supervised".to_owned(), "--log".to_owned(), common.log.clone()];
    if common.log_format == LogFormat::Json {
        inherited.extend(["--log-format".to_owned(), "json".to_owned()]);
    }
    if let Some(config) = &common.config {
        let config = config.canonicalize().unwrap_or_else(|_| config.clone());
        inherited.extend(["--config".to_owned(), config.display().to_string()]);
    }
    let serve = &settings.serve;
    let prefill = (0..serve.prefill_workers).map(|number| (Role::Prefill, number));
    // Without prefill workers every decode worker does both.
    let decode_role = if serve.prefill_workers == 0 { Role::Both } else { Role::Decode };
    let roles: Vec<(Role, u64)> =
        prefill.chain((0..serve.decode_workers).map(|number| (decode_role, number))).collect();
    let count = roles.len() + 1;
    let shared_threads = (process::available_cores() / roles.len()).max(1);
    let mut all = Vec::new();
    let mut gateway = vec!["gateway".to_owned(), "--listen".to_owned(), listen.to_string()];
    gateway.extend(aside.into_iter().flat_map(|aside| ["--aside".to_owned(), aside.to_string()]));
    for (index, (role, number)) in roles.into_iter().enumerate() {
        let address = free_address()?;
        let pinned = cores_of(settings, index + 1, count);
        let mut arguments = vec!["worker".to_owned(), "--role".to_owned(), role.name().to_owned()];
        arguments.extend(["--listen".to_owned(), address.to_string()]);
        arguments.extend(["--instance".to_owned(), format!("{}-{number}", role.name())]);
        if settings.engine.threads == 0 {
            let threads = pinned.as_ref().map_or(shared_threads, |(_, cores)| *cores);
            arguments.extend(["--threads".to_owned(), threads.to_string()]);
        }
        arguments.extend(pinned.into_iter().flat_map(|(cores, _)| ["--cores".to_owned(), cores]));
        arguments.extend(inherited.iter().cloned());
        gateway.extend(["--worker".to_owned(), format!("http://{address}")]);
        all.push(Service::new(format!("{} worker {number}", role.name()), arguments, peer_key, settings));
    }
    gateway.extend(
        cores_of(settings, 0, count).into_iter().flat_map(|(cores, _)| ["--cores".to_owned(), cores]),
    );
    gateway.extend(inherited);
    all.insert(0, Service::new("gateway".to_owned(), gateway, peer_key, settings));
    Ok(all)
}

async fn supervise(common: &Common, settings: &Settings, listen: SocketAddr) -> Result<ExitCode> {
    // Before any child is started, so that the reason is a clear one.
    let probe = TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    // With port 0 it has decided.
    let listen = probe.local_addr()?;
    drop(probe);
    // Over TLS, with keys or a listener for administrators, this process would be a stranger to its own gateway: it asks
    // over a listener of its own, and shows what gateways of a fleet show each other.
    let is_tls = !settings.tls.certificate_file.is_empty();
    let has_admin_listener = !settings.gateway.admin_listen.is_empty();
    let aside = if is_tls || has_admin_listener { Some(free_address()?) } else { None };
    if !settings.gateway.peers.is_empty() && compose::peer_key().is_none() {
        tracing::warn!(
            "`gateway.peers` is set and {} is not: no peer has the key of this run",
            compose::PEER_KEY
        );
    }
    let peer_key = compose::peer_key().map_or_else(router_access::new_secret, Ok)?;
    let mut services = services(common, settings, listen, aside, &peer_key)?;
    let asked = aside.unwrap_or(listen);
    let client = EngineClient::new(&format!("http://{asked}"), None).with_peer_key(Some(&peer_key));
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut watch = tokio::time::interval(WATCH_PERIOD);
    let mut status = Status::new(client);
    let started = Instant::now();
    let mut is_ready = false;
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            // Files and logs are the gateway's, which comes first.
            _ = hang_up.recv() => services[0].signal(rustix::process::Signal::HUP),
            _ = watch.tick() => {}
        }
        for service in &mut services {
            service.watch(settings)?;
        }
        if is_ready {
            status.show().await;
        } else if status.all_ready().await {
            is_ready = true;
            announce(settings, listen, &services);
        } else if let Some(service) = services.iter().find(|service| service.ends >= FAILED_STARTS_MAX) {
            let (name, ends) = (service.name.clone(), service.ends);
            drain(&mut services, settings).await;
            anyhow::bail!("{name} ended {ends} times before it was ready; why is said above");
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
            services.iter().for_each(|service| service.signal(rustix::process::Signal::KILL));
            Ok(ExitCode::from(130))
        }
        () = drain(&mut services, settings) => Ok(ExitCode::SUCCESS),
    }
}

async fn drain(services: &mut [Service], settings: &Settings) {
    for (index, service) in services.iter_mut().enumerate() {
        // The gateway comes first and waits for its requests; it has a moment more than it grants them.
        let within =
            if index == 0 { settings.serve.drain + GATEWAY_ENDS_WITHIN } else { WORKERS_STOP_WITHIN };
        if !service.stop(within).await {
            eprintln!("{} did not stop in time and was killed", service.name);
        }
    }
}

fn announce(settings: &Settings, listen: SocketAddr, services: &[Service]) {
    let names: Vec<&str> = services.iter().map(|service| service.name.as_str()).collect();
    let model = compose::model_name(settings);
    let tls = !settings.tls.certificate_file.is_empty();
    // Nobody can be asked at "any address".
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
    // Whoever reads a pipe wants to see this now.
    let _closed = std::io::stdout().flush();
}

/// The live line.
struct Status {
    client: EngineClient,
    shown: Instant,
    tokens: u64,
    is_terminal: bool,
}

impl Status {
    fn new(client: EngineClient) -> Self {
        Self { client, shown: Instant::now(), tokens: 0, is_terminal: std::io::stderr().is_terminal() }
    }

    async fn fetch(&self) -> Option<Value> {
        let body = tokio::time::timeout(ANSWER_WITHIN, self.client.get("/kvasir/status")).await.ok()?.ok()?;
        serde_json::from_slice(&body).ok()
    }

    async fn all_ready(&self) -> bool {
        let Some(status) = self.fetch().await else { return false };
        let workers = status["workers"].as_array();
        workers.is_some_and(|workers| workers.iter().all(|worker| worker["ready"] == true))
    }

    async fn show(&mut self) {
        let passed = self.shown.elapsed();
        if passed < STATUS_PERIOD || !self.is_terminal {
            return;
        }
        self.shown = Instant::now();
        let Some(status) = self.fetch().await else { return };
        let number = |name: &str| status[name].as_u64().unwrap_or(0);
        let tokens = number("generated_tokens");
        let rate = tokens.saturating_sub(self.tokens) as f64 / passed.as_secs_f64();
        self.tokens = tokens;
        let workers = status["workers"].as_array().map_or(&[][..], Vec::as_slice);
        let ready = workers.iter().filter(|worker| worker["ready"] == true).count();
        let cached = 100.0 * number("cached_tokens") as f64 / number("prompt_tokens").max(1) as f64;
        eprint!(
            "\r{ready}/{} workers · {} active · {rate:.0} tokens/s · {cached:.0} % of prompt tokens cached · {} moved mid-stream   ",
            workers.len(),
            number("active"),
            number("migrations"),
        );
    }
}
