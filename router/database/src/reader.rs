//! Threads that read.

use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use redb::{ReadOnlyTable, ReadableDatabase, ReadableTable};
use tokio::sync::oneshot;

use crate::tables::{self, DOCUMENTS, SIZES};
use crate::{Collection, Error, Key, unix_seconds};

const READERS: usize = 2;
/// Reads that may wait.
const WAITING_MAX: usize = 1024;

type Read = Box<dyn FnOnce(Result<&Snapshot, Error>) + Send>;

/// The documents at one moment.
pub struct Snapshot {
    documents: ReadOnlyTable<(&'static str, u8, &'static str), (u64, &'static [u8])>,
    sizes: ReadOnlyTable<&'static str, u64>,
    now: u64,
}

impl Snapshot {
    /// A document.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, Error> {
        let found = self.documents.get(tables::place(key)).map_err(Error::storage)?;
        let found = found.map(|found| {
            let (expires, document) = found.value();
            (expires > self.now).then(|| document.to_vec())
        });
        Ok(found.flatten())
    }

    /// Goes through a tenant's documents whose id begins with `prefix`, in the order of their ids, from the first after
    /// `after`, until `each` answers false.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn walk(
        &self,
        tenant: &str,
        collection: Collection,
        prefix: &str,
        after: Option<&str>,
        mut each: impl FnMut(&str, &[u8]) -> bool,
    ) -> Result<(), Error> {
        tables::walk(&self.documents, (tenant, collection), prefix, after, |id, expires, document| {
            expires <= self.now || each(id, document)
        })
    }

    /// Goes through the documents of a collection, of all tenants.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`]: the file cannot be read.
    pub fn walk_all(
        &self,
        collection: Collection,
        mut each: impl FnMut(&str, &str, &[u8]),
    ) -> Result<(), Error> {
        for entry in self.sizes.iter().map_err(Error::storage)? {
            let tenant = entry.map_err(Error::storage)?.0;
            self.walk(tenant.value(), collection, "", None, |id, document| {
                each(tenant.value(), id, document);
                true
            })?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct Readers {
    queue: Option<SyncSender<Read>>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    pub(crate) fn start(file: &Arc<redb::Database>) -> Result<Self, Error> {
        let (queue, waiting) = mpsc::sync_channel::<Read>(WAITING_MAX);
        let waiting = Arc::new(Mutex::new(waiting));
        let start = |_| {
            let (file, waiting) = (Arc::clone(file), Arc::clone(&waiting));
            thread::Builder::new().name("database-read".to_owned()).spawn(move || serve(&file, &waiting))
        };
        let threads = (0..READERS).map(start).collect::<Result<_, _>>().map_err(Error::storage)?;
        Ok(Self { queue: Some(queue), threads })
    }

    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Snapshot) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        let read: Read = Box::new(move |snapshot| {
            // The request is gone: its read is skipped.
            if !answer.is_closed() {
                let _gone = answer.send(snapshot.and_then(work));
            }
        });
        let queue = self.queue.as_ref().ok_or(Error::Busy)?;
        queue.try_send(read).map_err(|error| match error {
            TrySendError::Full(_) => Error::Busy,
            TrySendError::Disconnected(_) => Error::Storage("its readers have ended".to_owned()),
        })?;
        answered.await.map_err(|_| Error::Storage("a read was given up".to_owned()))?
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            // A panic was reported where it happened.
            let _panicked = thread.join();
        }
    }
}

fn serve(file: &redb::Database, waiting: &Mutex<Receiver<Read>>) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(read) = next else { return };
        let snapshot = file.begin_read().map_err(Error::storage).and_then(|transaction| {
            let documents = transaction.open_table(DOCUMENTS).map_err(Error::storage)?;
            let sizes = transaction.open_table(SIZES).map_err(Error::storage)?;
            Ok(Snapshot { documents, sizes, now: unix_seconds() })
        });
        read(snapshot.as_ref().map_err(Clone::clone));
    }
}
