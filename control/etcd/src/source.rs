//! The workers whose keys are in etcd, listed and watched.
//!
//! | Event | Reported as |
//! | --- | --- |
//! | a key is written | changed |
//! | a key is deleted that had no lease, or whose worker was draining | deleted |
//! | a key with a lease is deleted | expired: it was not renewed; see the guard of `control-discovery` |
//! | a key with a lease is missing from a list | the same |
//! | a value that cannot be read | a failure with the key's name; its worker stays as it was |
//! | etcd cannot be reached, the watched revision is gone | a failure; listed anew as soon as that succeeds |
//!
//! All keys are listed again every `relist`, which corrects for lost events.

use std::collections::BTreeMap;
use std::time::Duration;

use control_discovery::{Object, Sender, Update};
use tokio::time::Instant;

use crate::client::{Client, EtcdError};
use crate::rpc::mvccpb::{Event, KeyValue, event::EventType};
use crate::worker::Worker;

/// Pause after a failure: doubled with each further failure, up to the longest.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Most keys named in a failure.
const MISTAKES_SHOWN: usize = 3;

/// Source of the workers whose keys are in etcd.
pub struct EtcdSource {
    client: Client,
    prefix: String,
    relist: Duration,
}

/// State of a key.
#[derive(Debug, Default)]
struct Key {
    /// The worker of the last readable value; `None` if there was none.
    worker: Option<Worker>,
    has_lease: bool,
    mistake: Option<String>,
}

/// State of all keys.
#[derive(Debug, Default)]
struct Keys(BTreeMap<String, Key>);

/// Reason for which following the keys ended.
enum End {
    /// The updates have no receiver.
    Closed,
    /// The list is due again.
    Relist,
}

impl EtcdSource {
    /// Creates the source of the workers below `PREFIX/workers/`.
    #[must_use]
    pub fn new(client: Client, prefix: &str, relist: Duration) -> Self {
        Self { client, prefix: workers_prefix(prefix), relist }
    }

    /// Name of the source in the status.
    #[must_use]
    pub fn name(&self) -> String {
        format!("etcd {} {}", self.client.endpoints(), self.prefix)
    }

