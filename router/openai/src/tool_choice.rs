//! `tool_choice`: the tools that a model may or must call, and the JSON of a forced call.
//!
//! A forced call is written as vLLM has its models write it, whatever their own format: `required` is a list
//! `[{"name": …, "parameters": {…}}, …]`, a named function is that function's bare arguments.

use serde_json::{Map, Value, json};

use crate::json_schema::check_schema;
use crate::{ApiError, Fields, StructuredOutput};

/// Largest number of calls of one answer when a call is forced: without a limit the model could repeat calls for ever.
const FORCED_CALLS_MAX: usize = 16;

/// Tools that the model may or must call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// Any number of calls, or none.
    Auto,
    /// No call.
    None,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// A function among the tools of a request. `router-parsers` has a similar type for texts; this crate does not depend on it.
struct Function<'a> {
    name: &'a str,
    parameters: Option<&'a Value>,
    is_strict: bool,
}

fn functions(tools: Option<&Value>) -> impl Iterator<Item = Function<'_>> {
    let entries = tools.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    entries.iter().filter_map(|entry| {
        let function = entry.get("function").unwrap_or(entry);
        Some(Function {
            name: function.get("name")?.as_str()?,
            parameters: function.get("parameters").filter(|parameters| !parameters.is_null()),
            is_strict: function.get("strict") == Some(&Value::Bool(true)),
        })
    })
}

impl Function<'_> {
    /// Schema of the arguments, which are an object.
    fn arguments(&self) -> Result<Value, ApiError> {
        let bad = |why: &str| {
            let message = format!("The parameters of the function {:?} cannot be used: {why}.", self.name);
            ApiError::invalid("tools", message)
        };
        let mut keywords = match self.parameters {
            None => Map::from_iter([("additionalProperties".to_owned(), Value::Bool(false))]),
            Some(Value::Object(keywords)) => keywords.clone(),
            Some(_) => return Err(bad("they must be an object")),
        };
        if *keywords.entry("type").or_insert_with(|| "object".into()) != "object" {
            return Err(bad("their `type` must be `object`"));
        }
        let schema = Value::Object(keywords);
        check_schema(&schema).map_err(|why| bad(&why))?;
        Ok(schema)
    }
}

impl ToolChoice {
    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, ApiError> {
        let bad = |message: String| Err(ApiError::invalid("tool_choice", message));
        let choice = match fields.get("tool_choice") {
            None => Self::Auto,
            Some(value) => match (value.as_str(), value["function"]["name"].as_str()) {
                (Some("auto"), _) => Self::Auto,
                (Some("none"), _) => Self::None,
                (Some("required"), _) => Self::Required,
                (None, Some(name)) if value["type"] == "function" => Self::Named(name.to_owned()),
                _ => {
                    return bad("`tool_choice` must be `none`, `auto`, `required` or a function.".to_owned());
                }
            },
        };
        let tools = fields.get("tools");
        match &choice {
            Self::Required if functions(tools).next().is_none() => {
                bad("`tool_choice` requires a call, but there are no `tools`.".to_owned())
            }
            Self::Named(name) if !functions(tools).any(|function| function.name == name) => {
                bad(format!("`tool_choice` names the function {name:?}, which is not among `tools`."))
            }
            _ => Ok(choice),
        }
    }

    /// Schema of a forced call; `None` when no call is forced. `is_parallel`: more than one call is allowed.
    pub(super) fn forced_output(
        &self,
        tools: Option<&Value>,
        is_parallel: bool,
    ) -> Result<Option<StructuredOutput>, ApiError> {
        match self {
            Self::Auto | Self::None => Ok(None),
            Self::Required => {
                let count = if is_parallel { FORCED_CALLS_MAX } else { 1 };
                let (mut calls, mut definitions, mut is_strict) = (Vec::new(), Map::new(), true);
                for (index, function) in functions(tools).enumerate() {
                    let base = format!("#/$defs/{index}");
                    let mut arguments = function.arguments()?;
                    rebase(&mut arguments, &base);
                    definitions.insert(index.to_string(), arguments);
                    is_strict &= function.is_strict;
                    calls.push(json!({
                        "type": "object",
                        "properties": { "name": { "const": function.name }, "parameters": { "$ref": base } },
                        "required": ["name", "parameters"],
                        "additionalProperties": false,
                    }));
                }
                let schema = json!({
                    "type": "array", "minItems": 1, "maxItems": count, "items": { "anyOf": calls },
                    "$defs": definitions,
                });
                StructuredOutput::new("tools", schema, is_strict).map(Some)
            }
            Self::Named(name) => {
                let Some(function) = functions(tools).find(|function| function.name == name) else {
                    return Ok(None);
                };
                StructuredOutput::new("tools", function.arguments()?, function.is_strict).map(Some)
            }
        }
    }
}

