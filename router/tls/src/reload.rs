//! A configuration that is built from files, and rebuilt when they change: all of it, or nothing.
//!
//! The stamps of the files are taken before they are read, so that a change during the reading is seen at
//! the next check. A failed load keeps the stamps of the last successful one, so each check tries again:
//! the load succeeds once both the certificate and the key have been written.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;

use crate::error::TlsError;
use crate::material::{Stamp, stamps};

/// Shortest time between two checks of the files.
const EVERY_MIN: Duration = Duration::from_millis(10);
/// Remaining validity below which a certificate is warned of.
const EXPIRY_WARNING_SECONDS: u64 = 14 * DAY_SECONDS;
/// Time between two expiry warnings.
const WARN_EVERY: Duration = Duration::from_secs(DAY_SECONDS);
const DAY_SECONDS: u64 = 24 * 60 * 60;

/// Number of times that files were read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReloadCounts {
    /// Loads that replaced the configuration.
    pub done: u64,
    /// Loads that failed and changed nothing.
    pub failed: u64,
}

/// Result of one load.
pub(crate) struct Loaded<C> {
    pub(crate) config: Arc<C>,
    /// End of the own certificate's validity.
    pub(crate) expires_unix: Option<u64>,
}

type Build<C> = Box<dyn Fn() -> Result<Loaded<C>, TlsError> + Send + Sync>;

pub(crate) struct Reloadable<C> {
    side: &'static str,
    files: Vec<PathBuf>,
    build: Build<C>,
    current: ArcSwap<Loaded<C>>,
    /// The stamps of the files of `current`. Held during a load, so that of two loads the later one wins.
    seen: Mutex<Vec<Option<Stamp>>>,
    // Both are statistics only.
    done: AtomicU64,
    failed: AtomicU64,
}

impl<C: Send + Sync + 'static> Reloadable<C> {
    /// Loads for the first time. `side` is for the log; `files` are the files that `build` reads.
    pub(crate) fn load(
        side: &'static str,
        files: Vec<PathBuf>,
        build: Build<C>,
    ) -> Result<Arc<Self>, TlsError> {
        let seen = stamps(&files);
        let loaded = build()?;
        let expires_unix = loaded.expires_unix;
        warn_of_expiry(side, expires_unix);
        Ok(Arc::new(Self {
            side,
            files,
            build,
            current: ArcSwap::from_pointee(loaded),
            seen: Mutex::new(seen),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }))
    }

    pub(crate) fn config(&self) -> Arc<C> {
        self.current.load().config.clone()
    }

    pub(crate) fn expires_unix(&self) -> Option<u64> {
        self.current.load().expires_unix
    }

    pub(crate) fn counts(&self) -> ReloadCounts {
        ReloadCounts { done: self.done.load(Ordering::Relaxed), failed: self.failed.load(Ordering::Relaxed) }
    }

    /// Reads all files again.
    pub(crate) fn reload(&self) -> Result<(), TlsError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        self.reload_from(stamps(&self.files), &mut seen)
    }

    /// Reads all files again if a file's stamp has changed; `None` when no file has changed.
    fn reload_if_changed(&self) -> Option<Result<(), TlsError>> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamps(&self.files);
        (now != *seen).then(|| self.reload_from(now, &mut seen))
    }

    fn reload_from(&self, now: Vec<Option<Stamp>>, seen: &mut Vec<Option<Stamp>>) -> Result<(), TlsError> {
        let loaded = (self.build)().inspect_err(|_| {
            self.failed.fetch_add(1, Ordering::Relaxed);
        })?;
        self.current.store(Arc::new(loaded));
        *seen = now;
        self.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Checks the files forever, and loads them when they have changed. A failure is logged once for each
    /// reason.
    pub(crate) async fn watch(self: Arc<Self>, every: Duration) {
        let side = self.side;
        let mut told = String::new();
        let mut warned = Instant::now();
        loop {
            tokio::time::sleep(every.max(EVERY_MIN)).await;
            let this = self.clone();
            let looked = tokio::task::spawn_blocking(move || this.reload_if_changed()).await;
            match looked {
                Ok(Some(Ok(()))) => {
                    told.clear();
                    tracing::info!(side, files = ?self.files, "TLS files were loaded again");
                    warn_of_expiry(side, self.expires_unix());
                }
                Ok(Some(Err(error))) => {
                    let reason = error.to_string();
                    if reason != told {
                        tracing::warn!(side, %error, "changed TLS files cannot be used; the old ones stay in force");
                        told = reason;
                    }
                }
                Ok(None) => {}
                // The runtime is shutting down.
                Err(_) => return,
            }
            if warned.elapsed() >= WARN_EVERY {
                warned = Instant::now();
                warn_of_expiry(side, self.expires_unix());
            }
        }
    }
}

fn warn_of_expiry(side: &'static str, expires_unix: Option<u64>) {
    if let Some(expiry) = expires_unix.and_then(|expires| expiry(expires, unix_now())) {
        tracing::warn!(side, "the TLS certificate {expiry}");
    }
}

/// Seconds since 1970.
fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the warning for a certificate that has expired or will soon.
fn expiry(expires_unix: u64, now_unix: u64) -> Option<String> {
    match expires_unix.checked_sub(now_unix) {
        None => Some(format!("expired {} days ago", (now_unix - expires_unix) / DAY_SECONDS)),
        Some(left) if left < EXPIRY_WARNING_SECONDS => {
            Some(format!("expires in {} days", left / DAY_SECONDS))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_within_two_weeks_is_warned_of() {
        let now = 1_800_000_000;
        let cases = [
            (now + EXPIRY_WARNING_SECONDS, None),
            (now + EXPIRY_WARNING_SECONDS - 1, Some("expires in 13 days")),
            (now, Some("expires in 0 days")),
            (now - 2 * DAY_SECONDS, Some("expired 2 days ago")),
        ];
        for (expires, expected) in cases {
            assert_eq!(expiry(expires, now).as_deref(), expected);
        }
    }
}
