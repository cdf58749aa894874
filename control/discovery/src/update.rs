//! Updates that a source reports.

use crate::endpoint::Endpoint;

/// An object of a source (a pod, an entry of a file, an address of a name) and the endpoints it stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Identity of the object within its source.
    pub key: String,
    /// Endpoints of the object; empty while it has no address yet.
    pub endpoints: Vec<Endpoint>,
}

impl Object {
    /// Returns an object with one endpoint, whose key is its address.
    pub(crate) fn of(endpoint: Endpoint) -> Self {
        Self { key: endpoint.address(), endpoints: vec![endpoint] }
    }
}

/// A change that a source reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Update {
    /// All objects of the source, from a successful list.
    Listed(Vec<Object>),
    /// All objects of the source after its selection was changed on purpose: it may lack any previous object.
    Replaced(Vec<Object>),
    /// One object was added or has changed.
    Changed(Object),
    /// The object with this key was deleted.
    Deleted(String),
    /// The registration of the object with this key was not renewed in time. The object becomes suspect: see the guard.
    Expired(String),
    /// The source cannot be read, with the reason. Its objects stay as they are.
    Failed(String),
}
