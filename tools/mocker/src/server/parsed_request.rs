//! A request of any surface, checked and in token ids.

use router_tokens::ModelText;
use serde_json::{Map, Value, json};

use super::refusal::Refusal;
use super::request::{Body, BootstrapRooms, Logprobs, Message, Prompt};
use super::schema;
use crate::output_generator::Limits;
use crate::worker::Worker;

/// Tokens of an output if the request sets no limit.
pub(crate) const OUTPUT_TOKENS: i64 = 16;
/// Most outputs of one request: prompts times choices.
const CHOICES_MAX: usize = 1024;
/// Most alternatives of log-probabilities, as in vLLM.
const TOP_LOGPROBS_MAX: u32 = 20;
/// Most characters of a token in any vocabulary, according to vLLM; longer texts are refused without tokenising.
const CHARACTERS_PER_TOKEN_MAX: usize = 64;

/// Surface that shapes the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Surface {
    Completion,
    Chat,
    Messages,
    Responses,
}

/// Output required by a tool choice or a response format.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ForcedOutput {
    pub(crate) text: String,
    /// The tool that is called with this text.
    pub(crate) tool: Option<String>,
}

/// A request of any surface, checked and in token ids.
#[derive(Debug)]
pub(crate) struct ParsedRequest {
    pub(crate) surface: Surface,
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) choices: usize,
    pub(crate) limits: Limits,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) echo: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) tokens_as_ids: bool,
    /// Number of alternatives, if log-probabilities are requested.
    pub(crate) logprobs: Option<usize>,
    pub(crate) forced: Option<ForcedOutput>,
    /// The LoRA adapter that the request names.
    pub(crate) adapter: Option<String>,
    /// Texts that enter the hash of the first block.
    pub(crate) extras: Vec<String>,
    pub(crate) transfer: Option<Value>,
    pub(crate) rooms: Option<BootstrapRooms>,
    pub(crate) request_id: Option<String>,
}

impl ParsedRequest {
    /// Checks a body of `/v1/completions` or `/v1/chat/completions`, or one converted to their form.
    pub(crate) fn new(worker: &Worker, surface: Surface, body: Body<'_>) -> Result<Self, Refusal> {
        let config = &worker.config;
        let asked = body.model.as_ref().filter(|asked| asked.0 != config.model);
        let adapter = match asked.map(|asked| config.adapters.iter().find(|name| **name == asked.0)) {
            None => None,
            Some(Some(adapter)) => Some(adapter.clone()),
            Some(None) => {
                let asked = asked.map_or("", |asked| &asked.0);
                return Err(Refusal::no_such_model(asked, &config.model));
            }
        };
        if let Some(low) = body.temperature.filter(|temperature| *temperature < 0.0) {
            return Err(Refusal::bad(
                "temperature",
                format!("temperature must be non-negative, got {low:?}."),
            ));
        }
        if body.cache_salt.as_ref().is_some_and(|salt| salt.0.is_empty()) {
            return Err(Refusal::bad("cache_salt", "Parameter 'cache_salt' must be a non-empty string."));
        }
        let prompts = match surface {
            Surface::Completion => completion_prompts(worker, &body)?,
            _ => vec![chat_prompt(worker, &body)?],
        };
        let choices = body.n.unwrap_or(1) as usize;
        if choices == 0 || choices * prompts.len() > CHOICES_MAX {
            return Err(Refusal::bad("n", format!("n must be at least 1 and at most {CHOICES_MAX}.")));
        }
        let limits = limits(&body, &prompts, config.context_tokens)?;
        let logprobs = match (surface, body.logprobs) {
            (Surface::Completion, Some(Logprobs::Top(top))) => Some(top),
            (_, Some(Logprobs::Flag(true))) => Some(body.top_logprobs.unwrap_or(0)),
            _ => None,
        };
        if logprobs.is_some_and(|top| top > TOP_LOGPROBS_MAX) {
            return Err(Refusal::bad("logprobs", format!("At most {TOP_LOGPROBS_MAX} logprobs can be had.")));
        }
        let options = body.stream_options.unwrap_or_default();
        let stream = body.stream.unwrap_or(false);
        if body.stream_options.is_some() && !stream {
            return Err(Refusal::bad(
                "stream_options",
                "Stream options can only be defined when `stream=True`.",
            ));
        }
        Ok(Self {
            surface,
            choices,
            limits,
            stream,
            include_usage: options.include_usage.unwrap_or(false),
            continuous_usage: options.continuous_usage_stats.unwrap_or(false),
            echo: body.echo.unwrap_or(false) && surface == Surface::Completion,
            return_token_ids: body.return_token_ids.unwrap_or(false),
            tokens_as_ids: body.return_tokens_as_token_ids.unwrap_or(false),
            logprobs: logprobs.map(|top| top as usize),
            forced: forced(&body)?,
            // In vLLM's order: the adapter before the salt.
            extras: adapter
                .iter()
                .cloned()
                .chain(body.cache_salt.iter().map(|salt| salt.0.to_string()))
                .collect(),
            adapter,
            transfer: body.kv_transfer_params.filter(Value::is_object),
            rooms: body.bootstrap_room,
            request_id: body.request_id.map(|id| id.0.into_owned()),
            prompts,
        })
    }
}

