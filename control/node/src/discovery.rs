//! Discovery in a gateway: starts the sources of `[discovery]`, and updates the fleet to the workers that
//! they report.
//!
//! The sources and the task that merges them run on the gateway's runtime, not on its serving threads. They
//! end with the fleet.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use control_config::{DiscoverySettings, Settings};
use control_discovery::{
    Batch, Dns, Endpoint, EndpointState, FileSource, RemovalLimit, Role, Roster, Sender, SourceStatus,
    channel, follow,
};
use router_engines::dialect::{self, Engine};
use router_engines::exposition;
use router_engines::key::EngineKeys;
use router_fleet::{DEFAULT_POOL, Fleet, Pool, WorkerSpec};
use router_gateway::Gateway;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::compose::some;
use crate::etcd::Etcd;
use crate::secret;

/// Most reasons for omitted workers that are shown to an administrator.
const REFUSED_SHOWN_MAX: usize = 20;

enum Source {
    File(FileSource),
    Dns(Dns, Duration),
    Etcd(control_etcd::EtcdSource),
    #[cfg(feature = "kubernetes")]
    Pods(control_kubernetes::PodSource),
}

impl Source {
    fn name(&self) -> String {
        match self {
            Self::File(file) => file.name(),
            Self::Dns(dns, _) => dns.name(),
            Self::Etcd(etcd) => etcd.name(),
            #[cfg(feature = "kubernetes")]
            Self::Pods(pods) => pods.name(),
        }
    }

    fn start(self, sender: Sender) -> JoinHandle<()> {
        match self {
            Self::File(file) => tokio::spawn(file.watch(sender)),
            Self::Dns(dns, interval) => tokio::spawn(dns.watch(interval, sender)),
            Self::Etcd(etcd) => tokio::spawn(etcd.watch(sender)),
            #[cfg(feature = "kubernetes")]
            Self::Pods(pods) => tokio::spawn(pods.watch(sender)),
        }
    }
}

/// Pods given on the command line, with the flags of vLLM's and SGLang's routers and, as aliases, those of
/// vLLM's production-stack. They take precedence over `[discovery]`.
#[derive(Args, Clone, Default)]
pub(crate) struct PodArgs {
    /// Find workers among pods of Kubernetes. Any of the selectors below implies it.
    #[arg(long, value_name = "k8s", num_args = 0..=1, default_missing_value = "k8s", value_parser = ["k8s"])]
    service_discovery: Option<String>,
    /// Label selector of pods that are workers. May be given several times.
    #[arg(long, alias = "k8s-label-selector", num_args = 1.., value_name = "KEY=VALUE")]
    selector: Vec<String>,
    /// Label selector of pods that prefill for decode workers.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE")]
    prefill_selector: Vec<String>,
    /// Label selector of pods that decode from prompts that prefill workers computed.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE")]
    decode_selector: Vec<String>,
    /// Namespace of those pods (default: this pod's own, or that of the kubeconfig's context).
    #[arg(long, alias = "k8s-namespace", value_name = "NAMESPACE")]
    service_discovery_namespace: Option<String>,
    /// Port of pods whose labels and annotations name none.
    #[arg(long, alias = "k8s-port", value_name = "PORT")]
    service_discovery_port: Option<u16>,
}

impl PodArgs {
    /// Returns `[discovery]`, overridden by the command line.
    fn over(&self, settings: &DiscoverySettings) -> Result<DiscoverySettings> {
        let mut settings = settings.clone();
        for (given, key) in [
            (&self.selector, &mut settings.selector),
            (&self.prefill_selector, &mut settings.prefill_selector),
            (&self.decode_selector, &mut settings.decode_selector),
        ] {
            if !given.is_empty() {
                *key = given.join(",");
            }
        }
        if let Some(namespace) = &self.service_discovery_namespace {
            settings.namespace.clone_from(namespace);
        }
        if let Some(port) = self.service_discovery_port {
            settings.port = u64::from(port);
        }
        if self.service_discovery.is_some() && pods(&settings).is_empty() {
            bail!("--service-discovery needs --selector, or --prefill-selector and --decode-selector");
        }
        Ok(settings)
    }
}

/// Sources of workers that a configuration names.
pub(crate) struct Discovery {
    settings: DiscoverySettings,
    sources: Vec<Source>,
    etcd: Option<Etcd>,
    pods: Vec<Pods>,
    guard: RemovalLimit,
}

/// A set of pods that a configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pods {
    /// Label selector, or the name of an InferencePool.
    selection: String,
    is_pool: bool,
    role: Option<Role>,
}

