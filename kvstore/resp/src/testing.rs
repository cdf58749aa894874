//! A store in memory, for tests and for measuring the server alone.
//!
//! Keeps values up to a number of bytes and evicts the oldest first. `slow` delays each operation, so
//! that tests can observe concurrency.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::values::{
    Condition, Entry, Expiry, KeyPage, SetOptions, SetOutcome, Usage, Value, ValueError, Values,
};

/// Pieces up to this length are copied: they may be slices of a much larger read buffer.
const COPY_MAX: usize = 64 << 10;

/// A bounded map.
#[derive(Debug)]
pub struct MemoryValues {
    bytes_max: u64,
    slow: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    values: HashMap<Bytes, Kept>,
    /// Keys by age, for eviction and for iteration: a later value has a larger number.
    ages: BTreeMap<u64, Bytes>,
    next_age: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Kept {
    value: Value,
    age: u64,
    expires: Option<Instant>,
}

impl MemoryValues {
    /// Returns an empty store for at most `bytes_max` bytes of values.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes_max, slow: Duration::ZERO, state: Mutex::default() }
    }

    /// Makes each operation take at least this long.
    #[must_use]
    pub fn slow(mut self, slow: Duration) -> Self {
        self.slow = slow;
        self
    }

    async fn wait(&self) {
        if !self.slow.is_zero() {
            tokio::time::sleep(self.slow).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while holding it, and a test that does has failed anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn find(&mut self, key: &[u8]) -> Option<&mut Kept> {
        if self.values.get(key)?.expires.is_some_and(|expires| expires <= Instant::now()) {
            self.forget(key);
            return None;
        }
        self.values.get_mut(key)
    }

    fn forget(&mut self, key: &[u8]) -> bool {
        let Some(kept) = self.values.remove(key) else { return false };
        self.ages.remove(&kept.age);
        self.bytes -= kept.value.len() as u64;
        true
    }

    fn keep(&mut self, key: &[u8], value: Value, expires: Option<Instant>) {
        self.forget(key);
        let key = Bytes::copy_from_slice(key);
        let age = self.next_age;
        self.next_age += 1;
        self.bytes += value.len() as u64;
        self.ages.insert(age, key.clone());
        self.values.insert(key, Kept { value, age, expires });
    }
}

fn own(value: Value) -> Value {
    let copied = |piece: Bytes| if piece.len() <= COPY_MAX { Bytes::copy_from_slice(&piece) } else { piece };
    value.into_pieces().into_iter().map(copied).collect()
}

impl Values for MemoryValues {
    async fn get(&self, key: &[u8]) -> Result<Option<Value>, ValueError> {
        self.wait().await;
        Ok(self.state().find(key).map(|kept| kept.value.clone()))
    }

    async fn set(&self, key: &[u8], value: Value, options: SetOptions) -> Result<SetOutcome, ValueError> {
        self.wait().await;
        let bytes = value.len() as u64;
        if bytes > self.bytes_max {
            return Ok(SetOutcome::TooLarge { bytes_max: self.bytes_max });
        }
        let value = own(value);
        let mut state = self.state();
        let before = state.find(key).map(|kept| kept.expires);
        match (options.condition, before) {
            (Condition::IfAbsent, Some(_)) | (Condition::IfPresent, None) => {
                return Ok(SetOutcome::ConditionUnmet);
            }
            _ => {}
        }
        let expires = match options.expiry {
            Expiry::Never => None,
            Expiry::After(time) => Instant::now().checked_add(time),
            Expiry::Keep => before.flatten(),
        };
        state.keep(key, value, expires);
        while state.bytes > self.bytes_max {
            let Some((_, oldest)) = state.ages.pop_first() else { break };
            state.forget(&oldest);
        }
        Ok(SetOutcome::Stored)
    }

    async fn look(&self, key: &[u8]) -> Result<Option<Entry>, ValueError> {
        self.wait().await;
        Ok(self.state().find(key).map(|kept| Entry {
            bytes: kept.value.len() as u64,
            expires_in: kept.expires.map(|expires| expires.saturating_duration_since(Instant::now())),
        }))
    }

    fn size_hint(&self, key: &[u8]) -> Option<u64> {
        Some(self.state().find(key).map_or(0, |kept| kept.value.len() as u64))
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, ValueError> {
        self.wait().await;
        let mut state = self.state();
        Ok(state.find(key).is_some() && state.forget(key))
    }

    async fn expire(&self, key: &[u8], after: Option<Duration>) -> Result<bool, ValueError> {
        self.wait().await;
        let mut state = self.state();
        let Some(kept) = state.find(key) else { return Ok(false) };
        kept.expires = after.and_then(|after| Instant::now().checked_add(after));
        Ok(true)
    }

    async fn keys(&self, cursor: u64, limit: usize) -> Result<KeyPage, ValueError> {
        self.wait().await;
        let state = self.state();
        // The cursor is one more than the age of the last key, so that 0 is the beginning.
        let from = match cursor.checked_sub(1) {
            Some(age) => (Excluded(age), Unbounded),
            None => (Unbounded, Unbounded),
        };
        let page: Vec<_> = state.ages.range(from).take(limit).collect();
        let next = page.last().filter(|_| page.len() == limit).map_or(0, |(age, _)| *age + 1);
        let now = Instant::now();
        let alive = |key: &&Bytes| {
            state.values.get(*key).is_some_and(|kept| kept.expires.is_none_or(|expires| expires > now))
        };
        Ok(KeyPage { keys: page.into_iter().map(|(_, key)| key).filter(alive).cloned().collect(), next })
    }

    async fn clear(&self) -> Result<(), ValueError> {
        *self.state() = State::default();
        Ok(())
    }

    fn usage(&self) -> Usage {
        let state = self.state();
        Usage { keys: state.values.len() as u64, bytes: state.bytes, bytes_max: self.bytes_max }
    }
}
