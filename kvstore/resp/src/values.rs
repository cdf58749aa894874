//! Interface between the server and a store.
//!
//! A [`Value`] is a list of pieces, because a value is kept in several blocks and arrives in several reads, and
//! is never joined on either way. A piece that a store hands out keeps its memory alive until the answer has
//! been written, so a piece can hold a lease.
//!
//! Implementations may be called by any number of tasks concurrently. They answer a damaged or half-written
//! value with "absent": a wrong value is worse than a miss.
//!
//! A future may be dropped before it is ready, at any await point: its client has gone, or the server stops.
//! Resources must then be released on drop, and an interrupted `set` must leave the old value, the new one or
//! none, never a part.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

/// A store of named byte strings. `async fn` satisfies each method that returns a future; futures may be
/// dropped half-way (see the module).
pub trait Values: Send + Sync + 'static {
    /// Returns the value of a key; `None`: absent, expired, or not readable in time.
    fn get(&self, key: &[u8]) -> impl Future<Output = Result<Option<Value>, ValueError>> + Send;

    /// Stores a value. Its pieces may be slices of a larger read buffer: copy what is kept for long.
    fn set(
        &self,
        key: &[u8],
        value: Value,
        options: SetOptions,
    ) -> impl Future<Output = Result<SetOutcome, ValueError>> + Send;

    /// Returns the size and remaining lifetime of a key's value without reading it; `None`: absent.
    fn look(&self, key: &[u8]) -> impl Future<Output = Result<Option<Entry>, ValueError>> + Send;

    /// Length of a key's value, if it is known without waiting: the memory that a `get` will take. 0 for an
    /// absent key; `None` if it is not known, and then [`Values::look`] is called if needed. A wrong length
    /// makes reads wait too long or too little, nothing worse.
    fn size_hint(&self, key: &[u8]) -> Option<u64> {
        let _ = key;
        None
    }

    /// Deletes a key; returns whether it existed.
    fn delete(&self, key: &[u8]) -> impl Future<Output = Result<bool, ValueError>> + Send;

    /// Sets or removes the expiry of a key; returns whether the key existed.
    fn expire(
        &self,
        key: &[u8],
        after: Option<Duration>,
    ) -> impl Future<Output = Result<bool, ValueError>> + Send;

    /// Returns at most `limit` keys from a cursor on; 0 is the beginning, and as the next cursor the end. A key
    /// that exists from the first page to the last is returned at least once.
    fn keys(&self, cursor: u64, limit: usize) -> impl Future<Output = Result<KeyPage, ValueError>> + Send;

    /// Deletes all keys.
    fn clear(&self) -> impl Future<Output = Result<(), ValueError>> + Send;

    /// Number of keys and bytes. Read from counters, without waiting.
    fn usage(&self) -> Usage;
}

/// A value: a list of pieces of bytes.
#[derive(Debug, Clone, Default)]
pub struct Value {
    /// Separate, because most values have one piece, which then needs no list.
    first: Bytes,
    rest: Vec<Bytes>,
    bytes: usize,
}

impl Value {
    /// Appends a piece; empty ones are left out.
    pub fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.bytes += piece.len();
        if self.first.is_empty() {
            self.first = piece;
        } else {
            self.rest.push(piece);
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the value is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        std::iter::once(&self.first).filter(|piece| !piece.is_empty()).chain(&self.rest)
    }

    /// All bytes, if they are in one piece.
    #[must_use]
    pub fn contiguous(&self) -> Option<&[u8]> {
        self.rest.is_empty().then_some(&self.first[..])
    }

    /// The part in a range, cut off at the end of the value. Copies nothing.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let (mut part, mut at) = (Self::default(), 0);
        for piece in self.pieces() {
            let from = range.start.clamp(at, at + piece.len()) - at;
            let to = range.end.clamp(at, at + piece.len()) - at;
            if from < to {
                part.push(piece.slice(from..to));
            }
            at += piece.len();
        }
        part
    }

    /// Returns the pieces.
    #[must_use]
    pub fn into_pieces(self) -> Vec<Bytes> {
        let mut pieces = self.rest;
        if !self.first.is_empty() {
            pieces.insert(0, self.first);
        }
        pieces
    }
}

impl From<Bytes> for Value {
    fn from(piece: Bytes) -> Self {
        Self { bytes: piece.len(), first: piece, rest: Vec::new() }
    }
}

impl FromIterator<Bytes> for Value {
    fn from_iter<I: IntoIterator<Item = Bytes>>(pieces: I) -> Self {
        let mut value = Self::default();
        pieces.into_iter().for_each(|piece| value.push(piece));
        value
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes && self.pieces().flatten().eq(other.pieces().flatten())
    }
}

/// Condition of a `set`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Condition {
    /// In any case.
    #[default]
    Always,
    /// Only if the key is absent.
    IfAbsent,
    /// Only if the key is there.
    IfPresent,
}

/// Lifetime of a stored value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expiry {
    /// Until it is evicted.
    #[default]
    Never,
    /// At most this long.
    After(Duration),
    /// As long as the value that it replaces would have lived.
    Keep,
}

/// Options of a `set`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetOptions {
    /// Condition for storing.
    pub condition: Condition,
    /// Lifetime of the value.
    pub expiry: Expiry,
}

/// Result of a `set`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetOutcome {
    /// The value is stored, and a `get` finds it until it is evicted.
    Stored,
    /// The condition was not met.
    ConditionUnmet,
    /// The store has no room or bandwidth for it now.
    Throttled,
    /// The store never takes values as large as this.
    TooLarge {
        /// Maximum number of bytes of a value.
        bytes_max: u64,
    },
}

/// Metadata of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Length of the value.
    pub bytes: u64,
    /// Remaining lifetime; `None`: no expiry.
    pub expires_in: Option<Duration>,
}

/// A page of keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyPage {
    /// The keys.
    pub keys: Vec<Bytes>,
    /// Cursor of the next page; 0: this was the last.
    pub next: u64,
}

/// Usage of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Number of keys.
    pub keys: u64,
    /// Bytes of their values.
    pub bytes: u64,
    /// Maximum bytes of values; 0: not bounded.
    pub bytes_max: u64,
}

/// Errors of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The store does not support the operation.
    #[error("{operation} is not supported by this store")]
    Unsupported {
        /// The operation.
        operation: &'static str,
    },
    /// The operation failed this time.
    #[error("{operation}: {reason}")]
    Failed {
        /// The operation.
        operation: &'static str,
        /// Reason of the failure, with errno where there is one.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cross_pieces_and_stop_at_the_end() {
        let value: Value = ["abc", "", "de", "f"].into_iter().map(Bytes::from).collect();
        assert_eq!((value.len(), value.pieces().count()), (6, 3));
        for start in 0..8 {
            for end in start..9 {
                let expected = &b"abcdef"[start.min(6)..end.min(6)];
                let part = value.slice(start..end);
                assert_eq!(part, Value::from(Bytes::from_static(expected)), "{start}..{end}");
            }
        }
        assert_eq!(value.clone().into_pieces().concat(), b"abcdef");
        assert_eq!(value.contiguous(), None);
        assert_eq!(Value::default().contiguous(), Some(&b""[..]));
    }
}
