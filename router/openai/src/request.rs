//! Requests, parsed and checked.

use serde_json::{Map, Value};

use crate::fields::{kind, token_ids};
use crate::{ApiError, Fields, Sampling, ToolChoice};

/// Largest number of choices of one request.
pub(super) const CHOICES_MAX: i64 = 16;
/// Largest number of alternatives with log-probabilities.
const TOP_LOGPROBS_MAX: i64 = 20;
/// Prompt of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text, still to be tokenised.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A request to `/v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The model's name, if the client gave one.
    pub model: Option<String>,
    /// One or more prompts.
    pub prompts: Vec<Prompt>,
    /// Sampling parameters and stop conditions.
    pub sampling: Sampling,
    /// Whether to stream the answer.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
    /// Whether usage is also reported before the end.
    pub continuous_usage: bool,
    /// Whether to report token ids.
    pub return_token_ids: bool,
    /// Whether log-probabilities name tokens by id.
    pub tokens_as_ids: bool,
    /// Whether the prompt is part of the output.
    pub echo: bool,
    /// Salt that separates this request's cached blocks from those of other salts.
    pub cache_salt: Option<String>,
    /// Parameters of the hand-off, not interpreted here.
    pub kv_transfer_params: Option<Value>,
}

/// A request to `/v1/chat/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The model's name, if the client gave one.
    pub model: Option<String>,
    /// The conversation.
    pub messages: Value,
    /// Variables for the template: `tools` and `chat_template_kwargs`.
    pub template_extras: Map<String, Value>,
    /// Tools that the model may or must call, among those that it is shown.
    pub tool_choice: ToolChoice,
    /// Whether the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// Sampling parameters and stop conditions.
    pub sampling: Sampling,
    /// Whether to stream the answer.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
    /// Salt that separates this request's cached blocks from those of other salts.
    pub cache_salt: Option<String>,
    /// Whether to report token ids.
    pub return_token_ids: bool,
    /// Parameters of the hand-off, not interpreted here.
    pub kv_transfer_params: Option<Value>,
}

fn parse_body(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => {
            Err(ApiError::malformed(format!("The body must be a JSON object, not {}.", kind(&other))))
        }
        Err(error) => Err(ApiError::malformed(format!("The body is not JSON: {error}."))),
    }
}

/// `include_usage` and `continuous_usage_stats` of `stream_options`.
fn usage_options(fields: Fields<'_>, stream: bool) -> Result<(bool, bool), ApiError> {
    let options = match fields.get("stream_options") {
        None => return Ok((false, false)),
        Some(Value::Object(options)) => options,
        Some(other) => {
            let message = format!("`stream_options` must be an object, not {}.", kind(other));
            return Err(ApiError::invalid("stream_options", message));
        }
    };
    if !stream {
        return Err(ApiError::invalid(
            "stream_options",
            "`stream_options` is only allowed with `stream: true`.",
        ));
    }
    let flag = |name| Ok(Fields(options).flag(name)?.unwrap_or(false));
    Ok((flag("include_usage")?, flag("continuous_usage_stats")?))
}

/// Fields of a request that [`ChatRequest`] or [`CompletionRequest`] takes into account, or that change no answer. A field in
/// no such list may have a meaning to an engine. `structured_outputs` and `parallel_tool_calls` are left out although they
/// are parsed: with `gateway.text = "gateway"`, a request that has them is relayed to engines other than the reference engine.
pub const KNOWN_FIELDS: [&str; 44] = [
    "add_generation_prompt",
    "cache_salt",
    "chat_template_kwargs",
    "echo",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "presence_penalty",
    "priority",
    "prompt",
    "prompt_cache_key",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "rid",
    "safety_identifier",
    "seed",
    "service_tier",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
];

/// Refuses fields that would change the answer and are not supported.
fn refuse_unsupported(fields: Fields<'_>) -> Result<(), ApiError> {
    let refuse =
        |name: &str, what: &str| Err(ApiError::invalid(name, format!("{what} is not supported yet.")));
    for name in ["functions", "function_call", "audio", "prediction"] {
        if fields.get(name).is_some() {
            return refuse(name, &format!("`{name}`"));
        }
    }
    Ok(())
}

/// The value of `max_tokens` or its newer name.
fn max_tokens(fields: Fields<'_>, names: &[&str]) -> Result<Option<usize>, ApiError> {
    for name in names {
        if let Some(number) = fields.integer(name, 1, i64::from(u32::MAX))? {
            return Ok(Some(number as usize));
        }
    }
    Ok(None)
}

