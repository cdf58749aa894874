//! Converts claims to a grant. The names of the claims are configured, since every provider has its own.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::grant::{Models, is_name};

/// Largest number of models in a token.
const MODELS_MAX: usize = 1024;

/// Names of claims. A name that begins with `/` is a JSON pointer (RFC 6901) into nested claims, such as
/// `/realm_access/roles`; any other is the literal name of a claim, dots and slashes inside included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimNames {
    /// The claim with the subject, for logs: `sub`.
    pub name: String,
    /// The claim with the tenant: `tenant`.
    pub tenant: String,
    /// The claim with the models, as a list or a text with blanks between: `models`.
    pub models: String,
    /// The claim with the priority, a whole number: `priority`.
    pub priority: String,
}

impl Default for ClaimNames {
    fn default() -> Self {
        let [name, tenant, models, priority] = ["sub", "tenant", "models", "priority"].map(str::to_owned);
        Self { name, tenant, models, priority }
    }
}

/// The claims of a token.
pub(super) type Claims = Map<String, Value>;

/// Returns the claim of this name. A null counts as absent.
fn get<'a>(claims: &'a Claims, name: &str) -> Option<&'a Value> {
    let value = match name.strip_prefix('/') {
        None => claims.get(name),
        Some(path) => {
            let (first, rest) = path.find('/').map_or((path, ""), |at| path.split_at(at));
            claims.get(&first.replace("~1", "/").replace("~0", "~"))?.pointer(rest)
        }
    };
    value.filter(|value| !value.is_null())
}

/// Returns a text that is a valid name. `Ok(None)` when the claim is absent, `Err` when it is not such a
/// text.
pub(super) fn name(claims: &Claims, claim: &str) -> Result<Option<Arc<str>>, ()> {
    match get(claims, claim) {
        None => Ok(None),
        Some(Value::String(text)) if is_name(text) => Ok(Some(text.as_str().into())),
        Some(_) => Err(()),
    }
}

/// Returns the models, with the errors of [`name`].
pub(super) fn models(claims: &Claims, claim: &str) -> Result<Option<Models>, ()> {
    let names: Vec<&str> = match get(claims, claim) {
        None => return Ok(None),
        Some(Value::String(text)) => text.split_ascii_whitespace().collect(),
        Some(Value::Array(list)) => list.iter().map(Value::as_str).collect::<Option<_>>().ok_or(())?,
        Some(_) => return Err(()),
    };
    if names.len() > MODELS_MAX || !names.iter().all(|name| is_name(name)) {
        return Err(());
    }
    Ok(Some(Models::from_names(names)))
}

/// Returns a whole number, clamped to a range, with the errors of [`name`].
pub(super) fn priority(claims: &Claims, claim: &str, range: (i32, i32)) -> Result<Option<i32>, ()> {
    let Some(value) = get(claims, claim) else { return Ok(None) };
    let number = value.as_i64().ok_or(())?.clamp(range.0.into(), range.1.into());
    i32::try_from(number).map(Some).map_err(|_| ())
}

/// Returns seconds since 1970 (RFC 7519, section 2, "NumericDate"); fractions are cut off.
pub(super) fn time(claims: &Claims, claim: &str) -> Result<Option<u64>, ()> {
    match claims.get(claim) {
        None => Ok(None),
        Some(value) => match (value.as_u64(), value.as_f64()) {
            (Some(seconds), _) => Ok(Some(seconds)),
            // The cast saturates.
            (None, Some(seconds)) if seconds >= 0.0 => Ok(Some(seconds as u64)),
            _ => Err(()),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claims(value: Value) -> Claims {
        value.as_object().cloned().expect("an object")
    }

    #[test]
    fn claims_are_found_by_name_or_pointer() {
        let claims =
            claims(json!({"a": "1", "https://x.example/a/b": "2", "n": {"m": {"k/": "3"}}, "none": null}));
        let cases = [
            ("a", Some("1")),
            ("https://x.example/a/b", Some("2")),
            ("/n/m/k~1", Some("3")),
            ("/a", Some("1")),
            ("b", None),
            ("none", None),
            ("/n/x", None),
            ("/", None),
        ];
        for (claim, expected) in cases {
            assert_eq!(name(&claims, claim).expect("a text").as_deref(), expected, "{claim}");
        }
        assert!(name(&claims, "n").is_err());
    }

    #[test]
    fn claims_of_the_wrong_form_are_refused() {
        let claims = claims(json!({
            "list": ["a", "b*"], "text": "a  b*", "empty": [], "number": 3, "mixed": ["a", 1], "bad": "a\nb",
            "control": ["a\u{0}"], "huge": 1e300, "past": -1, "half": 1.5, "low": -1000,
        }));
        let two = Models::from_names(["a", "b*"]);
        assert_eq!(models(&claims, "list"), Ok(Some(two.clone())));
        assert_eq!(models(&claims, "text"), Ok(Some(two)));
        assert_eq!(models(&claims, "empty"), Ok(Some(Models::from_names([]))), "none, and not all");
        assert_eq!(models(&claims, "absent"), Ok(None));
        for claim in ["number", "mixed", "control"] {
            assert!(models(&claims, claim).is_err(), "{claim}");
        }
        assert!(name(&claims, "bad").is_err() && name(&claims, "number").is_err());
        assert_eq!(priority(&claims, "low", (-5, 5)), Ok(Some(-5)));
        assert_eq!(priority(&claims, "number", (-5, 5)), Ok(Some(3)));
        assert!(priority(&claims, "half", (-5, 5)).is_err() && priority(&claims, "text", (-5, 5)).is_err());
        assert_eq!((time(&claims, "half"), time(&claims, "huge")), (Ok(Some(1)), Ok(Some(u64::MAX))));
        assert!(time(&claims, "past").is_err() && time(&claims, "text").is_err());
    }
}
