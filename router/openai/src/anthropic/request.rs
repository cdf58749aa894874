//! Converts a Messages request to a chat completion request.
//!
//! Fields of the Messages API are translated or, if they have no meaning here (billing), dropped. Fields that would change
//! the answer and are not supported are refused. Other fields go to the engine unchanged, but a translated field always
//! wins over one of the same name.

use serde_json::{Map, Value, json};

use super::messages::{conversation, system};
use super::{cache_control, tools};
use crate::ApiError;
use crate::nested_fields::{NestedFields, pass_through, refuse_several};
use crate::retention::PROMPT_CACHE_RETENTION;

/// Fields that the translation consumes, and those of chat that would contradict it.
const KNOWN: &[&str] = &[
    "system",
    "messages",
    "max_tokens",
    "stop_sequences",
    "stream",
    "tools",
    "tool_choice",
    "thinking",
    "metadata",
    "output_config",
    "output_format",
    "cache_control",
    "container",
    "context_management",
    "mcp_servers",
    "betas",
    "diagnostics",
    "inference_geo",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
    "max_completion_tokens",
    "stop",
    "stream_options",
    "functions",
    "function_call",
    "chat_template_kwargs",
    "n",
];

/// Converts a Messages request to a chat completion request.
///
/// # Errors
///
/// The first field that is missing, of the wrong type, or asks for an unsupported feature.
pub fn to_chat(request: &Value) -> Result<Value, ApiError> {
    let fields = NestedFields::of_body(request)?;
    let mut chat = prompt(request, &fields)?;
    let max_tokens = fields.positive("max_tokens")?.ok_or_else(|| fields.missing("max_tokens"))?;
    chat.insert("max_tokens".to_owned(), max_tokens.into());
    if let Some(stops) = stop_sequences(&fields)? {
        chat.insert("stop".to_owned(), stops);
    }
    if fields.flag("stream")?.unwrap_or(false) {
        chat.insert("stream".to_owned(), true.into());
        chat.insert("stream_options".to_owned(), json!({ "include_usage": true }));
    }
    if let Some(user) =
        fields.object("metadata")?.map(|metadata| metadata.text("user_id")).transpose()?.flatten()
    {
        chat.insert("user".to_owned(), user.into());
    }
    output(&fields, &mut chat)?;
    if let Some(ttl) = cache_control::longest(request) {
        chat.insert(PROMPT_CACHE_RETENTION.to_owned(), ttl.into());
    }
    Ok(Value::Object(chat))
}

/// Converts a `count_tokens` request to a chat completion request with the same prompt, for counting only.
///
/// # Errors
///
/// As for [`to_chat`], but `max_tokens` may be absent.
pub fn to_chat_for_count(request: &Value) -> Result<Value, ApiError> {
    let fields = NestedFields::of_body(request)?;
    prompt(request, &fields).map(Value::Object)
}

/// Converts the fields that decide the prompt, and copies the fields that pass through.
fn prompt(request: &Value, fields: &NestedFields<'_>) -> Result<Map<String, Value>, ApiError> {
    refuse(fields)?;
    let mut chat = pass_through(request, KNOWN);
    fields.required_text("model")?;
    let mut messages: Vec<Value> = system(fields)?.into_iter().collect();
    let continues = conversation(fields, &mut messages)?;
    chat.insert("messages".to_owned(), Value::Array(messages));
    if continues {
        chat.insert("continue_final_message".to_owned(), true.into());
        chat.insert("add_generation_prompt".to_owned(), false.into());
    }
    tools::translate(fields, &mut chat)?;
    template_kwargs(fields, &mut chat)?;
    Ok(chat)
}

fn refuse(fields: &NestedFields<'_>) -> Result<(), ApiError> {
    refuse_several(fields)?;
    if fields.array("mcp_servers")?.is_some_and(|servers| !servers.is_empty()) {
        return Err(ApiError::unsupported("mcp_servers", "Calling MCP servers"));
    }
    if fields.get("container").is_some() {
        return Err(ApiError::unsupported("container", "A container for code"));
    }
    Ok(())
}

fn stop_sequences(fields: &NestedFields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(stops) = fields.array("stop_sequences")? else { return Ok(None) };
    if let Some((index, stop)) = stops.iter().enumerate().find(|(_, stop)| !stop.is_string()) {
        return Err(fields.wrong(&format!("stop_sequences[{index}]"), "a string", stop));
    }
    Ok((!stops.is_empty()).then(|| Value::from(stops)))
}

/// Converts `thinking` to a variable of the chat template; a value that the client set there itself stays.
fn template_kwargs(fields: &NestedFields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut variables = match fields.get("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(other) => return Err(fields.wrong("chat_template_kwargs", "an object", other)),
    };
    if let Some(thinking) = fields.object("thinking")? {
        let thinks = match thinking.required_text("type")? {
            "disabled" => false,
            "enabled" => {
                thinking.positive("budget_tokens")?;
                true
            }
            _ => true,
        };
        variables.entry("enable_thinking").or_insert(thinks.into());
    }
    if !variables.is_empty() {
        chat.insert("chat_template_kwargs".to_owned(), Value::Object(variables));
    }
    Ok(())
}

