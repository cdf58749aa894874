//! Requests and answers of each API surface. Answers are normalised and compared with the reference.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::catalog::Exchange;
use crate::client::Outcome;
use crate::model::MODEL_NAME;
use crate::oracle::Oracle;

/// An API surface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Surface {
    /// OpenAI's chat completions.
    #[default]
    Chat,
    /// Anthropic's messages.
    Messages,
    /// OpenAI's responses.
    Responses,
}

impl Surface {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }

    /// Returns the request body for an exchange.
    pub(crate) fn body(self, exchange: &Exchange, streams: bool) -> Value {
        let (messages, most) = (&exchange.messages, exchange.tokens_max);
        match self {
            Self::Chat | Self::Messages => {
                let mut body = json!({
                    "model": MODEL_NAME, "messages": messages, "max_tokens": most, "stream": streams, "temperature": 0,
                });
                if streams && self == Self::Chat {
                    body["stream_options"] = json!({"include_usage": true});
                }
                body
            }
            Self::Responses => json!({
                "model": MODEL_NAME, "input": messages, "max_output_tokens": most, "stream": streams, "temperature": 0,
                "store": false,
            }),
        }
    }
}

/// Whether a body is an error in the format that clients of a surface expect. Engines' own errors are relayed
/// unchanged, and some engines have the message at the top level.
pub(crate) fn is_error(surface: Surface, content: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<Value>(content) else { return false };
    match surface {
        Surface::Messages => body["type"] == "error" && body["error"]["message"].is_string(),
        Surface::Chat | Surface::Responses => {
            body["error"]["message"].is_string() || body["message"].is_string()
        }
    }
}

/// An answer, or the part of it that has arrived.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// Whether the end marker of the surface has arrived.
    is_done: bool,
    has_error: bool,
    ids: Vec<Value>,
    beginnings: usize,
    /// Finish reasons, in the terms of chat completions.
    finish_reasons: Vec<String>,
    usage: Option<(u64, u64)>,
    /// Tokens of the prompt that were cached.
    pub(crate) cached: Option<u64>,
    is_after_end: bool,
    /// Whether there is more than the requested choice, block or item, or the end contradicts the content.
    has_surplus: bool,
    malformed: Option<String>,
}

impl Answer {
    /// Parses an answer that is no stream.
    pub(crate) fn of_whole(surface: Surface, content: &[u8]) -> Self {
        let mut answer = Self::default();
        let Ok(body) = serde_json::from_slice::<Value>(content) else {
            answer.malformed = Some(String::from_utf8_lossy(content).into_owned());
            return answer;
        };
        answer.begin(&body);
        match surface {
            Surface::Chat => {
                let choice = &body["choices"][0];
                answer.expect_one(&body["choices"]);
                answer.text = text(&choice["message"]["content"]);
                answer.finish(&choice["finish_reason"]);
            }
            Surface::Messages => {
                answer.expect_one(&body["content"]);
                answer.text = text(&body["content"][0]["text"]);
                answer.finish(&body["stop_reason"]);
            }
            Surface::Responses => {
                answer.expect_one(&body["output"]);
                answer.expect_one(&body["output"][0]["content"]);
                answer.text = text(&body["output"][0]["content"][0]["text"]);
                answer.finish(&body["status"]);
            }
        }
        answer.count(&body["usage"]);
        answer.is_done = true;
        answer
    }

    /// Parses the events of a stream, as far as they have arrived.
    pub(crate) fn of_stream(surface: Surface, content: &[u8]) -> Self {
        let mut answer = Self::default();
        // The last line may be incomplete.
        let lines = content.split(|byte| *byte == b'\n');
        let count = lines.clone().count();
        for line in lines.take(count.saturating_sub(1)) {
            let Some(data) = line.strip_prefix(b"data: ") else { continue };
            let is_mark = data == b"[DONE]";
            answer.is_after_end |= answer.is_done || answer.has_error && !is_mark;
            if is_mark {
                answer.is_done = true;
                continue;
            }
            let Ok(event) = serde_json::from_slice::<Value>(data) else {
                answer.malformed = Some(String::from_utf8_lossy(data).into_owned());
                return answer;
            };
            match surface {
                Surface::Chat => answer.take_chunk(&event),
                Surface::Messages => answer.take_message_event(&event),
                Surface::Responses => answer.take_response_event(&event),
            }
        }
        answer
    }

    fn begin(&mut self, head: &Value) {
        self.beginnings += 1;
        self.name(&head["id"]);
    }

    fn expect_one(&mut self, list: &Value) {
        self.has_surplus |= list.as_array().is_none_or(|list| list.len() != 1);
    }

    fn name(&mut self, id: &Value) {
        if !self.ids.contains(id) {
            self.ids.push(id.clone());
        }
    }

    fn finish(&mut self, reason: &Value) {
        let Some(reason) = reason.as_str() else { return };
        let reason = match reason {
            "max_tokens" | "incomplete" => "length",
            "end_turn" | "completed" => "stop",
            other => other,
        };
        self.finish_reasons.push(reason.to_owned());
    }

