//! Whole-system tests: real processes of `kvasir` on loopback, one module for each promise.
//!
//! All tests are one binary, because each binary that is linked with the whole product costs a second of
//! linking and fifty megabytes of disk. `cargo test --workspace --all-features --test system NAME::` runs one
//! module.

mod support;

#[cfg(feature = "kubernetes")]
mod actuators;
mod batches;
mod cancellation;
mod config_reload;
mod deploy;
mod disaggregation;
mod discovery;
mod drain;
mod engines;
mod etcd;
mod faulty_worker;
mod fleet;
mod gateways;
mod guardrail;
mod host_tier;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod migration;
mod observe;
mod openai_client;
mod profile;
mod rails;
mod rolling;
mod scaling;
mod secure;
mod serve;
mod sleep;
mod stored_responses;
mod structured;
mod tidy;
mod tiers;
mod timeouts;
mod trtllm;
