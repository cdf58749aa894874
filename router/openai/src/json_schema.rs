//! Checks of JSON schemas before an engine makes a grammar of them.
//!
//! The compiler takes schemas of any client, but it panics on some values of the wrong type (`llguidance` 1.9: `limited_str` cuts
//! a text within a character) and overflows on some numbers, and a release build aborts on a panic; it recurses along
//! references. So keywords have their types, numbers and counts their ranges, references point to definitions only, and all
//! that is nested or repeated has a limit.

use serde_json::{Map, Value};

use crate::fields::kind;
use crate::schema_size::check_size;

/// Largest schema, as JSON text.
pub(super) const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Values in a schema, annotations included. References lead the compiler's recursion through each of them once at most.
const VALUES_MAX: usize = 8192;
/// Deepest nesting of objects and arrays in the schema's JSON.
const DEPTH_MAX: usize = 64;
/// Properties of one object, and names in one `required`.
const PROPERTIES_MAX: usize = 512;
/// Patterns of one `patternProperties`: each is compared with each.
const PATTERNS_MAX: usize = 16;
/// Schemas of one `anyOf` or of its like.
const ALTERNATIVES_MAX: usize = 512;
/// Longest regular expression.
const PATTERN_BYTES_MAX: usize = 1024;
/// Largest length or number of items and properties.
const COUNT_MAX: u64 = (1 << 31) - 1;
/// Largest magnitude of a number; beyond it the compiler's integers overflow.
const NUMBER_MAX: f64 = 1e18;
/// Largest `multipleOf`.
const MULTIPLE_MAX: f64 = 10_000.0;
/// Reciprocal of the smallest `multipleOf`: six decimals. The automaton's states grow with both.
const DECIMAL_SCALE: f64 = 1e6;
/// Whether a schema is one that a compiler can be given; otherwise what is wrong with it.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    if serde_json::to_string(schema).map_or(0, |text| text.len()) > SCHEMA_BYTES_MAX {
        return Err(format!("it has more than {SCHEMA_BYTES_MAX} bytes"));
    }
    Check::default().schema(schema, 0)?;
    check_size(schema)
}

/// Goes through a schema and counts its values.
#[derive(Default)]
struct Check {
    values: usize,
}