/// Prefixes each `$ref` with `base`, the schema's new place; data values with the same key stay.
fn rebase(schema: &mut Value, base: &str) {
    let keywords = match schema {
        Value::Array(schemas) => return schemas.iter_mut().for_each(|schema| rebase(schema, base)),
        Value::Object(keywords) => keywords,
        _ => return,
    };
    for (keyword, value) in keywords.iter_mut() {
        match (keyword.as_str(), value) {
            ("$ref", Value::String(reference)) => {
                if let Some(rest) = reference.strip_prefix('#') {
                    *reference = format!("{base}{rest}");
                }
            }
            ("const" | "enum" | "examples" | "default", _) => {}
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(|schema| rebase(schema, base));
            }
            (_, other) => rebase(other, base),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools() -> Value {
        json!([
            {"type": "function", "function": {"name": "f", "parameters": {
                "properties": {"x": {"$ref": "#/$defs/n"}, "const": {"$ref": "#/$defs/n"}, "y": {"const": {"$ref": "#"}}},
                "$defs": {"n": {"type": "integer"}}}}},
            {"type": "function", "function": {"name": "g", "strict": true}},
        ])
    }

    fn choice(choice: Value, tools: Value) -> Result<ToolChoice, ApiError> {
        let body = json!({ "tool_choice": choice, "tools": tools });
        ToolChoice::parse(Fields(body.as_object().expect("an object")))
    }

    #[test]
    fn forced_calls_are_json_of_the_functions() {
        let required = choice("required".into(), tools()).expect("parses");
        let output = required.forced_output(Some(&tools()), false).expect("a schema").expect("forced");
        assert_eq!((output.param, output.is_strict), ("tools", false));
        assert_eq!(output.schema["maxItems"], 1);
        assert_eq!(output.schema["items"]["anyOf"][1]["properties"]["name"]["const"], "g");
        let first = &output.schema["items"]["anyOf"][0]["properties"]["parameters"]["$ref"];
        assert_eq!(first, "#/$defs/0");
        assert_eq!(output.schema["$defs"]["0"]["properties"]["x"]["$ref"], "#/$defs/0/$defs/n");
        assert_eq!(output.schema["$defs"]["0"]["properties"]["const"]["$ref"], "#/$defs/0/$defs/n", "a name");
        assert_eq!(output.schema["$defs"]["0"]["properties"]["y"]["const"]["$ref"], "#", "a value");
        assert_eq!(output.schema["$defs"]["1"]["type"], "object");
        let named = json!({"type": "function", "function": {"name": "g"}});
        let named = choice(named, tools()).expect("parses");
        assert_eq!(named, ToolChoice::Named("g".to_owned()));
        let output = named.forced_output(Some(&tools()), true).expect("a schema").expect("forced");
        assert_eq!(output.schema, json!({"additionalProperties": false, "type": "object"}));
        assert!(output.is_strict);
        for free in ["auto", "none"] {
            let free = choice(free.into(), tools()).expect("parses");
            assert_eq!(free.forced_output(Some(&tools()), true), Ok(None));
        }
    }

    #[test]
    fn bad_choices_and_tools_are_named() {
        for (asked, tools) in [
            (json!("required"), json!([])),
            (json!("required"), Value::Null),
            (json!("some"), tools()),
            (json!(5), tools()),
            (json!({"type": "function", "function": {"name": "h"}}), tools()),
            (json!({"type": "allowed_tools"}), tools()),
        ] {
            let error = choice(asked.clone(), tools).expect_err("refused");
            assert_eq!(error.param.as_deref(), Some("tool_choice"), "{asked}");
        }
        for parameters in [json!(5), json!({"type": "string"}), json!({"properties": 5})] {
            let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
            let required = choice("required".into(), tools.clone()).expect("parses");
            let error = required.forced_output(Some(&tools), true).expect_err("refused");
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("tools")), "{tools}");
        }
    }
}
