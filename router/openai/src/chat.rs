//! Reading chat completions, whole and in pieces, as the engines write them.
//!
//! Engines differ: reasoning is called `reasoning` (vLLM) or `reasoning_content` (SGLang, TensorRT-LLM), a matched stop
//! string `stop_reason` (vLLM) or `matched_stop` (SGLang), and details of the usage may be absent or null.
//! Source: <https://platform.openai.com/docs/api-reference/chat>.

use serde_json::Value;

/// The reasoning of a message or a delta, unless empty.
pub(crate) fn reasoning(message: &Value) -> Option<&str> {
    text_of(&message["reasoning"]).or_else(|| text_of(&message["reasoning_content"]))
}

/// The text of a message or a delta, unless empty.
pub(crate) fn content(message: &Value) -> Option<&str> {
    text_of(&message["content"])
}

/// The tool calls of a message or a delta.
pub(crate) fn tool_calls(message: &Value) -> &[Value] {
    message["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

/// The stop string that ended a choice.
pub(crate) fn stop_string(choice: &Value) -> Option<&str> {
    choice["stop_reason"].as_str().or_else(|| choice["matched_stop"].as_str())
}

/// An answer's id without the prefix that says which surface it is from.
pub(crate) fn bare_id(answer: &Value) -> &str {
    let id = answer["id"].as_str().unwrap_or_default();
    id.strip_prefix("chatcmpl-").unwrap_or(id)
}

/// The message of an error in any of the shapes that engines and the gateway use.
pub(crate) fn error_message(error: &Value) -> &str {
    let inner = if error["error"].is_object() { &error["error"] } else { error };
    inner["message"].as_str().or_else(|| error["error"].as_str()).unwrap_or("The engine failed.")
}

/// The HTTP status that an error names as its code.
pub(crate) fn error_status(error: &Value) -> Option<u16> {
    let inner = if error["error"].is_object() { &error["error"] } else { error };
    inner["code"].as_u64().and_then(|code| u16::try_from(code).ok())
}

fn text_of(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_of_every_shape() {
        let cases = [
            (json!({ "error": { "message": "a", "code": 500 } }), "a", Some(500)),
            (json!({ "message": "b", "code": "invalid_value" }), "b", None),
            (json!({ "error": "c" }), "c", None),
            (json!({}), "The engine failed.", None),
        ];
        for (error, message, status) in cases {
            assert_eq!((error_message(&error), error_status(&error)), (message, status), "{error}");
        }
    }
}
