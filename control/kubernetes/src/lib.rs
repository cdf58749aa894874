//! Workers that are pods of Kubernetes.
//!
//! Reading order: `config` (which pods, and how the API server is reached), `pod` (what a pod says of a worker; no I/O),
//! `pool` (the same of an InferencePool), `source` (list and watch).
//!
//! Rights that this needs: `get`, `list` and `watch` of pods in one namespace, and of one InferencePool where that is named.

#![forbid(unsafe_code)]

mod config;
mod pod;
mod pool;
mod source;

pub use config::{KubernetesError, PodSourceConfig, Selection, connect};
pub use pod::{PodRules, object};
pub use source::PodSource;
