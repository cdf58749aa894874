//! API keys, found by their SHA-256, so that neither the file nor the gateway's memory holds a key. The
//! same file maps names in clients' certificates to grants; a certificate without a listed name has no
//! grant.
//!
//! A SHA-256 without salt or stretching suffices because keys are 256 random bits ([`new_key`]): no
//! dictionary can be tried. Stretching (argon2) would cost each request milliseconds without a gain.
//!
//! Timing. A look-up hashes the presented text and searches a map for the digest. The time may depend on
//! (a) the bucket, which the map derives from the digest with a random SipHash key of its own, and (b) the
//! number of leading bytes in which a stored digest agrees. A client could learn (b) only by presenting
//! texts whose digests agree further and further, that is by finding partial preimages, at 2^n hashes for n
//! bits; and with a whole digest it would still need a preimage of it. The map's own comparison is
//! therefore harmless; the decision is a second comparison of the whole digest in constant time, so that
//! the rule "secrets are compared in constant time" needs no exception. Expiry is checked after it.
//!
//! Reloading parses the whole file first and reports every problem in it with its line; the set in force
//! changes only when the file has no problem. Readers take a snapshot ([`arc_swap`]) without a lock.
//!
//! Hot path: one SHA-256 and one look-up, together about 120 ns; no allocation.

mod create;
mod file;

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use aws_lc_rs::digest;
use subtle::ConstantTimeEq;

pub use create::{NewKey, new_key};

use crate::error::Error;
use crate::grant::{Grant, LimitConfig};

/// Most keys in a file.
pub const KEYS_MAX: usize = 65_536;
/// Largest keys file: enough for [`KEYS_MAX`] keys of 512 bytes.
pub const KEYS_FILE_BYTES_MAX: usize = 32 << 20;

/// A SHA-256 digest.
type Digest = [u8; 32];

/// Grants by the names in a certificate. Names are compared byte by byte.
#[derive(Debug, Default)]
struct Certificates {
    uris: HashMap<Box<str>, Arc<Grant>>,
    dns_names: HashMap<Box<str>, Arc<Grant>>,
    common_names: HashMap<Box<str>, Arc<Grant>>,
}

impl Certificates {
    fn len(&self) -> usize {
        self.uris.len() + self.dns_names.len() + self.common_names.len()
    }
}

/// The keys of one file.
#[derive(Debug, Default)]
pub struct KeySet {
    grants: HashMap<Digest, Arc<Grant>>,
    certificates: Certificates,
    tenants: HashMap<Box<str>, LimitConfig>,
}

impl KeySet {
    /// Parses a keys file.
    ///
    /// # Errors
    ///
    /// [`Error::Keys`] with every problem of the file.
    pub fn parse(text: &str) -> Result<Self, Error> {
        file::parse(text).map_err(Error::Keys)
    }

    /// Returns the grant of a key; `None` when the key is unknown, or has expired at this Unix time in
    /// seconds.
    #[must_use]
    pub fn find(&self, presented: &str, now_unix: u64) -> Option<&Arc<Grant>> {
        let digest = sha256(presented.as_bytes());
        let (stored, grant) = self.grants.get_key_value(&digest)?;
        let is_equal: bool = stored.ct_eq(&digest).into();
        (is_equal && !grant.is_expired(now_unix)).then_some(grant)
    }

    /// Returns the grant of a certificate by the names in it: URIs are tried before DNS names, and these
    /// before the common name. The caller has verified the certificate.
    #[must_use]
    pub fn find_certificate(
        &self,
        uris: &[String],
        dns_names: &[String],
        common_name: Option<&str>,
        now_unix: u64,
    ) -> Option<&Arc<Grant>> {
        let known = &self.certificates;
        let by_uri = uris.iter().filter_map(|name| known.uris.get(name.as_str()));
        let by_dns_name = dns_names.iter().filter_map(|name| known.dns_names.get(name.as_str()));
        let by_common_name = common_name.and_then(|name| known.common_names.get(name));
        by_uri.chain(by_dns_name).chain(by_common_name).find(|grant| !grant.is_expired(now_unix))
    }

    /// Returns the grant of this name, of a key or of a certificate; it may have expired.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Arc<Grant>> {
        let known = &self.certificates;
        let certificates =
            known.uris.values().chain(known.dns_names.values()).chain(known.common_names.values());
        self.grants.values().chain(certificates).find(|grant| *grant.name == *name)
    }

    /// Returns the limits of a tenant in the file; for grants that come from tokens.
    #[must_use]
    pub fn tenant_limits(&self, tenant: &str) -> Option<LimitConfig> {
        self.tenants.get(tenant).copied()
    }

    /// Returns the number of keys and certificates.
    #[must_use]
    pub fn len(&self) -> usize {
        self.grants.len() + self.certificates.len()
    }

    /// Whether the set has neither a key nor a certificate.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The keys in force.
#[derive(Debug, Default)]
pub struct KeyStore {
    current: ArcSwap<KeySet>,
}

impl KeyStore {
    /// Creates a store with these keys.
    #[must_use]
    pub fn new(keys: KeySet) -> Self {
        Self { current: ArcSwap::from_pointee(keys) }
    }

    /// Returns the keys in force, as a snapshot that a reload does not change.
    #[must_use]
    pub fn load(&self) -> arc_swap::Guard<Arc<KeySet>> {
        self.current.load()
    }

    /// Replaces the keys in force by those of this text, and returns their number.
    ///
    /// # Errors
    ///
    /// [`Error::Keys`] with every problem; the old keys stay in force.
    pub fn reload(&self, text: &str) -> Result<usize, Error> {
        let keys = KeySet::parse(text)?;
        let count = keys.len();
        self.current.store(Arc::new(keys));
        Ok(count)
    }
}

fn sha256(bytes: &[u8]) -> Digest {
    let mut digest = [0; 32];
    digest.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_until_it_expires() {
        // SHA-256 of "abc", FIPS 180-4.
        let text = "[[key]]\nname='a'\ntenant='t'\nexpires='1970-01-01T00:01:40Z'\n\
                    sha256='ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'";
        let keys = KeySet::parse(text).expect("keys");
        assert_eq!(keys.find("abc", 99).map(|grant| &*grant.name), Some("a"));
        assert_eq!(keys.find("abc", 100), None);
        for wrong in ["", "ab", "abcd", "ABC"] {
            assert_eq!(keys.find(wrong, 0), None, "{wrong}");
        }
    }

    #[test]
    fn a_bad_file_leaves_the_old_keys_in_force() {
        let key = new_key("app", "acme").expect("key");
        let store = KeyStore::new(KeySet::parse(&key.lines).expect("keys"));
        let held = store.load();
        let error = store.reload("[[key]]\nname = 1\n").expect_err("bad");
        assert!(matches!(&error, Error::Keys(problems) if problems.0.len() == 3), "{error}");
        assert!(store.load().find(&key.secret, 0).is_some());
        assert_eq!(store.reload("").expect("empty"), 0);
        assert!(store.load().find(&key.secret, 0).is_none());
        assert!(held.find(&key.secret, 0).is_some(), "a snapshot stays what it is");
    }
}
