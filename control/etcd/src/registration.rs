//! The key of a worker, kept while the worker runs.

use std::time::Duration;

use tokio::time::Instant;

use crate::client::{Client, EtcdError};
use crate::source::workers_prefix;
use crate::worker::Worker;

/// The lease of a worker's key; renewed three times as often.
const LEASE_SECONDS: i64 = 15;
const RENEW_EVERY: Duration = Duration::from_secs(5);

/// A worker's key in etcd, with a lease of its own.
pub struct Registration {
    client: Client,
    key: String,
    worker: Worker,
    lease: Option<i64>,
    /// The value that etcd has.
    written: Option<String>,
    /// Another process has taken the key over, and keeps it.
    is_lost: bool,
    next: Instant,
}

impl Registration {
    /// The worker under this name, not yet written.
    #[must_use]
    pub fn new(client: Client, prefix: &str, name: &str, worker: Worker) -> Self {
        let key = format!("{}{name}", workers_prefix(prefix));
        Self { client, key, worker, lease: None, written: None, is_lost: false, next: Instant::now() }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Waits until [`Self::renew`] is due.
    pub async fn due(&self) {
        tokio::time::sleep_until(self.next).await;
    }

    /// Renews the lease and writes the key where that is needed; whether the key was written.
    ///
    /// # Errors
    ///
    /// etcd does not answer or refuses: it is due again soon. [`EtcdError::Taken`] when another process has registered the same
    /// name since, whose key it is now.
    pub async fn renew(&mut self) -> Result<bool, EtcdError> {
        self.next = Instant::now() + RENEW_EVERY;
        if self.is_lost {
            return Err(EtcdError::Taken(self.key.clone()));
        }
        if let Some(lease) = self.lease {
            match self.client.keep_alive(lease).await {
                Err(EtcdError::LeaseGone) => (self.lease, self.written) = (None, None),
                other => other?,
            }
        }
        let lease = match self.lease {
            Some(lease) => lease,
            None => *self.lease.insert(self.client.grant(LEASE_SECONDS).await?),
        };
        let value = self.worker.to_value();
        if self.written.is_some() {
            match self.client.get(&self.key).await? {
                Some(found) if found.lease == lease => {}
                Some(_) => {
                    self.is_lost = true;
                    return Err(EtcdError::Taken(self.key.clone()));
                }
                // The key was deleted although the engine is there: write it again.
                None => self.written = None,
            }
        }
        if self.written.as_ref() == Some(&value) {
            return Ok(false);
        }
        match self.client.put(&self.key, &value, lease).await {
            Ok(()) => self.written = Some(value),
            Err(error) => {
                // A put whose answer is lost may have been carried out.
                self.written = None;
                if matches!(error, EtcdError::LeaseGone) {
                    self.lease = None;
                }
                return Err(error);
            }
        }
        Ok(true)
    }

    /// Tells that the worker takes no more requests, so that the end of its key is a deletion.
    ///
    /// # Errors
    ///
    /// etcd does not answer or refuses.
    pub async fn drain(&mut self) -> Result<(), EtcdError> {
        self.worker.draining = true;
        match self.lease {
            // A key of another process is left as it is.
            Some(_) => match self.renew().await {
                Err(EtcdError::Taken(_)) => Ok(()),
                renewed => renewed.map(drop),
            },
            None => Ok(()),
        }
    }

    /// Marks the worker as draining, so that the deletion counts as one, then deletes its key. A later [`Self::renew`] writes it
    /// again, unless the key was lost ([`EtcdError::Taken`]).
    ///
    /// # Errors
    ///
    /// etcd does not answer or refuses: the key goes when its lease runs out.
    pub async fn remove(&mut self) -> Result<(), EtcdError> {
        let told = self.drain().await;
        self.worker.draining = false;
        self.written = None;
        told?;
        match self.lease.take() {
            Some(lease) => self.client.revoke(lease).await,
            None => Ok(()),
        }
    }
}
