//! Rights of a credential, independent of its kind.

use std::sync::Arc;

use crate::limits::Scope;

/// Longest name of a key, a tenant or a model.
pub const NAME_BYTES_MAX: usize = 128;
/// Largest limit per minute. Above it the nanosecond steps of the buckets would round by more than 2 %.
pub const PER_MINUTE_MAX: u64 = 1_000_000_000;
/// Largest weight of a tenant; the smallest is 1.
pub const WEIGHT_MAX: u32 = 1000;

/// Limits of a key or a tenant; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct LimitConfig {
    /// Requests per minute.
    pub requests_per_minute: Option<u64>,
    /// Tokens per minute, prompt and answer together.
    pub tokens_per_minute: Option<u64>,
    /// Concurrent requests.
    pub concurrent_max: Option<u32>,
}

/// Models that a client may request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Models {
    /// Every model.
    All,
    /// The listed models. A name that ends in `*` matches every model with that prefix.
    Some(Arc<[Box<str>]>),
}

impl Models {
    /// Creates the set from names and prefixes; `*` alone is every model. An empty list allows none.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let names: Vec<Box<str>> = names.into_iter().map(Box::from).collect();
        if names.iter().any(|name| &**name == "*") { Self::All } else { Self::Some(names.into()) }
    }

    /// Whether the client may request a model.
    #[must_use]
    pub fn allows(&self, model: &str) -> bool {
        match self {
            Self::All => true,
            Self::Some(names) => names.iter().any(|name| match name.strip_suffix('*') {
                Some(prefix) => model.starts_with(prefix),
                None => **name == *model,
            }),
        }
    }
}

/// Identity and rights of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Name of the key, or the subject of the token; for logs and metrics. Unique among keys.
    pub name: Arc<str>,
    /// Whether `name` is of a key or of a token's subject; selects the table in which its limits are
    /// counted.
    pub scope: Scope,
    /// Tenant that is charged; the unit of fairness, of shared limits and of cache isolation.
    pub tenant: Arc<str>,
    /// Whether the client may use the administrative routes.
    pub is_admin: bool,
    /// Models that the client may request.
    pub models: Models,
    /// Limits of this key alone.
    pub limits: LimitConfig,
    /// Limits of the whole tenant.
    pub tenant_limits: LimitConfig,
    /// Priority; a lower value is earlier, as in vLLM; 0 by default.
    pub priority: i32,
    /// Share of the tenant when it waits beside other tenants of the same priority, 1 by default.
    pub weight: u32,
    /// Time of expiry in Unix seconds.
    pub expires: Option<u64>,
}

impl Grant {
    /// Whether the grant has expired at this time, in Unix seconds.
    #[must_use]
    pub fn is_expired(&self, now_unix: u64) -> bool {
        self.expires.is_some_and(|expires| now_unix >= expires)
    }
}

/// Whether a text can be a name in logs, headers and metrics: not empty, not too long, no control
/// characters or blanks at its ends.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= NAME_BYTES_MAX
        && text.trim() == text
        && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_names_or_prefixes() {
        let cases: [(&[&str], &str, bool); 7] = [
            (&["*"], "anything", true),
            (&["a", "*"], "b", true),
            (&["llama"], "llama", true),
            (&["llama"], "llama-2", false),
            (&["llama*"], "llama-2", true),
            (&["llama*"], "qwen", false),
            (&[], "llama", false),
        ];
        for (names, model, expected) in cases {
            assert_eq!(
                Models::from_names(names.iter().copied()).allows(model),
                expected,
                "{names:?} {model}"
            );
        }
    }

    #[test]
    fn names_are_fit_for_logs() {
        for good in ["a", "acme corp", "ü", &"x".repeat(NAME_BYTES_MAX)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", " a", "a ", "a\nb", "a\u{85}b", "a\u{7f}", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }
}
