//! Outputs that must be JSON of a schema: `response_format`, vLLM's `structured_outputs`, and calls that `tool_choice`
//! forces.
//!
//! A schema is checked here before an engine makes a grammar of it. The compiler takes schemas of any client, but it panics
//! on some values of the wrong type (`llguidance` 1.9: `limited_str` cuts a text within a character) and overflows on some
//! numbers, and a release build aborts on a panic; it recurses along references. So keywords have their types, numbers and
//! counts their ranges, references lead to definitions only, and all that is nested or repeated has a limit.

use serde_json::{Map, Value, json};

use super::fields::kind;
use super::{ApiError, Fields};

/// The field with which an engine is asked for a structured output.
pub const STRUCTURED_OUTPUTS: &str = "structured_outputs";

/// Largest schema, as JSON text.
pub const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Values in a schema, annotations included. References lead the compiler's recursion through each of them once at most.
const VALUES_MAX: usize = 8192;
/// Deepest nesting of objects and arrays; a schema in a schema is two deeper.
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
const COUNT_MAX: u64 = 1 << 31;
/// Largest magnitude of a number; beyond it the compiler's integers overflow.
const NUMBER_MAX: f64 = 1e18;
/// Largest `multipleOf`, and how many of it make one: the states of its automaton grow with both.
const MULTIPLE_MAX: f64 = 10_000.0;
const DECIMALS_MAX: f64 = 1e6;

/// The JSON that an output must be.
#[derive(Debug, Clone, PartialEq)]
pub struct StructuredOutput {
    /// JSON schema, an object.
    pub schema: Value,
    /// Keywords that a grammar cannot express are refused; otherwise they are left out.
    pub is_strict: bool,
    /// The field of the client's request that asked for it, for errors.
    pub param: &'static str,
}

impl StructuredOutput {
    /// An output of this schema.
    pub fn new(param: &'static str, schema: Value, is_strict: bool) -> Result<Self, ApiError> {
        let checked = match schema.is_object() {
            true => check_schema(&schema),
            false => Err(format!("it must be an object, not {}", kind(&schema))),
        };
        match checked {
            Ok(()) => Ok(Self { schema, is_strict, param }),
            Err(why) => {
                Err(ApiError::invalid(param, format!("The schema of `{param}` cannot be used: {why}.")))
            }
        }
    }

    /// What a request asks for.
    pub(super) fn parse(fields: Fields<'_>) -> Result<Option<Self>, ApiError> {
        let format = response_format(fields)?;
        let Some(asked) = fields.get(STRUCTURED_OUTPUTS) else { return Ok(format) };
        let bad = |message: String| Err(ApiError::invalid(STRUCTURED_OUTPUTS, message));
        let Value::Object(asked) = asked else {
            return bad(format!("`{STRUCTURED_OUTPUTS}` must be an object, not {}.", kind(asked)));
        };
        if format.is_some() {
            return bad(format!("`{STRUCTURED_OUTPUTS}` and `response_format` exclude each other."));
        }
        let asked = Fields(asked);
        let other = asked.0.keys().find(|name| {
            !matches!(name.as_str(), "json" | "json_object" | "strict")
                && asked.get(name).is_some_and(is_asked)
        });
        if let Some(name) = other {
            return bad(format!(
                "`{STRUCTURED_OUTPUTS}.{name}` is not supported; `json` and `json_object` are."
            ));
        }
        let is_strict = asked.flag("strict")?.unwrap_or(true);
        match asked.get("json") {
            // vLLM takes a schema as text, too.
            Some(Value::String(text)) if text.len() <= SCHEMA_BYTES_MAX => match serde_json::from_str(text) {
                Ok(schema) => Self::new(STRUCTURED_OUTPUTS, schema, is_strict).map(Some),
                Err(error) => bad(format!("`{STRUCTURED_OUTPUTS}.json` is not JSON: {error}.")),
            },
            Some(schema) => Self::new(STRUCTURED_OUTPUTS, schema.clone(), is_strict).map(Some),
            None if asked.flag("json_object")?.unwrap_or(false) => Ok(Some(any_object(STRUCTURED_OUTPUTS))),
            None => Ok(None),
        }
    }

    /// As an engine is asked for it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({ "json": self.schema, "strict": self.is_strict })
    }
}

/// Whether an option that is there asks for something: vLLM's clients send all of them, most of them off.
fn is_asked(value: &Value) -> bool {
    *value != Value::Bool(false)
}

fn any_object(param: &'static str) -> StructuredOutput {
    StructuredOutput { schema: json!({ "type": "object" }), is_strict: true, param }
}

fn response_format(fields: Fields<'_>) -> Result<Option<StructuredOutput>, ApiError> {
    const PARAM: &str = "response_format";
    let Some(format) = fields.get(PARAM) else { return Ok(None) };
    let bad = |message: &str| Err(ApiError::invalid(PARAM, message.to_owned()));
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(any_object(PARAM))),
        Some("json_schema") => {
            let Some(schema) = format["json_schema"].get("schema") else {
                return bad("`response_format.json_schema.schema` is required.");
            };
            let is_strict = format["json_schema"]["strict"].as_bool().unwrap_or(true);
            StructuredOutput::new(PARAM, schema.clone(), is_strict).map(Some)
        }
        _ => bad("`response_format.type` must be `text`, `json_object` or `json_schema`."),
    }
}

