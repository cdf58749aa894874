//! Configuration of a running gateway. When its file changes, live keys take effect, and the keys that wait
//! for the next start are logged. A file with mistakes, or with which the gateway could not start, is logged
//! and has no effect.
//!
//! The file is polled every second and read once it is unchanged between two polls; on SIGHUP it is read at
//! once. A file that changes while it is read, or is empty, is still being written and is left for the next
//! poll. No request waits for this.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use control_config::{Settings, changes, in_force};
use router_fleet::{DEFAULT_POOL, RosterDelta, WorkerSpec};
use router_gateway::Gateway;

use crate::{compose, process};

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Fingerprint of a file's state: device, inode, size, time of the last change in seconds and nanoseconds.
/// Symbolic links are followed.
type Stamp = [i64; 5];

/// Returns `None` if there is no file or it is empty.
fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok().filter(|found| found.size() > 0)?;
    Some([found.dev() as i64, found.ino() as i64, found.size() as i64, found.mtime(), found.mtime_nsec()])
}

/// Returns the workers of a file, or the error with which a start would fail beyond the file's own mistakes.
pub(crate) type Check = Box<dyn Fn(&Settings) -> Result<Vec<WorkerSpec>> + Send + Sync>;

/// Watches the configuration file of a gateway and applies its live keys.
pub(crate) struct ConfigReloader {
    path: PathBuf,
    is_supervised: bool,
    check: Check,
    gateway: Arc<Gateway>,
    /// Settings with which the process was started.
    started: Settings,
    seen: Mutex<Seen>,
}

struct Seen {
    /// Settings that were last accepted from the file.
    settings: Settings,
    /// State of the file that was last read, whether accepted or not.
    read: Option<Stamp>,
    is_refused: bool,
}

impl ConfigReloader {
    /// Creates the watcher of a gateway that was started with the settings of this file.
    pub(crate) fn new(
        path: PathBuf,
        is_supervised: bool,
        started: Settings,
        check: Check,
        gateway: Arc<Gateway>,
    ) -> Self {
        // Without a stamp the first poll reads the file, including changes made while the gateway was
        // starting.
        let seen = Seen { settings: started.clone(), read: None, is_refused: false };
        Self { path, is_supervised, check, gateway, started, seen: Mutex::new(seen) }
    }

    /// Reads the file whenever it has changed. Never returns.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut last = None;
        loop {
            let now = stamp(&self.path);
            if now.is_some() && now == last && now != self.seen().read {
                let this = Arc::clone(&self);
                // A panic in it has been logged.
                let _read = tokio::task::spawn_blocking(move || this.read()).await;
            }
            last = now;
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        // A panic leaves the state from before that file; the file is then compared again.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the file and applies its live keys. Blocking.
    pub(crate) fn read(&self) {
        let mut seen = self.seen();
        let before = stamp(&self.path);
        let new = process::read(Some(&self.path), self.is_supervised)
            .map_err(anyhow::Error::from)
            .and_then(|new| (self.check)(&new).map(|workers| (new, workers)));
        if before.is_none() || stamp(&self.path) != before {
            return;
        }
        seen.read = before;
        match new {
            Ok((new, workers)) => self.take(&mut seen, new, workers),
            Err(error) => self.refuse(&mut seen, &error),
        }
    }

    /// Returns the file's workers of the pools that this gateway has, plus the present workers of pools that
    /// the file no longer has: pools are added and removed only at the next start.
    fn workers_in_force(&self, mut workers: Vec<WorkerSpec>, new: &Settings) -> Vec<WorkerSpec> {
        let fleet = self.gateway.fleet();
        workers.retain(|worker| fleet.pool(&worker.pool).is_some());
        let is_there = |name: &str| name == DEFAULT_POOL || new.pools.iter().any(|pool| pool.name == name);
        workers.extend(fleet.configured().iter().filter(|worker| !is_there(&worker.pool)).cloned());
        workers
    }

    fn refuse(&self, seen: &mut Seen, error: &anyhow::Error) {
        tracing::error!("{}: {error:#}; the previous configuration stays in force", self.path.display());
        self.gateway.refuse_configuration();
        seen.is_refused = true;
    }

    fn take(&self, seen: &mut Seen, new: Settings, workers: Vec<WorkerSpec>) {
        let file = self.path.display();
        if std::mem::take(&mut seen.is_refused) {
            tracing::warn!("{file} is valid again");
        }
        let told = changes(&seen.settings, &new);
        if told.is_empty() {
            return;
        }
        let applied = match self.gateway.fleet().configure(self.workers_in_force(workers, &new)) {
            Ok(applied) => applied,
            Err(error) => return self.refuse(seen, &error.into()),
        };
        let waiting = changes(&self.started, &new).iter().filter(|change| !change.is_live).count();
        self.gateway.tune(compose::tuning(&new), waiting);
        for change in &told {
            let is_roster = change.is_live && change.key.ends_with("workers");
            let from_when = match change.is_live {
                true if is_roster && applied == RosterDelta::default() => {
                    "without effect: the command line names the workers, or an administrator has changed them"
                }
                true => "in force",
                false => "from the next start on",
            };
            tracing::warn!("{file}: {change}, {from_when}");
        }
        self.gateway.show_configuration(in_force(&self.started, &new));
        seen.settings = new;
    }
}

#[cfg(test)]
mod tests {
    use control_config::{json_schema, parse};
    use router_engines::key::EngineKeys;

    use crate::roster::{self, Workers};

    use super::*;

    /// Returns settings in which one key differs from its default; `None` if no candidate value fits.
    fn with_another(section: &str, key: &str, schema: &serde_json::Value) -> Option<Settings> {
        let words = schema["enum"].as_array().into_iter().flatten().map(ToString::to_string);
        let plain =
            ["true", "false", "1", "2", "0.5", "\"1s\"", "\"2s\"", "\"1 GiB\"", "\"127.0.0.1:9\"", "[\"x\"]"];
        let values = words.chain(plain.map(str::to_owned)).chain(["\"x\"".to_owned()]);
        let settings = values.filter_map(|value| parse(&format!("[{section}]\n{key} = {value}\n")).ok());
        settings.into_iter().find(|settings| !changes(&Settings::default(), settings).is_empty())
    }

    /// A key that is declared live but not applied would be reported as in force.
    #[test]
    fn live_keys_are_those_that_are_put_in_force() {
        let in_force = |settings: &Settings| {
            let workers = roster::workers(settings, &Workers::default(), &EngineKeys::default());
            (compose::tuning(settings), workers.ok())
        };
        let (schema, default) = (json_schema(), in_force(&Settings::default()));
        let (mut live, mut tried) = (0, 0);
        for (section, described) in schema["properties"].as_object().expect("sections") {
            // The keys of pools are in tables that may be repeated.
            let Some(keys) = described["properties"].as_object() else { continue };
            for (key, schema) in keys {
                let Some(settings) = with_another(section, key, schema) else { continue };
                let told = changes(&Settings::default(), &settings);
                assert_eq!(told.len(), 1, "{section}.{key}");
                assert_eq!(told[0].is_live, in_force(&settings) != default, "{section}.{key}");
                live += usize::from(told[0].is_live);
                tried += 1;
            }
        }
        assert!(live == 19 && tried > 100, "{live} of {tried} keys are live");
    }
}
