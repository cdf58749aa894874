//! Hash tables keyed by small numbers that this node or its device chose.
//!
//! The standard hasher defends against keys chosen by an attacker and costs more than the rest of the
//! look-up; no peer chooses these keys.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Hasher that multiplies by 2^64 divided by the golden ratio, which spreads consecutive numbers.
#[derive(Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}
