//! The pods of a namespace, listed and watched.
//!
//! `kube`'s watcher lists, watches from there on, resumes after a cut, lists anew when the server has forgotten its place
//! (410), and pauses longer after each failure. One thing it does not do (5.0.0): when the request for a watch is itself
//! answered with 410, it asks for the same version for ever; the list is then begun anew here. On top of that all pods are listed anew every `relist`: an event that got
//! lost on the way is made up for. A watch on which nothing comes ends after [`WATCH_SECONDS`], so that a connection
//! whose other end is gone is noticed.

use std::time::Duration;

use control_discovery::{Object, Sender, Update};
use futures_util::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::time::Instant;

use crate::config::{PodSourceConfig, Selection};
use crate::pod::{PodRules, key, object};
use crate::pool;

/// Longest watch, in seconds.
const WATCH_SECONDS: u32 = 55;
/// Pause before a list, after a watch that was refused because its version is gone.
const EXPIRED_PAUSE: Duration = Duration::from_millis(500);
/// Pause before an InferencePool is asked for again that cannot be had.
const POOL_PAUSE: Duration = Duration::from_secs(2);

/// Pods that are workers.
pub struct PodSource {
    client: Client,
    config: PodSourceConfig,
}

/// How following a list of pods ended.
enum End {
    /// Nothing receives the updates.
    Closed,
    /// It is time to list anew.
    Relist,
    /// The InferencePool has changed.
    PoolChanged,
}

impl PodSource {
    /// The pods of this configuration.
    #[must_use]
    pub fn new(client: Client, config: PodSourceConfig) -> Self {
        Self { client, config }
    }

    /// Its name in the status.
    #[must_use]
    pub fn name(&self) -> String {
        let namespace = self.namespace();
        match &self.config.selection {
            Selection::Labels(selector) => format!("pods {namespace}/{selector}"),
            Selection::InferencePool(name) => format!("inferencepool {namespace}/{name}"),
        }
    }

    fn namespace(&self) -> &str {
        self.config.namespace.as_deref().unwrap_or(self.client.default_namespace())
    }

    /// Reports the pods until nothing receives the updates.
    pub async fn watch(self, sender: Sender) {
        match &self.config.selection {
            Selection::Labels(selector) => self.watch_labels(selector, &sender).await,
            Selection::InferencePool(name) => self.watch_pool(name, &sender).await,
        }
    }

    async fn watch_labels(&self, selector: &str, sender: &Sender) {
        let rules = self.rules(vec![self.config.port]);
        while let End::Relist | End::PoolChanged =
            self.follow(selector, &rules, std::future::pending(), sender).await
        {}
    }

    fn rules(&self, ports: Vec<u16>) -> PodRules {
        PodRules { role: self.config.role, ports }
    }

    /// Follows the pods of an InferencePool, and begins anew when the pool changes.
    async fn watch_pool(&self, name: &str, sender: &Sender) {
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), self.namespace(), &pool::resource());
        loop {
            let found = match api.get(name).await {
                Ok(found) => pool::selector_and_ports(&found).map(|pool| (found, pool)),
                Err(error) => Err(format!("InferencePool {name}: {error}")),
            };
            let (found, (selector, ports)) = match found {
                Ok(found) => found,
                Err(reason) => {
                    if !sender.send(Update::Failed(reason)).await {
                        return;
                    }
                    tokio::time::sleep(POOL_PAUSE).await;
                    continue;
                }
            };
            let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
            let changes = watcher(api.clone(), config.timeout(WATCH_SECONDS));
            let spec = found.data["spec"].clone();
            let has_changed = async move {
                let mut changes = std::pin::pin!(changes.default_backoff());
                loop {
                    if let Some(Ok(Event::Apply(now) | Event::InitApply(now))) = changes.next().await
                        && now.data["spec"] != spec
                    {
                        return;
                    }
                }
            };
            if let End::Closed = self.follow(&selector, &self.rules(ports), has_changed, sender).await {
                return;
            }
        }
    }

    /// Reports the pods of a selector from a list on, until they are to be listed anew.
    async fn follow(
        &self,
        selector: &str,
        rules: &PodRules,
        pool_changed: impl Future<Output = ()>,
        sender: &Sender,
    ) -> End {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace());
        let config = watcher::Config::default().labels(selector).timeout(WATCH_SECONDS);
        let events = std::pin::pin!(watcher(api, config).default_backoff());
        tokio::select! {
            end = report(events, rules, self.config.relist, sender) => end,
            () = pool_changed => End::PoolChanged,
        }
    }
}

/// Passes events on as updates, until `relist` after the pods were last listed: a list that takes longer is not cut short.
async fn report(
    mut events: impl Stream<Item = Result<Event<Pod>, watcher::Error>> + Unpin,
    rules: &PodRules,
    relist: Duration,
    sender: &Sender,
) -> End {
    let mut until: Option<Instant> = None;
    let mut listed: Vec<Object> = Vec::new();
    loop {
        let event = match until {
            None => events.next().await,
            Some(until) => match tokio::time::timeout_at(until, events.next()).await {
                Ok(event) => event,
                Err(_) => return End::Relist,
            },
        };
        let update = match event {
            None => return End::Relist,
            Some(Err(error)) => {
                let is_expired = is_expired(&error);
                if !sender.send(Update::Failed(chain(&error))).await {
                    return End::Closed;
                }
                if is_expired {
                    tokio::time::sleep(EXPIRED_PAUSE).await;
                    return End::Relist;
                }
                continue;
            }
            Some(Ok(Event::Init)) => {
                until = None;
                listed.clear();
                continue;
            }
            Some(Ok(Event::InitApply(pod))) => {
                listed.push(object(&pod, rules));
                continue;
            }
            Some(Ok(Event::InitDone)) => {
                until = Some(Instant::now() + relist);
                Update::Listed(std::mem::take(&mut listed))
            }
            Some(Ok(Event::Apply(pod))) => Update::Changed(object(&pod, rules)),
            Some(Ok(Event::Delete(pod))) => Update::Deleted(key(&pod)),
        };
        if !sender.send(update).await {
            return End::Closed;
        }
    }
}

/// Whether a watch was refused because its version is gone.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

/// An error with its causes, each once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    text
}
