//! What the server needs of a store.
//!
//! A [`Value`] is a list of pieces, because a value is kept in several blocks and arrives in several reads: neither
//! way are they joined. A piece that a store gives out keeps its memory alive until the answer has been written, so
//! a piece is the natural holder of a lease.
//!
//! Implementations may be asked by any number of tasks at a time. They answer a damaged or half-written value with
//! "absent": a wrong value is worse than a miss.
//!
//! A future may be dropped before it is ready, at any point where it waits: its client has gone, or the server stops.
//! What it has taken must then be given back by what it holds, and a `set` that was cut off must leave the old value,
//! the new one or none, never a part.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

/// Named strings of bytes. `async fn` satisfies each method that gives a future; futures may be dropped half-way (see
/// the module).
pub trait Values: Send + Sync + 'static {
    /// The value of a key; `None` is absent, expired, or not readable in time.
    fn get(&self, key: &[u8]) -> impl Future<Output = Result<Option<Value>, ValueError>> + Send;

    /// Stores a value. Its pieces may be slices of a larger read buffer: what is kept for long should be copied.
    fn set(
        &self,
        key: &[u8],
        value: Value,
        options: SetOptions,
    ) -> impl Future<Output = Result<SetOutcome, ValueError>> + Send;

    /// Whether a key is there, its size and remaining life, without reading the value.
    fn look(&self, key: &[u8]) -> impl Future<Output = Result<Option<Entry>, ValueError>> + Send;

    /// Length of a key's value, if that is known at once, without waiting: what a `get` will take in memory. 0 for a key
    /// that is not there; `None` is not known, and then [`Values::look`] is asked where it matters. A wrong one makes
    /// reads wait too long or too little, nothing worse.
    fn size_hint(&self, key: &[u8]) -> Option<u64> {
        let _ = key;
        None
    }

    /// Forgets a key; tells whether it was there.
    fn delete(&self, key: &[u8]) -> impl Future<Output = Result<bool, ValueError>> + Send;

    /// Gives a key a remaining life, or an endless one; tells whether it was there.
    fn expire(
        &self,
        key: &[u8],
        after: Option<Duration>,
    ) -> impl Future<Output = Result<bool, ValueError>> + Send;

    /// At most `limit` keys from a cursor on; 0 is the beginning, and as the next cursor the end. A key that is there
    /// from the first page to the last is given at least once.
    fn keys(&self, cursor: u64, limit: usize) -> impl Future<Output = Result<KeyPage, ValueError>> + Send;

    /// Forgets everything.
    fn clear(&self) -> impl Future<Output = Result<(), ValueError>> + Send;

    /// How much is there. Answered from counters, at once.
    fn usage(&self) -> Usage;
}

/// Bytes in pieces.
#[derive(Debug, Clone, Default)]
pub struct Value {
    /// Most values have one piece, which then costs no list.
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

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        std::iter::once(&self.first).filter(|piece| !piece.is_empty()).chain(&self.rest)
    }

    /// All bytes, where they lie in one piece.
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

    /// Takes the pieces apart.
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

/// When to store.
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

/// How long a stored value lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expiry {
    /// Until it is evicted.
    #[default]
    Never,
    /// At most this long.
    After(Duration),
    /// As long as the value that it replaces would have.
    Keep,
}

/// How to store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetOptions {
    /// When to store.
    pub condition: Condition,
    /// How long it lives.
    pub expiry: Expiry,
}

/// What became of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetOutcome {
    /// It is stored, and a `get` will find it until it is evicted.
    Stored,
    /// The condition was not met.
    ConditionUnmet,
    /// The store has no room or bandwidth for it now.
    Throttled,
    /// The store never takes values as large as this.
    TooLarge {
        /// The largest that it takes.
        bytes_max: u64,
    },
}

/// What is known of a value without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Length of the value.
    pub bytes: u64,
    /// Remaining life; `None` is endless.
    pub expires_in: Option<Duration>,
}

/// Some of the keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyPage {
    /// The keys.
    pub keys: Vec<Bytes>,
    /// Where to go on; 0 is the end.
    pub next: u64,
}

/// How much is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Number of keys.
    pub keys: u64,
    /// Bytes of their values.
    pub bytes: u64,
    /// Most bytes that values may have; 0 is not bounded.
    pub bytes_max: u64,
}

/// A store that could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// This store cannot do it at all.
    #[error("{operation} is not supported by this store")]
    Unsupported {
        /// What was asked.
        operation: &'static str,
    },
    /// It failed this time.
    #[error("{operation}: {reason}")]
    Failed {
        /// What was asked.
        operation: &'static str,
        /// What went wrong, with errno where there is one.
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
