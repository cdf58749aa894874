//! The programs of a simulated cluster, and their configurations.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use control_node::{StopSignal, StopSource};
use tests_apiserver::ApiServer;
use tokio::sync::mpsc::{self, UnboundedSender};
use tools_mocker::{Dialect, LoadFailure, Mock, MockConfig};

use crate::catalog::{self, MODEL};
use crate::deployment;
use crate::kernel::{self, HostId, ProcessId, report};
use crate::model::{self, MODEL_NAME};
use crate::oracle::Oracle;
use crate::plan::{EngineKind, EnginePlan, Role, Tiers};

pub(crate) const GATEWAY_PORT: u16 = 8000;
pub(crate) const ADMIN_PORT: u16 = 9090;
pub(crate) const ENGINE_PORT: u16 = 8100;
/// Ports of a worker's KV events, of their replay and of its data plane.
const WORKER_PORTS: [u16; 3] = [8101, 8102, 8103];
const STORE_PORT: u16 = 7400;
pub(crate) const STORE_HTTP_PORT: u16 = 7401;

const API_PORT: u16 = 6443;
pub(crate) const CONTROL_PORT: u16 = 8090;
/// File with the address of the API server.
pub(crate) const KUBECONFIG: &str = "kubeconfig.json";

/// Drain time of gateways, workers and stores for requests in flight when they are told to stop.
pub(crate) const DRAIN: Duration = Duration::from_secs(60);

/// Key of each tenant and its SHA-256; the last one is also the administrator's.
const KEYS: [(&str, &str); 3] = [
    ("kvasir-acme-of-the-simulation", "f67a3cba3ab89ef896dc0710560000903755956ddd3f347375004aa7d3181ccc"),
    ("kvasir-globex-of-the-simulation", "ab896b70bba63b8e259006fe1340d3b15ca230be42cd258a2f9b04156fa70717"),
    ("kvasir-boss-of-the-simulation", "821645f7eb6068254655eda5c46feceb87ab08f6d41366bc3d1f9e74a6019f8c"),
];
const KEYS_FILE: &str = "keys.toml";

/// Returns the key of a tenant.
pub(crate) fn key(tenant: u8) -> &'static str {
    KEYS[usize::from(tenant)].0
}

/// Returns the last key, which is the administrator's.
pub(crate) fn administrators_key() -> &'static str {
    KEYS[KEYS.len() - 1].0
}

pub(crate) fn write_keys() -> Result<()> {
    let key = |(number, (_, digest)): (usize, &(&str, &str))| {
        let admin = number + 1 == KEYS.len();
        format!(
            "[[key]]\nname = \"key{number}\"\ntenant = \"tenant{number}\"\nsha256 = \"{digest}\"\nmodels = [\"*\"]\nadmin = {admin}\n"
        )
    };
    let keys: String = KEYS.iter().enumerate().map(key).collect();
    std::fs::write(KEYS_FILE, keys).context("the file of keys")
}

/// Stops a node, as SIGTERM does.
#[derive(Clone)]
pub(crate) struct StopHandle(Arc<StopState>);

struct StopState {
    is_stop_requested: AtomicBool,
    /// Sender to the running command.
    signals: Mutex<UnboundedSender<StopSignal>>,
}

impl StopHandle {
    fn new() -> Self {
        let signals = Mutex::new(mpsc::unbounded_channel().0);
        Self(Arc::new(StopState { is_stop_requested: AtomicBool::new(false), signals }))
    }

    /// Returns the source of stop signals for the next command.
    fn source(&self) -> StopSource {
        let (signals, received) = mpsc::unbounded_channel();
        if self.is_stop_requested() {
            // The signal arrived between the start of the process and that of the command.
            let _heard = signals.send(StopSignal::Terminate);
        }
        *self.0.signals.lock().unwrap_or_else(PoisonError::into_inner) = signals;
        StopSource::Channel(received)
    }

    fn is_stop_requested(&self) -> bool {
        self.0.is_stop_requested.load(Ordering::Relaxed)
    }

    /// A command that does not listen yet gets the signal when it does, where a real process would exit at
    /// once.
    pub(crate) fn terminate(&self) {
        self.0.is_stop_requested.store(true, Ordering::Relaxed);
        // A command that has ended has no receiver.
        let _unheard =
            self.0.signals.lock().unwrap_or_else(PoisonError::into_inner).send(StopSignal::Terminate);
    }
}

