//! From the pieces of a chat completion to the events of a response.
//!
//! Items follow each other: a piece of another kind than the open item finishes it and adds the next. Engines finish
//! one tool call before they begin another, so a call is an item like any other. The state at the end and the counts
//! come in separate pieces and are told together when the chat stream has ended. The stream keeps all that was said,
//! because the last event repeats it. Only text goes through the JSON writer; the rest of a delta is constant.
//!
//! Source: <https://platform.openai.com/docs/api-reference/responses-streaming>.

use std::fmt::Write;

use serde_json::{Value, json};

use super::facts::{Facts, State};
use super::items;
use super::open::{Kind, Open};
use crate::sse;
use crate::{Usage, chat};

/// A streamed response.
#[derive(Debug)]
pub struct Stream {
    facts: Facts,
    /// Id and time of the answer; null until the first piece.
    head: Value,
    open: Option<Open>,
    /// Finished items.
    output: Vec<Value>,
    /// The latest tool call begun.
    call: Option<u64>,
    /// The choice that told why it ended.
    ended: Value,
    usage: Usage,
    /// Number of the next event.
    sequence: u64,
    is_over: bool,
}

impl Stream {
    /// The answer to a request.
    #[must_use]
    pub fn new(facts: Facts) -> Self {
        Self {
            facts,
            head: Value::Null,
            open: None,
            output: Vec::new(),
            call: None,
            ended: Value::Null,
            usage: Usage::default(),
            sequence: 0,
            is_over: false,
        }
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
        if let Some(thoughts) = chat::reasoning(delta) {
            self.switch(&Kind::Reasoning, out);
            self.delta(thoughts, &[], out);
        }
        if let Some(text) = chat::content(delta) {
            self.switch(&Kind::Message, out);
            self.delta(text, items::logprobs(choice), out);
        }
        for call in chat::tool_calls(delta) {
            self.call_piece(call, out);
        }
        if choice["finish_reason"].is_string() {
            self.ended = json!({ "finish_reason": choice["finish_reason"] });
        }
    }

    /// Appends the events of the end; to be called when the chat stream says `[DONE]`, which this stream does not repeat.
    pub fn end(&mut self, out: &mut String) {
        if let Some(response) = self.finish(out) {
            self.complete(response, out);
        }
    }

    /// The same in two steps, for what is to be stored before its client hears that it is complete: appends the events of the
    /// last item, and gives the whole response for [`Self::complete`].
    pub fn finish(&mut self, out: &mut String) -> Option<Value> {
        if self.is_over {
            return None;
        }
        self.begin(&json!({}), out);
        if self.open.is_none() && self.output.is_empty() {
            self.switch(&Kind::Message, out);
        }
        let ended = std::mem::take(&mut self.ended);
        let state = State::of(&ended, self.usage);
        self.close(state.name(), out);
        Some(self.facts.response(&self.head, state, std::mem::take(&mut self.output)))
    }

    /// Appends the last event, which tells the whole response.
    pub fn complete(&mut self, response: Value, out: &mut String) {
        let name = format!("response.{}", response["status"].as_str().unwrap_or("completed"));
        self.tell(&name, json!({ "response": response }), out);
        self.is_over = true;
    }

    /// Appends the event of a failure, after which there is nothing more. Takes what an engine or the gateway sends in
    /// the stream: `{"error": {...}}`.
    pub fn error(&mut self, error: &Value, out: &mut String) {
        if self.is_over {
            return;
        }
        let message = chat::error_message(error);
        if self.head.is_null() {
            // There is no response yet that could fail.
            let fields = json!({ "code": "server_error", "message": message, "param": null });
            self.tell("error", fields, out);
        } else {
            self.close("incomplete", out);
            let output = std::mem::take(&mut self.output);
            let response = self.facts.response(&self.head, State::Failed(message), output);
            self.tell("response.failed", json!({ "response": response }), out);
        }
        self.is_over = true;
    }

    fn begin(&mut self, chunk: &Value, out: &mut String) {
        if !self.head.is_null() {
            return;
        }
        self.head = json!({ "id": chunk["id"], "created": chunk["created"] });
        let response = self.facts.response(&self.head, State::InProgress, Vec::new());
        for name in ["response.created", "response.in_progress"] {
            self.tell(name, json!({ "response": response }), out);
        }
    }

    fn call_piece(&mut self, call: &Value, out: &mut String) {
        let index = call["index"].as_u64().unwrap_or(0);
        let text = |name: &str| call["function"][name].as_str().unwrap_or_default();
        if !self.open.as_ref().is_some_and(|open| open.is_call(index)) {
            if self.call.is_some_and(|latest| index <= latest) {
                return;
            }
            self.call = Some(index);
            let call_id =
                items::call_id(&self.head, call, self.output.len() + usize::from(self.open.is_some()));
            self.switch(&Kind::Call { index, call_id, name: text("name").to_owned() }, out);
        }
        if !text("arguments").is_empty() {
            self.delta(text("arguments"), &[], out);
        }
    }

    /// Makes an item of this kind the open one.
    fn switch(&mut self, kind: &Kind, out: &mut String) {
        if self.open.as_ref().is_some_and(|open| open.kind == *kind) {
            return;
        }
        self.close("completed", out);
        let place = self.output.len();
        let open = Open::new(kind.clone(), &self.head, place);
        let item = open.item(&[], "in_progress");
        self.tell("response.output_item.added", json!({ "output_index": place, "item": item }), out);
        if let Some(part) = open.part("", &[]) {
            let mut fields = open.place();
            fields["part"] = part;
            self.tell("response.content_part.added", fields, out);
        }
        self.open = Some(open);
    }

    /// Finishes the open item.
    fn close(&mut self, status: items::Status, out: &mut String) {
        let Some(open) = self.open.take() else { return };
        let mut done = open.place();
        done[open.kind.text_field()] = open.text.as_str().into();
        if open.kind == Kind::Message {
            done["logprobs"] = open.logprobs.as_slice().into();
        }
        self.tell(&format!("{}.done", open.kind.event()), done, out);
        let part = open.part(&open.text, &open.logprobs);
        if let Some(part) = &part {
            let mut fields = open.place();
            fields["part"] = part.clone();
            self.tell("response.content_part.done", fields, out);
        }
        let item = open.item(part.as_slice(), status);
        let fields = json!({ "output_index": self.output.len(), "item": item });
        self.tell("response.output_item.done", fields, out);
        self.output.push(item);
    }

    /// Appends to the open item.
    fn delta(&mut self, text: &str, logprobs: &[Value], out: &mut String) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        open.logprobs.extend_from_slice(logprobs);
        let (name, head, sequence) = (open.kind.event(), &open.delta_head, self.sequence);
        // Writing to a string cannot fail.
        let _ = write!(out, "event: {name}.delta\ndata: {head}\"sequence_number\":{sequence},");
        if open.kind == Kind::Message {
            let _ = write!(out, "\"logprobs\":{},", Value::from(logprobs));
        }
        out.push_str("\"delta\":");
        sse::quoted(out, text);
        out.push_str("}\n\n");
        self.sequence += 1;
    }

    fn tell(&mut self, name: &str, mut fields: Value, out: &mut String) {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        sse::named_event(out, name, &fields);
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
