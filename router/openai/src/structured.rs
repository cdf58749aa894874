//! Outputs that must be JSON of a schema: `response_format`, vLLM's `structured_outputs`, and calls that `tool_choice`
//! forces.

use serde_json::{Value, json};

use crate::fields::kind;
use crate::json_schema::{SCHEMA_BYTES_MAX, check_schema};
use crate::{ApiError, Fields};

/// Field that requests a structured output from an engine.
pub const STRUCTURED_OUTPUTS: &str = "structured_outputs";

/// JSON that an output must match.
#[derive(Debug, Clone, PartialEq)]
pub struct StructuredOutput {
    /// JSON schema, an object.
    pub schema: Value,
    /// Whether keywords that a grammar cannot express are refused; otherwise they are left out. Default: true for a schema
    /// that the request gives as its format, false for the parameters of a tool, which were often written for models that only
    /// read them.
    pub is_strict: bool,
    /// Field of the client's request with the schema, for error messages.
    pub param: &'static str,
}

impl StructuredOutput {
    /// Returns an output of this schema.
    pub fn new(param: &'static str, schema: Value, is_strict: bool) -> Result<Self, ApiError> {
        let checked = match schema.is_object() {
            true => check_schema(&schema),
            false => Err(format!("it must be an object, not {}", kind(&schema))),
        };
        match checked {
            Ok(()) => Ok(Self { schema, is_strict, param }),
            Err(why) => Err(ApiError::invalid(param, format!("The schema cannot be used: {why}."))),
        }
    }

    /// Parses the structured output that a request asks for.
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
            // vLLM also accepts a schema as text.
            Some(Value::String(text)) if text.len() <= SCHEMA_BYTES_MAX => match serde_json::from_str(text) {
                Ok(schema) => Self::new(STRUCTURED_OUTPUTS, schema, is_strict).map(Some),
                Err(error) => bad(format!("`{STRUCTURED_OUTPUTS}.json` is not JSON: {error}.")),
            },
            Some(schema) => Self::new(STRUCTURED_OUTPUTS, schema.clone(), is_strict).map(Some),
            None if asked.flag("json_object")?.unwrap_or(false) => Ok(Some(any_object(STRUCTURED_OUTPUTS))),
            None => Ok(None),
        }
    }

    /// Returns the field's value in a request to an engine.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({ "json": self.schema, "strict": self.is_strict })
    }
}

/// Whether an option is set. vLLM's clients send every option, most of them null or false.
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
            let is_strict = match &format["json_schema"]["strict"] {
                Value::Null => true,
                Value::Bool(is_strict) => *is_strict,
                _ => return bad("`response_format.json_schema.strict` must be true or false."),
            };
            StructuredOutput::new(PARAM, schema.clone(), is_strict).map(Some)
        }
        _ => bad("`response_format.type` must be `text`, `json_object` or `json_schema`."),
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
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "no"}}}),
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
}
