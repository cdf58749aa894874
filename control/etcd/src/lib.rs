//! etcd as a source of workers, and as the store of the lease with which control services elect a leader.
//!
//! Reading order: `client` (etcd's API over gRPC, with several endpoints), `worker` (a worker as the value of
//! a key), `source` (the keys of workers, listed and watched), `registration` (the key of a worker, kept
//! while it runs), `lease` (the lease of an election).
//!
//! | Key below the prefix | Value | Lease of etcd |
//! | --- | --- | --- |
//! | `workers/NAME` | a worker, as JSON ([`Worker`]), or its URL alone | of the registering process, or none |
//! | `leaders/NAME` | identity of the leader | of the leader |
//!
//! Requests do not depend on etcd: an unreachable etcd changes nothing. A worker's key whose lease has
//! expired means that the lease was not renewed in time, not that the worker is gone: the worker is served
//! while it answers its health checks, for `discovery.guard_time`.

#![forbid(unsafe_code)]

mod client;
mod lease;
mod registration;
mod source;
mod worker;

/// Messages and clients generated from `proto/`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
mod rpc {
    pub(crate) mod mvccpb {
        tonic::include_proto!("mvccpb");
    }
    pub(crate) mod etcdserverpb {
        tonic::include_proto!("etcdserverpb");
    }
}

pub use client::{Client, ClientConfig, EtcdError};
pub use lease::EtcdLease;
pub use registration::Registration;
pub use source::EtcdSource;
pub use worker::Worker;
