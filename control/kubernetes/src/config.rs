//! Which pods are workers, and how the API server is reached.

use std::time::Duration;

use control_discovery::Role;
use kube::Client;

/// How pods are selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// Label selector in the form of `kubectl get pods -l`.
    Labels(String),
    /// Name of an InferencePool (`inference.networking.k8s.io/v1`), which says selector and ports.
    InferencePool(String),
}

/// A set of pods that are workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSourceConfig {
    /// Namespace; `None` is that of this process's service account, or of the kubeconfig's context.
    pub namespace: Option<String>,
    /// Which of its pods.
    pub selection: Selection,
    /// Role of all of them; `None` goes by their labels.
    pub role: Option<Role>,
    /// Port at which they answer, where their labels and annotations say none.
    pub port: u16,
    /// How often all pods are listed anew, beside the watch.
    pub relist: Duration,
}

/// Why there is no way to an API server.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// Neither a service account nor a kubeconfig.
    #[error("no Kubernetes API: {0}")]
    Config(#[from] kube::config::InferConfigError),
    /// Its certificates or credentials cannot be used.
    #[error("the Kubernetes API's configuration cannot be used: {0}")]
    Client(#[source] kube::Error),
}

/// Time within which the API server must accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A client by `KUBECONFIG` or `~/.kube/config`, else by the service account of the pod that this process runs in. Only
/// files are read: whether the server answers is found out by those who ask. The account's token is read again as it is
/// rotated.
pub async fn connect() -> Result<Client, KubernetesError> {
    let mut config = kube::Config::infer().await?;
    config.connect_timeout = Some(CONNECT_MAX);
    // The source tries again itself, and says meanwhile what is wrong.
    config.default_retry = false;
    Client::try_from(config).map_err(KubernetesError::Client)
}
