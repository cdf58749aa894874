//! Workers that are pods of Kubernetes: found, counted and scaled.
//!
//! Reading order: `config` (which pods, and how the API server is reached), `pod` (what a pod says of a worker; no I/O),
//! `pool` (the same of an InferencePool), `source` (list and watch); `workload` (a workload's pods counted; no I/O), `scale`
//! (its replicas read and set), `leader` (which of several control services may do so).
//!
//! Rights that a gateway needs: `get`, `list` and `watch` of pods in one namespace, and of one InferencePool where that is
//! named. Those of the control service are in `scale` and `leader`.

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
