//! Verification of one token.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Validation, decode, decode_header};

use super::Algorithm;
use super::claims::{self, ClaimNames, Claims};
use super::jwks::{Found, Jwks};
use crate::credential::TOKEN_BYTES_MAX;
use crate::error::Error;
use crate::grant::{Grant, LimitConfig, Models, WEIGHT_MAX};
use crate::limits::Scope;

/// Largest leeway: more than synchronised clocks differ by.
const LEEWAY_MAX: Duration = Duration::from_secs(600);

/// Requirements on a token, and rights that it grants beyond its claims.
#[derive(Debug, Clone)]
pub struct JwtConfig {
    /// Accepted issuers (`iss`), at least one.
    pub issuers: Vec<String>,
    /// Audiences (`aud`) of which a token must name one; at least one.
    pub audiences: Vec<String>,
    /// Allowed algorithms, at least one.
    pub algorithms: Vec<Algorithm>,
    /// Largest accepted clock difference, for `exp` and `nbf`.
    pub leeway: Duration,
    /// Prefix of the names of subjects and tenants. Every issuer can claim every tenant; where it must not
    /// claim those of the keys file or of another issuer, give it a verifier with a prefix of its own, such
    /// as `okta/`.
    pub prefix: String,
    /// Names of the claims.
    pub claims: ClaimNames,
    /// Tenant of tokens that name none; without it such tokens are refused.
    pub default_tenant: Option<Arc<str>>,
    /// Models of tokens that name none.
    pub default_models: Models,
    /// Priority of tokens that name none.
    pub default_priority: i32,
    /// Best and worst priority that a token can claim; other values are clamped.
    pub priorities: (i32, i32),
    /// Weight of every tenant.
    pub weight: u32,
    /// Limits of every subject.
    pub limits: LimitConfig,
    /// Limits of every tenant.
    pub tenant_limits: LimitConfig,
}

/// Result of a verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenVerdict {
    /// The token is valid.
    Valid(Grant),
    /// No key of the set fits the token: fetch the set again if [`super::Refresh::begin`] allows it, and
    /// verify once more.
    UnknownKey,
    /// The token is refused.
    Refused(TokenProblem),
}

/// Reason why a token is refused. Never contains any part of the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenProblem {
    /// The text is not a token, or is too long.
    #[error("the token is malformed")]
    Malformed,
    /// The token's algorithm is not allowed.
    #[error("the token's algorithm is not allowed")]
    Algorithm,
    /// The token has critical extensions.
    #[error("the token has critical extensions, of which none is known")]
    Critical,
    /// The token names no key, and several fit.
    #[error("the token names no key")]
    NoKeyId,
    /// The token's signature is wrong.
    #[error("the token's signature is wrong")]
    Signature,
    /// The token's issuer is missing or not accepted.
    #[error("the token has another issuer")]
    Issuer,
    /// The token's audience is missing or not accepted.
    #[error("the token is for another audience")]
    Audience,
    /// The token has expired, or has no expiry.
    #[error("the token has expired")]
    Expired,
    /// The token is not valid yet.
    #[error("the token is not valid yet")]
    NotYet,
    /// A claim is missing or has the wrong form.
    #[error("a claim of the token is missing or has the wrong form: {0}")]
    Claim(&'static str),
}

/// Checks tokens.
#[derive(Debug)]
pub struct JwtVerifier {
    config: JwtConfig,
    keys: ArcSwap<Jwks>,
    /// One per allowed algorithm: the library requires all algorithms of one check to be of one family.
    validations: Vec<(Algorithm, Validation)>,
}

impl JwtVerifier {
    /// Creates a verifier without keys: every token's key is unknown until [`JwtVerifier::set_keys`].
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when issuers, audiences or algorithms are missing, or a number is out of range.
    pub fn new(config: JwtConfig) -> Result<Self, Error> {
        let checks = [
            (config.issuers.is_empty(), "no issuer"),
            (config.audiences.is_empty(), "no audience"),
            (config.algorithms.is_empty(), "no algorithm"),
            (config.leeway > LEEWAY_MAX, "a leeway of more than ten minutes"),
            (config.priorities.0 > config.priorities.1, "the best priority is above the worst"),
            (!(1..=WEIGHT_MAX).contains(&config.weight), "a weight outside 1 to 1000"),
        ];
        let problems: Vec<&str> =
            checks.iter().filter(|(is_bad, _)| *is_bad).map(|(_, text)| *text).collect();
        if !problems.is_empty() {
            return Err(Error::Config { what: "tokens", reason: problems.join(", ") });
        }
        let validations = config.algorithms.iter().map(|&algorithm| {
            let mut validation = Validation::new(algorithm.to_library());
            validation.set_issuer(&config.issuers);
            validation.set_audience(&config.audiences);
            validation.set_required_spec_claims(&["exp", "iss", "aud"]);
            // Both are checked below, with the time that is an argument.
            (validation.validate_exp, validation.validate_nbf) = (false, false);
            (algorithm, validation)
        });
        Ok(Self { validations: validations.collect(), config, keys: ArcSwap::default() })
    }

