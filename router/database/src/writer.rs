//! The writer thread: writes that arrive during a commit are committed together by the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use redb::{ReadableTable, Table, WriteTransaction};
use tokio::sync::oneshot;

use crate::tables::{self, DOCUMENTS, EXPIRIES, SIZES};
use crate::{Collection, Config, Error, Key, unix_seconds};

/// Capacity of the queue of writes.
const WAITING_MAX: usize = 1024;
/// Largest number of writes that are committed together.
const BATCH_MAX: usize = 256;
/// Interval of sweeps for expired documents.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Documents that one sweep removes before other writes are served.
const SWEPT_MAX: usize = 10_000;

type Documents<'a> = Table<'a, (&'static str, u8, &'static str), (u64, &'static [u8])>;
type Sizes<'a> = Table<'a, &'static str, u64>;

/// Runs a write in a transaction. The returned function is called with the result of the commit.
type Write = Box<dyn FnOnce(&mut Tables<'_>) -> Answer + Send>;
type Answer = Box<dyn FnOnce(Result<(), Error>) + Send>;

struct Tables<'a> {
    documents: Documents<'a>,
    expiries: Table<'a, (u64, &'static str, u8, &'static str), ()>,
    sizes: Sizes<'a>,
    config: &'a Config,
    /// Bytes of all documents.
    bytes: u64,
    /// Error after a partial change: this transaction must not be committed.
    broken: Option<Error>,
}

impl<'a> Tables<'a> {
    fn open(transaction: &'a WriteTransaction, config: &'a Config, bytes: u64) -> Result<Self, Error> {
        Ok(Self {
            documents: transaction.open_table(DOCUMENTS).map_err(Error::storage)?,
            expiries: transaction.open_table(EXPIRIES).map_err(Error::storage)?,
            sizes: transaction.open_table(SIZES).map_err(Error::storage)?,
            config,
            bytes,
            broken: None,
        })
    }

    /// Bytes and expiry time of an existing document.
    fn found(&self, key: &Key) -> Result<Option<(u64, u64)>, Error> {
        let found = self.documents.get(tables::place(key)).map_err(Error::storage)?;
        Ok(found.map(|found| {
            let (expires, document) = found.value();
            (size_of(&key.tenant, &key.id, document), expires)
        }))
    }

    fn resize(&mut self, tenant: &str, removed: u64, added: u64) -> Result<(), Error> {
        let before = self.sizes.get(tenant).map_err(Error::storage)?.map_or(0, |size| size.value());
        let after = before.saturating_sub(removed).saturating_add(added);
        match after {
            0 => drop(self.sizes.remove(tenant).map_err(Error::storage)?),
            after => drop(self.sizes.insert(tenant, after).map_err(Error::storage)?),
        }
        self.bytes = self.bytes.saturating_sub(removed).saturating_add(added);
        Ok(())
    }

    fn remove(&mut self, key: &Key) -> Result<bool, Error> {
        let Some((bytes, expires)) = self.found(key)? else { return Ok(false) };
        let (tenant, collection, id) = tables::place(key);
        self.documents.remove((tenant, collection, id)).map_err(Error::storage)?;
        self.expiries.remove((expires, tenant, collection, id)).map_err(Error::storage)?;
        self.resize(tenant, bytes, 0)?;
        Ok(true)
    }

    fn put(&mut self, key: &Key, expires: u64, document: &[u8]) -> Result<(), Error> {
        self.remove(key)?;
        let (tenant, collection, id) = tables::place(key);
        self.documents.insert((tenant, collection, id), (expires, document)).map_err(Error::storage)?;
        self.expiries.insert((expires, tenant, collection, id), ()).map_err(Error::storage)?;
        self.resize(tenant, 0, size_of(tenant, id, document))
    }

    /// Removes expired documents; returns whether there may be more.
    fn sweep(&mut self) -> Result<bool, Error> {
        let mut over = Vec::new();
        let end = (unix_seconds() + 1, "", 0, "");
        for entry in self.expiries.range(..end).map_err(Error::storage)?.take(SWEPT_MAX) {
            let (key, ()) = entry.map(|(key, _)| (key, ())).map_err(Error::storage)?;
            let (expires, tenant, collection, id) = key.value();
            over.push((expires, tenant.to_owned(), collection, id.to_owned()));
        }
        for (expires, tenant, collection, id) in &over {
            let place = (tenant.as_str(), *collection, id.as_str());
            let removed = self.documents.remove(place).map_err(Error::storage)?;
            let bytes = removed.map(|found| size_of(tenant, id, found.value().1));
            self.expiries.remove((*expires, place.0, place.1, place.2)).map_err(Error::storage)?;
            self.resize(tenant, bytes.unwrap_or(0), 0)?;
        }
        Ok(over.len() == SWEPT_MAX)
    }
}

/// Bytes that a document takes: its own and those of its key; for a document larger than a page, the pages that redb allocates,
/// which are a power of two.
fn size_of(tenant: &str, id: &str, document: &[u8]) -> u64 {
    const PAGE_BYTES: usize = 4096;
    let bytes = tenant.len() + id.len() + document.len();
    if bytes > PAGE_BYTES { bytes.next_power_of_two() as u64 } else { bytes as u64 }
}

/// Changes that are applied together. They are staged, and applied when the work that stages them has succeeded.
pub struct Transaction<'a> {
    tables: &'a Tables<'a>,
    now: u64,
    /// Staged documents; `None`: removed.
    staged: BTreeMap<Key, Option<(u64, Vec<u8>)>>,
    /// Bytes that the staged changes remove, and bytes that they add, by tenant.
    sizes: BTreeMap<Arc<str>, (u64, u64)>,
}

