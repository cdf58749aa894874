//! Discovery: finds the workers of a fleet in files, DNS and other sources, and merges them into one list.
//!
//! Reading order: `endpoint` (a worker as a source describes it), `update` (what a source reports), `source_state` (the
//! objects of one source, and the guard against lists that lose too many), `roster` (all sources merged), `follow` (the
//! task between sources and the fleet), then the sources: `file`, `file_format`, `dns`; `labels` (what labels of
//! Kubernetes mean). [`election`] stands beside them: the leader among several processes, by a lease that
//! Kubernetes or etcd keeps.
//!
//! Discovery runs inside every gateway; no other process is needed to route requests. A source that cannot be read
//! changes nothing. This crate knows nothing about fleets, requests or HTTP: the composition root turns endpoints into
//! workers.

#![forbid(unsafe_code)]

mod dns;
pub mod election;
mod endpoint;
mod file;
mod file_format;
mod follow;
mod labels;
mod roster;
mod source_state;
mod update;

pub use dns::{Dns, DnsError};
pub use endpoint::{Endpoint, EndpointState, Role};
pub use file::FileSource;
pub use follow::{Batch, Receiver, Sender, channel, follow};
pub use labels::Labels;
pub use roster::{Roster, SourceStatus};
pub use source_state::RemovalLimit;
pub use update::{Object, Update};
