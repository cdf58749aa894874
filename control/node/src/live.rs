//! The configuration of a running gateway: when its file has changed, live keys are put in force, and what waits for the
//! next start is said. A file with mistakes changes nothing, and all of them are told.
//!
//! The file is looked at every second and read once it has stayed as it is for a look, so that nobody reads one that is
//! being written; on SIGHUP it is read at once. Not on the way of any request.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use control_config::{Change, Settings, changes};
use router_gateway::Gateway;

use crate::{compose, process};

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What tells two states of a file apart: device, inode, size, time of the last change in seconds and nanoseconds.
type Stamp = Option<[i64; 5]>;

fn stamp(path: &Path) -> Stamp {
    let found = std::fs::metadata(path).ok()?;
    Some([found.dev() as i64, found.ino() as i64, found.size() as i64, found.mtime(), found.mtime_nsec()])
}

/// See the module.
pub(crate) struct LiveConfig {
    path: PathBuf,
    is_supervised: bool,
    gateway: Arc<Gateway>,
    /// As the process was started.
    started: Settings,
    /// As the file was when it was read last without mistakes.
    seen: Mutex<Settings>,
}

impl LiveConfig {
    /// For a gateway that was started with these settings, which came from that file.
    pub(crate) fn new(path: PathBuf, is_supervised: bool, started: Settings, gateway: Arc<Gateway>) -> Self {
        let seen = Mutex::new(started.clone());
        Self { path, is_supervised, gateway, started, seen }
    }

    /// Reads the file whenever it has changed. Without end.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut read = stamp(&self.path);
        let mut last = read;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = stamp(&self.path);
            if now == last && now != read {
                read = now;
                let this = Arc::clone(&self);
                // A panic in there has been told.
                let _read = tokio::task::spawn_blocking(move || this.read()).await;
            }
            last = now;
        }
    }

    /// Reads the file and puts in force what can be. Blocking.
    pub(crate) fn read(&self) {
        let new = match process::read(Some(&self.path), self.is_supervised) {
            Ok(new) => new,
            Err(error) => {
                tracing::error!("{error}\nwhat was in force stays");
                self.gateway.refuse_configuration();
                return;
            }
        };
        // Nothing below panics while it is held.
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let told = changes(&seen, &new);
        if told.is_empty() {
            return;
        }
        let waiting: Vec<Change> =
            changes(&self.started, &new).into_iter().filter(|change| !change.is_live).collect();
        self.gateway.tune(compose::tuning(&new), waiting.len());
        let file = self.path.display();
        for change in &told {
            match change.is_live {
                true => tracing::warn!("{file}: {change}, in force"),
                false => tracing::warn!("{file}: {change}, from the next start on"),
            }
        }
        *seen = new;
    }
}