/// A process of a node. Mock engines have no stop handle: they ignore signals.
pub(crate) struct Started {
    pub(crate) process: ProcessId,
    pub(crate) stop: Option<StopHandle>,
}

/// Configuration of gateways in addition to their peers.
pub(crate) struct GatewayOptions {
    pub(crate) requests_max: u32,
    pub(crate) has_keys: bool,
    /// Whether engines are found as pods, and not in a file.
    pub(crate) finds_pods: bool,
}

pub(crate) fn write_gateway_config(number: usize, peers: &[HostId], options: &GatewayOptions) -> Result<()> {
    let peers: Vec<String> = peers
        .iter()
        .map(|host| format!("\"http://{}:{GATEWAY_PORT}\"", kernel::host_address(*host)))
        .collect();
    let access =
        if options.has_keys { format!("[access]\nkeys_file = \"{KEYS_FILE}\"\n") } else { String::new() };
    let discovery = match options.finds_pods {
        false => format!("file = \"gateway{number}.workers.toml\""),
        true => format!(
            "selector = \"app={}\"\nnamespace = \"{}\"\nport = {ENGINE_PORT}",
            deployment::APP,
            deployment::NAMESPACE
        ),
    };
    let config = format!(
        "[gateway]\nlisten = \"0.0.0.0:{GATEWAY_PORT}\"\nadmin_listen = \"0.0.0.0:{ADMIN_PORT}\"\nthreads = 1\ncompute_threads = 1\nmodel = \"{MODEL_NAME}\"\n\
         model_folder = \"{MODEL}\"\n\
         health_interval = \"1s\"\nhealth_timeout = \"1s\"\nstall = \"5s\"\nanswer_within = \"20s\"\n\
         worker_wait = \"5s\"\nwrite_timeout = \"10s\"\npeers = [{}]\n\
         requests_max = {}\n\
         [serve]\ndrain = \"{}s\"\n\
         [router]\ndisaggregate_above_tokens = 40\n\
         [discovery]\nguard_time = \"60s\"\n{discovery}\n{access}",
        peers.join(", "),
        options.requests_max,
        DRAIN.as_secs(),
    );
    std::fs::write(format!("gateway{number}.toml"), config).context("the gateway's configuration")
}

/// Starts a process that runs a command of `kvasir`; the command must end only when it is told to stop.
fn start_command(host: HostId, name: &str, arguments: [&str; 3]) -> Started {
    let stop = StopHandle::new();
    let (handle, source) = (stop.clone(), stop.source());
    let arguments = ["kvasir"].into_iter().chain(arguments).map(str::to_owned);
    let (arguments, its_name) = (arguments.collect::<Vec<String>>(), name.to_owned());
    let process = kernel::start_process(host, name, move || {
        let code = control_node::run_with_stop_source(arguments, source);
        if !handle.is_stop_requested() || code != ExitCode::SUCCESS {
            report::fail(
                Oracle::Alive,
                &format!("{its_name} has ended by itself, or with an error: {code:?}"),
            );
        }
        kernel::exit();
    });
    Started { process, stop: Some(stop) }
}

pub(crate) fn start_gateway(host: HostId, number: usize) -> Started {
    start_command(
        host,
        &format!("gateway{number}"),
        ["gateway", "--config", &format!("gateway{number}.toml")],
    )
}

pub(crate) fn start_store(host: HostId, number: u8) -> Started {
    start_command(host, &format!("store{number}"), ["store", "--config", &format!("store{number}.toml")])
}

pub(crate) fn start_control(host: HostId, number: u8) -> Started {
    start_command(
        host,
        &format!("control{number}"),
        ["control", "--config", &format!("control{number}.toml")],
    )
}