fn pods(settings: &DiscoverySettings) -> Vec<Pods> {
    let roles = [
        // If two selections match one pod, the first one is used: it specifies the role.
        (&settings.prefill_selector, false, Some(Role::Prefill)),
        (&settings.decode_selector, false, Some(Role::Decode)),
        (&settings.selector, false, None),
        (&settings.inference_pool, true, None),
    ];
    let set = roles.into_iter().filter(|(selection, ..)| !selection.is_empty());
    set.map(|(selection, is_pool, role)| Pods { selection: selection.clone(), is_pool, role }).collect()
}

/// Connects the pod sources. Only files are read here: an unreachable API server does not prevent the start.
#[cfg(feature = "kubernetes")]
async fn connect(pods: &[Pods], settings: &DiscoverySettings) -> Result<Vec<Source>> {
    use control_kubernetes::{PodSource, PodSourceConfig, Selection, connect};

    if pods.is_empty() {
        return Ok(Vec::new());
    }
    let client = connect().await?;
    let source = |pods: &Pods| {
        let selection = pods.selection.clone();
        let config = PodSourceConfig {
            namespace: some(&settings.namespace),
            selection: if pods.is_pool {
                Selection::InferencePool(selection)
            } else {
                Selection::Labels(selection)
            },
            role: pods.role,
            port: settings.port as u16,
            relist: settings.relist,
        };
        Source::Pods(PodSource::new(client.clone(), config))
    };
    Ok(pods.iter().map(source).collect())
}

#[cfg(not(feature = "kubernetes"))]
async fn connect(_: &[Pods], _: &DiscoverySettings) -> Result<Vec<Source>> {
    Ok(Vec::new())
}

impl Discovery {
    /// Collects the sources of `[discovery]`, `[etcd]` and the command line; `None` if there are none.
    pub(crate) fn new(settings: &Settings, given: &PodArgs) -> Result<Option<Self>> {
        let discovery = given.over(&settings.discovery)?;
        let mut sources = Vec::new();
        if let Some(file) = some(&discovery.file) {
            sources.push(Source::File(FileSource::new(PathBuf::from(file))));
        }
        for name in &discovery.dns {
            let dns = Dns::new(name, some(&discovery.dns_pool)).context("discovery.dns")?;
            sources.push(Source::Dns(dns, discovery.dns_interval));
        }
        let pods = pods(&discovery);
        if !pods.is_empty() && !cfg!(feature = "kubernetes") {
            bail!(
                "[discovery] or the command line names pods of Kubernetes, and this binary was built without: \
                 cargo build --release --features kubernetes"
            );
        }
        let guard = RemovalLimit { share: discovery.guard_share, time: discovery.guard_time };
        let etcd = Etcd::new(settings)?;
        let is_empty = sources.is_empty() && pods.is_empty() && etcd.is_none();
        Ok((!is_empty).then_some(Self { settings: discovery, sources, etcd, pods, guard }))
    }

    /// Starts the sources. Must be called within a Tokio runtime.
    pub(crate) async fn start(mut self, gateway: &Arc<Gateway>, keys: EngineKeys) -> Result<()> {
        self.sources.extend(connect(&self.pods, &self.settings).await?);
        // etcd is the last source: of two sources that name one address the first is used, and many processes
        // may write to etcd.
        if let Some(etcd) = self.etcd.take() {
            let client = etcd.client()?;
            let source = control_etcd::EtcdSource::new(client, &etcd.prefix, self.settings.relist);
            self.sources.push(Source::Etcd(source));
        }
        let names = self.sources.iter().map(Source::name).collect();
        let (senders, receiver) = channel(self.sources.len());
        let shown: Arc<Mutex<DiscoveryStatus>> = Arc::default();
        let metrics = Arc::clone(&shown);
        gateway.show_also(Box::new(move |out| lock(&metrics).render(out)));
        // From here on, an empty roster means that no worker has been found yet.
        gateway.show_discovery(lock(&shown).to_json());
        let publisher = Publisher { gateway: Arc::downgrade(gateway), keys, shown };
        let following =
            follow(Roster::new(names, self.guard), receiver, move |batch| publisher.publish(batch));
        let sources = self.sources.into_iter().zip(senders).map(|(source, sender)| source.start(sender));
        gateway.fleet().adopt(sources.chain([tokio::spawn(following)]));
        Ok(())
    }
}

/// State of discovery that administrators and metrics see.
#[derive(Default)]
struct DiscoveryStatus {
    sources: Vec<SourceStatus>,
    refused: Vec<String>,
    /// Number of publications, and total time from a source's report to the change of the fleet.
    published: u64,
    lag: Duration,
}

