//! A double of Kubernetes' API server for tests: namespaced objects to get, list and watch, with seeded faults.
//!
//! It behaves as "Kubernetes API Concepts" (kubernetes.io, "Efficient detection of changes", "Resource versions",
//! "Retrieving large results sets in chunks") says: each change has the next resource version; a list is a state at one
//! version; a watch tells every change after a version, then bookmarks; a version that has left the window of kept
//! changes is answered with 410; objects that begin or cease to match a selector are told as added or deleted.
//!
//! Reading order: `store` (objects and their changes), `selector`, `faults`, `server` (HTTP).
//!
//! Left out: writing over HTTP, other content types than JSON, authentication.

#![forbid(unsafe_code)]

mod faults;
mod selector;
mod server;
mod store;

pub use faults::Faults;
pub use selector::Selector;
pub use server::ApiServer;
pub use store::{Change, ChangeKind, Store};