impl Transaction<'_> {
    /// Returns a document, with the changes staged so far.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, Error> {
        if let Some(staged) = self.staged.get(key) {
            return Ok(staged.as_ref().map(|(_, document)| document.clone()));
        }
        let found = self.tables.documents.get(tables::place(key)).map_err(Error::storage)?;
        let found = found.map(|found| {
            let (expires, document) = found.value();
            (expires > self.now).then(|| document.to_vec())
        });
        Ok(found.flatten())
    }

    /// Stores a document until `expires`, in Unix seconds.
    ///
    /// # Errors
    ///
    /// There is no room for it.
    pub fn put(&mut self, key: Key, expires: u64, document: Vec<u8>) -> Result<(), Error> {
        let tenant = Arc::clone(&key.tenant);
        self.stage(key, Some((expires, document)))?;
        let sizes = &self.tables.sizes;
        let before = sizes.get(&*tenant).map_err(Error::storage)?.map_or(0, |size| size.value());
        let (removed, added) = self.sizes.get(&tenant).copied().unwrap_or_default();
        let config = self.tables.config;
        if before.saturating_sub(removed).saturating_add(added) > config.tenant_bytes_max {
            return Err(Error::TenantFull(config.tenant_bytes_max));
        }
        let (removed, added) = self.sizes.values().fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1));
        if self.tables.bytes.saturating_sub(removed).saturating_add(added) > config.bytes_max {
            return Err(Error::Full);
        }
        Ok(())
    }

    /// As [`Self::put`], but beyond the quota: for the final state of work that was begun within it.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn put_beyond_quota(&mut self, key: Key, expires: u64, document: Vec<u8>) -> Result<(), Error> {
        self.stage(key, Some((expires, document)))
    }

    fn stage(&mut self, key: Key, change: Option<(u64, Vec<u8>)>) -> Result<(), Error> {
        let bytes = |change: &Option<(u64, Vec<u8>)>| {
            change.as_ref().map_or(0, |(_, document)| size_of(&key.tenant, &key.id, document))
        };
        let added = bytes(&change);
        let sizes = self.sizes.entry(Arc::clone(&key.tenant)).or_default();
        match self.staged.get(&key) {
            Some(before) => sizes.1 -= bytes(before),
            None => sizes.0 += self.tables.found(&key)?.map_or(0, |(bytes, _)| bytes),
        }
        sizes.1 += added;
        self.staged.insert(key, change);
        Ok(())
    }

    /// Removes a document; returns whether it existed.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn delete(&mut self, key: Key) -> Result<bool, Error> {
        let was_there = self.get(&key)?.is_some();
        self.stage(key, None)?;
        Ok(was_there)
    }

    /// Removes a tenant's documents whose id begins with `prefix`.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn delete_all(
        &mut self,
        tenant: &Arc<str>,
        collection: Collection,
        prefix: &str,
    ) -> Result<(), Error> {
        let mut found = Vec::new();
        tables::walk(&self.tables.documents, (tenant, collection), prefix, None, |id, _, _| {
            found.push(id.to_owned());
            true
        })?;
        found.into_iter().try_for_each(|id| self.stage(Key::new(tenant, collection, id), None))
    }
}

