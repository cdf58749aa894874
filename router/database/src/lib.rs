//! Documents of tenants in an embedded database: stored responses, conversations, files, batches.
//!
//! One file, kept by [redb](https://docs.rs/redb). A document has a [`Key`] (tenant, collection, id) and an expiry time, after
//! which it is invisible and a sweep removes it. Reading and writing a tenant's documents takes the tenant's name, so one tenant
//! cannot reach another's.
//!
//! Callers never wait for the disk on their own thread: a writer thread commits the queued writes as one transaction
//! (`writer`), and reader threads read snapshots (`reader`). Their queues are bounded; a full one is an error. A write that was
//! acknowledged is on the disk.

#![forbid(unsafe_code)]

mod reader;
mod tables;
#[cfg(test)]
mod tests;
mod writer;

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use self::reader::Snapshot;
pub use self::writer::Transaction;

/// Memory for pages of the file. Space in the file beside documents (keys, freed pages) is not counted.
const CACHE_BYTES: usize = 64 << 20;

/// A kind of documents. The numbers are part of the file's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Collection {
    /// Responses of the Responses API.
    Response = 1,
    /// Conversations that responses belong to.
    Conversation = 2,
    /// Files that clients uploaded, and results of batches.
    File = 4,
    /// Parts of files, `FILE/NUMBER`.
    FilePart = 5,
    /// Batches of requests.
    Batch = 6,
}

/// Key of a document.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The tenant that owns the document.
    pub tenant: Arc<str>,
    /// The kind of the document.
    pub collection: Collection,
    /// The document's id within the tenant's collection.
    pub id: String,
}

impl Key {
    /// Returns the key of a document.
    #[must_use]
    pub fn new(tenant: &Arc<str>, collection: Collection, id: impl Into<String>) -> Self {
        Self { tenant: Arc::clone(tenant), collection, id: id.into() }
    }
}

/// Settings of a database.
#[derive(Debug, Clone)]
pub struct Config {
    /// Path of the file. Its folder must exist; one process at a time has it open.
    pub path: PathBuf,
    /// Time for which documents are kept, unless their writer sets another expiry.
    pub keep: Duration,
    /// Largest number of bytes of all documents.
    pub bytes_max: u64,
    /// Largest number of bytes of one tenant's documents.
    pub tenant_bytes_max: u64,
}

/// Reason for which a read or write failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The queue of reads or writes is full.
    #[error("the database is busy")]
    Busy,
    /// The tenant's documents have reached their size limit.
    #[error("the tenant has no room left: its documents may take {0} bytes")]
    TenantFull(u64),
    /// All documents together have reached their size limit.
    #[error("the database is full")]
    Full,
    /// The work itself failed; no document was changed.
    #[error("{0}")]
    Refused(String),
    /// The file cannot be read or written.
    #[error("the database: {0}")]
    Storage(String),
}

impl Error {
    fn storage(error: impl std::fmt::Display) -> Self {
        Self::Storage(error.to_string())
    }
}

/// Current Unix time in seconds.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The database. Dropping it waits for the writes that were accepted.
#[derive(Debug)]
pub struct Database {
    writer: writer::Writer,
    readers: reader::Readers,
    keep: Duration,
    bytes: Arc<AtomicU64>,
}

impl Database {
    /// Opens the file, and creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, or another process has it open.
    pub fn open(config: Config) -> Result<Self, Error> {
        let at =
            |error: &dyn std::fmt::Display| Error::Storage(format!("{}: {error}", config.path.display()));
        // The file is readable by the gateway's user alone.
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&config.path);
        drop(made.map_err(|error| at(&error))?);
        let file = Arc::new(
            redb::Builder::new()
                .set_cache_size(CACHE_BYTES)
                .create(&config.path)
                .map_err(|error| at(&error))?,
        );
        let bytes = Arc::new(AtomicU64::new(tables::prepare(&file).map_err(|error| at(&error))?));
        let keep = config.keep;
        let readers = reader::Readers::start(&file)?;
        let writer = writer::Writer::start(file, config, Arc::clone(&bytes))?;
        Ok(Self { writer, readers, keep, bytes })
    }

    /// Expiry time, in Unix seconds, of a document that is written now.
    #[must_use]
    pub fn expires(&self) -> u64 {
        unix_seconds().saturating_add(self.keep.as_secs())
    }

    /// Bytes of all documents, including expired ones that are not removed yet.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Applies all changes that `work` stages, or none if it fails. They are on the disk when this returns.
    ///
    /// # Errors
    ///
    /// The error of `work`, or the writes cannot be done.
    pub async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Transaction<'_>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.writer.run(work).await
    }

    /// Reads documents in their present state.
    ///
    /// # Errors
    ///
    /// The error of `work`, or the documents cannot be read.
    pub async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Snapshot) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.readers.run(work).await
    }

    /// Returns a document.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub async fn get(&self, key: Key) -> Result<Option<Vec<u8>>, Error> {
        self.read(move |snapshot| snapshot.get(&key)).await
    }
}