fn lock(shown: &Mutex<DiscoveryStatus>) -> std::sync::MutexGuard<'_, DiscoveryStatus> {
    // Each update is complete, so a poisoned lock leaves no broken state.
    shown.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiscoveryStatus {
    fn to_json(&self) -> Value {
        let source = |source: &SourceStatus| {
            json!({
                "source": source.name,
                "workers": source.endpoints,
                "suspect": source.suspects,
                "listed": source.is_listed,
                "error": source.error,
            })
        };
        json!({ "sources": self.sources.iter().map(source).collect::<Vec<_>>(), "refused": self.refused })
    }

    fn render(&self, out: &mut String) {
        type Value = fn(&SourceStatus) -> u64;
        let series: [(&str, &str, &str, Value); 4] = [
            ("workers", "", "Workers that the source reports", |source| source.endpoints as u64),
            (
                "suspect",
                "",
                "Workers that the last list lacked or whose registration expired, served while they answer",
                |source| source.suspects as u64,
            ),
            ("failing", "", "1 while it cannot be read", |source| u64::from(source.error.is_some())),
            ("events", "_total", "Updates that it reported", |source| source.updates),
        ];
        for (name, suffix, help, value) in series {
            let (family, kind) =
                (format!("kvasir_discovery_{name}"), if suffix.is_empty() { "gauge" } else { "counter" });
            let _infallible = writeln!(out, "# HELP {family} {help}.\n# TYPE {family} {kind}");
            for source in &self.sources {
                let (label, value) = (exposition::label("source", &source.name), value(source));
                let _infallible = writeln!(out, "{family}{suffix}{{{label}}} {value}");
            }
        }
        let family = "kvasir_discovery_lag_seconds";
        let (count, sum) = (self.published, self.lag.as_secs_f64());
        let _infallible = writeln!(
            out,
            "# HELP {family} From a source's report to the change of the fleet.\n# TYPE {family} summary\n\
             {family}_sum {sum:?}\n{family}_count {count}"
        );
    }
}

/// Updates the fleet to the workers that the sources report.
struct Publisher {
    gateway: Weak<Gateway>,
    keys: EngineKeys,
    shown: Arc<Mutex<DiscoveryStatus>>,
}

impl Publisher {
    fn publish(&self, batch: Batch) {
        let Some(gateway) = self.gateway.upgrade() else { return };
        let refused = batch.endpoints.map(|endpoints| self.apply(gateway.fleet(), endpoints));
        let mut shown = lock(&self.shown);
        shown.sources = batch.sources;
        if let Some(refused) = refused {
            shown.published += 1;
            shown.lag += batch.reported.elapsed();
            if refused != shown.refused {
                refused.iter().for_each(|refused| tracing::warn!("discovered worker left out: {refused}"));
                shown.refused = refused;
            }
        }
        gateway.show_discovery(shown.to_json());
    }

    /// Applies the endpoints to the fleet. Returns the reasons for omitted workers.
    fn apply(&self, fleet: &Arc<Fleet>, endpoints: Vec<Endpoint>) -> Vec<String> {
        let mut refused = Vec::new();
        let mut workers = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints {
            match pool_of(fleet.pools(), &endpoint) {
                Ok(pool) => workers.push(self.worker(endpoint, pool)),
                Err(reason) => refused.push(reason),
            }
        }
        match fleet.discover(workers) {
            Ok(discovered) => refused.extend(discovered.refused.iter().map(ToString::to_string)),
            Err(error) => refused.push(error.to_string()),
        }
        let more = refused.len().saturating_sub(REFUSED_SHOWN_MAX);
        if more > 0 {
            refused.truncate(REFUSED_SHOWN_MAX);
            refused.push(format!("{more} more"));
        }
        refused
    }

    fn worker(&self, endpoint: Endpoint, pool: &Pool) -> WorkerSpec {
        let is_outside = pool.engine() == Some(Engine::OpenAi);
        WorkerSpec {
            key: secret::of_configured(&self.keys, &endpoint.url, is_outside),
            url: endpoint.url,
            uid: endpoint.uid,
            role: endpoint.role.map(|role| match role {
                Role::Prefill => dialect::Role::Prefill,
                Role::Decode => dialect::Role::Decode,
                Role::Both => dialect::Role::Both,
            }),
            pool: pool.name.clone(),
            generation: endpoint.generation,
            is_draining: endpoint.state != EndpointState::Ready,
            asleep: None,
        }
    }
}