/// Writes a control service's configuration in which a few concurrent requests are too many for one engine,
/// and decisions are carried out within seconds.
pub(crate) fn write_control_config(
    host: HostId,
    number: u8,
    has_others: bool,
    gateways: &[HostId],
    engines_max: usize,
) -> Result<()> {
    let gateways: Vec<String> = gateways
        .iter()
        .map(|host| format!("\"http://{}:{ADMIN_PORT}\"", kernel::host_address(*host)))
        .collect();
    let leader = if has_others { "lease" } else { "none" };
    let config = format!(
        "[planner]\nmode = \"act\"\nactuator = \"kubernetes\"\ndecode_target = \"Deployment/{}\"\n\
         interval = \"500ms\"\nstart_time = \"1s\"\ndown_after = \"4s\"\ndecode_min = 1\ndecode_max = {engines_max}\n\
         utilisation = 0.05\nrunning_max = 1\nkv_tokens = 256\nclear_within = \"1s\"\nseasons = []\nhistory = \"0s\"\n\
         [control]\ngateways = [{}]\nlisten = \"{}:{CONTROL_PORT}\"\nleader = \"{leader}\"\nnamespace = \"{}\"\n",
        deployment::NAME,
        gateways.join(", "),
        kernel::host_address(host),
        deployment::NAMESPACE,
    );
    std::fs::write(format!("control{number}.toml"), config).context("the control service's configuration")
}