impl CompletionRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_body(body)?;
        let fields = Fields(&object);
        let mut sampling = Sampling::parse(fields)?;
        sampling.max_tokens = Some(max_tokens(fields, &["max_tokens"])?.unwrap_or(16));
        sampling.logprobs = fields.integer("logprobs", 0, TOP_LOGPROBS_MAX)?.map(|top| top as u32);
        if fields.get("suffix").is_some() {
            return Err(ApiError::invalid("suffix", "`suffix` is not supported."));
        }
        if fields.integer("best_of", 1, CHOICES_MAX)?.is_some_and(|best| best as u32 != sampling.n) {
            return Err(ApiError::invalid("best_of", "`best_of` other than `n` is not supported."));
        }
        let stream = fields.flag("stream")?.unwrap_or(false);
        let usage = usage_options(fields, stream)?;
        let echo = fields.flag("echo")?.unwrap_or(false);
        if echo && sampling.logprobs.is_some() {
            return Err(ApiError::invalid(
                "echo",
                "`echo` with `logprobs` is not supported: there are none for the prompt.",
            ));
        }
        Ok(Self {
            model: fields.text("model")?.map(str::to_owned),
            prompts: prompts(fields)?,
            sampling,
            stream,
            include_usage: usage.0,
            continuous_usage: usage.1,
            return_token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: fields.flag("return_tokens_as_token_ids")?.unwrap_or(false),
            echo,
            cache_salt: fields.text("cache_salt")?.map(str::to_owned),
            kv_transfer_params: fields.get("kv_transfer_params").cloned(),
        })
    }
}

fn prompts(fields: Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    let bad = |message: &str| ApiError::invalid("prompt", message.to_owned());
    let value = fields.get("prompt").ok_or_else(|| bad("`prompt` is required."))?;
    let prompts = match value {
        Value::String(text) => vec![Prompt::Text(text.clone())],
        Value::Array(items) => match items.first() {
            None => return Err(bad("`prompt` is an empty array.")),
            Some(Value::Number(_)) => vec![Prompt::Tokens(token_ids("prompt", value)?)],
            Some(_) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Ok(Prompt::Text(text.clone())),
                    other => token_ids("prompt", other).map(Prompt::Tokens),
                })
                .collect::<Result<_, _>>()?,
        },
        other => return Err(bad(&format!("`prompt` must be a string or an array, not {}.", kind(other)))),
    };
    let is_empty = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(ids) => ids.is_empty(),
    };
    if prompts.iter().any(is_empty) {
        return Err(bad("`prompt` must not be empty."));
    }
    if prompts.len() > CHOICES_MAX as usize {
        return Err(bad(&format!("`prompt` has {} prompts, more than {CHOICES_MAX}.", prompts.len())));
    }
    Ok(prompts)
}

impl ChatRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_body(body)?;
        let fields = Fields(&object);
        let mut sampling = Sampling::parse(fields)?;
        refuse_unsupported(fields)?;
        let tool_choice = ToolChoice::parse(fields)?;
        let may_call_several = fields.flag("parallel_tool_calls")?.unwrap_or(true);
        if let Some(output) = tool_choice.forced_output(fields.get("tools"), may_call_several)? {
            // `response_format` applies to answers that are not calls.
            sampling.constrain(output);
        }
        sampling.max_tokens = max_tokens(fields, &["max_completion_tokens", "max_tokens"])?;
        let wants_logprobs = fields.flag("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
        if top_logprobs.is_some() && !wants_logprobs {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`."));
        }
        sampling.logprobs = wants_logprobs.then(|| top_logprobs.unwrap_or(0) as u32);
        let stream = fields.flag("stream")?.unwrap_or(false);
        let mut template_extras = match fields.get("chat_template_kwargs") {
            None => Map::new(),
            Some(Value::Object(extras)) => extras.clone(),
            Some(other) => {
                return Err(ApiError::invalid(
                    "chat_template_kwargs",
                    format!("`chat_template_kwargs` must be an object, not {}.", kind(other)),
                ));
            }
        };
        if let Some(tools) = fields.get("tools") {
            template_extras.insert("tools".to_owned(), tools.clone());
        }
        Ok(Self {
            model: fields.text("model")?.map(str::to_owned),
            messages: messages(fields)?,
            template_extras,
            tool_choice,
            add_generation_prompt: fields.flag("add_generation_prompt")?.unwrap_or(true),
            sampling,
            stream,
            include_usage: usage_options(fields, stream)?.0,
            cache_salt: fields.text("cache_salt")?.map(str::to_owned),
            return_token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            kv_transfer_params: fields.get("kv_transfer_params").cloned(),
        })
    }
}

/// The conversation, with content parts of type text joined to plain strings.
fn messages(fields: Fields<'_>) -> Result<Value, ApiError> {
    let value =
        fields.get("messages").ok_or_else(|| ApiError::invalid("messages", "`messages` is required."))?;
    let Value::Array(messages) = value else {
        return Err(ApiError::invalid(
            "messages",
            format!("`messages` must be an array, not {}.", kind(value)),
        ));
    };
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` must not be empty."));
    }
    for (index, message) in messages.iter().enumerate() {
        check_message(index, message)?;
    }
    Ok(value.clone())
}