/// Whether a schema is one that a compiler can be given; otherwise what is wrong with it.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    if serde_json::to_string(schema).map_or(0, |text| text.len()) > SCHEMA_BYTES_MAX {
        return Err(format!("it has more than {SCHEMA_BYTES_MAX} bytes"));
    }
    Check::default().schema(schema, 0)
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
                    self.count(depth)
                }
                _ => wrong("an array of names"),
            },
            "enum" if !value.is_array() => wrong("an array"),
            "$ref" => match text {
                Some(reference) if is_definition(reference) => self.count(depth),
                Some(_) => Err("`$ref` must lead to a definition: `#/$defs/NAME` or `#`".to_owned()),
                None => wrong("a text"),
            },
            "pattern" => match text {
                Some(pattern) => at_most(keyword, pattern.len(), PATTERN_BYTES_MAX),
                None => wrong("a text"),
            },
            "format" if text.is_none() => wrong("a text"),
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                match value.as_u64() {
                    Some(count) if count < COUNT_MAX => self.count(depth),
                    _ => Err(format!("`{keyword}` must be a whole number from 0 to {}", COUNT_MAX - 1)),
                }
            }
            "minimum" | "maximum" if !value.is_number() => wrong("a number"),
            "exclusiveMinimum" | "exclusiveMaximum" if !value.is_number() && !value.is_boolean() => {
                wrong("a number")
            }
            "multipleOf" => match value.as_f64() {
                Some(step) if step > 0.0 && step <= MULTIPLE_MAX && (step * DECIMALS_MAX).fract() == 0.0 => {
                    self.count(depth)
                }
                _ => Err(format!("`multipleOf` must be from 0.000001 to {MULTIPLE_MAX}, with six decimals")),
            },
            // Numbers, texts, and what only describes.
            _ => self.plain(value, depth),
        }
    }

    fn members(&mut self, keyword: &str, members: &Map<String, Value>, depth: usize) -> Result<(), String> {
        let is_pattern = keyword == "patternProperties";
        at_most(keyword, members.len(), if is_pattern { PATTERNS_MAX } else { PROPERTIES_MAX })?;
        self.count(depth)?;
        for (name, schema) in members {
            if is_pattern {
                at_most(keyword, name.len(), PATTERN_BYTES_MAX)?;
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
        false => Err(format!("`{keyword}` is longer than {most}")),
    }
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
    use super::*;

    fn asked(body: &Value) -> Result<Option<StructuredOutput>, ApiError> {
        let Value::Object(fields) = body else { panic!("an object") };
        StructuredOutput::parse(Fields(fields))
    }

    #[test]
    fn formats_become_schemas() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let format = |inner: Value| json!({"response_format": {"type": "json_schema", "json_schema": inner}});
        for (body, expected, is_strict) in [
            (json!({"response_format": {"type": "json_object"}}), json!({"type": "object"}), true),
            (format(json!({"name": "n", "schema": schema})), schema.clone(), true),
            (format(json!({"schema": schema, "strict": false})), schema.clone(), false),
            (json!({"structured_outputs": {"json": schema, "regex": null}}), schema.clone(), true),
            (
                json!({"structured_outputs": {"json": schema.to_string(), "strict": false}}),
                schema.clone(),
                false,
            ),
            (json!({"structured_outputs": {"json_object": true}}), json!({"type": "object"}), true),
        ] {
            let output = asked(&body).expect("parses").expect("asks for JSON");
            assert_eq!((&output.schema, output.is_strict), (&expected, is_strict), "{body}");
            let again = asked(&json!({ "structured_outputs": output.to_json() })).expect("parses");
            let again = again.expect("asks for JSON");
            assert_eq!((again.schema, again.is_strict), (output.schema, is_strict), "{body}");
        }
        for body in
            [json!({}), json!({"response_format": {"type": "text"}}), json!({"structured_outputs": {}})]
        {
            assert_eq!(asked(&body), Ok(None), "{body}");
        }
    }

    #[test]
    fn bad_formats_name_their_field() {
        for (body, param) in [
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": true}}}),
                "response_format",
            ),
            (json!({"structured_outputs": {"regex": "a"}}), "structured_outputs"),
            (json!({"structured_outputs": {"json": "{"}}), "structured_outputs"),
            (json!({"structured_outputs": 1}), "structured_outputs"),
        ] {
            let error = asked(&body).expect_err("refused");
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}");
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
            json!({"type": "number", "multipleOf": 0.01, "minimum": -9_007_199_254_740_991_i64}),
            json!({"type": "number", "exclusiveMinimum": true, "minimum": 0}),
            json!({"type": "array", "items": [{"type": "null"}], "additionalItems": false}),
            deep,
        ] {
            assert_eq!(check_schema(&schema), Ok(()), "{schema}");
        }
    }
}
