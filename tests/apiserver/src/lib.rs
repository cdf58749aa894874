//! A double of Kubernetes' API server for tests: namespaced objects to get, list and watch, with seeded faults.
//!
//! The double follows "Kubernetes API Concepts" (kubernetes.io, "Efficient detection of changes", "Resource
//! versions", "Retrieving large results sets in chunks"): each change has the next resource version; a list
//! is the state at one version; a watch sends every change after a version, then bookmarks; a version outside
//! the window of kept changes is answered with 410; objects that start or cease to match a selector are sent
//! as added or deleted.
//!
//! Writes cover one object with its `scale` and `status`; calls can be restricted by the rules of a Role.
//!
//! Reading order: `store` (objects and their changes), `selector`, `faults`, `access` (rules of a Role), `writes`, `server`
//! (HTTP).
//!
//! Not implemented: content types other than JSON, authentication, ownership of fields, controllers.

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
