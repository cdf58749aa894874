//! A Lease (`coordination.k8s.io/v1`) for leader election.
//!
//! Whether a holder renews is judged by this process's own clock, from when it first saw the Lease unchanged:
//! clocks of other machines are not trusted. All writes carry the Lease's resource version, so that of two
//! processes that take it at once one is refused.
//!
//! Required rights: `create` of leases, `get` and `update` of the named one.

use std::time::Duration;

use control_discovery::election::{LEASE_DURATION, Lease};
use k8s_openapi::api::coordination::v1::{Lease as LeaseObject, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

/// Seconds after its last renewal for which other processes respect a Lease.
const LEASE_SECONDS: i32 = LEASE_DURATION.as_secs() as i32;

/// A Lease of Kubernetes.
pub struct KubernetesLease {
    api: Api<LeaseObject>,
    name: String,
    identity: String,
    /// The last observed content of the Lease, and the time at which it was first observed.
    seen: Option<(Option<LeaseSpec>, Instant)>,
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

/// Returns the next step. `unchanged_for` is the time for which this process has seen the Lease unchanged.
fn step(spec: &LeaseSpec, identity: &str, unchanged_for: Duration) -> Step {
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    let duration = u64::try_from(spec.lease_duration_seconds.unwrap_or(LEASE_SECONDS)).unwrap_or(0);
    match () {
        () if holder == identity => Step::Renew,
        () if holder.is_empty() || unchanged_for >= Duration::from_secs(duration) => Step::Take,
        () => Step::Follow,
    }
}

impl KubernetesLease {
    /// Creates a candidate for the Lease of this name. `identity` must differ between processes.
    #[must_use]
    pub fn new(client: Client, namespace: Option<&str>, name: &str, identity: &str) -> Self {
        let namespace = namespace.unwrap_or(client.default_namespace()).to_owned();
        Self {
            api: Api::namespaced(client, &namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            seen: None,
        }
    }
}

impl Lease for KubernetesLease {
    type Error = kube::Error;

    fn name(&self) -> &str {
        &self.name
    }

    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let lease = self.api.get_opt(&self.name).await?;
        let spec = lease.as_ref().and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let known = Some(spec.clone());
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != known) {
            // Measured from the answer: a follower must not count the time of its own request.
            self.seen = Some((known, Instant::now()));
        }
        let unchanged_for = self.seen.as_ref().map_or(Duration::ZERO, |(_, since)| since.elapsed());
        let step = step(&spec, &self.identity, unchanged_for);
        if step == Step::Follow {
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
                let lease = LeaseObject { spec: Some(next), ..lease };
                self.api.replace(&self.name, &PostParams::default(), &lease).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                self.api.create(&PostParams::default(), &LeaseObject { metadata, spec: Some(next) }).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            // Another process took the Lease first.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn release(&mut self) -> Result<(), kube::Error> {
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
