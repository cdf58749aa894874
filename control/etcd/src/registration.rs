//! The key of a worker, kept while the worker runs.

use std::time::Duration;

use tokio::time::Instant;

use crate::client::{Client, EtcdError};
use crate::source::workers_prefix;
use crate::worker::Worker;

/// Time to live of the lease of a worker's key; it is renewed three times within this time.
const LEASE_SECONDS: i64 = 15;
const RENEW_EVERY: Duration = Duration::from_secs(5);

/// A worker's key in etcd, with its own lease.
pub struct Registration {
    client: Client,
    key: String,
    worker: Worker,
    lease: Option<i64>,
    /// The value last written to etcd; `None`: it must be written.
    written: Option<String>,
    /// Whether another process has taken over the key.
    is_lost: bool,
    next: Instant,
}

impl Registration {
    /// Creates the registration of a worker under this name. The key is not written yet.
    #[must_use]
    pub fn new(client: Client, prefix: &str, name: &str, worker: Worker) -> Self {
        let key = format!("{}{name}", workers_prefix(prefix));
        Self { client, key, worker, lease: None, written: None, is_lost: false, next: Instant::now() }
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Waits until [`Self::renew`] is due.
    pub async fn due(&self) {
        tokio::time::sleep_until(self.next).await;
    }

    /// Renews the lease and writes the key if necessary; returns whether the key was written.
    ///
    /// # Errors
    ///
    /// etcd does not answer or refuses: the renewal is due again soon. [`EtcdError::Taken`] if another
    /// process has registered the same name since; the key then belongs to that process.
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
                // The key was deleted although the engine is up: it is written again.
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

    /// Marks the worker as draining, so that the removal of its key counts as a deletion.
    ///
    /// # Errors
    ///
    /// etcd does not answer or refuses.
    pub async fn drain(&mut self) -> Result<(), EtcdError> {
        self.worker.draining = true;
        match self.lease {
            // A key of another process is left unchanged.
            Some(_) => match self.renew().await {
                Err(EtcdError::Taken(_)) => Ok(()),
                renewed => renewed.map(drop),
            },
            None => Ok(()),
        }
    }

    /// Marks the worker as draining, so that the removal counts as a deletion, then deletes its key. A later
    /// [`Self::renew`] writes the key again, unless it was lost ([`EtcdError::Taken`]).
    ///
    /// # Errors
    ///
    /// etcd does not answer or refuses: the key is then deleted when its lease expires.
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
