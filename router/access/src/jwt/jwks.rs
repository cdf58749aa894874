//! The provider's public keys: a JSON Web Key Set (RFC 7517), as bytes that the caller fetched.
//!
//! Unusable keys are skipped, as section 5 of the RFC requires: other types, other uses, unknown
//! algorithms. Each key is bound to the algorithms that fit its type and curve, and to its own `alg` if it
//! names one, so that a token cannot choose how its key is used. Symmetric keys are never accepted: a
//! public set cannot hold a secret.

use aws_lc_rs::digest;
use jsonwebtoken::DecodingKey;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use serde::Deserialize;
use serde_json::Value;

use super::Algorithm;
use crate::error::Error;

/// Largest key set in bytes.
pub const JWKS_BYTES_MAX: usize = 1 << 20;
/// Most keys in a set; providers publish two to ten.
pub const JWKS_KEYS_MAX: usize = 256;

#[derive(Deserialize)]
struct Document {
    keys: Vec<Value>,
}

/// A key and the algorithms that it may verify.
#[derive(Debug)]
pub(super) struct Key {
    id: Option<String>,
    algorithms: Vec<Algorithm>,
    pub(super) decoding: DecodingKey,
}

/// The usable keys of a set.
#[derive(Debug, Default)]
pub struct Jwks {
    keys: Vec<Key>,
    skipped: usize,
    fingerprint: Vec<u8>,
}

/// Result of a key look-up.
pub(super) enum Found<'a> {
    Key(&'a Key),
    /// No key has this id: the set may be outdated.
    Unknown,
    /// The token has no key id, and several keys fit.
    Ambiguous,
}

impl Jwks {
    /// Parses the bytes of a key set.
    ///
    /// # Errors
    ///
    /// [`Error::Jwks`] when the bytes are no key set, are too large, or contain no usable key.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let bad = |reason: String| Error::Jwks { reason };
        if bytes.len() > JWKS_BYTES_MAX {
            return Err(bad(format!("it is larger than {JWKS_BYTES_MAX} bytes")));
        }
        let document: Document = serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))?;
        if document.keys.len() > JWKS_KEYS_MAX {
            return Err(bad(format!("it has more than {JWKS_KEYS_MAX} keys")));
        }
        let count = document.keys.len();
        let keys: Vec<Key> = document.keys.into_iter().filter_map(read).collect();
        if keys.is_empty() {
            return Err(bad(format!("none of its {count} keys is usable")));
        }
        let fingerprint = digest::digest(&digest::SHA256, bytes).as_ref().to_vec();
        Ok(Self { skipped: count - keys.len(), keys, fingerprint })
    }

    /// Returns the number of usable keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether the set has no usable key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the number of skipped keys.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Whether both came from the same bytes.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }

    /// Returns the key that a token names. Without a key id, the only key that fits.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Found<'_> {
        let mut fitting = self
            .keys
            .iter()
            .filter(|key| key.algorithms.contains(&algorithm) && (id.is_none() || key.id.as_deref() == id));
        match (fitting.next(), fitting.next()) {
            (None, _) => Found::Unknown,
            (Some(key), None) => Found::Key(key),
            (Some(key), Some(_)) if id.is_some() => Found::Key(key),
            (Some(_), Some(_)) => Found::Ambiguous,
        }
    }
}

fn read(value: Value) -> Option<Key> {
    let own_name = match value.get("alg") {
        None => None,
        // A key with an unknown algorithm is skipped.
        Some(name) => Some(Algorithm::from_name(name.as_str()?)?),
    };
    let jwk: Jwk = serde_json::from_value(value).ok()?;
    if !matches!(jwk.common.public_key_use, None | Some(PublicKeyUse::Signature)) {
        return None;
    }
    if jwk.common.key_operations.as_ref().is_some_and(|list| !list.contains(&KeyOperations::Verify)) {
        return None;
    }
    let fitting: &[Algorithm] = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => {
            &[Algorithm::Rs256, Algorithm::Rs384, Algorithm::Rs512, Algorithm::Ps256]
        }
        AlgorithmParameters::EllipticCurve(key) => match key.curve {
            EllipticCurve::P256 => &[Algorithm::Es256],
            EllipticCurve::P384 => &[Algorithm::Es384],
            _ => &[],
        },
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => &[Algorithm::EdDsa],
        _ => &[],
    };
    let algorithms: Vec<Algorithm> =
        fitting.iter().copied().filter(|&fits| own_name.is_none_or(|own| own == fits)).collect();
    if algorithms.is_empty() {
        return None;
    }
    let decoding = DecodingKey::from_jwk(&jwk).ok()?;
    Some(Key { id: jwk.common.key_id, algorithms, decoding })
}

#[cfg(test)]
mod tests {
    use super::*;

    // RFC 7517, appendix A.1, and RFC 8037, appendix A.2.
    const EC: &str = r#"{"kty":"EC","crv":"P-256","kid":"1","use":"sig",
        "x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"}"#;
    const ED: &str =
        r#"{"kty":"OKP","crv":"Ed25519","kid":"2","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}"#;

    fn set(keys: &[&str]) -> String {
        format!(r#"{{"keys":[{}]}}"#, keys.join(","))
    }

    fn is_key(found: &Found<'_>) -> bool {
        matches!(found, Found::Key(_))
    }

    #[test]
    fn unusable_keys_are_skipped() {
        let symmetric = r#"{"kty":"oct","kid":"1","alg":"HS256","k":"AyM1SysPpbyDfgZld3umj1qzKObwVMko"}"#;
        let encryption = EC.replace("sig", "enc");
        let unknown = r#"{"kty":"AKP","alg":"ML-DSA-44","pub":"AA"}"#;
        let foreign = EC.replace("\"use\"", "\"alg\":\"ECDH-ES\",\"use\"");
        let mismatch = EC.replace("\"use\"", "\"alg\":\"RS256\",\"use\"");
        let text = set(&[symmetric, &encryption, unknown, &foreign, &mismatch, EC, ED]);
        let keys = Jwks::parse(text.as_bytes()).expect("two are good");
        assert_eq!((keys.len(), keys.skipped()), (2, 5));
        assert!(is_key(&keys.find(Some("1"), Algorithm::Es256)));
        assert!(is_key(&keys.find(None, Algorithm::EdDsa)));
        for (id, algorithm) in [("1", Algorithm::Es384), ("1", Algorithm::EdDsa), ("3", Algorithm::Es256)] {
            assert!(matches!(keys.find(Some(id), algorithm), Found::Unknown));
        }
        assert!(Jwks::parse(set(&[symmetric]).as_bytes()).is_err());
    }

    #[test]
    fn a_token_without_id_needs_a_single_key() {
        let other = EC.replace("\"kid\":\"1\"", "\"kid\":\"9\"");
        let keys = Jwks::parse(set(&[EC, &other]).as_bytes()).expect("good");
        assert!(matches!(keys.find(None, Algorithm::Es256), Found::Ambiguous));
        assert!(is_key(&keys.find(Some("9"), Algorithm::Es256)));
    }

    #[test]
    fn bad_sets_are_errors() {
        let many = set(&[ED; JWKS_KEYS_MAX + 1]);
        for text in ["", "[]", "{}", r#"{"keys":[]}"#, r#"{"keys":[1]}"#, many.as_str()] {
            assert!(Jwks::parse(text.as_bytes()).is_err());
        }
        assert!(Jwks::parse(&vec![b' '; JWKS_BYTES_MAX + 1]).is_err());
    }
}
