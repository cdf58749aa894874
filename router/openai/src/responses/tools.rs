//! Tools of a Responses request as functions of a chat completion.

use serde_json::{Map, Value, json};

use crate::ApiError;
use crate::nested_fields::NestedFields;

/// Sets `tools` and `tool_choice`.
pub(super) fn translate(fields: &NestedFields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let tools = fields.array("tools")?.unwrap_or_default().iter().enumerate();
    let mut tools = tools.map(|(index, value)| tool(value, index)).collect::<Result<Vec<_>, _>>()?;
    if let Some(choice) = fields.get("tool_choice") {
        let choice = tool_choice(choice, &mut tools)?;
        chat.insert("tool_choice".to_owned(), choice);
    }
    if !tools.is_empty() {
        chat.insert("tools".to_owned(), tools.into());
    }
    Ok(())
}

fn tool(value: &Value, index: usize) -> Result<Value, ApiError> {
    let tool = NestedFields::of(value, format!("tools[{index}]"))?;
    let kind = tool.required_text("type")?;
    if kind != "function" {
        let what = format!("A tool of type {kind:?}, which OpenAI's servers run or define,");
        return Err(ApiError::unsupported(&tool.at("type"), &what));
    }
    let mut function = Map::new();
    function.insert("name".to_owned(), tool.required_text("name")?.into());
    if let Some(description) = tool.text("description")? {
        function.insert("description".to_owned(), description.into());
    }
    if let Some(parameters) = tool.object("parameters")? {
        function.insert("parameters".to_owned(), parameters.to_value());
    }
    if let Some(strict) = tool.flag("strict")? {
        function.insert("strict".to_owned(), strict.into());
    }
    Ok(json!({ "type": "function", "function": function }))
}

/// The choice as chat has it. A choice among allowed tools leaves the others out.
fn tool_choice(value: &Value, tools: &mut Vec<Value>) -> Result<Value, ApiError> {
    if let Some(name) = value.as_str() {
        return match name {
            "auto" | "none" | "required" => Ok(name.into()),
            other => {
                let wanted = "`auto`, `none`, `required` or an object";
                let message = format!("`tool_choice` must be {wanted}, not {other:?}.");
                Err(ApiError::invalid("tool_choice", message))
            }
        };
    }
    let choice = NestedFields::of(value, "tool_choice".to_owned())?;
    match choice.required_text("type")? {
        "function" => {
            Ok(json!({ "type": "function", "function": { "name": choice.required_text("name")? } }))
        }
        "allowed_tools" => {
            let allowed = choice.array("tools")?.ok_or_else(|| choice.missing("tools"))?;
            tools.retain(|tool| allowed.iter().any(|allowed| allowed["name"] == tool["function"]["name"]));
            let mode = choice.text("mode")?.unwrap_or("auto");
            match mode {
                "auto" | "required" => Ok(mode.into()),
                other => {
                    let at = choice.at("mode");
                    Err(ApiError::invalid(
                        &at,
                        format!("`{at}` must be `auto` or `required`, not {other:?}."),
                    ))
                }
            }
        }
        other => Err(ApiError::unsupported(&choice.at("type"), &format!("A choice of type {other:?}"))),
    }
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
        let body = json!({ "tools": [
            { "type": "function", "name": "f", "description": "d", "parameters": {}, "strict": true },
            { "type": "function", "name": "g", "parameters": null, "strict": null },
        ] });
        let wanted = json!({ "tools": [
            { "type": "function", "function": { "name": "f", "description": "d", "parameters": {}, "strict": true } },
            { "type": "function", "function": { "name": "g" } },
        ] });
        assert_eq!(translated(body), Ok(wanted));
    }

    #[test]
    fn choices() {
        let named = json!({ "type": "function", "function": { "name": "f" } });
        let cases = [
            (json!("auto"), json!("auto")),
            (json!("none"), json!("none")),
            (json!("required"), json!("required")),
            (json!({ "type": "function", "name": "f" }), named),
        ];
        for (choice, wanted) in cases {
            assert_eq!(translated(json!({ "tool_choice": choice })), Ok(json!({ "tool_choice": wanted })));
        }
    }

    #[test]
    fn allowed_tools_are_all_there_are() {
        let tool = |name: &str| json!({ "type": "function", "name": name });
        let choice = json!({ "type": "allowed_tools", "mode": "required", "tools": [tool("g")] });
        let got = translated(json!({ "tools": [tool("f"), tool("g")], "tool_choice": choice }));
        let left = json!([{ "type": "function", "function": { "name": "g" } }]);
        assert_eq!(got, Ok(json!({ "tool_choice": "required", "tools": left })));
    }

    #[test]
    fn complaints_name_the_tool() {
        let cases = [
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "function" }] }), "tools[0].name"),
            (
                json!({ "tools": [{ "type": "function", "name": "f", "parameters": 1 }] }),
                "tools[0].parameters",
            ),
            (json!({ "tool_choice": "some" }), "tool_choice"),
            (json!({ "tool_choice": 1 }), "tool_choice"),
            (json!({ "tool_choice": { "type": "mcp" } }), "tool_choice.type"),
            (json!({ "tool_choice": { "type": "function" } }), "tool_choice.name"),
            (
                json!({ "tool_choice": { "type": "allowed_tools", "tools": [], "mode": "x" } }),
                "tool_choice.mode",
            ),
        ];
        for (body, param) in cases {
            assert_eq!(translated(body).expect_err("invalid").param.as_deref(), Some(param));
        }
    }
}
