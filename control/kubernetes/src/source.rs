//! The pods of a namespace, listed and watched.
//!
//! `kube`'s watcher lists, watches from that version on, resumes after a lost connection, lists again when
//! the server no longer has its version (410), and pauses longer after each failure. It has one defect
//! (5.0.0): if the request for a watch is itself answered with 410, it requests the same version forever; in
//! that case this module starts with a new list. In addition, all pods are listed again every `relist`, which
//! corrects for lost events. A watch without events ends after [`WATCH_SECONDS`], so that a dead connection
//! is detected.

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
pub(crate) const WATCH_SECONDS: u32 = 55;
/// Pause before a list, after a watch was refused because its version no longer exists.
const EXPIRED_PAUSE: Duration = Duration::from_millis(500);
/// Pause before an unavailable InferencePool is requested again.
const POOL_PAUSE: Duration = Duration::from_secs(2);
/// Longest wait for an InferencePool, and for the next event of a list.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Time after a failure of a watch at which all pods are listed again. A working watch reports nothing while
/// nothing changes, so only a list shows that the server is back.
const RELIST_AFTER_FAILURE: Duration = Duration::from_secs(10);

/// Source of the pods that are workers.
pub struct PodSource {
    client: Client,
    config: PodSourceConfig,
}

/// Reason for which following a list of pods ended.
enum End {
    /// The updates have no receiver.
    Closed,
    /// The pods are due to be listed again.
    Relist,
    /// The InferencePool has changed.
    PoolChanged,
}

impl PodSource {
    /// Creates the source of the pods of this configuration.
    #[must_use]
    pub fn new(client: Client, config: PodSourceConfig) -> Self {
        Self { client, config }
    }

    /// Name of the source in the status.
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

    /// Reports the pods until the updates have no receiver.
    pub async fn watch(self, sender: Sender) {
        match &self.config.selection {
            Selection::Labels(selector) => self.watch_labels(selector, &sender).await,
            Selection::InferencePool(name) => self.watch_pool(name, &sender).await,
        }
    }

    async fn watch_labels(&self, selector: &str, sender: &Sender) {
        let rules = self.rules(vec![self.config.port]);
        while let End::Relist | End::PoolChanged =
            self.follow(selector, &rules, &mut false, std::future::pending(), sender).await
        {}
    }

    fn rules(&self, ports: Vec<u16>) -> PodRules {
        PodRules { role: self.config.role, ports }
    }

    /// Follows the pods of an InferencePool, and starts again when the pool changes.
    async fn watch_pool(&self, name: &str, sender: &Sender) {
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), self.namespace(), &pool::resource());
        let mut last: Option<(DynamicObject, (String, Vec<u16>))> = None;
        // True from a change of the pool until the pods of the changed pool have been listed once, over any
        // number of attempts.
        let mut is_other = false;
        loop {
            let asked = tokio::time::timeout(ANSWER_MAX, api.get(name)).await;
            let found = match asked {
                Ok(Ok(found)) => pool::selector_and_ports(&found).map(|pool| (found, pool)),
                Ok(Err(error)) => Err(format!("InferencePool {name}: {}", error_chain(&error))),
                Err(_) => Err(format!("InferencePool {name}: no answer within {ANSWER_MAX:?}")),
            };
            let before = last.take();
            let (found, (selector, ports)) = match (found, before.clone()) {
                (Ok(found), _) => found,
                (Err(reason), before) => {
                    if !sender.send(Update::Failed(reason)).await {
                        return;
                    }
                    // The pods of the previous selection are still followed.
                    let Some(before) = before else {
                        tokio::time::sleep(POOL_PAUSE).await;
                        continue;
                    };
                    before
                }
            };
            is_other |= before.is_some_and(|(_, before)| before != (selector.clone(), ports.clone()));
            last = Some((found.clone(), (selector.clone(), ports.clone())));
            let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
            let changes = watcher(api.clone(), config.timeout(WATCH_SECONDS));
            let spec = found.data["spec"].clone();
            let has_changed = async move {
                let mut changes = std::pin::pin!(changes.default_backoff());
                loop {
                    match changes.next().await {
                        Some(Ok(Event::Apply(now) | Event::InitApply(now))) if now.data["spec"] != spec => {
                            return;
                        }
                        // The pool is read again.
                        Some(Err(error)) if is_expired(&error) => {
                            return tokio::time::sleep(POOL_PAUSE).await;
                        }
                        _ => {}
                    }
                }
            };
            if let End::Closed =
                self.follow(&selector, &self.rules(ports), &mut is_other, has_changed, sender).await
            {
                return;
            }
        }
    }

    /// Lists and reports the pods of a selector until they are due to be listed again. `is_other`: the
    /// selection differs from the previous one.
    async fn follow(
        &self,
        selector: &str,
        rules: &PodRules,
        is_other: &mut bool,
        pool_changed: impl Future<Output = ()>,
        sender: &Sender,
    ) -> End {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace());
        let config = watcher::Config::default().labels(selector).timeout(WATCH_SECONDS);
        let events = std::pin::pin!(watcher(api, config).default_backoff());
        tokio::select! {
            end = report(events, rules, self.config.relist, is_other, sender) => end,
            () = pool_changed => End::PoolChanged,
        }
    }
}

/// Converts events to updates, until `relist` after the pods were last listed: a list that takes longer is
/// not interrupted.
async fn report(
    mut events: impl Stream<Item = Result<Event<Pod>, watcher::Error>> + Unpin,
    rules: &PodRules,
    relist: Duration,
    is_other: &mut bool,
    sender: &Sender,
) -> End {
    let mut until: Option<Instant> = None;
    let mut listed: Vec<Object> = Vec::new();
    loop {
        let deadline = until.unwrap_or(Instant::now() + ANSWER_MAX);
        let Ok(event) = tokio::time::timeout_at(deadline, events.next()).await else {
            let has_listed = until.is_some();
            let reason = || Update::Failed(format!("the pods were not listed within {ANSWER_MAX:?}"));
            return if has_listed || sender.send(reason()).await { End::Relist } else { End::Closed };
        };
        let update = match event {
            None => return End::Relist,
            Some(Err(error)) => {
                let is_expired = is_expired(&error);
                if !sender.send(Update::Failed(error_chain(&error))).await {
                    return End::Closed;
                }
                if is_expired {
                    tokio::time::sleep(EXPIRED_PAUSE).await;
                    return End::Relist;
                }
                until = until.map(|until| until.min(Instant::now() + RELIST_AFTER_FAILURE));
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
                let listed = std::mem::take(&mut listed);
                if std::mem::take(is_other) { Update::Replaced(listed) } else { Update::Listed(listed) }
            }
            Some(Ok(Event::Apply(pod))) => Update::Changed(object(&pod, rules)),
            Some(Ok(Event::Delete(pod))) => Update::Deleted(key(&pod)),
        };
        if !sender.send(update).await {
            return End::Closed;
        }
    }
}

/// Whether a watch was refused because its version no longer exists.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

/// Returns an error with its causes, each once.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
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
