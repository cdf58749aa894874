//! Tools of a Messages request as functions of a chat completion.

use serde_json::{Map, Value, json};

use crate::ApiError;
use crate::nested_fields::NestedFields;

/// Sets `tools`, `tool_choice` and `parallel_tool_calls`.
pub(super) fn translate(fields: &NestedFields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    if let Some(tools) = fields.array("tools")?.filter(|tools| !tools.is_empty()) {
        let tools = tools.iter().enumerate().map(|(index, value)| tool(value, index));
        chat.insert("tools".to_owned(), tools.collect::<Result<Vec<_>, _>>()?.into());
    }
    let Some(choice) = fields.object("tool_choice")? else { return Ok(()) };
    let translated = match choice.required_text("type")? {
        "auto" => json!("auto"),
        "any" => json!("required"),
        "none" => json!("none"),
        "tool" => json!({ "type": "function", "function": { "name": choice.required_text("name")? } }),
        other => {
            let at = choice.at("type");
            let wanted = "`auto`, `any`, `tool` or `none`";
            return Err(ApiError::invalid(&at, format!("`{at}` must be {wanted}, not {other:?}.")));
        }
    };
    chat.insert("tool_choice".to_owned(), translated);
    if choice.flag("disable_parallel_tool_use")?.unwrap_or(false) {
        chat.insert("parallel_tool_calls".to_owned(), false.into());
    }
    Ok(())
}

fn tool(value: &Value, index: usize) -> Result<Value, ApiError> {
    let tool = NestedFields::of(value, format!("tools[{index}]"))?;
    let kind = tool.text("type")?.unwrap_or("custom");
    if kind != "custom" {
        let what = format!("A tool of type {kind:?}, which Anthropic's servers run or define,");
        return Err(ApiError::unsupported(&tool.at("type"), &what));
    }
    let schema = tool.object("input_schema")?.ok_or_else(|| tool.missing("input_schema"))?;
    let mut function = Map::new();
    function.insert("name".to_owned(), tool.required_text("name")?.into());
    if let Some(description) = tool.text("description")? {
        function.insert("description".to_owned(), description.into());
    }
    function.insert("parameters".to_owned(), schema.to_value());
    if let Some(strict) = tool.flag("strict")? {
        function.insert("strict".to_owned(), strict.into());
    }
    Ok(json!({ "type": "function", "function": function }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(body: Value) -> Result<Value, ApiError> {
        let mut chat = Map::new();
        translate(&NestedFields::of_body(&body)?, &mut chat)?;
        Ok(Value::Object(chat))
    }

    #[test]
    fn tools_become_functions() {
        let schema = json!({ "type": "object", "properties": {} });
        let got = translated(json!({ "tools": [
            { "name": "f", "description": "d", "input_schema": schema, "cache_control": { "type": "ephemeral" } },
            { "type": "custom", "name": "g", "input_schema": schema, "strict": true },
        ] }));
        let wanted = json!({ "tools": [
            { "type": "function", "function": { "name": "f", "description": "d", "parameters": schema } },
            { "type": "function", "function": { "name": "g", "parameters": schema, "strict": true } },
        ] });
        assert_eq!(got, Ok(wanted));
        assert_eq!(translated(json!({ "tools": [] })), Ok(json!({})));
    }

    #[test]
    fn choices() {
        let cases = [
            (json!({ "type": "auto" }), json!({ "tool_choice": "auto" })),
            (
                json!({ "type": "any", "disable_parallel_tool_use": true }),
                json!({ "tool_choice": "required", "parallel_tool_calls": false }),
            ),
            (json!({ "type": "none" }), json!({ "tool_choice": "none" })),
            (
                json!({ "type": "tool", "name": "f" }),
                json!({ "tool_choice": { "type": "function", "function": { "name": "f" } } }),
            ),
        ];
        for (choice, wanted) in cases {
            assert_eq!(translated(json!({ "tool_choice": choice })), Ok(wanted));
        }
    }

    #[test]
    fn complaints_name_the_tool() {
        let cases = [
            (json!({ "tools": [{ "type": "web_search_20250305", "name": "w" }] }), "tools[0].type"),
            (json!({ "tools": [{ "name": "f" }] }), "tools[0].input_schema"),
            (json!({ "tools": [{ "input_schema": {} }] }), "tools[0].name"),
            (json!({ "tool_choice": { "type": "some" } }), "tool_choice.type"),
            (json!({ "tool_choice": { "type": "tool" } }), "tool_choice.name"),
            (json!({ "tool_choice": "auto" }), "tool_choice"),
        ];
        for (body, param) in cases {
            assert_eq!(translated(body).expect_err("invalid").param.as_deref(), Some(param));
        }
    }
}