/// Starts a double of Kubernetes' API server. Its objects outlive the process.
pub(crate) fn start_api_server(host: HostId, server: &ApiServer) -> Started {
    let routes = server.router();
    let process = kernel::start_process(host, "api", move || {
        let serve = async {
            let address = SocketAddr::from((kernel::host_address(host), API_PORT));
            let listener = tokio::net::TcpListener::bind(address).await?;
            axum::serve(listener, routes).await
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let ended = runtime.and_then(|runtime| runtime.block_on(serve));
        report::fail(Oracle::Alive, &format!("the API server has ended: {ended:?}"));
    });
    Started { process, stop: None }
}

/// Writes the kubeconfig with the API server's address for its clients.
pub(crate) fn write_kubeconfig(host: HostId) -> Result<()> {
    let url = format!("http://{}:{API_PORT}", kernel::host_address(host));
    let content = tests_apiserver::kubeconfig(&url, deployment::NAMESPACE);
    std::fs::write(KUBECONFIG, content).context("the kubeconfig")
}

/// Time within which a worker on a slow disk has started or failed to start.
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// Runs a worker. A worker whose start fails because of its disk is restarted, as a supervisor would do.
fn start_worker(host: HostId, number: usize, role: Role) -> Started {
    let role = match role {
        Role::Both => "both",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    let stop = StopHandle::new();
    let handle = stop.clone();
    let process = kernel::start_process(host, &format!("engine{number}"), move || {
        let config = format!("worker{number}.toml");
        loop {
            let arguments = ["kvasir", "worker", "--role", role, "--config", &config];
            let has_faults = || {
                let faults = kernel::disk_of(host);
                faults.slow > 0 || faults.fail_one_in > 0
            };
            let (began, began_in_faults) =
                (kernel::now(), kernel::disk_of(host) != kernel::DiskFaults::default());
            let code = control_node::run_with_stop_source(arguments, handle.source());
            // A slow operation of the start may fail after the end of the faults in which it began, and a start refuses
            // headers that are damaged. Later a rotten block is a miss, and no reason to end.
            let was_starting = kernel::now() - began < STARTS_WITHIN.as_nanos() as u64;
            let rots = kernel::disk_of(host).rot_one_in > 0;
            let has_disk_faults = has_faults() || (was_starting && (began_in_faults || rots));
            match code == ExitCode::SUCCESS {
                true if handle.is_stop_requested() => kernel::exit(),
                // The supervisor starts a worker again after a failure, until the worker is told to stop.
                false if has_disk_faults && handle.is_stop_requested() => kernel::exit(),
                false if has_disk_faults => std::thread::sleep(Duration::from_secs(1)),
                _ => report::fail(
                    Oracle::Alive,
                    &format!("worker {number} has ended by itself, or with an error: {code:?}"),
                ),
            }
        }
    });
    Started { process, stop: Some(stop) }
}

pub(crate) fn write_store_config(host: HostId, number: u8) -> Result<()> {
    let address = kernel::host_address(host);
    let config = format!(
        "[store]\nname = \"store{number}\"\npool = \"2 MiB\"\nslot = \"8 KiB\"\nlisten = \"{address}:{STORE_PORT}\"\n\
         http = \"{address}:{STORE_HTTP_PORT}\"\nlease = \"5s\"\nresp = []\n\
         [serve]\ndrain = \"{}s\"\n\
         [transfer]\ntransport = \"tcp\"\nhuge_pages = false\nzero_copy_from = \"0 B\"\n",
        DRAIN.as_secs()
    );
    std::fs::write(format!("store{number}.toml"), config).context("the store's configuration")
}

pub(crate) fn write_worker_config(
    host: HostId,
    number: usize,
    plan: &EnginePlan,
    tiers: Tiers,
    stores: &[HostId],
) -> Result<()> {
    let address = kernel::host_address(host);
    let [events, replay, transfer] = WORKER_PORTS;
    let nodes: Vec<String> = stores
        .iter()
        .enumerate()
        .map(|(number, host)| format!("\"store{number}=tcp:{}:{STORE_PORT}\"", kernel::host_address(*host)))
        .collect();
    let nodes = if tiers.host_kib == 0 { String::new() } else { nodes.join(", ") };
    let disk = if tiers.host_kib == 0 { 0 } else { tiers.disk_kib };
    let context = model::CONTEXT.min((plan.blocks - 2) * 16);
    let config = format!(
        "[engine]\nmodel_name = \"{MODEL_NAME}\"\nmodel_folder = \"{MODEL}\"\nthreads = 1\nblocks = {}\n\
         context_tokens = {context}\n\
         [worker]\nlisten = \"{address}:{ENGINE_PORT}\"\nevents = \"{address}:{events}\"\nreplay = \"{address}:{replay}\"\n\
         [transfer]\ntransport = \"tcp\"\nlisten = \"{address}:{transfer}\"\nhuge_pages = false\n\
         zero_copy_from = \"0 B\"\ndeadline = \"5s\"\nlease = \"8s\"\n\
         [host_tier]\ncapacity = \"{} KiB\"\n\
         [disk_tier]\ncapacity = \"{disk} KiB\"\nsegment = \"1 MiB\"\npath = \"disk{number}\"\n\
         [remote_tier]\nnodes = [{nodes}]\n\
         [serve]\ndrain = \"{}s\"\n",
        plan.blocks,
        tiers.host_kib,
        DRAIN.as_secs()
    );
    std::fs::write(format!("worker{number}.toml"), config).context("the worker's configuration")
}

/// Starts an engine; if `is_other_model`, with a model that no gateway serves.
pub(crate) fn start_engine(
    host: HostId,
    number: usize,
    plan: &EnginePlan,
    is_other_model: bool,
    place: Arc<Mutex<Option<Arc<Mock>>>>,
) -> Started {
    if plan.kind == EngineKind::Worker {
        return start_worker(host, number, plan.role);
    }
    let plan = plan.clone();
    let process = kernel::start_process(host, &format!("engine{number}"), move || {
        let ended = run_engine(host, number, &plan, is_other_model, &place);
        report::fail(Oracle::Alive, &format!("engine{number} has ended: {ended:?}"));
    });
    Started { process, stop: None }
}

fn run_engine(
    host: HostId,
    number: usize,
    plan: &EnginePlan,
    is_other_model: bool,
    place: &Mutex<Option<Arc<Mock>>>,
) -> Result<()> {
    let config = MockConfig {
        dialect: if plan.kind == EngineKind::Sglang { Dialect::Sglang } else { Dialect::Vllm },
        model: if is_other_model { "another" } else { MODEL_NAME }.to_owned(),
        role: match plan.role {
            Role::Both => tools_mocker::Role::Both,
            Role::Prefill => tools_mocker::Role::Prefill,
            Role::Decode => tools_mocker::Role::Decode,
        },
        load_failure: if plan.recomputes { LoadFailure::Recompute } else { LoadFailure::Fail },
        tells_start: plan.tells_start,
        blocks: plan.blocks,
        context_tokens: (plan.blocks - 1) * 16,
        decode_seconds_per_step: plan.step_us as f64 / 1e6,
        prefill_seconds_per_token: plan.token_us as f64 / 1e6,
        events: plan.events,
        seed: number as u64,
        bootstrap_timeout: Duration::from_secs(20),
        ..catalog::engine_config()?
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let address = SocketAddr::from((kernel::host_address(host), ENGINE_PORT));
        let mock = Mock::start(config, address).await?;
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(mock));
        std::future::pending::<()>().await;
        Ok(())
    })
}
