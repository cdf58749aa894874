//! The API key of an engine, sent as `Authorization: Bearer KEY`; vLLM and SGLang call it `--api-key`.
//!
//! The gateway sends it with every request to that engine, including those for health, load and metrics; Kvasir's own
//! workers check it. Debug output does not contain it, and it is compared in constant time.

use std::collections::HashMap;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use subtle::ConstantTimeEq;

const SCHEME: &str = "Bearer ";

/// A key between a gateway and an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey(HeaderValue);

impl ApiKey {
    /// Makes a key of its text; `None` when the text is empty, begins or ends with a blank, or is not plain ASCII.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let is_whole = !text.is_empty() && text.is_ascii() && text.trim() == text;
        let mut value = HeaderValue::from_str(&format!("{SCHEME}{text}")).ok().filter(|_| is_whole)?;
        value.set_sensitive(true);
        Some(Self(value))
    }

    /// Value of the `authorization` header with this key.
    #[must_use]
    pub fn header(&self) -> &HeaderValue {
        &self.0
    }

    /// Text of the key.
    #[must_use]
    pub fn text(&self) -> &str {
        let shown = self.0.to_str().unwrap_or_default();
        shown.strip_prefix(SCHEME).unwrap_or_default()
    }

    /// Whether these request headers contain the key.
    #[must_use]
    pub fn is_shown_in(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
        let Some((scheme, shown)) = given.split_at_checked(SCHEME.len()) else { return false };
        let own = &self.0.as_bytes()[SCHEME.len()..];
        scheme.eq_ignore_ascii_case(SCHEME.as_bytes()) && bool::from(own.ct_eq(shown.trim_ascii()))
    }
}

/// The keys of all engines of a gateway.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineKeys {
    /// Key of engines of the cluster without a key of their own.
    pub all: Option<ApiKey>,
    /// Keys by the engine's URL, without a slash at its end.
    pub own: HashMap<String, ApiKey>,
    /// Whether workers that an administrator adds get `all`, too. Must be false on a gateway without keys, where every process of
    /// the machine is an administrator and would learn the key by adding itself.
    pub trusts_added: bool,
}

impl EngineKeys {
    /// Key for the engine at this URL.
    #[must_use]
    pub fn of(&self, url: &str) -> Option<&ApiKey> {
        self.own_of(url).or(self.all.as_ref())
    }

    /// Key that is configured for this URL alone.
    #[must_use]
    pub fn own_of(&self, url: &str) -> Option<&ApiKey> {
        self.own.get(url.trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_by_its_bearer_and_shown_by_nothing_else() {
        let key = ApiKey::new("s3cret").expect("a key");
        let shows = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_str(value).expect("a value"));
            key.is_shown_in(&headers)
        };
        for right in ["Bearer s3cret", "bearer s3cret", "Bearer  s3cret "] {
            assert!(shows(right), "{right:?}");
        }
        for wrong in ["", "s3cret", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret"] {
            assert!(!shows(wrong), "{wrong:?}");
        }
        assert!(!key.is_shown_in(&HeaderMap::new()));
        assert_eq!(key.text(), "s3cret");
        assert!(!format!("{key:?}").contains("s3cret"));
        for no_key in ["", " a", "a\n", "\u{fc}"] {
            assert_eq!(ApiKey::new(no_key), None, "{no_key:?}");
        }
    }
}
