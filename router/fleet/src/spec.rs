//! The roster that is wanted: full, versioned state. Sources of workers (configuration, administrators, peers) end here, and
//! the fleet makes itself equal to it.

use std::collections::HashSet;

use router_engines::dialect::Role;
use router_engines::key::ApiKey;

use crate::changes::CHANGES_MAX;

/// Largest number of workers of a fleet. The index has as many places, one for each data-parallel rank.
pub const WORKERS_MAX: usize = router_radix::MEMBERS_MAX;

/// Longest URL of a worker: a host name has at most 253 bytes (RFC 1035, 2.3.4).
const URL_BYTES_MAX: usize = 280;

/// Longest name that a source may give to a worker's identity. A pod's UID has 36 bytes.
pub(crate) const UID_BYTES_MAX: usize = 64;

/// Pool of workers whose source names no pool.
pub const DEFAULT_POOL: &str = "gateway";

/// A worker as a source describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSpec {
    /// URL of the worker: `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: String,
    /// Identity that the source gives (a pod's UID). Another value is another worker, of which nothing is remembered.
    pub uid: Option<String>,
    /// Role given by the operator.
    pub role: Option<Role>,
    /// API key of the worker's engine.
    pub key: Option<ApiKey>,
    /// Name of its pool.
    pub pool: String,
    /// Version of the worker's deployment, if its source gives one: prefill and decode workers of two versions are not paired.
    pub generation: Option<String>,
    /// Whether the source wants no new requests at the worker.
    pub is_draining: bool,
    /// The sleeping run of the worker's process, if its engine does not report sleep; the worker is then draining, too.
    pub asleep: Option<AsleepRun>,
}

/// Run of a process that sleeps: the run number of its engine, if it reports one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AsleepRun(pub Option<u64>);

impl WorkerSpec {
    /// Returns a worker of [`DEFAULT_POOL`] that reports its own role.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            uid: None,
            role: None,
            key: None,
            pool: DEFAULT_POOL.to_owned(),
            generation: None,
            is_draining: false,
            asleep: None,
        }
    }

    /// The worker's name in metrics, headers, snapshots and commands: host and port, normalized.
    #[must_use]
    pub fn name(&self) -> String {
        name_of(&self.url)
    }

    /// Checks the URL and the identity.
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        check_url(&self.url)?;
        match self.uid.as_ref().is_some_and(|uid| uid.len() > UID_BYTES_MAX) {
            true => Err(SpecError::Uid(UID_BYTES_MAX)),
            false => Ok(()),
        }
    }

    /// Whether this describes the same worker: everything except the changes to drain it and to have it asleep.
    pub(crate) fn is_same_worker(&self, other: &Self) -> bool {
        Self { is_draining: other.is_draining, asleep: other.asleep, ..self.clone() } == *other
    }
}

/// Host and port of a worker's URL, normalized: lower case, no slash at the end, and no port where it is the scheme's
/// default.
#[must_use]
pub fn name_of(url: &str) -> String {
    let url = url.trim_end_matches('/').to_ascii_lowercase();
    let usual = if url.starts_with("https:") { ":443" } else { ":80" };
    let url = url.strip_suffix(usual).unwrap_or(&url);
    url.split_once("://").map_or(url, |(_, name)| name).to_owned()
}

/// The wanted roster: all workers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FleetSpec {
    /// Version, larger than that of the state before.
    pub version: u64,
    /// Workers in the order in which they are shown.
    pub workers: Vec<WorkerSpec>,
}

/// Reason for which a roster is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The roster's version is not newer than the one in force.
    #[error("version {given} of the roster is not newer than version {current}, which is in force")]
    Stale {
        /// Version of the refused roster.
        given: u64,
        /// Version of the roster in force.
        current: u64,
    },
    /// The roster has more than [`WORKERS_MAX`] workers.
    #[error("{0} workers are more than a fleet can have ({WORKERS_MAX})")]
    TooMany(usize),
    /// The text is not a worker's URL.
    #[error("{0:?} is no URL of a worker: it must be http://HOST:PORT or https://HOST:PORT")]
    Url(String),
    /// The URL is https, and no TLS was loaded for workers.
    #[error("{0}: this gateway was started without TLS to its workers: set `tls.upstream_ca_file`")]
    Tls(String),
    /// Two workers have the same address.
    #[error("a worker is named twice: {0}")]
    Twice(String),
    /// The worker's pool is not configured.
    #[error("the worker {worker} is of the pool {pool:?}, which is not configured")]
    UnknownPool {
        /// The worker's name.
        worker: String,
        /// The pool's name.
        pool: String,
    },
    /// The text is not a role.
    #[error("a worker's role is prefill, decode or both, not {0:?}")]
    Role(String),
    /// The identity is too long; the field is the largest number of bytes.
    #[error("a worker's uid has at most {0} bytes")]
    Uid(usize),
    /// The list of administrators' changes is full.
    #[error("{CHANGES_MAX} workers were added or drained by administrators: name them in the configuration")]
    TooManyChanges,
    /// No worker has this name.
    #[error("there is no worker {0:?}")]
    UnknownWorker(String),
}

