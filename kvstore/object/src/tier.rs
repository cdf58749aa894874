//! The tier: its parts, and how it is opened.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kvstore_block::BlockIdentity;
use tokio::sync::Semaphore;

use crate::backend::Backend;
use crate::breaker::Breaker;
use crate::budget::{Jitter, RetryBudget};
use crate::config::ObjectConfig;
use crate::error::ConfigError;
use crate::key::object_key;
use crate::metrics::ObjectCounters;
use crate::presence::PresenceCache;

/// Wall clock, for the age of objects.
pub trait Clock: std::fmt::Debug + Send + Sync {
    /// Milliseconds since 1970.
    fn unix_ms(&self) -> u64;
}

/// The system's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn unix_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }
}

/// A block that was read and verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedBlock {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Opaque bytes that were stored with the block.
    pub meta: Bytes,
    /// KV of the block.
    pub payload: Bytes,
    /// xxh3-64 of the payload, as in the object's index.
    pub checksum: u64,
}

/// Result of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The run was stored.
    Stored,
    /// The run was stored already.
    Present,
    /// Refused for now: too many puts in flight, the breaker is open, or the server asks to slow down.
    Throttled,
}

/// The object tier. Share it in an `Arc`; every method takes `&self` and may be called concurrently.
///
/// A deadline is an instant of tokio's clock. Dropping a future cancels its operation.
#[derive(Debug)]
pub struct ObjectTier {
    pub(crate) config: ObjectConfig,
    pub(crate) backend: Backend,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) counters: Arc<ObjectCounters>,
    pub(crate) presence: PresenceCache,
    pub(crate) budget: RetryBudget,
    pub(crate) breaker: Breaker,
    pub(crate) jitter: Jitter,
    pub(crate) in_flight: Semaphore,
    pub(crate) puts: Semaphore,
    pub(crate) sweep_after: Mutex<Option<String>>,
}

impl ObjectTier {
    /// Opens the tier. Makes no request: the store may be unreachable now and come up later.
    pub fn open(config: ObjectConfig) -> Result<Self, ConfigError> {
        Self::open_with_clock(config, Arc::new(SystemClock))
    }

    /// Like [`ObjectTier::open`], with another clock.
    pub fn open_with_clock(config: ObjectConfig, clock: Arc<dyn Clock>) -> Result<Self, ConfigError> {
        config.validate()?;
        let backend = Backend::open(&config)?;
        let (present, absent, avoid) = (config.present_ttl, config.absent_ttl, config.avoid_ttl);
        Ok(Self {
            backend,
            clock,
            counters: Arc::default(),
            presence: PresenceCache::new(config.cache_bytes, present, absent, avoid),
            budget: RetryBudget::new(config.retry_percent, config.retry_burst),
            breaker: Breaker::new(config.breaker_failures, config.breaker_pause),
            jitter: Jitter::new(config.seed),
            in_flight: Semaphore::new(config.requests_max),
            puts: Semaphore::new(config.puts_max),
            sweep_after: Mutex::default(),
            config,
        })
    }

    /// Counters of this tier.
    #[must_use]
    pub fn counters(&self) -> Arc<ObjectCounters> {
        self.counters.clone()
    }

    /// The configuration; its `Debug` shows no secret.
    #[must_use]
    pub fn config(&self) -> &ObjectConfig {
        &self.config
    }

    pub(crate) fn key(&self, last: BlockIdentity) -> String {
        object_key(&self.config.prefix, self.config.layout_fingerprint, last)
    }

    /// Whether an object of this creation time is too old. A time in the future counts as now.
    pub(crate) fn is_expired(&self, created_unix_ms: u64) -> bool {
        let age = Duration::from_millis(self.clock.unix_ms().saturating_sub(created_unix_ms));
        self.config.ttl.is_some_and(|ttl| age >= ttl)
    }
}