/// Returns the pool that the endpoint's source names, or else one with the endpoint's model name, or else the
/// pool `gateway`. The fleet itself checks that the worker's model is the pool's.
fn pool_of<'a>(pools: &'a [Arc<Pool>], endpoint: &Endpoint) -> Result<&'a Pool, String> {
    let named = |name: &str| pools.iter().find(|pool| pool.name == name);
    if let Some(name) = &endpoint.pool {
        let pool = named(name).ok_or_else(|| format!("{}: there is no pool {name:?}", endpoint.url))?;
        return Ok(pool);
    }
    let by_model = endpoint.model.as_ref().and_then(|model| {
        pools.iter().find(|pool| pool.has_configured_model && pool.is_named(model)).or_else(|| named(model))
    });
    let pool = by_model.or_else(|| named(DEFAULT_POOL));
    pool.map(|pool| &**pool).ok_or_else(|| format!("{}: no pool takes it", endpoint.url))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{compose, roster};

    #[tokio::test]
    async fn a_worker_goes_to_the_pool_that_is_named_or_has_its_model() {
        let text = "[[pool]]\nname = \"large\"\nmodel = \"llama-70b\"\naliases = [\"big\"]\n";
        let settings = control_config::parse(text).expect("settings");
        let access = compose::access(&settings, &[]).expect("access");
        let fleet = Fleet::start(roster::fleet(&settings, &access, EngineKeys::default()), 1);
        let pool = |endpoint: Endpoint| pool_of(fleet.pools(), &endpoint).map(|pool| pool.name.clone());
        let of = |pool: Option<&str>, model: Option<&str>| Endpoint {
            pool: pool.map(str::to_owned),
            model: model.map(str::to_owned),
            ..Endpoint::new("http://a:1")
        };
        for (endpoint, expected) in [
            (of(None, None), Ok("gateway")),
            (of(Some("large"), None), Ok("large")),
            (of(None, Some("llama-70b")), Ok("large")),
            (of(None, Some("big")), Ok("large")),
            (of(None, Some("large")), Ok("large")),
            (of(None, Some("another")), Ok("gateway")),
            (of(Some("none"), Some("big")), Err("http://a:1: there is no pool \"none\"")),
        ] {
            let found = pool(endpoint.clone());
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{endpoint:?}");
        }
    }

    #[test]
    fn flags_of_other_routers_select_pods() {
        #[derive(clap::Parser)]
        struct Flags {
            #[command(flatten)]
            pods: PodArgs,
        }
        let read = |flags: &str| {
            let flags = std::iter::once("kvasir").chain(flags.split_whitespace());
            let flags = <Flags as clap::Parser>::try_parse_from(flags).expect("flags");
            flags
                .pods
                .over(&DiscoverySettings { selector: "of=file".to_owned(), ..DiscoverySettings::default() })
        };
        let settings = read(
            "--service-discovery --selector app=vllm tier=a --service-discovery-namespace llm \
             --service-discovery-port 8080 --prefill-selector role=p --decode-selector role=d",
        );
        let settings = settings.expect("a selection");
        assert_eq!((settings.selector.as_str(), settings.port), ("app=vllm,tier=a", 8080));
        assert_eq!(settings.namespace, "llm");
        let roles: Vec<_> = pods(&settings).into_iter().map(|pods| (pods.selection, pods.role)).collect();
        assert_eq!(
            roles[..2],
            [("role=p".to_owned(), Some(Role::Prefill)), ("role=d".to_owned(), Some(Role::Decode))]
        );
        let stack =
            read("--service-discovery k8s --k8s-label-selector app=opt --k8s-port 9000 --k8s-namespace n")
                .expect("a selection");
        assert_eq!((stack.selector.as_str(), stack.port, stack.namespace.as_str()), ("app=opt", 9000, "n"));
        assert_eq!(read("").expect("the file's").selector, "of=file");
        let none = PodArgs { service_discovery: Some("k8s".to_owned()), ..PodArgs::default() };
        assert!(none.over(&DiscoverySettings::default()).is_err());
    }

    #[test]
    fn metrics_name_their_source() {
        let status = SourceStatus {
            name: "file \"a\"".to_owned(),
            endpoints: 3,
            suspects: 1,
            updates: 7,
            error: Some("gone".to_owned()),
            is_listed: true,
        };
        let mut out = String::new();
        DiscoveryStatus {
            sources: vec![status],
            published: 2,
            lag: Duration::from_millis(30),
            ..DiscoveryStatus::default()
        }
        .render(&mut out);
        for line in [
            "kvasir_discovery_workers{source=\"file \\\"a\\\"\"} 3",
            "kvasir_discovery_suspect{source=\"file \\\"a\\\"\"} 1",
            "kvasir_discovery_failing{source=\"file \\\"a\\\"\"} 1",
            "kvasir_discovery_events_total{source=\"file \\\"a\\\"\"} 7",
            "kvasir_discovery_lag_seconds_sum 0.03",
            "kvasir_discovery_lag_seconds_count 2",
        ] {
            assert!(out.lines().any(|shown| shown == line), "{line} in {out}");
        }
    }
}
