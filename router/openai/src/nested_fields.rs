//! Typed access to the fields of a nested JSON object. `null` counts as absent, and every error names the field's path.

use serde_json::{Map, Value};

use crate::ApiError;
use crate::fields::kind;

/// An object together with its path in the request.
#[derive(Debug, Clone)]
pub(crate) struct NestedFields<'a> {
    object: &'a Map<String, Value>,
    at: String,
}

impl<'a> NestedFields<'a> {
    /// Returns the request itself.
    pub(crate) fn of_body(body: &'a Value) -> Result<Self, ApiError> {
        match body {
            Value::Object(object) => Ok(Self { object, at: String::new() }),
            other => {
                let message = format!("The body must be a JSON object, not {}.", kind(other));
                Err(ApiError::malformed(message))
            }
        }
    }

    /// Returns a value inside the request, which must be an object.
    pub(crate) fn of(value: &'a Value, at: String) -> Result<Self, ApiError> {
        match value {
            Value::Object(object) => Ok(Self { object, at }),
            other => Err(must_be(&at, "an object", other)),
        }
    }

    /// Path of a field of this object.
    pub(crate) fn at(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// The object itself.
    pub(crate) fn to_value(&self) -> Value {
        Value::Object(self.object.clone())
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.typed(name, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<NestedFields<'a>>, ApiError> {
        self.get(name).map(|value| Self::of(value, self.at(name))).transpose()
    }

    /// Returns an integer of at least 1.
    pub(crate) fn positive(&self, name: &str) -> Result<Option<u64>, ApiError> {
        self.at_least(name, 1)
    }

    /// Returns an integer of at least `least`.
    pub(crate) fn at_least(&self, name: &str, least: u64) -> Result<Option<u64>, ApiError> {
        match self.typed(name, "an integer up to 4294967295", whole)? {
            Some(number) if number < least as f64 => {
                let at = self.at(name);
                Err(ApiError::invalid(&at, format!("`{at}` must be at least {least}, not {number}.")))
            }
            other => Ok(other.map(|number| number as u64)),
        }
    }

    pub(crate) fn required_text(&self, name: &str) -> Result<&'a str, ApiError> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    pub(crate) fn missing(&self, name: &str) -> ApiError {
        let at = self.at(name);
        ApiError::invalid(&at, format!("`{at}` is required."))
    }

    pub(crate) fn wrong(&self, name: &str, wanted: &str, value: &Value) -> ApiError {
        must_be(&self.at(name), wanted, value)
    }

    fn typed<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(name, wanted, value))
    }
}

/// Refuses more than one choice: these surfaces can carry only one.
pub(crate) fn refuse_several(fields: &NestedFields<'_>) -> Result<(), ApiError> {
    match fields.get("n") {
        Some(count) if count.as_u64() != Some(1) => Err(ApiError::unsupported("n", "More than one answer")),
        _ => Ok(()),
    }
}

/// Copies the fields that this translation does not know, for the engine.
pub(crate) fn pass_through(body: &Value, known: &[&str]) -> Map<String, Value> {
    let Some(object) = body.as_object() else { return Map::new() };
    let passed = object.iter().filter(|(name, value)| !known.contains(&name.as_str()) && !value.is_null());
    passed.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Returns an integer, which JSON may also write as `1.0`. Integers above `u32::MAX` are refused.
fn whole(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= f64::from(u32::MAX))
}

fn must_be(at: &str, wanted: &str, value: &Value) -> ApiError {
    match value {
        // A number that is too large, or has a fraction, is shown in the message.
        Value::Number(number) => ApiError::invalid(at, format!("`{at}` must be {wanted}, not {number}.")),
        _ => ApiError::invalid(at, format!("`{at}` must be {wanted}, not {}.", kind(value))),
    }
}
