//! Cache salts: a text for each tenant that is part of the hash of each of its blocks and that other
//! tenants cannot compute.
//!
//! Without a salt a tenant could learn by timing whether another tenant sent a prompt with the same
//! beginning. A keyed BLAKE3 of the tenant's name is enough: equal on every gateway that has the same
//! secret, so that caches are shared between them, and without a table. After a change of the secret caches
//! are cold.
//!
//! A client's own salt can only divide its tenant's cache further: it is hashed together with the tenant, with
//! lengths, so that no choice of it reaches another tenant's salt.
//!
//! Hot path: one BLAKE3 of less than a kilobyte, about 130 ns; no allocation.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::error::Error;

/// Fewest bytes of a secret.
const SECRET_BYTES_MIN: usize = 32;
/// Bytes of the hash that are kept: a collision among 2^32 tenants has a chance of 2^-81.
const SALT_BYTES: usize = 18;
/// Letters of a salt: four for three bytes, no padding.
const SALT_LETTERS: usize = SALT_BYTES / 3 * 4;
/// Separates this use of the secret from every other.
const CONTEXT: &str = "kvasir 2026 cache salt of a tenant";

/// A salt: 24 letters, digits, `-` and `_`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Salt([u8; SALT_LETTERS]);

impl Salt {
    /// Returns the text for `cache_salt`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // Base64 is ASCII, so the empty text is never returned.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for Salt {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Salt(..)")
    }
}

/// Derives salts from a secret.
#[derive(Clone)]
pub struct Salter {
    key: [u8; 32],
    are_own_salts_allowed: bool,
}

impl fmt::Debug for Salter {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Salter(..)")
    }
}

impl Salter {
    /// Creates a salter with a secret that all gateways of a fleet share. With `are_own_salts_allowed` a
    /// client's `cache_salt` divides its tenant's cache; without, it is ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the secret has fewer than 32 bytes.
    pub fn new(secret: &[u8], are_own_salts_allowed: bool) -> Result<Self, Error> {
        if secret.len() < SECRET_BYTES_MIN {
            let reason = format!("the secret has fewer than {SECRET_BYTES_MIN} bytes");
            return Err(Error::Config { what: "cache salts", reason });
        }
        Ok(Self { key: blake3::derive_key(CONTEXT, secret), are_own_salts_allowed })
    }

    /// Returns the salt of a tenant's request, with the client's own if there is one. An empty own salt
    /// counts as none.
    #[must_use]
    pub fn salt(&self, tenant: &str, own: Option<&str>) -> Salt {
        let own = own.filter(|own| self.are_own_salts_allowed && !own.is_empty());
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant.as_bytes());
        if let Some(own) = own {
            hasher.update(&(own.len() as u64).to_le_bytes()).update(own.as_bytes());
        }
        let mut letters = [0; SALT_LETTERS];
        let hash = hasher.finalize();
        // The buffer has the right length by construction.
        let written = URL_SAFE_NO_PAD.encode_slice(&hash.as_bytes()[..SALT_BYTES], &mut letters);
        assert_eq!(written.ok(), Some(SALT_LETTERS));
        Salt(letters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: [u8; 32] = [7; 32];

    #[test]
    fn salts_differ_by_tenant_secret_and_own_salt() {
        let salter = Salter::new(&SECRET, true).expect("long enough");
        let other = Salter::new(&[8; 32], true).expect("long enough");
        let salts = [
            salter.salt("a", None),
            salter.salt("b", None),
            salter.salt("a", Some("x")),
            salter.salt("a", Some("y")),
            salter.salt("ax", None),
            salter.salt("", Some("ax")),
            salter.salt("", Some("a")),
            other.salt("a", None),
        ];
        for (index, salt) in salts.iter().enumerate() {
            assert!(!salts[..index].contains(salt), "{index}");
            assert_eq!(salt.as_str().len(), 24);
            assert!(salt.as_str().bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)));
        }
        assert_eq!(salter.salt("a", None), Salter::new(&SECRET, false).expect("same").salt("a", None));
        assert_eq!(salter.salt("a", Some("")), salter.salt("a", None));
    }

    #[test]
    fn own_salts_count_only_when_allowed() {
        let salter = Salter::new(&SECRET, false).expect("long enough");
        assert_eq!(salter.salt("a", Some("x")), salter.salt("a", None));
        assert!(Salter::new(&SECRET[1..], false).is_err());
    }
}
