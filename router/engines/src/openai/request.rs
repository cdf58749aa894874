//! Requests, parsed and checked.

use serde_json::{Map, Value, json};

use super::fields::{kind, token_ids};
use super::{ApiError, Fields};

/// Most choices of one request.
const CHOICES_MAX: i64 = 16;
/// Most alternatives that log-probabilities are reported for.
const TOP_LOGPROBS_MAX: i64 = 20;
/// Most stop strings.
const STOP_STRINGS_MAX: usize = 16;

/// How tokens are chosen and when to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Smallest set of tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// The most likely so many; 0 is all.
    pub top_k: u32,
    /// At least so likely, relative to the most likely.
    pub min_p: f32,
    /// Taken off per earlier occurrence in the output.
    pub frequency_penalty: f32,
    /// Taken off when it occurred in the output.
    pub presence_penalty: f32,
    /// Divides (multiplies, if negative) the logit of what occurred in prompt or output.
    pub repetition_penalty: f32,
    /// Makes sampling repeatable.
    pub seed: Option<u64>,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens to generate at most; `None` is up to the context length.
    pub max_tokens: Option<usize>,
    /// No end before so many.
    pub min_tokens: usize,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string is part of the output.
    pub include_stop: bool,
    /// Whether to go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// How many alternatives to report log-probabilities for; `None` is no log-probabilities.
    pub logprobs: Option<u32>,
    /// Number of independent outputs.
    pub n: u32,
    /// Last so many prompt tokens are output of an interrupted run of the same request.
    pub resumed_tokens: usize,
}

/// Name of the vLLM extra argument that carries [`Sampling::resumed_tokens`].
const RESUMED_TOKENS: &str = "kvasir_resumed_tokens";

impl Sampling {
    fn parse(fields: Fields<'_>) -> Result<Self, ApiError> {
        let xargs = match fields.get("vllm_xargs") {
            None => None,
            Some(Value::Object(xargs)) => Some(Fields(xargs)),
            Some(other) => {
                return Err(ApiError::invalid(
                    "vllm_xargs",
                    format!("`vllm_xargs` must be an object, not {}.", kind(other)),
                ));
            }
        };
        let resumed = xargs.map(|xargs| xargs.integer(RESUMED_TOKENS, 0, i64::from(u32::MAX))).transpose()?;
        Ok(Self {
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
            top_p: positive(fields, "top_p", 1.0)?.unwrap_or(1.0),
            top_k: fields.integer("top_k", -1, i64::from(u32::MAX))?.map_or(0, |k| k.max(0) as u32),
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            repetition_penalty: positive(fields, "repetition_penalty", 10.0)?.unwrap_or(1.0),
            seed: fields.integer("seed", i64::MIN, i64::MAX)?.map(|seed| seed as u64),
            logit_bias: logit_bias(fields)?,
            max_tokens: None,
            min_tokens: fields.integer("min_tokens", 0, i64::from(u32::MAX))?.unwrap_or(0) as usize,
            stop: stop(fields)?,
            stop_token_ids: fields.token_ids("stop_token_ids")?.unwrap_or_default(),
            include_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            skip_special_tokens: fields.flag("skip_special_tokens")?.unwrap_or(true),
            logprobs: None,
            n: fields.integer("n", 1, CHOICES_MAX)?.unwrap_or(1) as u32,
            resumed_tokens: resumed.flatten().unwrap_or(0) as usize,
        })
    }

    /// These parameters as fields of a completions request to an engine, without `n` and `stop`.
    #[must_use]
    pub fn to_engine_fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
        put("temperature", json!(self.temperature));
        put("top_p", json!(self.top_p));
        put("top_k", json!(if self.top_k == 0 { -1 } else { i64::from(self.top_k) }));
        put("min_p", json!(self.min_p));
        put("frequency_penalty", json!(self.frequency_penalty));
        put("presence_penalty", json!(self.presence_penalty));
        put("repetition_penalty", json!(self.repetition_penalty));
        put("min_tokens", json!(self.min_tokens));
        put("ignore_eos", json!(self.ignore_eos));
        put("skip_special_tokens", json!(self.skip_special_tokens));
        if let Some(seed) = self.seed {
            put("seed", json!(seed as i64));
        }
        if let Some(max_tokens) = self.max_tokens {
            put("max_tokens", json!(max_tokens));
        }
        if let Some(top) = self.logprobs {
            put("logprobs", json!(top));
        }
        if !self.stop_token_ids.is_empty() {
            put("stop_token_ids", json!(self.stop_token_ids));
        }
        if !self.logit_bias.is_empty() {
            let bias: Map<String, Value> =
                self.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias))).collect();
            put("logit_bias", Value::Object(bias));
        }
        if self.resumed_tokens > 0 {
            put("vllm_xargs", json!({ RESUMED_TOKENS: self.resumed_tokens }));
        }
        fields
    }
}

fn positive(fields: Fields<'_>, name: &str, high: f64) -> Result<Option<f32>, ApiError> {
    match fields.number(name, 0.0, high)? {
        Some(number) if number <= 0.0 => {
            Err(ApiError::invalid(name, format!("`{name}` must be greater than 0.")))
        }
        other => Ok(other),
    }
}

