//! Carries out the planner's counts through external autoscalers.
//!
//! Reading order: `desired` (the published counts, shared by both actuators), `hpa` (the count that a
//! HorizontalPodAutoscaler will set for a published value; no I/O), `keda` (the gRPC service that KEDA
//! queries), `webhook` (posts each change to a URL). Scaling a Kubernetes object directly is in
//! `control-kubernetes`; starting processes of this machine is in `control-node`.
//!
//! Invariant: nothing is published before the planner has decided once, so that a restart never looks like a
//! request for zero workers.

#![forbid(unsafe_code)]

mod desired;
mod hpa;
mod keda;
mod webhook;

pub use desired::{DesiredCounts, DesiredSender, PoolTarget, desired_counts};
pub use hpa::{DEFAULT_TOLERANCE, HpaMetric, published};
pub use keda::keda_routes;
pub use webhook::{Webhook, WebhookError};