    /// Adds a usage, in the format of any surface.
    fn count(&mut self, usage: &Value) {
        let of = |names: [&str; 2]| names.iter().find_map(|name| usage[name].as_u64());
        let (prompt, completion) =
            (of(["prompt_tokens", "input_tokens"]), of(["completion_tokens", "output_tokens"]));
        let (Some(mut prompt), Some(completion)) = (prompt, completion) else { return };
        let anthropic =
            ["cache_read_input_tokens", "cache_creation_input_tokens"].map(|name| usage[name].as_u64());
        // Anthropic's `input_tokens` excludes cached tokens.
        prompt += anthropic.iter().flatten().sum::<u64>();
        self.usage = Some((prompt, completion));
        self.cached = anthropic[0]
            .or_else(|| usage["prompt_tokens_details"]["cached_tokens"].as_u64())
            .or_else(|| usage["input_tokens_details"]["cached_tokens"].as_u64());
    }

    fn take_chunk(&mut self, event: &Value) {
        if event["error"].is_object() {
            self.has_error = true;
            return;
        }
        self.name(&event["id"]);
        self.count(&event["usage"]);
        let choices = event["choices"].as_array().map_or(0, Vec::len);
        let choice = &event["choices"][0];
        self.has_surplus |= choices > 1 || choice["index"].as_u64().unwrap_or(0) != 0;
        self.beginnings += usize::from(choice["delta"]["role"].is_string());
        self.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        self.finish(&choice["finish_reason"]);
    }

    fn take_message_event(&mut self, event: &Value) {
        match event["type"].as_str().unwrap_or_default() {
            "message_start" => self.begin(&event["message"]),
            "content_block_start" => self.has_surplus |= event["index"].as_u64() != Some(0),
            "content_block_delta" => self.text.push_str(event["delta"]["text"].as_str().unwrap_or_default()),
            "message_delta" => {
                self.count(&event["usage"]);
                self.finish(&event["delta"]["stop_reason"]);
            }
            "message_stop" => self.is_done = true,
            "error" => self.has_error = true,
            _ => {}
        }
    }

    fn take_response_event(&mut self, event: &Value) {
        match event["type"].as_str().unwrap_or_default() {
            "response.created" => self.begin(&event["response"]),
            "response.output_text.delta" => self.text.push_str(event["delta"].as_str().unwrap_or_default()),
            "response.completed" | "response.incomplete" => {
                let response = &event["response"];
                self.expect_one(&response["output"]);
                self.has_surplus |= text(&response["output"][0]["content"][0]["text"]) != self.text;
                self.name(&response["id"]);
                self.count(&event["response"]["usage"]);
                self.finish(&event["response"]["status"]);
                self.is_done = true;
            }
            "response.failed" | "error" => self.has_error = true,
            _ => {}
        }
    }

    /// Returns what is wrong with an answer that may be a part of one, if anything is.
    pub(crate) fn violation(&self, exchange: &Exchange) -> Option<Outcome> {
        if !exchange.answer.starts_with(&self.text) {
            let text = format!("an answer begins with {:?} for {:?}", self.text, exchange.answer);
            return Some(Outcome::Wrong(Oracle::Tokens, text));
        }
        if let Some(malformed) = &self.malformed {
            return Some(Outcome::Wrong(Oracle::OneEnd, format!("no JSON: {malformed}")));
        }
        if self.ids.len() > 1 || self.beginnings > 1 || self.finish_reasons.len() > 1 || self.is_after_end {
            let text = format!(
                "an answer with ids {:?}, {} beginnings, ends {:?}, events after the end: {}",
                self.ids, self.beginnings, self.finish_reasons, self.is_after_end
            );
            return Some(Outcome::Wrong(Oracle::OneEnd, text));
        }
        if self.has_error && !self.finish_reasons.is_empty() {
            let text = "an error after the end of the answer".to_owned();
            return Some(Outcome::Wrong(Oracle::OneEnd, text));
        }
        None
    }

    /// Returns the outcome of an answer whose HTTP body is complete.
    pub(crate) fn judge(&self, exchange: &Exchange) -> Outcome {
        if let Some(wrong) = self.violation(exchange) {
            return wrong;
        }
        if self.has_error {
            return Outcome::Broken;
        }
        if !self.is_done {
            return Outcome::Wrong(Oracle::OneEnd, "a stream that ends without its end".to_owned());
        }
        let wanted = Some((exchange.prompt_tokens, exchange.completion_tokens));
        if self.beginnings != 1 || !matches!(&self.ids[..], [Value::String(_)]) || self.has_surplus {
            let text = format!(
                "a whole answer with {} beginnings, ids {:?}, more than one part: {}",
                self.beginnings, self.ids, self.has_surplus
            );
            return Outcome::Wrong(Oracle::OneEnd, text);
        }
        if self.text != exchange.answer
            || self.usage != wanted
            || self.finish_reasons != [exchange.finish_reason.as_str()]
        {
            let text = format!(
                "a whole answer says {:?} for {:?}, usage {:?} for {wanted:?}, ends {:?}",
                self.text, exchange.answer, self.usage, self.finish_reasons
            );
            return Outcome::Wrong(Oracle::Tokens, text);
        }
        Outcome::Correct
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
