//! Random numbers that must not be guessed, from the generator that makes keys.

use std::fmt::Write as _;

use aws_lc_rs::rand;

use crate::error::Error;

/// Random bytes of a secret.
const SECRET_BYTES: usize = 32;

/// A number that nobody can guess. No allocation, and no system call but for the seed.
///
/// # Panics
///
/// When the system has no random bytes: nothing that rests on them may go on then.
#[must_use]
pub fn random_number() -> u64 {
    let mut bytes = [0; 8];
    assert!(rand::fill(&mut bytes).is_ok(), "the system has no random bytes");
    u64::from_le_bytes(bytes)
}

/// A fresh secret of 256 bits, in hexadecimal digits.
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
