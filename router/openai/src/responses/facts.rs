//! The response object without an answer: the fields that it repeats from its request.

use serde_json::{Map, Value, json};

use crate::{Usage, chat};

/// Fields of a request that its answer repeats.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Fields of the response that the request decides.
    echoed: Map<String, Value>,
    /// Id of the response, if it is not derived from the chat's.
    id: Option<String>,
}

/// Fields that are copied from the request, with their values when absent.
const ECHOED: &[(&str, Value)] = &[
    ("instructions", Value::Null),
    ("max_output_tokens", Value::Null),
    ("max_tool_calls", Value::Null),
    ("parallel_tool_calls", Value::Bool(true)),
    ("prompt_cache_key", Value::Null),
    ("reasoning", Value::Null),
    ("safety_identifier", Value::Null),
    ("temperature", Value::Null),
    ("top_logprobs", Value::Null),
    ("top_p", Value::Null),
    ("user", Value::Null),
];

impl Facts {
    /// Reads the facts of a request that [`super::to_chat`] has accepted.
    #[must_use]
    pub fn of(request: &Value) -> Self {
        let given = |name: &str| request.get(name).filter(|value| !value.is_null()).cloned();
        let mut echoed = Map::new();
        echoed.insert("model".to_owned(), given("model").unwrap_or_else(|| "".into()));
        for (name, otherwise) in ECHOED {
            echoed.insert((*name).to_owned(), given(name).unwrap_or_else(|| otherwise.clone()));
        }
        let mut text = given("text").filter(Value::is_object).unwrap_or_else(|| json!({}));
        if text["format"].is_null() {
            text["format"] = json!({ "type": "text" });
        }
        let tools = given("tools").unwrap_or_else(|| json!([]));
        let unlike = [
            ("text", text),
            ("tools", tools.as_array().map(|tools| tools.iter().map(tool).collect()).unwrap_or_default()),
            ("tool_choice", given("tool_choice").unwrap_or_else(|| "auto".into())),
            ("metadata", given("metadata").unwrap_or_else(|| json!({}))),
            ("service_tier", given("service_tier").unwrap_or_else(|| "default".into())),
            ("truncation", given("truncation").unwrap_or_else(|| "disabled".into())),
            ("background", false.into()),
            ("store", false.into()),
            ("previous_response_id", Value::Null),
        ];
        echoed.extend(unlike.map(|(name, value)| (name.to_owned(), value)));
        Self { echoed, id: None }
    }

    /// Sets the id under which the response is stored.
    #[must_use]
    pub fn stored(mut self, id: &str, previous: Option<&str>, conversation: Option<&str>) -> Self {
        self.echoed.insert("store".to_owned(), true.into());
        self.echoed.insert("previous_response_id".to_owned(), previous.into());
        self.echoed
            .insert("conversation".to_owned(), conversation.map_or(Value::Null, |id| json!({ "id": id })));
        self.id = Some(id.to_owned());
        self
    }

    /// Sets the stored response that this one continues.
    #[must_use]
    pub fn continuing(mut self, previous: Option<&str>) -> Self {
        self.echoed.insert("previous_response_id".to_owned(), previous.into());
        self
    }

    /// Builds a response in this state. `chat` is the chat completion, or any piece of it, and gives id and time.
    pub(super) fn response(&self, chat: &Value, state: State<'_>, output: Vec<Value>) -> Value {
        let mut response = Map::new();
        let mut put = |name: &str, value: Value| drop(response.insert(name.to_owned(), value));
        let id = self.id.clone().unwrap_or_else(|| format!("resp_{}", chat::bare_id(chat)));
        put("id", id.into());
        put("object", "response".into());
        put("created_at", chat["created"].as_u64().unwrap_or(0).into());
        put("status", state.name().into());
        put("error", state.error());
        put("incomplete_details", state.incomplete_details());
        put("output", output.into());
        put("usage", state.usage().map_or(Value::Null, usage));
        response.extend(self.echoed.clone());
        Value::Object(response)
    }
}

/// State of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State<'a> {
    /// The response is being generated.
    InProgress,
    /// The response is complete.
    Completed(Usage),
    /// The response was cut short, for this reason.
    Incomplete(&'static str, Usage),
    /// The engine failed with this message.
    Failed(&'a str),
}

impl State<'_> {
    /// The state that a choice ended in.
    pub(super) fn of(choice: &Value, usage: Usage) -> Self {
        match choice["finish_reason"].as_str() {
            Some("length") => Self::Incomplete("max_output_tokens", usage),
            Some("content_filter") => Self::Incomplete("content_filter", usage),
            _ => Self::Completed(usage),
        }
    }

    /// The `status` of a response in this state.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed(_) => "completed",
            Self::Incomplete(..) => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    fn error(self) -> Value {
        match self {
            Self::Failed(message) => json!({ "code": "server_error", "message": message }),
            _ => Value::Null,
        }
    }

    fn incomplete_details(self) -> Value {
        match self {
            Self::Incomplete(reason, _) => json!({ "reason": reason }),
            _ => Value::Null,
        }
    }

    fn usage(self) -> Option<Usage> {
        match self {
            Self::Completed(usage) | Self::Incomplete(_, usage) => Some(usage),
            Self::InProgress | Self::Failed(_) => None,
        }
    }
}

/// Returns a tool as the response shows it, with defaults for the fields that a request may leave out.
fn tool(tool: &Value) -> Value {
    let mut shown = tool.clone();
    if let Value::Object(fields) = &mut shown {
        for name in ["description", "parameters", "strict"] {
            fields.entry(name).or_insert(Value::Null);
        }
    }
    shown
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": { "cached_tokens": usage.cached.unwrap_or(0), "cache_write_tokens": usage.cache_written.unwrap_or(0) },
        "output_tokens": usage.completion,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning.unwrap_or(0) },
        "total_tokens": usage.prompt.saturating_add(usage.completion),
    })
}