    /// Replaces the keys; false when they are unchanged.
    pub fn set_keys(&self, keys: Jwks) -> bool {
        let is_new = !self.keys.load().is_same(&keys);
        self.keys.store(Arc::new(keys));
        is_new
    }

    /// Checks a token at a Unix time in seconds.
    #[must_use]
    pub fn verify(&self, token: &str, now_unix: u64) -> TokenVerdict {
        match self.check(token, now_unix) {
            Ok(Some(grant)) => TokenVerdict::Valid(grant),
            Ok(None) => TokenVerdict::UnknownKey,
            Err(problem) => TokenVerdict::Refused(problem),
        }
    }

    fn check(&self, token: &str, now_unix: u64) -> Result<Option<Grant>, TokenProblem> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenProblem::Malformed);
        }
        let header = decode_header(token).map_err(|_| TokenProblem::Malformed)?;
        if header.crit.is_some() {
            return Err(TokenProblem::Critical);
        }
        let algorithm = Algorithm::from_library(header.alg).ok_or(TokenProblem::Algorithm)?;
        let validation = self.validations.iter().find(|(allowed, _)| *allowed == algorithm);
        let (_, validation) = validation.ok_or(TokenProblem::Algorithm)?;
        let keys = self.keys.load();
        let key = match keys.find(header.kid.as_deref(), algorithm) {
            Found::Key(key) => key,
            Found::Unknown => return Ok(None),
            Found::Ambiguous => return Err(TokenProblem::NoKeyId),
        };
        let decoded =
            decode::<Claims>(token, &key.decoding, validation).map_err(|error| match error.kind() {
                ErrorKind::InvalidSignature => TokenProblem::Signature,
                ErrorKind::InvalidIssuer => TokenProblem::Issuer,
                ErrorKind::InvalidAudience => TokenProblem::Audience,
                ErrorKind::MissingRequiredClaim(claim) => match claim.as_str() {
                    "iss" => TokenProblem::Issuer,
                    "aud" => TokenProblem::Audience,
                    _ => TokenProblem::Expired,
                },
                _ => TokenProblem::Malformed,
            })?;
        let claims = &decoded.claims;
        // The library also accepts a list of issuers; RFC 7519 allows only one.
        let issuer = claims.get("iss").and_then(|issuer| issuer.as_str());
        if !issuer.is_some_and(|issuer| self.config.issuers.iter().any(|known| known == issuer)) {
            return Err(TokenProblem::Issuer);
        }
        let expires = self.check_times(claims, now_unix)?;
        self.grant(claims, expires).map(Some)
    }

    /// Checks `exp` and `nbf`; returns the time of expiry, leeway included.
    fn check_times(&self, claims: &Claims, now_unix: u64) -> Result<u64, TokenProblem> {
        let leeway = self.config.leeway.as_secs();
        let expires = claims::time(claims, "exp").map_err(|()| TokenProblem::Claim("exp"))?;
        let expires = expires.ok_or(TokenProblem::Expired)?.saturating_add(leeway);
        if now_unix >= expires {
            return Err(TokenProblem::Expired);
        }
        let begins = claims::time(claims, "nbf").map_err(|()| TokenProblem::Claim("nbf"))?;
        if begins.is_some_and(|begins| begins > now_unix.saturating_add(leeway)) {
            return Err(TokenProblem::NotYet);
        }
        Ok(expires)
    }

    fn prefixed(&self, name: Arc<str>) -> Arc<str> {
        if self.config.prefix.is_empty() { name } else { format!("{}{name}", self.config.prefix).into() }
    }

    fn grant(&self, claims: &Claims, expires: u64) -> Result<Grant, TokenProblem> {
        let config = &self.config;
        let names = &config.claims;
        let name = claims::name(claims, &names.name).ok().flatten().ok_or(TokenProblem::Claim("name"))?;
        let tenant = claims::name(claims, &names.tenant).map_err(|()| TokenProblem::Claim("tenant"))?;
        let tenant = tenant.map(|tenant| self.prefixed(tenant));
        let tenant = tenant.or_else(|| config.default_tenant.clone()).ok_or(TokenProblem::Claim("tenant"))?;
        let models = claims::models(claims, &names.models).map_err(|()| TokenProblem::Claim("models"))?;
        let priority = claims::priority(claims, &names.priority, config.priorities)
            .map_err(|()| TokenProblem::Claim("priority"))?;
        Ok(Grant {
            name: self.prefixed(name),
            scope: Scope::Subject,
            tenant,
            // Only keys of the file may administer: the provider's operators could change claims.
            is_admin: false,
            models: models.unwrap_or_else(|| config.default_models.clone()),
            limits: config.limits,
            tenant_limits: config.tenant_limits,
            priority: priority.unwrap_or(config.default_priority),
            weight: config.weight,
            expires: Some(expires),
        })
    }
}
