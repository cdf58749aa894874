//! Leader election among control services: the holder of a lease, of Kubernetes or of etcd, acts.

use anyhow::{Result, bail};
use control_config::Settings;
use control_discovery::election::Lease;
use control_etcd::EtcdLease;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::etcd::Etcd;

/// Participation of this process in an election.
pub(super) struct Leadership {
    leads: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl Leadership {
    /// Joins the election that the settings name; `None` if they name none.
    pub(super) async fn start(settings: &Settings) -> Result<Option<Self>> {
        let (planner, control) = (&settings.planner, &settings.control);
        if control.leader == "none" {
            return Ok(None);
        }
        // KEDA may query any of several processes, and a webhook's receiver expects one sequence of growing
        // decision numbers.
        if planner.mode != "act" || planner.actuator != "kubernetes" {
            bail!(
                "control.leader = {:?} is for planner.mode = \"act\" with planner.actuator = \"kubernetes\"",
                control.leader
            );
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let identity = format!("{host}_{:016x}", router_gateway::random_number());
        if control.leader == "lease" {
            return kubernetes(settings, &identity).await.map(Some);
        }
        let Some(etcd) = Etcd::new(settings)? else {
            bail!("control.leader = \"etcd\" needs etcd.endpoints");
        };
        Ok(Some(Self::of(EtcdLease::new(etcd.client()?, &etcd.prefix, &control.lease, &identity))))
    }

    fn of(lease: impl Lease + Send + 'static) -> Self {
        let (sender, leads) = watch::channel(false);
        Self { leads, task: tokio::spawn(control_discovery::election::run(lease, sender)) }
    }

    /// Whether this process holds the lease.
    pub(super) fn leads(&self) -> bool {
        !self.task.is_finished() && *self.leads.borrow()
    }

    /// Leaves the election and releases the lease.
    pub(super) async fn stop(self) {
        drop(self.leads);
        // A panic of the task has been logged.
        let _ended = self.task.await;
    }
}

#[cfg(feature = "kubernetes")]
async fn kubernetes(settings: &Settings, identity: &str) -> Result<Leadership> {
    let client = control_kubernetes::connect().await?;
    let namespace = crate::compose::some(&settings.control.namespace);
    let lease = control_kubernetes::KubernetesLease::new(
        client,
        namespace.as_deref(),
        &settings.control.lease,
        identity,
    );
    Ok(Leadership::of(lease))
}

#[cfg(not(feature = "kubernetes"))]
#[expect(clippy::unused_async, reason = "connecting to Kubernetes waits")]
async fn kubernetes(_: &Settings, _: &str) -> Result<Leadership> {
    bail!("control.leader = \"lease\" needs a binary that was built with `--features kubernetes`")
}
