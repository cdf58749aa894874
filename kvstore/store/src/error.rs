//! Errors while a store is opened.

use dataplane_memory::MemoryError;
use kvstore_catalog::CatalogError;
use kvstore_object::ConfigError;
use kvstore_remote::RemoteError;

/// The error that kept a store from starting.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The host tier's memory cannot be had.
    #[error("host tier: {0}")]
    Memory(#[from] MemoryError),
    /// The tiers' sizes make no catalog.
    #[error("catalog: {0}")]
    Catalog(#[from] CatalogError),
    /// The disk tier cannot be opened.
    #[error("disk tier: {0}")]
    Disk(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client of other nodes' pools cannot be made.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The object tier's settings make no sense, or its credentials are not there.
    #[error("object tier: {0}")]
    Object(#[from] ConfigError),
    /// A setting has an invalid value.
    #[error("{key}: {reason}")]
    Setting {
        /// Section and key of the setting.
        key: &'static str,
        /// Explanation of what is wrong with the value.
        reason: String,
    },
    /// A thread could not be started.
    #[error("a thread of the store cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}