/// Valid roles of a message.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Whether a message may have no content because it has other fields, such as tool calls.
fn needs_no_content(role: &str, fields: &Map<String, Value>) -> bool {
    const OF_AN_ASSISTANT: [&str; 6] =
        ["tool_calls", "function_call", "refusal", "audio", "reasoning", "reasoning_content"];
    let is_there = |name: &&str| match fields.get(*name) {
        None | Some(Value::Null) => false,
        Some(Value::Array(several)) => !several.is_empty(),
        Some(_) => true,
    };
    role == "function" || (role == "assistant" && OF_AN_ASSISTANT.iter().any(is_there))
}

/// Whether a message has a role and nothing but text.
fn check_message(index: usize, message: &Value) -> Result<(), ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let Value::Object(fields) = message else {
        return Err(ApiError::invalid(
            &at(""),
            format!("`{}` must be an object, not {}.", at(""), kind(message)),
        ));
    };
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
    if !ROLES.contains(&role) {
        let message = format!("`{}` must be one of {}.", at(".role"), ROLES.join(", "));
        return Err(ApiError::invalid(&at(".role"), message));
    }
    match fields.get("content") {
        Some(Value::String(_)) => {}
        None | Some(Value::Null) if needs_no_content(role, fields) => {}
        None | Some(Value::Null) => {
            let at = at(".content");
            return Err(ApiError::invalid(
                &at,
                format!("`{at}` is required: a string or an array of parts."),
            ));
        }
        Some(Value::Array(parts)) => {
            for part in parts {
                match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("text" | "input_text"), Some(_)) => {}
                    (Some(other), _) => {
                        let message = format!(
                            "`{}` has a part of type {other:?}; only text is supported.",
                            at(".content")
                        );
                        return Err(ApiError::invalid(&at(".content"), message));
                    }
                    (None, _) => {
                        return Err(ApiError::invalid(
                            &at(".content"),
                            format!("`{}` has a part without a type.", at(".content")),
                        ));
                    }
                }
            }
        }
        Some(other) => {
            let message =
                format!("`{}` must be a string or an array of parts, not {}.", at(".content"), kind(other));
            return Err(ApiError::invalid(&at(".content"), message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn completion(body: Value) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(body.to_string().as_bytes())
    }

    fn chat(body: Value) -> Result<ChatRequest, ApiError> {
        ChatRequest::parse(body.to_string().as_bytes())
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        for (prompt, expected) in [
            (json!("a"), vec![Prompt::Text("a".into())]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!(["a", "b"]), vec![Prompt::Text("a".into()), Prompt::Text("b".into())]),
            (json!([[1], [2, 3]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
        ] {
            assert_eq!(completion(json!({ "prompt": prompt })).expect("parses").prompts, expected);
        }
    }

    #[test]
    fn every_complaint_names_its_field() {
        let base = json!({ "prompt": "x" });
        for (field, value) in [
            ("temperature", json!(3)),
            ("temperature", json!("hot")),
            ("top_p", json!(0)),
            ("n", json!(0)),
            ("n", json!(1.5)),
            ("max_tokens", json!(0)),
            ("logprobs", json!(21)),
            ("stop", json!(5)),
            ("stop", json!([""])),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"5": 101})),
            ("stream", json!("yes")),
            ("stream_options", json!({"include_usage": true})),
            ("prompt", json!([])),
            ("prompt", json!("")),
            ("prompt", json!([-1])),
            ("prompt", json!({"a": 1})),
            ("suffix", json!("x")),
            ("stop_token_ids", json!([1.5])),
            ("vllm_xargs", json!(1)),
            ("echo", json!(true)),
        ] {
            let mut body = base.clone();
            body[field] = value.clone();
            if field == "echo" {
                body["logprobs"] = json!(1);
            }
            let error = completion(body).expect_err("must be refused");
            assert_eq!(error.param.as_deref(), Some(field), "{value}");
            assert!(error.message.contains(field), "{}", error.message);
            assert_eq!(error.status, 400);
        }
        let error = chat(json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}));
        assert_eq!(error.expect_err("refused").param.as_deref(), Some("messages[0].content"));
        let error = chat(json!({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}));
        assert_eq!(error.expect_err("refused").param.as_deref(), Some("top_logprobs"));
        for (field, value) in [
            ("response_format", json!({"type": "xml"})),
            ("tool_choice", json!("required")),
            ("parallel_tool_calls", json!("yes")),
            ("functions", json!([])),
        ] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], field: value});
            assert_eq!(chat(body).expect_err("refused").param.as_deref(), Some(field));
        }
        assert!(CompletionRequest::parse(b"{").is_err_and(|error| error.param.is_none()));
    }

    #[test]
    fn unknown_roles_and_missing_contents_are_refused() {
        let one = |message: Value| chat(json!({ "messages": [message] }));
        let call = json!([{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
        for (message, param) in [
            (json!({"role": "wizard", "content": "x"}), "messages[0].role"),
            (json!({"role": "User", "content": "x"}), "messages[0].role"),
            (json!({"role": 5, "content": "x"}), "messages[0].role"),
            (json!({"content": "x"}), "messages[0].role"),
            (json!({"role": "user", "content": null}), "messages[0].content"),
            (json!({"role": "user"}), "messages[0].content"),
            (json!({"role": "system"}), "messages[0].content"),
            (json!({"role": "tool", "tool_call_id": "a"}), "messages[0].content"),
            (json!({"role": "user", "tool_calls": call}), "messages[0].content"),
            (json!({"role": "assistant", "content": null}), "messages[0].content"),
            (json!({"role": "assistant", "tool_calls": []}), "messages[0].content"),
        ] {
            let error = one(message.clone()).expect_err("refused");
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{message}");
        }
        for message in [
            json!({"role": "assistant", "content": null, "tool_calls": call}),
            json!({"role": "assistant", "tool_calls": call}),
            json!({"role": "assistant", "refusal": "No."}),
            json!({"role": "function", "name": "f", "content": null}),
            json!({"role": "developer", "content": ""}),
        ] {
            assert!(one(message.clone()).is_ok(), "{message}");
        }
    }

    #[test]
    fn numbers_that_are_no_integers_are_shown_as_they_are() {
        for (text, shown) in [
            (r#"{"prompt": "x", "max_tokens": 5.5}"#, "from 1 to 4294967295, not 5.5."),
            (r#"{"prompt": "x", "max_tokens": 100000000000000000000}"#, "from 1 to 4294967295, not 1"),
            (r#"{"prompt": "x", "max_tokens": "5"}"#, "from 1 to 4294967295, not a string."),
            (r#"{"prompt": "x", "seed": 123456789012345678901234567890}"#, "to 9223372036854775807, not 1"),
            (r#"{"prompt": "x", "seed": 18446744073709551615}"#, "not 18446744073709551615."),
        ] {
            let error = CompletionRequest::parse(text.as_bytes()).expect_err("refused");
            assert!(error.message.contains("must be an integer"), "{}", error.message);
            assert!(
                error.message.contains(shown) && !error.message.contains("a number"),
                "{}",
                error.message
            );
        }
        let whole = completion(json!({ "prompt": "x", "max_tokens": 5.0 })).expect("a whole number");
        assert_eq!(whole.sampling.max_tokens, Some(5));
    }

    #[test]
    fn what_goes_to_an_engine_comes_back_the_same() {
        let body = json!({
            "prompt": [1], "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -5,
            "frequency_penalty": 1.5, "presence_penalty": -1.0, "repetition_penalty": 1.25, "max_tokens": 9,
            "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": true, "skip_special_tokens": false,
            "logprobs": 4, "logit_bias": {"5": -100.0}, "vllm_xargs": {"kvasir_resumed_tokens": 6},
        });
        let mut structured = body.clone();
        structured[crate::STRUCTURED_OUTPUTS] = json!({"json": {"type": "boolean"}, "strict": false});
        let parsed = completion(structured).expect("parses");
        assert_eq!(
            (parsed.sampling.ignore_eos, parsed.sampling.min_tokens),
            (false, 0),
            "the grammar says when"
        );
        let mut again = parsed.sampling.to_engine_fields();
        again.insert("prompt".into(), json!([1]));
        assert_eq!(completion(Value::Object(again)).expect("parses").sampling, parsed.sampling);
        let parsed = completion(body).expect("parses");
        let mut again = parsed.sampling.to_engine_fields();
        again.insert("prompt".into(), json!([1]));
        assert_eq!(completion(Value::Object(again)).expect("parses").sampling, parsed.sampling);
        assert_eq!(parsed.sampling.resumed_tokens, 6);
    }

    #[test]
    fn content_parts_are_text_and_left_to_the_template() {
        let parsed = chat(json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "max_completion_tokens": 3}));
        let parsed = parsed.expect("parses");
        assert_eq!(parsed.messages[0]["content"][1]["text"], "b");
        assert_eq!(parsed.sampling.max_tokens, Some(3));
    }
}