/// Converts the effort and the format of `output_config`, and the format's older name.
fn output(fields: &NestedFields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let config = fields.object("output_config")?;
    if let Some(effort) = config.as_ref().map(|config| config.text("effort")).transpose()?.flatten() {
        // Engines support only three levels.
        let effort = if matches!(effort, "xhigh" | "max") { "high" } else { effort };
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
    let inner = config.as_ref().map(|config| config.object("format")).transpose()?.flatten();
    let Some(format) = inner.map_or_else(|| fields.object("output_format"), |format| Ok(Some(format)))?
    else {
        return Ok(());
    };
    if format.required_text("type")? != "json_schema" {
        return Err(ApiError::unsupported(&format.at("type"), "A format other than `json_schema`"));
    }
    let schema = format.get("schema").ok_or_else(|| format.missing("schema"))?;
    let wrapped = json!({ "name": "output", "strict": true, "schema": schema });
    chat.insert("response_format".to_owned(), json!({ "type": "json_schema", "json_schema": wrapped }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(extra: Value) -> Value {
        let mut request =
            json!({ "model": "m", "max_tokens": 5, "messages": [{ "role": "user", "content": "Hi" }] });
        for (name, value) in extra.as_object().expect("an object") {
            request[name] = value.clone();
        }
        request
    }

    #[test]
    fn fields_become_those_of_chat() {
        let chat = to_chat(&with(json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["a"], "stream": true,
            "metadata": { "user_id": "u" }, "seed": 7, "service_tier": "auto", "stop": "clash",
            "thinking": { "type": "enabled", "budget_tokens": 1024 }, "chat_template_kwargs": { "x": 1 },
            "output_config": { "effort": "max", "format": { "type": "json_schema", "schema": {} } },
        })))
        .expect("valid");
        assert_eq!(
            chat,
            json!({
                "model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7,
                "messages": [{ "role": "user", "content": "Hi" }],
                "chat_template_kwargs": { "x": 1, "enable_thinking": true },
                "max_tokens": 5, "stop": ["a"], "stream": true, "stream_options": { "include_usage": true },
                "user": "u", "reasoning_effort": "high",
                "response_format": { "type": "json_schema",
                    "json_schema": { "name": "output", "strict": true, "schema": {} } },
            })
        );
    }

    #[test]
    fn thinking_is_a_template_variable() {
        let cases = [
            (json!({}), json!(null)),
            (json!({ "thinking": { "type": "disabled" } }), json!({ "enable_thinking": false })),
            (json!({ "thinking": { "type": "adaptive" } }), json!({ "enable_thinking": true })),
            (
                json!({ "thinking": { "type": "disabled" }, "chat_template_kwargs": { "enable_thinking": true } }),
                json!({ "enable_thinking": true }),
            ),
        ];
        for (extra, wanted) in cases {
            assert_eq!(to_chat(&with(extra)).expect("valid")["chat_template_kwargs"], wanted);
        }
    }

    #[test]
    fn every_complaint_names_its_field() {
        let cases = [
            (json!({ "max_tokens": null }), "max_tokens"),
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "max_tokens": 1.5 }), "max_tokens"),
            (json!({ "model": null }), "model"),
            (json!({ "messages": null }), "messages"),
            (json!({ "messages": "Hi" }), "messages"),
            (json!({ "n": 2 }), "n"),
            (json!({ "stream": "yes" }), "stream"),
            (json!({ "stop_sequences": ["a", 1] }), "stop_sequences[1]"),
            (json!({ "thinking": { "type": "enabled", "budget_tokens": 0 } }), "thinking.budget_tokens"),
            (
                json!({ "output_config": { "format": { "type": "json_schema" } } }),
                "output_config.format.schema",
            ),
            (json!({ "output_format": { "type": "xml" } }), "output_format.type"),
            (json!({ "mcp_servers": [{}] }), "mcp_servers"),
            (json!({ "container": "c" }), "container"),
        ];
        for (extra, param) in cases {
            let problem = to_chat(&with(extra.clone())).expect_err("invalid");
            assert_eq!(problem.param.as_deref(), Some(param), "{extra}");
        }
        assert_eq!(to_chat(&json!([])).expect_err("invalid").param, None);
    }

    #[test]
    fn counting_needs_no_limit() {
        let request = with(json!({ "max_tokens": null, "system": "S" }));
        let chat = to_chat_for_count(&request).expect("valid");
        assert_eq!(chat["messages"][0], json!({ "role": "system", "content": "S" }));
        assert!(chat.get("max_tokens").is_none() && chat.get("stream").is_none());
    }
}