    /// Reports the workers until the updates have no receiver.
    pub async fn watch(self, sender: Sender) {
        let mut keys = Keys::default();
        let mut pause = PAUSE;
        loop {
            let began = Instant::now();
            match self.follow(&mut keys, &sender).await {
                Ok(End::Closed) => return,
                Ok(End::Relist) | Err(EtcdError::Compacted) => pause = PAUSE,
                Err(error) => {
                    if !sender.send(Update::Failed(error.to_string())).await {
                        return;
                    }
                    // A watch that ran for a while ends a row of failures.
                    if began.elapsed() > PAUSE_MAX {
                        pause = PAUSE;
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// Lists all keys, and watches them from that revision on.
    async fn follow(&self, keys: &mut Keys, sender: &Sender) -> Result<End, EtcdError> {
        let listed = self.client.list(&self.prefix).await?;
        let updates = keys.list(&self.prefix, listed.keys);
        if !send(sender, updates).await {
            return Ok(End::Closed);
        }
        let relist = Instant::now() + self.relist;
        let mut watch = self.client.watch(&self.prefix, listed.revision + 1).await?;
        loop {
            let Ok(answer) = tokio::time::timeout_at(relist, watch.next()).await else {
                return Ok(End::Relist);
            };
            if !send(sender, keys.events(&self.prefix, answer?.events)).await {
                return Ok(End::Closed);
            }
        }
    }
}

/// Returns `PREFIX/workers/`, whether or not the prefix ends with a slash.
pub(crate) fn workers_prefix(prefix: &str) -> String {
    format!("{}/workers/", prefix.trim_end_matches('/'))
}

/// Whether the updates still have a receiver.
async fn send(sender: &Sender, updates: Vec<Update>) -> bool {
    for update in updates {
        if !sender.send(update).await {
            return false;
        }
    }
    true
}

/// Returns the name of a worker's key in a form that may be logged and shown.
fn name(prefix: &str, key: &[u8]) -> String {
    let name = String::from_utf8_lossy(key.strip_prefix(prefix.as_bytes()).unwrap_or(key));
    name.escape_debug().to_string()
}

impl Keys {
    /// Applies a list of all keys.
    fn list(&mut self, prefix: &str, listed: Vec<KeyValue>) -> Vec<Update> {
        let mut before = std::mem::take(&mut self.0);
        for found in listed {
            let name = name(prefix, &found.key);
            let key = before.remove(&name).unwrap_or_default().with(&found);
            self.0.insert(name, key);
        }
        // Keys whose leases expired between two watches.
        let is_expired =
            |key: &Key| key.has_lease && key.worker.as_ref().is_some_and(|worker| !worker.draining);
        let expired =
            before.into_iter().filter(|(_, key)| is_expired(key)).map(|(name, _)| Update::Expired(name));
        expired.chain([self.listed()]).chain(self.mistakes()).collect()
    }

    /// Applies the events of an answer.
    fn events(&mut self, prefix: &str, events: Vec<Event>) -> Vec<Update> {
        let had_mistakes = self.mistakes().is_some();
        let mut updates: Vec<Update> =
            events.into_iter().filter_map(|event| self.event(prefix, event)).collect();
        match self.mistakes() {
            Some(failure) => updates.push(failure),
            // A success ends the failure.
            None if had_mistakes && updates.is_empty() => updates.push(self.listed()),
            None => {}
        }
        updates
    }

    fn event(&mut self, prefix: &str, event: Event) -> Option<Update> {
        let is_deletion = event.r#type() == EventType::Delete;
        let found = event.kv?;
        let name = name(prefix, &found.key);
        if is_deletion {
            let gone = self.0.remove(&name)?;
            let worker = gone.worker?;
            let is_expired = gone.has_lease && !worker.draining;
            return Some(if is_expired { Update::Expired(name) } else { Update::Deleted(name) });
        }
        let key = self.0.remove(&name).unwrap_or_default().with(&found);
        let worker = key.worker.as_ref().filter(|_| key.mistake.is_none());
        let changed = worker.map(|worker| Update::Changed(object(&name, worker)));
        self.0.insert(name, key);
        changed
    }

    /// Returns an update with all known workers.
    fn listed(&self) -> Update {
        let workers = self.0.iter().filter_map(|(name, key)| Some(object(name, key.worker.as_ref()?)));
        Update::Listed(workers.collect())
    }

    /// Returns a failure that names the unreadable keys, if there are any.
    fn mistakes(&self) -> Option<Update> {
        let all = self.0.iter().filter_map(|(name, key)| Some(format!("{name}: {}", key.mistake.as_ref()?)));
        let mut all: Vec<String> = all.collect();
        let more = all.len().saturating_sub(MISTAKES_SHOWN);
        if more > 0 {
            all.truncate(MISTAKES_SHOWN);
            all.push(format!("{more} more"));
        }
        (!all.is_empty()).then(|| Update::Failed(all.join("; ")))
    }
}

impl Key {
    /// Returns the key with a new value. An unreadable value leaves the worker unchanged.
    fn with(self, found: &KeyValue) -> Self {
        let has_lease = found.lease != 0;
        match Worker::parse(&found.value) {
            Ok(worker) => Self { worker: Some(worker), has_lease, mistake: None },
            Err(mistake) => Self { has_lease, mistake: Some(mistake), ..self },
        }
    }
}

fn object(name: &str, worker: &Worker) -> Object {
    Object { key: name.to_owned(), endpoints: vec![worker.endpoint()] }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "/kvasir/workers/";

    fn key(name: &str, value: &str, lease: i64) -> KeyValue {
        KeyValue { key: format!("{PREFIX}{name}").into(), value: value.into(), lease, ..KeyValue::default() }
    }

    fn put(name: &str, value: &str, lease: i64) -> Event {
        Event { r#type: EventType::Put.into(), kv: Some(key(name, value, lease)) }
    }

    fn delete(name: &str) -> Event {
        Event { r#type: EventType::Delete.into(), kv: Some(key(name, "", 0)) }
    }

    fn worker(name: &str, url: &str) -> Object {
        object(name, &Worker { url: url.to_owned(), ..Worker::default() })
    }

    #[test]
    fn a_deletion_is_one_where_nothing_was_left_to_run_out() {
        let mut keys = Keys::default();
        let listed = keys.list(PREFIX, vec![key("a", "http://a:1", 7), key("b", "http://b:1", 0)]);
        assert_eq!(listed, [Update::Listed(vec![worker("a", "http://a:1"), worker("b", "http://b:1")])]);
        assert_eq!(keys.events(PREFIX, vec![delete("b")]), [Update::Deleted("b".to_owned())]);
        assert_eq!(keys.events(PREFIX, vec![delete("a"), delete("a")]), [Update::Expired("a".to_owned())]);
        let mut unseen = Keys::default();
        unseen.list(
            PREFIX,
            vec![key("a", "http://a:1", 7), key("b", "http://b:1", 0), key("c", "http://c:1", 0)],
        );
        let listed = unseen.list(PREFIX, vec![key("b", "http://b:1", 0)]);
        assert_eq!(
            listed,
            [Update::Expired("a".to_owned()), Update::Listed(vec![worker("b", "http://b:1")])]
        );
        let draining = "{\"url\": \"http://a:1\", \"draining\": true}";
        let updates =
            keys.events(PREFIX, vec![put("a", "http://a:1", 8), put("a", draining, 8), delete("a")]);
        assert!(
            matches!(&updates[..], [Update::Changed(_), Update::Changed(_), Update::Deleted(name)] if name == "a")
        );
    }

    #[test]
    fn a_mistake_changes_nothing_and_is_told_until_it_is_mended() {
        let mut keys = Keys::default();
        keys.list(PREFIX, vec![key("a", "http://a:1", 0)]);
        let updates = keys.events(PREFIX, vec![put("a", "nonsense", 0), put("b", "http://b:1", 0)]);
        let [Update::Changed(changed), Update::Failed(reason)] = &updates[..] else { panic!("{updates:?}") };
        assert_eq!((changed.key.as_str(), reason.starts_with("a: ")), ("b", true), "{reason}");
        let listed = keys.list(PREFIX, vec![key("a", "nonsense", 0), key("b", "http://b:1", 0)]);
        let [Update::Listed(objects), Update::Failed(_)] = &listed[..] else { panic!("{listed:?}") };
        assert_eq!(objects[..], [worker("a", "http://a:1"), worker("b", "http://b:1")]);
        assert_eq!(
            keys.events(PREFIX, vec![put("a", "http://c:1", 0)]),
            [Update::Changed(worker("a", "http://c:1"))]
        );
        // A key that never was a worker is deleted: no worker is reported as deleted, and the failure ends.
        assert!(matches!(&keys.events(PREFIX, vec![put("d", "nonsense", 0)])[..], [Update::Failed(_)]));
        assert!(
            matches!(&keys.events(PREFIX, vec![delete("d")])[..], [Update::Listed(all)] if all.len() == 2)
        );
        assert_eq!(keys.events(PREFIX, Vec::new()), []);
    }

    #[test]
    fn many_mistakes_are_counted() {
        let mut keys = Keys::default();
        let listed = keys.list(PREFIX, (0..9).map(|number| key(&number.to_string(), "", 0)).collect());
        let [Update::Listed(_), Update::Failed(reason)] = &listed[..] else { panic!("{listed:?}") };
        assert!(reason.ends_with("; 6 more") && reason.starts_with("0: "), "{reason}");
    }

    #[test]
    fn a_prefix_may_end_with_a_slash() {
        assert_eq!(
            (workers_prefix("/kvasir"), workers_prefix("/kvasir/")),
            (PREFIX.to_owned(), PREFIX.to_owned())
        );
    }
}
