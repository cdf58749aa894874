//! A double of Kubernetes' API server for tests: namespaced objects to get, list and watch, with seeded faults.
//!
//! It behaves as "Kubernetes API Concepts" (kubernetes.io, "Efficient detection of changes", "Resource versions",
//! "Retrieving large results sets in chunks") says: each change has the next resource version; a list is a state at one
//! version; a watch tells every change after a version, then bookmarks; a version that has left the window of kept
//! changes is answered with 410; objects that begin or cease to match a selector are told as added or deleted.
//!
//! Writes are those of one object with its `scale` and `status`; calls can be held to the rules of a Role.
//!
//! Reading order: `store` (objects and their changes), `selector`, `faults`, `access` (rules of a Role), `writes`, `server`
//! (HTTP).
//!
//! Left out: other content types than JSON, authentication, ownership of fields, controllers.

#![forbid(unsafe_code)]

mod access;
mod discovery;
mod faults;
mod selector;
mod server;
mod store;
mod writes;

pub use access::Rule;
pub use discovery::resource_of;
pub use faults::Faults;
pub use selector::Selector;
pub use server::{ApiServer, kubeconfig};
pub use store::{Change, ChangeKind, Store};