impl FleetSpec {
    /// Checks the roster; `has_pool` returns whether a pool is configured.
    pub fn check(&self, has_pool: impl Fn(&str) -> bool) -> Result<(), SpecError> {
        if self.workers.len() > WORKERS_MAX {
            return Err(SpecError::TooMany(self.workers.len()));
        }
        let mut names = HashSet::new();
        for worker in &self.workers {
            worker.check()?;
            if !names.insert(worker.name()) {
                return Err(SpecError::Twice(worker.url.clone()));
            }
            if !has_pool(&worker.pool) {
                return Err(SpecError::UnknownPool { worker: worker.name(), pool: worker.pool.clone() });
            }
        }
        Ok(())
    }
}

/// Returns an error unless this is the URL of a server, without a path.
pub(crate) fn check_url(url: &str) -> Result<(), SpecError> {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let authority = rest.map(|rest| rest.trim_end_matches('/')).unwrap_or_default();
    if url.len() > URL_BYTES_MAX {
        return Err(SpecError::Url(url.chars().take(URL_BYTES_MAX).collect()));
    }
    let is_plain = |letter: char| letter.is_ascii_graphic() && !"/?#@\\".contains(letter);
    // The port stands behind the last colon, and behind the bracket of an IPv6 address.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    match !host.is_empty() && authority.chars().all(is_plain) && is_port {
        true => Ok(()),
        false => Err(SpecError::Url(url.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(urls: &[&str]) -> FleetSpec {
        FleetSpec { version: 1, workers: urls.iter().map(|url| WorkerSpec::new(url)).collect() }
    }

    #[test]
    fn a_worker_named_twice_is_refused_however_it_is_spelled() {
        for (one, other) in [
            ("http://node:8000", "http://node:8000/"),
            ("http://node:8000", "http://NODE:8000"),
            ("http://node", "http://node:80/"),
            ("https://node:443", "https://node"),
        ] {
            let error = spec(&[one, other]).check(|_| true).expect_err("the same worker");
            assert!(matches!(error, SpecError::Twice(_)), "{error}");
        }
        let different = spec(&["http://node:8000", "http://node:8001", "http://node:80", "http://other"]);
        assert_eq!(different.check(|_| true), Ok(()));
    }

    #[test]
    fn what_is_no_server_is_refused() {
        for url in [
            "node:8000",
            "http://",
            "http://node/v1",
            "ftp://node",
            "http://a b",
            "http://u@node",
            "",
            "http://:80",
            "http://a:0",
            "http://a:70000",
            "http://a:b",
        ] {
            let error = spec(&[url]).check(|_| true).expect_err("no URL of a worker");
            assert_eq!(error, SpecError::Url(url.to_owned()));
        }
        assert_eq!(spec(&["http://[::1]:8000", "http://[::1]"]).check(|_| true), Ok(()));
    }

    #[test]
    fn pools_must_be_there_and_fleets_are_bounded() {
        let error = spec(&["http://a"]).check(|_| false).expect_err("no such pool");
        assert!(matches!(error, SpecError::UnknownPool { .. }));
        let urls: Vec<String> = (0..=WORKERS_MAX).map(|port| format!("http://a:{port}")).collect();
        let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
        assert_eq!(spec(&urls).check(|_| true), Err(SpecError::TooMany(WORKERS_MAX + 1)));
    }

    #[test]
    fn draining_alone_makes_no_new_worker() {
        let worker = WorkerSpec::new("http://a:1");
        assert!(worker.is_same_worker(&WorkerSpec { is_draining: true, ..worker.clone() }));
        for other in [
            WorkerSpec { uid: Some("b".to_owned()), ..worker.clone() },
            WorkerSpec { role: Some(Role::Prefill), ..worker.clone() },
            WorkerSpec { pool: "m".to_owned(), ..worker.clone() },
        ] {
            assert!(!worker.is_same_worker(&other), "{other:?}");
        }
    }
}
