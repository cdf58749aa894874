//! Bearer tokens of an identity provider: JSON Web Tokens (RFC 7519), checked as RFC 8725 advises.
//!
//! * [`Jwks`]: the provider's keys. [`Refresh`]: when to fetch them again. [`JwtVerifier`]: the check.
//!
//! The configuration and the key set decide on keys and algorithms, never the token: an allow-list without
//! `none` and without symmetric algorithms, and per key the algorithms that fit it. Issuer, audience and
//! expiry must be present and correct. Header fields that carry keys (`jwk`, `jku`, `x5c`, `x5u`) are
//! ignored, and a token with critical extensions is refused, since none is supported.
//!
//! The signature is checked by `jsonwebtoken` over aws-lc-rs. Times are checked here, because that crate
//! reads the system's clock, and here the time is an argument.
//!
//! Cost: one signature with the claims, 20 µs (RS256) to 150 µs (ES384), and some twenty allocations. That is well below a tokenised
//! prompt, so verified tokens are not cached: a cache would have to forget revoked keys.

mod claims;
mod jwks;
mod refresh;
mod verify;

pub use claims::ClaimNames;
pub use jwks::{JWKS_BYTES_MAX, JWKS_KEYS_MAX, Jwks};
pub use refresh::{Refresh, RefreshTicket};
pub use verify::{JwtConfig, JwtVerifier, TokenProblem, TokenVerdict};

/// A signature algorithm that can be allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    Rs256,
    /// RSASSA-PKCS1-v1_5 with SHA-384.
    Rs384,
    /// RSASSA-PKCS1-v1_5 with SHA-512.
    Rs512,
    /// RSASSA-PSS with SHA-256.
    Ps256,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// ECDSA on P-384 with SHA-384.
    Es384,
    /// Ed25519.
    EdDsa,
}

impl Algorithm {
    /// All supported algorithms.
    pub const ALL: [Self; 7] =
        [Self::Rs256, Self::Rs384, Self::Rs512, Self::Ps256, Self::Es256, Self::Es384, Self::EdDsa];

    /// Returns the algorithm with this name in a token's header or a configuration; `None` for all other
    /// names, `none` and `HS256` too.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    /// Returns the registered name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rs256 => "RS256",
            Self::Rs384 => "RS384",
            Self::Rs512 => "RS512",
            Self::Ps256 => "PS256",
            Self::Es256 => "ES256",
            Self::Es384 => "ES384",
            Self::EdDsa => "EdDSA",
        }
    }

    fn from_library(algorithm: jsonwebtoken::Algorithm) -> Option<Self> {
        Self::ALL.into_iter().find(|own| own.to_library() == algorithm)
    }

    fn to_library(self) -> jsonwebtoken::Algorithm {
        match self {
            Self::Rs256 => jsonwebtoken::Algorithm::RS256,
            Self::Rs384 => jsonwebtoken::Algorithm::RS384,
            Self::Rs512 => jsonwebtoken::Algorithm::RS512,
            Self::Ps256 => jsonwebtoken::Algorithm::PS256,
            Self::Es256 => jsonwebtoken::Algorithm::ES256,
            Self::Es384 => jsonwebtoken::Algorithm::ES384,
            Self::EdDsa => jsonwebtoken::Algorithm::EdDSA,
        }
    }
}

#[cfg(test)]
mod tests;
