//! Authentication, authorization, limits and admission. A library without a server: credentials, names,
//! estimates and the time arrive as arguments, and outcomes are values that the gateway converts to
//! answers.
//!
//! In the order in which a request uses them:
//!
//! * [`Credential`]: the credential that the client presented, a key or a token.
//! * [`KeyStore`]: keys from a file, by their digest. [`JwtVerifier`]: bearer tokens of an identity
//!   provider. Both give a [`Grant`]: name, tenant, models, limits, priority and weight.
//! * [`PASSED_HEADERS`] and [`BodyPolicy`]: headers and fields of a client's request that an engine may
//!   see. [`Screen`] and [`MediaPolicy`]: contents that are refused, since they endanger engines.
//! * [`Salter`]: the cache salt that keeps tenants out of each other's blocks.
//! * [`LimitTable`] and [`admit`]: requests, tokens and concurrency of a key and of its tenant.
//! * [`Gate`]: a bounded number of requests in flight; more wait in a fair and bounded queue, or are
//!   refused immediately.
//! * [`AuditLog`]: one line for each request, without contents of prompts or answers.
//!
//! Beside them, [`random_number`] and [`new_secret`] for values that must not be guessed.
//!
//! This crate knows nothing of workers, engines, blocks or HTTP; it opens one file, the audit log's.
//!
//! Hot path, for a request with a known key that does not have to wait: one SHA-256 of the key, one map
//! look-up, two look-ups of limiters under a read lock, at most six compare-and-swaps for limits, and two
//! atomic steps at the gate. About half a microsecond together, and no allocation until the audit line
//! (`tests/no_allocation.rs`).

#![forbid(unsafe_code)]

mod admission;
mod audit;
mod body;
mod credential;
mod error;
mod grant;
mod headers;
mod jwt;
mod keys;
mod limits;
mod media;
mod random;
mod salt;
mod screen;

pub use admission::{
    AdmissionRequest, Entry, Gate, GateConfig, GateStats, Permit, Refusal, WAITING_MAX_LIMIT, Wait,
    WaitOutcome,
};
pub use audit::{AUDIT_QUEUE_MAX, AuditCounters, AuditLog, AuditRecord};
pub use body::{BODY_FIELDS, BodyPolicy};
pub use credential::{Credential, TOKEN_BYTES_MAX};
pub use error::{Error, Problem, Problems};
pub use grant::{Grant, LimitConfig, Models, NAME_BYTES_MAX, PER_MINUTE_MAX, WEIGHT_MAX};
pub use headers::{Decision, PASSED_HEADERS, is_plain_request_id};
pub use jwt::{
    Algorithm, ClaimNames, JWKS_BYTES_MAX, JWKS_KEYS_MAX, Jwks, JwtConfig, JwtVerifier, Refresh,
    RefreshTicket, TokenProblem, TokenVerdict,
};
pub use keys::{KEYS_FILE_BYTES_MAX, KEYS_MAX, KeySet, KeyStore, NewKey, new_key};
pub use limits::{
    Charge, Estimate, LIMITERS_MAX, LimitKind, LimitReport, LimitTable, Limiter, Rate, RateState, Refused,
    Scope, TableFull, admit, retry_after_seconds,
};
pub use media::MediaPolicy;
pub use random::{new_secret, random_number};
pub use salt::{Salt, Salter};
pub use screen::{CONVERSATIONS, RANKED, Screen, ScreenError, TEMPLATE_FIELDS};
