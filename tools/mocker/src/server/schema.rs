//! Generates a JSON value that a simple schema allows: for `response_format` and for the arguments of tool calls.

use serde_json::{Map, Value, json};

/// Most levels of nesting; deeper values are null.
const DEPTH_MAX: usize = 16;
/// Most items of an array and characters of a text that a schema can require.
const LENGTH_MAX: u64 = 64;

/// Returns a value that the schema allows. Patterns and formats are ignored.
pub(crate) fn instance(schema: &Value) -> Value {
    value(schema, schema, DEPTH_MAX)
}

fn value(schema: &Value, root: &Value, depth: usize) -> Value {
    if depth == 0 {
        return Value::Null;
    }
    if let Some(constant) = schema.get("const") {
        return constant.clone();
    }
    if let Some(first) = schema["enum"].as_array().and_then(|values| values.first()) {
        return first.clone();
    }
    if let Some(path) = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
        return root.pointer(path).map_or(Value::Null, |schema| value(schema, root, depth - 1));
    }
    for several in ["anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema[several].as_array().and_then(|schemas| schemas.first()) {
            return value(first, root, depth - 1);
        }
    }
    let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str());
    match kind {
        Some("string") => {
            let length = schema["minLength"].as_u64().unwrap_or(4).min(LENGTH_MAX);
            let length = schema["maxLength"].as_u64().map_or(length, |most| length.min(most));
            Value::from("mock".chars().cycle().take(length as usize).collect::<String>())
        }
        Some("integer") => {
            let above = schema["exclusiveMinimum"].as_i64().map(|low| low.saturating_add(1));
            Value::from(schema["minimum"].as_i64().or(above).unwrap_or(0))
        }
        Some("number") => schema["minimum"].as_f64().map_or_else(|| json!(0.5), Value::from),
        Some("boolean") => Value::from(true),
        Some("array") => {
            let count = schema["minItems"].as_u64().unwrap_or(1).min(LENGTH_MAX);
            (0..count).map(|_| value(&schema["items"], root, depth - 1)).collect()
        }
        Some("object") => object(schema, root, depth),
        None if schema.get("properties").is_some() => object(schema, root, depth),
        _ => Value::Null,
    }
}

fn object(schema: &Value, root: &Value, depth: usize) -> Value {
    let required = schema["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = required.iter().filter_map(Value::as_str);
    let fields: Map<String, Value> =
        names.map(|name| (name.to_owned(), value(&schema["properties"][name], root, depth - 1))).collect();
    Value::Object(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simple_schemas_are_met() {
        for (schema, expected) in [
            (json!({"type": "object"}), json!({})),
            (json!({"enum": ["b", "a"]}), json!("b")),
            (json!({"type": ["integer", "null"], "minimum": 7}), json!(7)),
            (json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2}), json!([true, true])),
            (
                json!({"$defs": {"c": {"const": 5}}, "type": "object", "required": ["x", "y"],
                    "properties": {"x": {"$ref": "#/$defs/c"}, "y": {"type": "string"}, "z": {"type": "null"}}}),
                json!({"x": 5, "y": "mock"}),
            ),
            (json!({"anyOf": [{"type": "number"}, {"type": "null"}]}), json!(0.5)),
        ] {
            assert_eq!(instance(&schema), expected, "{schema}");
        }
        let endless = json!({"$ref": "#"});
        assert_eq!(instance(&endless), Value::Null);
    }
}
