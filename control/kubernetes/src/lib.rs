//! Workers in pods of Kubernetes: discovery, counts and scaling.
//!
//! Reading order: `config` (selection of pods, and connection to the API server), `pod` (endpoints of a pod;
//! no I/O), `pool` (selector and ports of an InferencePool), `source` (list and watch); `workload` (counts of
//! a workload's pods; no I/O), `scale` (its replicas read and set), `leader` (leader election among control
//! services).
//!
//! Rights that a gateway needs: `get`, `list` and `watch` of pods in one namespace, and of one InferencePool
//! if one is named. Those of the control service are in `scale` and `leader`.

#![forbid(unsafe_code)]

mod config;
mod graphs;
mod leader;
mod pod;
mod pool;
mod scale;
mod source;
mod workload;

pub use config::{KubernetesError, PodSourceConfig, Selection, connect};
pub use graphs::GraphController;
pub use leader::KubernetesLease;
pub use pod::{PodRules, object};
pub use scale::{ScaleError, ScaleTarget, Workload};
pub use source::{PodSource, error_chain};
pub use workload::WorkloadCounts;