impl Check {
    fn count(&mut self, depth: usize) -> Result<(), String> {
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err(format!("it has more than {VALUES_MAX} values"));
        }
        if depth > DEPTH_MAX {
            return Err(format!("it is nested more than {DEPTH_MAX} deep"));
        }
        Ok(())
    }

    fn schema(&mut self, schema: &Value, depth: usize) -> Result<(), String> {
        self.count(depth)?;
        let keywords = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(keywords) => keywords,
            other => return Err(format!("a schema in it must be an object, not {}", kind(other))),
        };
        keywords.iter().try_for_each(|(keyword, value)| self.keyword(keyword, value, depth + 1))
    }

    fn keyword(&mut self, keyword: &str, value: &Value, depth: usize) -> Result<(), String> {
        let wrong = |wanted: &str| Err(format!("`{keyword}` must be {wanted}, not {}", kind(value)));
        let text = value.as_str();
        match keyword {
            "properties" | "patternProperties" | "$defs" | "definitions" => match value {
                Value::Object(members) => self.members(keyword, members, depth),
                _ => wrong("an object"),
            },
            "additionalProperties" | "additionalItems" => self.schema(value, depth),
            "items" if !value.is_array() => self.schema(value, depth),
            "items" | "prefixItems" | "anyOf" | "oneOf" | "allOf" => match value {
                Value::Array(schemas) => {
                    at_most(keyword, schemas.len(), ALTERNATIVES_MAX)?;
                    self.count(depth)?;
                    schemas.iter().try_for_each(|schema| self.schema(schema, depth + 1))
                }
                _ => wrong("an array"),
            },
            "type" if text.is_some() => self.count(depth),
            "type" | "required" => match value {
                Value::Array(names) if names.iter().all(Value::is_string) => {
                    at_most(keyword, names.len(), PROPERTIES_MAX)?;
                    // The compiler's time grows with the square of the names.
                    names.iter().try_for_each(|_| self.count(depth))
                }
                _ if keyword == "type" => Err("`type` must be a name or an array of names".to_owned()),
                _ => Err("`required` must be an array of names".to_owned()),
            },
            "enum" if !value.is_array() => wrong("an array"),
            "$ref" => match text {
                Some(reference) if is_definition(reference) => self.count(depth),
                Some(_) => Err("`$ref` must point to a definition: `#/$defs/NAME` or `#`".to_owned()),
                None => wrong("a string"),
            },
            "pattern" => match text {
                Some(pattern) => {
                    check_pattern(keyword, pattern)?;
                    self.count(depth)
                }
                None => wrong("a string"),
            },
            "format" if text.is_none() => wrong("a string"),
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                match value.as_u64() {
                    Some(count) if count <= COUNT_MAX => self.count(depth),
                    _ => Err(format!("`{keyword}` must be a whole number from 0 to {COUNT_MAX}")),
                }
            }
            "minimum" | "maximum" if !value.is_number() => wrong("a number"),
            "exclusiveMinimum" | "exclusiveMaximum" if !value.is_number() && !value.is_boolean() => {
                wrong("a number")
            }
            "multipleOf" => match value.as_f64() {
                Some(step) if step > 0.0 && step <= MULTIPLE_MAX && has_six_decimals(step) => {
                    self.count(depth)
                }
                _ => Err(format!(
                    "`multipleOf` must be from 0.000001 to {MULTIPLE_MAX}, with at most six decimals"
                )),
            },
            // Keywords whose type was right above, constants, annotations, and schemas under keywords that the compiler does not
            // know (`not`, `if`, `contains`): it refuses or ignores those without reading them. To be checked with each update
            // of `llguidance` (`IMPLEMENTED` in its `json/schema.rs`).
            _ => self.plain(value, depth),
        }
    }

    fn members(&mut self, keyword: &str, members: &Map<String, Value>, depth: usize) -> Result<(), String> {
        let is_pattern = keyword == "patternProperties";
        at_most(keyword, members.len(), if is_pattern { PATTERNS_MAX } else { PROPERTIES_MAX })?;
        self.count(depth)?;
        for (name, schema) in members {
            if is_pattern {
                check_pattern(keyword, name)?;
            }
            self.schema(schema, depth + 1)?;
        }
        Ok(())
    }

    /// A value that is no schema: constants, examples and the like.
    fn plain(&mut self, value: &Value, depth: usize) -> Result<(), String> {
        self.count(depth)?;
        match value {
            Value::Number(number) if number.as_f64().is_none_or(|number| number.abs() > NUMBER_MAX) => {
                Err(format!("the number {number} is beyond {NUMBER_MAX:e}"))
            }
            Value::Array(items) => items.iter().try_for_each(|item| self.plain(item, depth + 1)),
            Value::Object(members) => members.values().try_for_each(|member| self.plain(member, depth + 1)),
            _ => Ok(()),
        }
    }
}

fn at_most(keyword: &str, count: usize, most: usize) -> Result<(), String> {
    match count <= most {
        true => Ok(()),
        false => Err(format!("`{keyword}` has more than {most} entries")),
    }
}

fn check_pattern(keyword: &str, pattern: &str) -> Result<(), String> {
    match pattern.len() <= PATTERN_BYTES_MAX {
        true => Ok(()),
        false => Err(format!("a pattern of `{keyword}` has more than {PATTERN_BYTES_MAX} bytes")),
    }
}

/// Whether a number is a whole number of millionths, as it was written.
fn has_six_decimals(number: f64) -> bool {
    (number * DECIMAL_SCALE).round() / DECIMAL_SCALE == number
}

