//! Converts a Responses request to a chat completion request.
//!
//! Fields of the Responses API are translated, only echoed in the answer, or refused when they need stored earlier
//! requests. Other fields go to the engine unchanged, but a translated field always wins over one of the same name.

use serde_json::{Map, Value, json};

use super::{input, tools};
use crate::ApiError;
use crate::nested_fields::{NestedFields, pass_through, refuse_several};
use crate::retention::PROMPT_CACHE_RETENTION;

/// Fields that the translation consumes or echoes, and those of chat that would contradict it.
const KNOWN: &[&str] = &[
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "max_output_tokens",
    "max_tool_calls",
    "reasoning",
    "store",
    "background",
    "previous_response_id",
    "conversation",
    "prompt",
    "stream",
    "stream_options",
    "include",
    "top_logprobs",
    "metadata",
    "service_tier",
    "truncation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "context_management",
    "moderation",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "logprobs",
    "functions",
    "function_call",
    "n",
];

/// Converts a Responses request to a chat completion request.
///
/// # Errors
///
/// The first field that is missing, of the wrong type, or asks for an unsupported feature.
pub fn to_chat(request: &Value) -> Result<Value, ApiError> {
    let fields = NestedFields::of_body(request)?;
    refuse(&fields)?;
    check_echoed(&fields)?;
    let mut chat = pass_through(request, KNOWN);
    fields.required_text("model")?;
    chat.insert("messages".to_owned(), Value::Array(input::messages(&fields)?));
    tools::translate(&fields, &mut chat)?;
    if let Some(limit) = fields.positive("max_output_tokens")? {
        chat.insert("max_tokens".to_owned(), limit.into());
    }
    if let Some(effort) =
        fields.object("reasoning")?.map(|reasoning| reasoning.text("effort")).transpose()?.flatten()
    {
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
    if let Some(format) = response_format(&fields)? {
        chat.insert("response_format".to_owned(), format);
    }
    logprobs(&fields, &mut chat)?;
    if let Some(retention) = fields.text(PROMPT_CACHE_RETENTION)? {
        chat.insert(PROMPT_CACHE_RETENTION.to_owned(), retention.into());
    }
    if fields.flag("stream")?.unwrap_or(false) {
        chat.insert("stream".to_owned(), true.into());
        chat.insert("stream_options".to_owned(), json!({ "include_usage": true }));
    }
    Ok(Value::Object(chat))
}

/// Refuses fields that need stored earlier requests, or OpenAI's servers.
fn refuse(fields: &NestedFields<'_>) -> Result<(), ApiError> {
    refuse_several(fields)?;
    if fields.flag("store")?.unwrap_or(false) {
        let message = "Responses are not stored here: leave `store` out or set it to false.";
        return Err(ApiError::invalid("store", message));
    }
    if fields.flag("background")?.unwrap_or(false) {
        return Err(ApiError::unsupported(
            "background",
            "A response in the background, which must be stored,",
        ));
    }
    let stateful = [
        ("previous_response_id", "Going on from a stored response"),
        ("conversation", "A stored conversation"),
        ("prompt", "A stored prompt"),
    ];
    match stateful.iter().find(|(name, _)| fields.get(name).is_some()) {
        Some((name, what)) => {
            let message = format!("{what} is not supported here: send the whole conversation as `input`.");
            Err(ApiError::invalid(name, message))
        }
        None => Ok(()),
    }
}

/// Checks the types of fields that are only echoed, since clients expect them back.
fn check_echoed(fields: &NestedFields<'_>) -> Result<(), ApiError> {
    fields.object("metadata")?;
    for name in ["user", "service_tier", "truncation", "prompt_cache_key", "safety_identifier"] {
        fields.text(name)?;
    }
    fields.flag("parallel_tool_calls")?;
    fields.positive("max_tool_calls")?;
    Ok(())
}

fn response_format(fields: &NestedFields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    let Some(format) = text.object("format")? else { return Ok(None) };
    match format.required_text("type")? {
        "text" => Ok(None),
        "json_object" => Ok(Some(json!({ "type": "json_object" }))),
        "json_schema" => {
            let mut schema = Map::new();
            schema.insert("name".to_owned(), format.required_text("name")?.into());
            let inner = format.get("schema").ok_or_else(|| format.missing("schema"))?;
            schema.insert("schema".to_owned(), inner.clone());
            for name in ["strict", "description"] {
                if let Some(value) = format.get(name) {
                    schema.insert(name.to_owned(), value.clone());
                }
            }
            Ok(Some(json!({ "type": "json_schema", "json_schema": schema })))
        }
        other => {
            let at = format.at("type");
            let wanted = "`text`, `json_object` or `json_schema`";
            Err(ApiError::invalid(&at, format!("`{at}` must be {wanted}, not {other:?}.")))
        }
    }
}

/// Converts the request for log-probabilities: `include` enables them, `top_logprobs` is the number of alternatives.
fn logprobs(fields: &NestedFields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let included = fields.array("include")?.unwrap_or_default();
    let is_wanted = included.iter().any(|name| name == "message.output_text.logprobs");
    if is_wanted || fields.get("top_logprobs").is_some() {
        chat.insert("logprobs".to_owned(), true.into());
    }
    if let Some(top) = fields.at_least("top_logprobs", 0)? {
        chat.insert("top_logprobs".to_owned(), top.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(extra: Value) -> Value {
        let mut request = json!({ "model": "m", "input": "Hi" });
        for (name, value) in extra.as_object().expect("an object") {
            request[name] = value.clone();
        }
        request
    }

    #[test]
    fn fields_become_those_of_chat() {
        let chat = to_chat(&with(json!({
            "instructions": "S", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "user": "u",
            "reasoning": { "effort": "low", "summary": "auto" }, "stream": true, "store": false,
            "text": { "format": { "type": "json_schema", "name": "n", "schema": {}, "strict": true } },
            "parallel_tool_calls": false, "metadata": { "a": "b" }, "truncation": "disabled",
            "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_tokens": 99,
        })))
        .expect("valid");
        assert_eq!(
            chat,
            json!({
                "model": "m", "temperature": 0.5, "top_p": 0.9, "seed": 7, "user": "u",
                "parallel_tool_calls": false,
                "messages": [{ "role": "system", "content": "S" }, { "role": "user", "content": "Hi" }],
                "max_tokens": 5, "reasoning_effort": "low",
                "response_format": { "type": "json_schema",
                    "json_schema": { "name": "n", "schema": {}, "strict": true } },
                "logprobs": true, "top_logprobs": 2,
                "stream": true, "stream_options": { "include_usage": true },
            })
        );
    }

    #[test]
    fn every_complaint_names_its_field() {
        let cases = [
            (json!({ "model": null }), "model"),
            (json!({ "input": null }), "input"),
            (json!({ "store": true }), "store"),
            (json!({ "background": true }), "background"),
            (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
            (json!({ "conversation": "conv_1" }), "conversation"),
            (json!({ "prompt": { "id": "p" } }), "prompt"),
            (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
            (json!({ "metadata": 1 }), "metadata"),
            (json!({ "n": 3 }), "n"),
            (json!({ "text": { "format": { "type": "xml" } } }), "text.format.type"),
            (json!({ "text": { "format": { "type": "json_schema", "name": "n" } } }), "text.format.schema"),
            (json!({ "top_logprobs": -1 }), "top_logprobs"),
            (json!({ "reasoning": { "effort": 3 } }), "reasoning.effort"),
        ];
        for (extra, param) in cases {
            let problem = to_chat(&with(extra.clone())).expect_err("invalid");
            assert_eq!(problem.param.as_deref(), Some(param), "{extra}");
        }
    }

    #[test]
    fn what_is_off_is_accepted() {
        let off =
            json!({ "store": false, "background": false, "previous_response_id": null, "prompt": null });
        assert!(to_chat(&with(off)).is_ok());
    }
}
