//! Random numbers that must not be guessed.

use std::cell::RefCell;
use std::fmt::Write as _;

use aws_lc_rs::rand;

use crate::error::Error;

/// Random bytes of a secret.
const SECRET_BYTES: usize = 32;
/// Numbers that a thread draws from the system at a time: as many as one call is guaranteed to return
/// (getrandom(2)).
const DRAWN: usize = 32;

thread_local! {
    /// Numbers that were drawn and not yet used. A used number is removed.
    static NUMBERS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Returns a number that cannot be guessed. Allocates only at a thread's first call, and makes one system
/// call for many numbers.
///
/// # Panics
///
/// When the system has no random bytes: no operation that relies on them may continue.
#[must_use]
pub fn random_number() -> u64 {
    NUMBERS.with_borrow_mut(|numbers| {
        if let Some(number) = numbers.pop() {
            return number;
        }
        let mut bytes = [0; 8 * DRAWN];
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        assert_eq!(filled, Ok(bytes.len()), "the system has no random bytes");
        let (words, _) = bytes.as_chunks::<8>();
        numbers.extend(words[1..].iter().map(|&word| u64::from_le_bytes(word)));
        u64::from_le_bytes(words[0])
    })
}

/// Returns a new secret of 256 bits, in hexadecimal digits.
///
/// # Errors
///
/// [`Error::Random`] when there are no random bytes.
pub fn new_secret() -> Result<String, Error> {
    let mut bytes = [0; SECRET_BYTES];
    rand::fill(&mut bytes).map_err(|_| Error::Random)?;
    Ok(bytes.iter().fold(String::with_capacity(2 * SECRET_BYTES), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_and_none_comes_twice() {
        let secrets = [(); 100].map(|()| new_secret().expect("random bytes"));
        let different: std::collections::HashSet<&String> = secrets.iter().collect();
        assert_eq!(different.len(), secrets.len());
        assert!(
            secrets
                .iter()
                .all(|secret| secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()))
        );
        let numbers: std::collections::HashSet<u64> = (0..10_000).map(|_| random_number()).collect();
        assert_eq!(numbers.len(), 10_000);
    }
}
