//! Converts the pieces of a chat completion to the events of a message.
//!
//! Blocks follow each other: a piece of another kind than the open block closes it and opens the next. Engines finish
//! one tool call before they begin another, so a call is a block like any other. The stop reason and the token counts
//! come in separate pieces and are sent together when the chat stream has ended. Only text goes through the JSON
//! writer; the rest of a delta is constant.
//!
//! Source: <https://docs.anthropic.com/en/api/messages-streaming>.

use std::fmt::Write;

use http::StatusCode;
use serde_json::{Value, json};

use super::answer::{Facts, call_id, message_id, stop, usage};
use super::error::error_body;
use crate::sse;
use crate::{Usage, chat};

/// Content of the open block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    /// The call with this index among the chat's tool calls.
    Call(u64),
}

/// One streamed answer.
#[derive(Debug)]
pub struct Stream {
    facts: Facts,
    open: Option<Block>,
    /// Blocks begun so far; the open one is the last.
    blocks: usize,
    /// Index of the latest tool call.
    call: Option<u64>,
    /// The choice with the finish reason.
    ended: Option<Value>,
    usage: Usage,
    is_begun: bool,
    is_over: bool,
}

impl Stream {
    /// Starts the answer to a request.
    #[must_use]
    pub fn new(facts: Facts) -> Self {
        let usage = Usage { prompt: facts.prompt_tokens, ..Usage::default() };
        Self { facts, open: None, blocks: 0, call: None, ended: None, usage, is_begun: false, is_over: false }
    }

    /// Appends the events that one `chat.completion.chunk` causes.
    pub fn event(&mut self, chunk: &Value, out: &mut String) {
        if self.is_over {
            return;
        }
        if chunk["usage"].is_object() {
            self.usage = Usage::read(&chunk["usage"]);
        }
        self.begin(chunk, out);
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        if let Some(thinking) = chat::reasoning(delta).filter(|_| self.facts.shows_thinking) {
            self.switch(
                Block::Thinking,
                || json!({ "type": "thinking", "thinking": "", "signature": "" }),
                out,
            );
            self.delta("thinking_delta", "thinking", thinking, out);
        }
        if let Some(text) = chat::content(delta) {
            self.switch(Block::Text, || json!({ "type": "text", "text": "" }), out);
            self.delta("text_delta", "text", text, out);
        }
        for call in chat::tool_calls(delta) {
            self.call_piece(chunk, call, out);
        }
        if choice["finish_reason"].is_string() {
            self.ended = Some(choice.clone());
        }
    }

    /// Appends the final events; must be called at the chat stream's `[DONE]`.
    pub fn end(&mut self, out: &mut String) {
        if self.is_over {
            return;
        }
        self.begin(&Value::Null, out);
        if self.blocks == 0 {
            self.switch(Block::Text, || json!({ "type": "text", "text": "" }), out);
        }
        self.close(out);
        let ended = self.ended.take().unwrap_or_default();
        let (reason, sequence) = stop(&ended, self.call.is_some());
        let delta = json!({
            "type": "message_delta",
            "delta": { "stop_reason": reason, "stop_sequence": sequence },
            "usage": usage(self.usage),
        });
        sse::named_event(out, "message_delta", &delta);
        sse::named_event(out, "message_stop", &json!({ "type": "message_stop" }));
        self.is_over = true;
    }

    /// Appends an error event, which is the last one. `error` is the object that an engine or the gateway sends in the stream:
    /// `{"error": {...}}`.
    pub fn error(&mut self, error: &Value, out: &mut String) {
        if self.is_over {
            return;
        }
        let status = chat::error_status(error).and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        sse::named_event(out, "error", &error_body(status, chat::error_message(error)));
        self.is_over = true;
    }

    fn begin(&mut self, chunk: &Value, out: &mut String) {
        if self.is_begun {
            return;
        }
        self.is_begun = true;
        let message = json!({
            "id": message_id(chunk),
            "type": "message",
            "role": "assistant",
            "model": self.facts.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(self.usage),
        });
        sse::named_event(out, "message_start", &json!({ "type": "message_start", "message": message }));
    }

    fn call_piece(&mut self, chunk: &Value, call: &Value, out: &mut String) {
        let index = call["index"].as_u64().unwrap_or(0);
        let function = &call["function"];
        if self.open != Some(Block::Call(index)) {
            if self.call.is_some_and(|latest| index <= latest) {
                return;
            }
            self.call = Some(index);
            let start = || {
                let id = call_id(chunk, call, index as usize);
                let name = function["name"].as_str().unwrap_or_default();
                json!({ "type": "tool_use", "id": id, "name": name, "input": {} })
            };
            self.switch(Block::Call(index), start, out);
        }
        if let Some(arguments) = function["arguments"].as_str().filter(|arguments| !arguments.is_empty()) {
            self.delta("input_json_delta", "partial_json", arguments, out);
        }
    }

    /// Makes a block of this kind the open one.
    fn switch(&mut self, block: Block, start: impl FnOnce() -> Value, out: &mut String) {
        if self.open == Some(block) {
            return;
        }
        self.close(out);
        let event = json!({ "type": "content_block_start", "index": self.blocks, "content_block": start() });
        sse::named_event(out, "content_block_start", &event);
        self.open = Some(block);
        self.blocks += 1;
    }

    fn close(&mut self, out: &mut String) {
        if self.open.take().is_some() {
            let event = json!({ "type": "content_block_stop", "index": self.blocks - 1 });
            sse::named_event(out, "content_block_stop", &event);
        }
    }

    /// Appends to the open block.
    fn delta(&self, kind: &str, field: &str, text: &str, out: &mut String) {
        let index = self.blocks - 1;
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{index},\"delta\":{{\"type\":\"{kind}\",\"{field}\":"
        );
        sse::quoted(out, text);
        out.push_str("}}\n\n");
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