fn limits(body: &Body<'_>, prompts: &[Vec<u32>], context: usize) -> Result<Limits, Refusal> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if longest > context {
        return Err(Refusal::bad(
            "input_tokens",
            format!(
                "This model's maximum context length is {context} tokens. However, your prompt contains at least {longest} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={longest})"
            ),
        ));
    }
    let asked = body.max_completion_tokens.or(body.max_tokens).unwrap_or(OUTPUT_TOKENS);
    // As in vLLM: an output that would not fit is shortened, not refused.
    let max_tokens = asked.min((context - longest) as i64);
    if max_tokens < 1 {
        return Err(Refusal::bad(
            "max_tokens",
            format!(
                "max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})"
            ),
        ));
    }
    Ok(Limits {
        max_tokens: max_tokens as usize,
        min_tokens: body.min_tokens.unwrap_or(0) as usize,
        ignore_eos: body.ignore_eos.unwrap_or(false),
        stop: body.stop.clone().unwrap_or_default().into_vec(),
        include_stop: body.include_stop_str_in_output.unwrap_or(false),
        stop_token_ids: body.stop_token_ids.clone().unwrap_or_default(),
    })
}

fn completion_prompts(worker: &Worker, body: &Body<'_>) -> Result<Vec<Vec<u32>>, Refusal> {
    let tokenizer = &worker.model.text.tokenizer;
    let vocabulary = tokenizer.vocabulary() as u32;
    let empty = || {
        let message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)";
        Refusal::bad("prompt", message)
    };
    let prompts = body.prompt.as_ref().ok_or_else(empty)?;
    let ids = |prompt: &Prompt<'_>| match prompt {
        Prompt::Text(text) => encode(worker, text, true),
        Prompt::Tokens(ids) => match ids.iter().find(|&&id| id >= vocabulary) {
            Some(id) => Err(Refusal::bad("prompt", format!("Token id {id} is out of vocabulary"))),
            None => Ok(ids.clone()),
        },
    };
    let prompts: Vec<Vec<u32>> = prompts.0.iter().map(ids).collect::<Result<_, _>>()?;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(empty());
    }
    Ok(prompts)
}

