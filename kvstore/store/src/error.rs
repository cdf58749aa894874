use dataplane_memory::MemoryError;
use kvstore_catalog::CatalogError;

/// Why a store could not be started.
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
    /// A thread could not be started.
    #[error("a thread of the store cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}