fn stop(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let bad = |message: &str| ApiError::invalid("stop", format!("`stop` {message}"));
    let stops = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(several)) => several
            .iter()
            .map(|stop| stop.as_str().map(str::to_owned).ok_or_else(|| bad("must hold strings only.")))
            .collect::<Result<_, _>>()?,
        Some(other) => {
            return Err(bad(&format!("must be a string or an array of strings, not {}.", kind(other))));
        }
    };
    if stops.len() > STOP_STRINGS_MAX {
        return Err(bad(&format!("has {} strings, more than {STOP_STRINGS_MAX}.", stops.len())));
    }
    if stops.iter().any(String::is_empty) {
        return Err(bad("must not hold an empty string."));
    }
    Ok(stops)
}

fn logit_bias(fields: Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let bad = |message: String| ApiError::invalid("logit_bias", message);
    let bias = match fields.get("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(bias)) => bias,
        Some(other) => return Err(bad(format!("`logit_bias` must be an object, not {}.", kind(other)))),
    };
    bias.iter()
        .map(|(id, bias)| {
            let id: u32 = id
                .parse()
                .map_err(|_| bad(format!("`logit_bias` has the key {id:?}, which is no token id.")))?;
            let value = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            let value = value.ok_or_else(|| {
                bad(format!("`logit_bias` of token {id} must be a number from -100 to 100."))
            })?;
            Ok((id, value as f32))
        })
        .collect()
}

/// What to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A text, to be tokenised.
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
    /// How to sample.
    pub sampling: Sampling,
    /// Whether to answer piece by piece.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
    /// Whether usage is also told before the end.
    pub continuous_usage: bool,
    /// Whether to report token ids.
    pub return_token_ids: bool,
    /// Whether log-probabilities name tokens by id.
    pub tokens_as_ids: bool,
    /// Whether the prompt is part of the output.
    pub echo: bool,
    /// Keeps this request's cache apart.
    pub cache_salt: Option<String>,
    /// The hand-off, opaque here.
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
    /// Whether the model may call the tools that it is shown.
    pub may_call_tools: bool,
    /// Whether the template shall open the assistant's turn.
    pub add_generation_prompt: bool,
    /// How to sample.
    pub sampling: Sampling,
    /// Whether to answer piece by piece.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
    /// Keeps this request's cache apart.
    pub cache_salt: Option<String>,
    /// Whether to report token ids.
    pub return_token_ids: bool,
    /// The hand-off, opaque here.
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

/// What would change the answer and is not there yet is refused, not ignored.
fn refuse_unsupported(fields: Fields<'_>) -> Result<(), ApiError> {
    let refuse =
        |name: &str, what: &str| Err(ApiError::invalid(name, format!("{what} is not supported yet.")));
    if fields.get("response_format").is_some_and(|format| format["type"] != "text") {
        return refuse("response_format", "A `response_format` other than text");
    }
    let is_plain = |choice: &Value| matches!(choice.as_str(), Some("none" | "auto"));
    if fields.get("tool_choice").is_some_and(|choice| !is_plain(choice)) {
        return refuse("tool_choice", "A `tool_choice` other than `none` and `auto`");
    }
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
            may_call_tools: fields.get("tool_choice").is_none_or(|choice| choice != "none"),
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
    let plain = messages.iter().enumerate().map(|(index, message)| plain_message(index, message));
    plain.collect::<Result<Vec<_>, _>>().map(Value::Array)
}

fn plain_message(index: usize, message: &Value) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let Value::Object(fields) = message else {
        return Err(ApiError::invalid(
            &at(""),
            format!("`{}` must be an object, not {}.", at(""), kind(message)),
        ));
    };
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(ApiError::invalid(&at(".role"), format!("`{}` must be a string.", at(".role"))));
    }
    let mut plain = fields.clone();
    match fields.get("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for part in parts {
                match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("text" | "input_text"), Some(piece)) => text.push_str(piece),
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
            plain.insert("content".to_owned(), Value::String(text));
        }
        Some(other) => {
            let message =
                format!("`{}` must be a string or an array of parts, not {}.", at(".content"), kind(other));
            return Err(ApiError::invalid(&at(".content"), message));
        }
    }
    Ok(Value::Object(plain))
}

#[cfg(test)]
mod tests {
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
            ("response_format", json!({"type": "json_object"})),
            ("tool_choice", json!("required")),
            ("functions", json!([])),
        ] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], field: value});
            assert_eq!(chat(body).expect_err("refused").param.as_deref(), Some(field));
        }
        assert!(CompletionRequest::parse(b"{").is_err_and(|error| error.param.is_none()));
    }

    #[test]
    fn what_goes_to_an_engine_comes_back_the_same() {
        let body = json!({
            "prompt": [1], "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -5,
            "frequency_penalty": 1.5, "presence_penalty": -1.0, "repetition_penalty": 1.25, "max_tokens": 9,
            "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": true, "skip_special_tokens": false,
            "logprobs": 4, "logit_bias": {"5": -100.0}, "vllm_xargs": {"kvasir_resumed_tokens": 6},
        });
        let parsed = completion(body).expect("parses");
        let mut again = parsed.sampling.to_engine_fields();
        again.insert("prompt".into(), json!([1]));
        assert_eq!(completion(Value::Object(again)).expect("parses").sampling, parsed.sampling);
        assert_eq!(parsed.sampling.resumed_tokens, 6);
    }

    #[test]
    fn content_parts_become_text() {
        let parsed = chat(json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "max_completion_tokens": 3}));
        let parsed = parsed.expect("parses");
        assert_eq!(parsed.messages[0]["content"], "ab");
        assert_eq!(parsed.sampling.max_tokens, Some(3));
    }
}
