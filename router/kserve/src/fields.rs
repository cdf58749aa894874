//! Names under which clients give sampling parameters, and the fields of OpenAI's body to which they are
//! mapped.
//!
//! A parameter may arrive as a tensor, in the request's parameters or in the JSON object of
//! `sampling_parameters`, and Triton's own examples write numbers as strings there; a known name is
//! therefore parsed by its own type.

use serde_json::{Map, Number, Value};

use crate::error::Error;
use crate::wire::{Tensor, Values};

/// Type of a known parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Integer,
    Number,
    Flag,
    /// A string, a list of strings, or a JSON list of strings in a string. Empty strings are dropped.
    Words,
    /// A count that must be 1, since a prompt has one answer.
    One,
    /// Accepted and ignored, since the engine has its own value.
    Ignored,
}

/// Name, field and type of each parameter. Aliases are those of Triton's TensorRT-LLM backend.
const KNOWN: [(&str, &str, Kind); 28] = [
    ("max_tokens", "max_tokens", Kind::Integer),
    ("max_new_tokens", "max_tokens", Kind::Integer),
    ("request_output_len", "max_tokens", Kind::Integer),
    ("min_tokens", "min_tokens", Kind::Integer),
    ("min_length", "min_tokens", Kind::Integer),
    ("temperature", "temperature", Kind::Number),
    ("top_p", "top_p", Kind::Number),
    ("runtime_top_p", "top_p", Kind::Number),
    ("top_k", "top_k", Kind::Integer),
    ("runtime_top_k", "top_k", Kind::Integer),
    ("min_p", "min_p", Kind::Number),
    ("seed", "seed", Kind::Integer),
    ("random_seed", "seed", Kind::Integer),
    ("frequency_penalty", "frequency_penalty", Kind::Number),
    ("presence_penalty", "presence_penalty", Kind::Number),
    ("repetition_penalty", "repetition_penalty", Kind::Number),
    ("logprobs", "logprobs", Kind::Integer),
    ("ignore_eos", "ignore_eos", Kind::Flag),
    ("skip_special_tokens", "skip_special_tokens", Kind::Flag),
    ("include_stop_str_in_output", "include_stop_str_in_output", Kind::Flag),
    ("stop", "stop", Kind::Words),
    ("stop_words", "stop", Kind::Words),
    ("bad_words", "bad_words", Kind::Words),
    ("n", "n", Kind::One),
    ("best_of", "best_of", Kind::One),
    ("beam_width", "beam_width", Kind::One),
    ("end_id", "", Kind::Ignored),
    ("pad_id", "", Kind::Ignored),
];

/// Fields that this crate writes itself.
const OWN: [&str; 5] = ["model", "prompt", "stream_options", "echo", "text_input"];

/// Whether a tensor may have this name.
pub(crate) fn is_known(name: &str) -> bool {
    KNOWN.iter().any(|(known, _, _)| *known == name)
}

/// Sets a parameter in the body. Unknown names are passed on unchanged.
pub(crate) fn set(body: &mut Map<String, Value>, name: &str, value: Value) -> Result<(), Error> {
    if OWN.contains(&name) {
        return Err(Error::field(name, "cannot be set by a parameter"));
    }
    if value.is_null() {
        return Ok(());
    }
    let Some((_, field, kind)) = KNOWN.iter().find(|(known, _, _)| *known == name) else {
        body.insert(name.to_owned(), value);
        return Ok(());
    };
    let wanted = match kind {
        Kind::Ignored => return Ok(()),
        Kind::One if integer(&value).is_some_and(|number| number.as_i64() == Some(1)) => return Ok(()),
        Kind::One => {
            return Err(Error::field(
                name,
                format!("one answer is given to a prompt, so this must be 1, not {value}"),
            ));
        }
        Kind::Integer => integer(&value).map(Value::Number).ok_or("an integer"),
        Kind::Number => number(&value).map(Value::Number).ok_or("a number"),
        Kind::Flag => flag(&value).map(Value::Bool).ok_or("true or false"),
        Kind::Words => words(&value).ok_or("a string or a list of strings"),
    };
    let read = wanted.map_err(|wanted| Error::field(name, format!("must be {wanted}, not {value}")))?;
    if read.as_array().is_none_or(|list| !list.is_empty()) {
        body.insert((*field).to_owned(), read);
    }
    Ok(())
}