#[derive(Debug)]
pub(crate) struct Writer {
    queue: Option<SyncSender<Write>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(crate) fn start(
        file: Arc<redb::Database>,
        config: Config,
        bytes: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        let (queue, waiting) = mpsc::sync_channel(WAITING_MAX);
        let thread = thread::Builder::new().name("database-write".to_owned());
        let thread = thread.spawn(move || serve(&file, &config, &waiting, &bytes)).map_err(Error::storage)?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Transaction<'_>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        let write: Write = Box::new(move |tables| {
            let done = staged(tables, work);
            Box::new(move |committed| {
                // The request may be gone; an accepted write is committed all the same.
                let _gone = answer.send(committed.and(done));
            })
        });
        let queue = self.queue.as_ref().ok_or(Error::Busy)?;
        queue.try_send(write).map_err(|error| match error {
            TrySendError::Full(_) => Error::Busy,
            TrySendError::Disconnected(_) => Error::Storage("its writer has ended".to_owned()),
        })?;
        answered.await.map_err(|_| Error::Storage("a write was given up".to_owned()))?
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported where it happened.
            let _panicked = thread.join();
        }
    }
}

/// Runs a write, and applies its staged changes if it succeeds.
fn staged<T>(
    tables: &mut Tables<'_>,
    work: impl FnOnce(&mut Transaction<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut transaction =
        Transaction { tables, now: unix_seconds(), staged: BTreeMap::new(), sizes: BTreeMap::new() };
    let done = work(&mut transaction)?;
    for (key, change) in transaction.staged {
        let changed = match change {
            Some((expires, document)) => tables.put(&key, expires, &document),
            None => tables.remove(&key).map(drop),
        };
        if let Err(error) = changed {
            tables.broken = Some(error.clone());
            return Err(error);
        }
    }
    Ok(done)
}

fn serve(file: &redb::Database, config: &Config, waiting: &Receiver<Write>, bytes: &AtomicU64) {
    let mut swept: Option<Instant> = None;
    loop {
        let patience = swept.map_or(Duration::ZERO, |swept| SWEEP_EVERY.saturating_sub(swept.elapsed()));
        let first = match waiting.recv_timeout(patience) {
            Ok(write) => Some(write),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let writes = first.into_iter().chain(waiting.try_iter()).take(BATCH_MAX);
        let mut answers = Vec::new();
        let is_due = patience.is_zero();
        let committed = commit(file, config, bytes, |tables| {
            answers.extend(writes.map(|write| write(tables)));
            if is_due { tables.sweep() } else { Ok(false) }
        });
        match &committed {
            Ok(false) if is_due => swept = Some(Instant::now()),
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "documents could not be written");
                swept = Some(Instant::now());
            }
        }
        for answer in answers {
            answer(committed.clone().map(drop));
        }
    }
}

/// Applies changes, all or none.
fn commit<T>(
    file: &redb::Database,
    config: &Config,
    bytes: &AtomicU64,
    change: impl FnOnce(&mut Tables<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let transaction = file.begin_write().map_err(Error::storage)?;
    let (changed, after) = {
        let mut tables = Tables::open(&transaction, config, bytes.load(Ordering::Relaxed))?;
        let changed = change(&mut tables)?;
        if let Some(error) = tables.broken {
            return Err(error);
        }
        (changed, tables.bytes)
    };
    transaction.commit().map_err(Error::storage)?;
    bytes.store(after, Ordering::Relaxed);
    Ok(changed)
}
