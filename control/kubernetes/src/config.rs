//! Selection of the pods that are workers, and connection to the API server.

use std::time::Duration;

use control_discovery::Role;
use kube::Client;

use crate::source::WATCH_SECONDS;

/// Selection of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// Label selector in the form of `kubectl get pods -l`.
    Labels(String),
    /// Name of an InferencePool (`inference.networking.k8s.io/v1`), which defines selector and ports.
    InferencePool(String),
}

/// A set of pods that are workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSourceConfig {
    /// Namespace; `None`: that of this process's service account, or of the kubeconfig's context.
    pub namespace: Option<String>,
    /// Selection of pods in the namespace.
    pub selection: Selection,
    /// Role of all selected pods; `None`: by their labels.
    pub role: Option<Role>,
    /// Port of pods whose labels and annotations name none.
    pub port: u16,
    /// Interval at which all pods are listed again, in addition to the watch.
    pub relist: Duration,
}

/// Error of the connection to an API server.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// There is neither a service account nor a kubeconfig.
    #[error("no Kubernetes API: {0}")]
    Config(#[from] kube::config::InferConfigError),
    /// The certificates or credentials of the configuration cannot be used.
    #[error("the Kubernetes API's configuration cannot be used: {0}")]
    Client(#[source] kube::Error),
}

/// Time within which the API server must accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Time after which a connection without a byte from the server is given up: longer than the longest watch, so that it ends only
/// connections that are dead. A request over a pooled connection that the network has dropped would otherwise wait until TCP
/// gives up, a quarter of an hour.
const READ_MAX: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);

/// Returns a client from `KUBECONFIG` or `~/.kube/config`, or else from the service account of the pod that
/// this process runs in. Only files are read: an unreachable server shows with the first request. The
/// account's token is read again when it is rotated.
pub async fn connect() -> Result<Client, KubernetesError> {
    let mut config = kube::Config::infer().await?;
    config.connect_timeout = Some(CONNECT_MAX);
    config.read_timeout = Some(READ_MAX);
    // The time that a connection was idle does not count.
    config.reset_reader_on_write = true;
    // The source retries on its own, and reports the failure meanwhile.
    config.default_retry = false;
    Client::try_from(config).map_err(KubernetesError::Client)
}