fn encode(worker: &Worker, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Refusal> {
    let context = worker.config.context_tokens;
    let most = context.saturating_mul(CHARACTERS_PER_TOKEN_MAX);
    if text.len() > most {
        let characters = text.chars().count();
        return Err(Refusal::bad(
            "input_text",
            format!(
                "This model's maximum context length is {context} tokens. However, your prompt contains {characters} characters (more than {most} characters, which is the upper bound for {context} input tokens). Please reduce the length of the input prompt. (parameter=input_text, value={characters})"
            ),
        ));
    }
    let ids = worker.model.text.tokenizer.encode(text, add_special_tokens);
    ids.map_err(|error| Refusal::bad("prompt", error.to_string()))
}

/// Token ids of a conversation.
pub(crate) fn chat_prompt(worker: &Worker, body: &Body<'_>) -> Result<Vec<u32>, Refusal> {
    let Some(messages) = &body.messages else { return Err(Refusal::missing("messages")) };
    let (mut shown, mut rest) = (messages.as_slice(), "");
    let mut opens = body.add_generation_prompt.unwrap_or(!body.continue_final_message.unwrap_or(false));
    if body.continue_final_message.unwrap_or(false) {
        if opens {
            return Err(Refusal::bad(
                "continue_final_message",
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            ));
        }
        if let Some((last, before)) = messages.split_last() {
            (shown, rest, opens) = (before, last.content.0.as_ref(), true);
        }
    }
    let mut text = match worker.model.is_tiny {
        true => tiny_chat(shown, opens),
        false => render_chat(&worker.model.text, shown, opens, body)?,
    };
    text.push_str(rest);
    encode(worker, &text, false)
}

/// The built-in model's template in code: interpreting it would cost more than the rest of a request.
pub(crate) fn tiny_chat(messages: &[Message<'_>], opens: bool) -> String {
    let bytes =
        messages.iter().map(|message| message.role.0.len() + message.content.0.len() + 5).sum::<usize>();
    let mut text = String::with_capacity(bytes + 16);
    for message in messages {
        text.push_str("<|");
        text.push_str(&message.role.0);
        text.push_str("|>");
        text.push_str(&message.content.0);
        text.push('\n');
    }
    if opens {
        text.push_str("<|assistant|>");
    }
    text
}

fn render_chat(
    text: &ModelText,
    messages: &[Message<'_>],
    opens: bool,
    body: &Body<'_>,
) -> Result<String, Refusal> {
    let message = |message: &Message<'_>| {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), Value::from(message.role.0.as_ref()));
        fields.insert("content".to_owned(), Value::from(message.content.0.as_ref()));
        let further = [
            ("tool_calls", &message.tool_calls),
            ("tool_call_id", &message.tool_call_id),
            ("name", &message.name),
        ];
        for (name, value) in further {
            fields.extend(value.iter().map(|value| (name.to_owned(), value.clone())));
        }
        Value::Object(fields)
    };
    let messages: Value = messages.iter().map(message).collect();
    let mut extras = body.chat_template_kwargs.clone().unwrap_or_default();
    extras.extend(body.tools.iter().map(|tools| ("tools".to_owned(), tools.clone())));
    let rendered = text.render_chat(&messages, opens, &extras);
    rendered.map_err(|error| Refusal::bad("messages", error.to_string()))
}

/// Returns the output that a tool choice or a response format requires.
fn forced(body: &Body<'_>) -> Result<Option<ForcedOutput>, Refusal> {
    if let Some(tools) = body.tools.as_ref().and_then(Value::as_array).filter(|tools| !tools.is_empty()) {
        let choice = body.tool_choice.as_ref().unwrap_or(&Value::Null);
        let named = choice["function"]["name"].as_str();
        let tool = match (named, choice.as_str()) {
            (Some(name), _) => {
                let tool = tools.iter().find(|tool| tool["function"]["name"] == name);
                let missing = format!("The tool choice names the tool {name:?}, which is not there.");
                Some(tool.ok_or_else(|| Refusal::bad("tool_choice", missing))?)
            }
            (None, Some("required")) => tools.first(),
            _ => None,
        };
        if let Some(tool) = tool {
            let arguments = match &tool["function"]["parameters"] {
                Value::Null => json!({}),
                parameters => schema::instance(parameters),
            };
            let name = tool["function"]["name"].as_str().unwrap_or_default().to_owned();
            return Ok(Some(ForcedOutput { text: arguments.to_string(), tool: Some(name) }));
        }
    }
    let structured = body.structured_outputs.as_ref().and_then(|outputs| outputs.get("json"));
    let format = body.response_format.as_ref().unwrap_or(&Value::Null);
    let schema = match format["type"].as_str() {
        Some("json_schema") => Some(&format["json_schema"]["schema"]),
        Some("json_object") => return Ok(Some(ForcedOutput { text: "{}".to_owned(), tool: None })),
        _ => structured.or(body.guided_json.as_ref()),
    };
    Ok(schema.map(|schema| ForcedOutput { text: schema::instance(schema).to_string(), tool: None }))
}
