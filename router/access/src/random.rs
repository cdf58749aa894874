//! Names that nobody can guess.

use aws_lc_rs::rand;

use crate::error::Error;

/// 128 random bits, which nobody can guess or repeat.
///
/// # Errors
///
/// [`Error::Random`] when there are no random bytes.
pub fn random_id() -> Result<u128, Error> {
    let mut bytes = [0; 16];
    rand::fill(&mut bytes).map_err(|_| Error::Random)?;
    Ok(u128::from_ne_bytes(bytes))
}