/// Whether a reference leads to the whole schema or, from definition to definition, to one that was checked.
fn is_definition(reference: &str) -> bool {
    let mut steps = reference.split('/');
    if steps.next() != Some("#") {
        return false;
    }
    loop {
        match (steps.next(), steps.next()) {
            (None, _) => return true,
            (Some("$defs" | "definitions"), Some(_)) => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn refused_schemas_say_what_is_wrong() {
        let names: Vec<String> = (0..600).map(|at| at.to_string()).collect();
        for (schema, why) in [
            (json!({"type": 5}), "`type` must be a name or an array of names"),
            (json!({"required": ["a", 1]}), "`required` must be an array of names"),
            (json!({ "required": names }), "`required` has more than 512 entries"),
            (json!({"pattern": "a".repeat(1025)}), "a pattern of `pattern` has more than 1024 bytes"),
            (json!({"format": 1}), "`format` must be a string, not a number"),
            (json!({"maxLength": 1.5}), "`maxLength` must be a whole number from 0 to 2147483647"),
            (
                json!({"multipleOf": 1e-7}),
                "`multipleOf` must be from 0.000001 to 10000, with at most six decimals",
            ),
            (json!({"$ref": "other.json"}), "`$ref` must point to a definition: `#/$defs/NAME` or `#`"),
            (json!({"items": {"items": 5}}), "a schema in it must be an object, not a number"),
        ] {
            assert_eq!(check_schema(&schema), Err(why.to_owned()), "{schema}");
        }
    }

    #[test]
    fn schemas_that_would_harm_the_compiler_are_refused() {
        let deep = (0..40).fold(json!({}), |inner, _| json!({ "items": inner }));
        let deeper = (0..90).fold(json!({}), |inner, _| json!({ "items": inner }));
        let wide: Map<String, Value> = (0..600).map(|at| (format!("p{at}"), Value::Bool(true))).collect();
        let many: Vec<Value> = (0..9000).map(Value::from).collect();
        let accented = "é".repeat(200);
        for schema in [
            json!({"type": 5}),
            json!({"properties": []}),
            json!({"format": [accented]}),
            json!({"pattern": {"é": accented}}),
            json!({"required": [accented, 1]}),
            json!({"minimum": accented}),
            json!({"multipleOf": 0}),
            json!({"multipleOf": 1e-9}),
            json!({"const": i64::MIN}),
            json!({"enum": [[{"a": 1e300}]]}),
            json!({"maxItems": 9_007_199_254_740_991_u64}),
            json!({"minLength": -1}),
            json!({"$ref": "#/enum/0", "enum": [{"format": [accented]}]}),
            json!({"$ref": "https://example.com/schema"}),
            json!({"$ref": "#name"}),
            json!({"anyOf": {"a": 1}}),
            json!({"items": "x"}),
            json!({ "properties": wide }),
            json!({ "enum": many }),
            deeper,
        ] {
            assert!(check_schema(&schema).is_err(), "{schema}");
        }
        for schema in [
            json!({"type": ["object", "null"], "properties": {"type": {"const": "é"}, "$ref": {"type": "string"}}}),
            json!({"$defs": {"a": {"$defs": {"b": true}}}, "$ref": "#/$defs/a/$defs/b"}),
            json!({"$ref": "#", "examples": [{"format": [1]}], "description": "x"}),
            json!({"multipleOf": 2.05}),
            json!({"multipleOf": 4.1}),
            json!({"multipleOf": 0.000_001}),
            json!({"type": "number", "multipleOf": 0.01, "minimum": -9_007_199_254_740_991_i64}),
            json!({"type": "number", "exclusiveMinimum": true, "minimum": 0}),
            json!({"type": "array", "items": [{"type": "null"}], "additionalItems": false}),
            deep,
        ] {
            assert_eq!(check_schema(&schema), Ok(()), "{schema}");
        }
    }
}
