//! Leader election among processes by a Lease (`coordination.k8s.io/v1`), as client-go's `leaderelection` does it.
//!
//! ```text
//!            the Lease is free, or was not renewed for its duration
//! Follower ─────────────────────────────────────────────────────────▶ Leader
//!          ◀─────────────────────────────────────────────────────────
//!            another process holds it, or it could not be renewed for RENEW_WITHIN
//! ```
//!
//! Whether a holder renews is judged by this process's own clock, from when it first saw the Lease unchanged: clocks of other
//! machines are not trusted. A leader gives up before others may take over (10 s against 15 s). All writes name the
//! Lease's version, so that of two that take it at once one is refused.
//!
//! Rights that this needs: `create` of leases, `get` and `update` of the named one.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;

/// Seconds for which a Lease that is not renewed is respected.
const LEASE_SECONDS: i32 = 15;
/// A leader that could not renew for so long is none any more.
const RENEW_WITHIN: Duration = Duration::from_secs(10);
/// Interval between two looks at the Lease.
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// Takes part in an election.
pub struct Election {
    api: Api<Lease>,
    name: String,
    identity: String,
    /// The Lease as it was last seen to change, and when.
    seen: Option<(Option<LeaseSpec>, Instant)>,
    renewed: Option<Instant>,
}

/// The next step of a candidate.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// The Lease is this process's own: renew it.
    Renew,
    /// The Lease is free, or its holder has stopped renewing it: take it.
    Take,
    /// Another process holds the Lease.
    Follow,
}

/// `unchanged_for`: how long this process has seen the Lease as it is.
fn step(spec: &LeaseSpec, identity: &str, unchanged_for: Duration) -> Step {
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    let duration = u64::try_from(spec.lease_duration_seconds.unwrap_or(LEASE_SECONDS)).unwrap_or(0);
    match () {
        () if holder == identity => Step::Renew,
        () if holder.is_empty() || unchanged_for >= Duration::from_secs(duration) => Step::Take,
        () => Step::Follow,
    }
}

impl Election {
    /// An election by the Lease of this name. `identity` must differ between processes.
    #[must_use]
    pub fn new(client: Client, namespace: Option<&str>, name: &str, identity: &str) -> Self {
        let namespace = namespace.unwrap_or(client.default_namespace()).to_owned();
        Self {
            api: Api::namespaced(client, &namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            seen: None,
            renewed: None,
        }
    }

    /// Takes part until nothing reads `leads`, which says whether this process leads. The Lease is then released.
    pub async fn run(mut self, leads: watch::Sender<bool>) {
        while !leads.is_closed() {
            // A leader that cannot renew gives up so long after its last renewal, however long a request takes.
            let give_up = self.renewed.unwrap_or_else(Instant::now) + RENEW_WITHIN;
            let tried = tokio::time::timeout_at(give_up, self.attempt()).await;
            let is_leader = match tried {
                // An answer may come so late that the renewal is old already.
                Ok(Ok(is_leader)) => is_leader && self.renewed.is_some_and(|at| at.elapsed() < RENEW_WITHIN),
                Ok(Err(error)) => self.still_leads(&error.to_string()),
                Err(_) => self.still_leads("no answer"),
            };
            let was_leader = leads.send_replace(is_leader);
            if is_leader != was_leader {
                tracing::info!(lease = self.name, is_leader, "leadership");
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY_EVERY) => {}
                () = leads.closed() => {}
            }
        }
        if self.renewed.is_some() {
            // Another process waits for the Lease's duration when it cannot be released.
            let _released = tokio::time::timeout(RETRY_EVERY, self.release()).await;
        }
    }

    /// Whether this process leads after an attempt that failed.
    fn still_leads(&mut self, reason: &str) -> bool {
        let leads = self.renewed.is_some_and(|renewed| renewed.elapsed() + RETRY_EVERY < RENEW_WITHIN);
        if !leads {
            self.renewed = None;
        }
        tracing::warn!(lease = self.name, still_leads = leads, "the Lease cannot be renewed: {reason}");
        leads
    }

    /// Looks at the Lease, renews or takes it; whether this process leads.
    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let asked = Instant::now();
        let lease = self.api.get_opt(&self.name).await?;
        let spec = lease.as_ref().and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let known = Some(spec.clone());
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != known) {
            // From when the answer is here: a follower must not count the time of its own request.
            self.seen = Some((known, Instant::now()));
        }
        let unchanged_for = self.seen.as_ref().map_or(Duration::ZERO, |(_, since)| since.elapsed());
        let step = step(&spec, &self.identity, unchanged_for);
        if step == Step::Follow {
            self.renewed = None;
            return Ok(false);
        }
        let now = Some(MicroTime(Timestamp::now()));
        let acquire_time = if step == Step::Renew { spec.acquire_time.clone() } else { now.clone() };
        let transitions = spec.lease_transitions.unwrap_or(0);
        let next = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(LEASE_SECONDS),
            acquire_time,
            renew_time: now,
            lease_transitions: Some(if step == Step::Renew {
                transitions
            } else {
                transitions.saturating_add(1)
            }),
            ..spec
        };
        let written = match lease {
            Some(lease) => {
                let lease = Lease { spec: Some(next), ..lease };
                self.api.replace(&self.name, &PostParams::default(), &lease).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                self.api.create(&PostParams::default(), &Lease { metadata, spec: Some(next) }).await
            }
        };
        match written {
            // Counted from before the request: it may have been carried out at any time since.
            Ok(_) => self.renewed = Some(asked),
            // Another process was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => self.renewed = None,
            Err(error) => return Err(error),
        }
        Ok(self.renewed.is_some())
    }

    async fn release(&self) -> Result<(), kube::Error> {
        let mut lease = self.api.get(&self.name).await?;
        if let Some(spec) =
            lease.spec.as_mut().filter(|spec| spec.holder_identity.as_deref() == Some(&self.identity))
        {
            spec.holder_identity = Some(String::new());
            self.api.replace(&self.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_when_it_is_free_or_was_long_not_renewed() {
        let spec = |holder: Option<&str>| LeaseSpec {
            holder_identity: holder.map(str::to_owned),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        };
        let (short, long) = (Duration::from_secs(14), Duration::from_secs(15));
        assert_eq!(step(&spec(None), "a", Duration::ZERO), Step::Take);
        assert_eq!(step(&spec(Some("")), "a", Duration::ZERO), Step::Take);
        assert_eq!(step(&spec(Some("a")), "a", long), Step::Renew);
        assert_eq!(step(&spec(Some("b")), "a", short), Step::Follow);
        assert_eq!(step(&spec(Some("b")), "a", long), Step::Take);
    }
}