/// Converts a tensor to JSON: the element if it has one, a list otherwise.
pub(crate) fn value_of(tensor: &Tensor) -> Result<Value, Error> {
    let mut values: Vec<Value> = match &tensor.values {
        Values::Bool(values) => values.iter().map(|value| Value::Bool(*value)).collect(),
        Values::Int(values) => values.iter().map(|value| Value::from(*value)).collect(),
        Values::Unsigned(values) => values.iter().map(|value| Value::from(*value)).collect(),
        Values::Float(values) => {
            let numbers = values.iter().map(|value| Number::from_f64(*value).map(Value::Number));
            numbers.collect::<Option<_>>().ok_or_else(|| Error::field(&tensor.name, "must be finite"))?
        }
        Values::Bytes(values) => {
            let texts = values.iter().map(|value| text_of(&tensor.name, value).map(Value::from));
            texts.collect::<Result<_, _>>()?
        }
    };
    if values.len() == 1 { Ok(values.remove(0)) } else { Ok(Value::Array(values)) }
}

/// Returns an element of type BYTES as text.
pub(crate) fn text_of<'a>(name: &str, bytes: &'a [u8]) -> Result<&'a str, Error> {
    std::str::from_utf8(bytes).map_err(|_| Error::field(name, "is not UTF-8"))
}

/// Parses true or false, also as 0 or 1 or in words.
pub(crate) fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        Value::Number(number) => match number.as_i64()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
        Value::String(text) if text.eq_ignore_ascii_case("true") => Some(true),
        Value::String(text) if text.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    }
}

fn integer(value: &Value) -> Option<Number> {
    match value {
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.clone()),
        Value::Number(number) => {
            // Beyond 2^53 a float does not identify one integer.
            let float = number
                .as_f64()
                .filter(|float| float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0)?;
            Some(Number::from(float as i64))
        }
        Value::String(text) => {
            let text = text.trim();
            text.parse::<i64>().map(Number::from).or_else(|_| text.parse::<u64>().map(Number::from)).ok()
        }
        _ => None,
    }
}

fn number(value: &Value) -> Option<Number> {
    match value {
        Value::Number(number) => Some(number.clone()),
        Value::String(text) => Number::from_f64(text.trim().parse().ok()?),
        _ => None,
    }
}

fn words(value: &Value) -> Option<Value> {
    let mut list = match value {
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Array(list)) if list.iter().all(Value::is_string) => list,
            _ => vec![value.clone()],
        },
        Value::Array(list) if list.iter().all(Value::is_string) => list.clone(),
        _ => return None,
    };
    list.retain(|word| word.as_str().is_some_and(|word| !word.is_empty()));
    Some(Value::Array(list))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn after(name: &str, value: Value) -> Result<Value, String> {
        let mut body = Map::new();
        set(&mut body, name, value).map_err(|error| error.to_string())?;
        Ok(Value::Object(body))
    }

    #[test]
    fn values_of_every_kind() {
        let cases = [
            ("max_tokens", json!(5), json!({ "max_tokens": 5 })),
            ("max_tokens", json!("100"), json!({ "max_tokens": 100 })),
            ("max_tokens", json!(7.0), json!({ "max_tokens": 7 })),
            ("runtime_top_k", json!(-1), json!({ "top_k": -1 })),
            ("random_seed", json!(u64::MAX), json!({ "seed": u64::MAX })),
            ("temperature", json!("0.1"), json!({ "temperature": 0.1 })),
            ("temperature", json!(0), json!({ "temperature": 0 })),
            ("ignore_eos", json!("True"), json!({ "ignore_eos": true })),
            ("stop", json!("a"), json!({ "stop": ["a"] })),
            ("stop", json!("[\"a\", \"b\"]"), json!({ "stop": ["a", "b"] })),
            ("stop", json!("[a"), json!({ "stop": ["[a"] })),
            ("stop_words", json!(["", "x"]), json!({ "stop": ["x"] })),
            ("bad_words", json!(""), json!({})),
            ("n", json!(1), json!({})),
            ("beam_width", json!(1), json!({})),
            ("end_id", json!(2), json!({})),
            ("guided_regex", json!("a+"), json!({ "guided_regex": "a+" })),
            ("top_p", Value::Null, json!({})),
        ];
        for (name, value, wanted) in cases {
            assert_eq!(after(name, value.clone()), Ok(wanted), "{name} = {value}");
        }
    }

    #[test]
    fn refusals_name_the_parameter() {
        let cases = [
            ("n", json!(2)),
            ("best_of", json!("2")),
            ("max_tokens", json!(1.5)),
            ("max_tokens", json!("ten")),
            ("temperature", json!("NaN")),
            ("ignore_eos", json!(2)),
            ("stop", json!([1])),
            ("model", json!("other")),
            ("prompt", json!("other")),
        ];
        for (name, value) in cases {
            let message = after(name, value).expect_err(name);
            assert!(message.starts_with(&format!("`{name}`: ")), "{message}");
        }
    }
}
