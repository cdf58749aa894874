//! Typed access to the fields of a JSON object; every error names the field.

use serde_json::{Map, Value};

use crate::ApiError;

/// Fields of a request.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// Returns the value, unless it is absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Returns a number within `low..=high`.
    pub fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number >= low && number <= high => Ok(Some(number as f32)),
            Some(number) => Err(ApiError::invalid(
                name,
                format!("`{name}` is {number}, but must be from {low} to {high}."),
            )),
            None => Err(ApiError::invalid(name, format!("`{name}` must be a number, not {}.", kind(value)))),
        }
    }

    /// Returns an integer within `low..=high`.
    pub fn integer(&self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_i64().or_else(|| whole(value)) {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            Some(number) => Err(ApiError::invalid(
                name,
                format!("`{name}` is {number}, but must be from {low} to {high}."),
            )),
            None => {
                // A number that is too large, or has a fraction, is shown in the message.
                let given = if value.is_number() { value.to_string() } else { kind(value).to_owned() };
                let message = format!("`{name}` must be an integer from {low} to {high}, not {given}.");
                Err(ApiError::invalid(name, message))
            }
        }
    }

    /// Returns a boolean.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let flag = value.as_bool();
        flag.map(Some).ok_or_else(|| {
            ApiError::invalid(name, format!("`{name}` must be true or false, not {}.", kind(value)))
        })
    }

    /// Returns a string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let text = value.as_str();
        text.map(Some).ok_or_else(|| {
            ApiError::invalid(name, format!("`{name}` must be a string, not {}.", kind(value)))
        })
    }

    /// Returns token ids.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        self.get(name).map(|value| token_ids(name, value)).transpose()
    }
}

/// Returns a whole number that is written as a float; floats beyond 2^53 are not exact and refused.
fn whole(value: &Value) -> Option<i64> {
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT_MAX)?;
    Some(number as i64)
}

/// Token ids of a JSON array.
pub(super) fn token_ids(name: &str, value: &Value) -> Result<Vec<u32>, ApiError> {
    let bad = || ApiError::invalid(name, format!("`{name}` must be an array of token ids."));
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(bad);
    value.as_array().ok_or_else(bad)?.iter().map(id).collect()
}

/// Kind of a value, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
