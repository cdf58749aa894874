//! Continuation of a stream whose worker failed: the same request again, with the delivered output as the
//! beginning of the answer.
//!
//! Engines continue a last message of the assistant when the request says so (`continue_final_message`),
//! and a completion continues any prompt. The delivered output is parsed only now, after the failure. A
//! request that an engine cannot continue is refused with the reason: the client is told that its stream
//! broke, and gets no answer made of two halves that do not belong together.

use bytes::{Bytes, BytesMut};
use router_openai::sse::{data_of, events};
use router_openai::{Kind, RawBody, Usage};
use serde_json::{Value, json};

/// Output that the client got before the failure.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct DeliveredOutput {
    pub(crate) text: String,
    /// Number of events with text; about as many as tokens, since engines send each token in an event.
    pub(crate) pieces: usize,
    /// `id`, `created` and `model` of the answer.
    pub(crate) id: Value,
    pub(crate) created: Value,
    pub(crate) model: Value,
    /// The engine has sent the finish reason: only the usage and the end of the stream are missing.
    pub(crate) is_finished: bool,
    /// Whether the output ended by a stop token without text, which engines count.
    pub(crate) ends_by_token: bool,
}

impl DeliveredOutput {
    /// Parses the delivered output; an error is the reason why no engine can continue it.
    pub(crate) fn read(kind: Option<Kind>, sent: &[u8]) -> Result<Self, &'static str> {
        let mut all = Self::default();
        for event in events(sent) {
            let Ok(value) = serde_json::from_slice::<Value>(&data_of(event)) else { continue };
            if all.id.is_null() {
                all.id = value["id"].clone();
                all.created = value["created"].clone();
                all.model = value["model"].clone();
            }
            let choice = &value["choices"][0];
            if choice["index"].as_u64().is_some_and(|index| index > 0) {
                return Err("the stream has several choices");
            }
            let delta = &choice["delta"];
            if delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty()) {
                return Err("a tool call was on its way");
            }
            let thinks = ["reasoning_content", "reasoning"].iter().any(|name| delta[*name].is_string());
            let piece = delta["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default();
            if thinks && piece.is_empty() {
                return Err("the model was still reasoning");
            }
            all.pieces += usize::from(!piece.is_empty());
            all.text.push_str(piece);
            all.is_finished |= choice["finish_reason"].is_string();
            all.ends_by_token |= choice["finish_reason"] == "stop" && piece.is_empty();
        }
        // Templates trim the last message and remove reasoning from it: the engine would continue another
        // text than was sent.
        let is_changed = || all.text.trim() != all.text || all.text.contains("<think");
        if kind == Some(Kind::Chat) && !all.is_finished && is_changed() {
            return Err("a template would change what has been sent");
        }
        Ok(all)
    }

    /// Returns the request for the rest; `None` when nothing is left to generate.
    pub(crate) fn continuation_body(&self, kind: Option<Kind>, asked: &RawBody) -> Option<RawBody> {
        let mut body = asked.clone();
        for name in ["max_tokens", "max_completion_tokens"] {
            if let Some(most) = body.value(name).and_then(|most| most.as_u64()) {
                let left = most.saturating_sub(self.pieces as u64);
                if left == 0 {
                    return None;
                }
                body.set(name, left.to_string());
            }
        }
        if let Some(least) = body.value("min_tokens").and_then(|least| least.as_u64()) {
            body.set("min_tokens", least.saturating_sub(self.pieces as u64).to_string());
        }
        if self.text.is_empty() {
            return Some(body);
        }
        match kind {
            Some(Kind::Completion) => {
                let prompt = body.value("prompt").unwrap_or_default();
                let text = format!("{}{}", prompt.as_str().unwrap_or_default(), self.text);
                body.set("prompt", json!(text).to_string());
            }
            _ => {
                // The client's messages stay as they are written; one is appended.
                let messages = body.get("messages").unwrap_or("[]").trim_end();
                let open = messages.strip_suffix(']').unwrap_or(messages).trim_end();
                let comma = if open.ends_with('[') { "" } else { "," };
                let last = json!({ "role": "assistant", "content": self.text });
                body.set("messages", format!("{open}{comma}{last}]"));
                body.set("add_generation_prompt", "false");
                body.set("continue_final_message", "true");
            }
        }
        Some(body)
    }

    /// Rewrites the rest of a stream as a continuation: the same id and time, no second beginning, and one
    /// usage for both parts.
    pub(crate) fn splice(&self, batch: &[u8], prompt_tokens: Option<usize>) -> Bytes {
        let mut out = BytesMut::with_capacity(batch.len() + 64);
        for event in events(batch) {
            let Ok(mut value) = serde_json::from_slice::<Value>(&data_of(event)) else {
                out.extend_from_slice(event);
                continue;
            };
            if !value.is_object() {
                continue;
            }
            let choice = &value["choices"][0];
            let begins = choice["delta"]["role"].is_string()
                && choice["delta"]["content"].as_str().is_none_or(str::is_empty)
                && choice["finish_reason"].is_null();
            if begins && !self.id.is_null() {
                continue;
            }
            if !self.id.is_null() {
                value["id"] = self.id.clone();
                value["created"] = self.created.clone();
            }
            if let Some(usage) = value.get_mut("usage").filter(|usage| usage.is_object()) {
                let count = |value: &Value| value.as_u64().unwrap_or(0);
                let prompt = self.prompt_tokens(count(&usage["prompt_tokens"]) as usize, prompt_tokens);
                let completion = count(&usage["completion_tokens"]) as usize + self.pieces;
                usage["prompt_tokens"] = json!(prompt);
                usage["completion_tokens"] = json!(completion);
                usage["total_tokens"] = json!(prompt + completion);
                // The delivered output is part of the second engine's prompt, but not of the client's.
                let mut room = prompt as u64;
                for detail in ["cached_tokens", "created_cache_tokens"] {
                    if let Some(tokens) = usage["prompt_tokens_details"][detail].as_u64() {
                        usage["prompt_tokens_details"][detail] = json!(tokens.min(room));
                        room -= tokens.min(room);
                    }
                }
            }
            out.extend_from_slice(format!("data: {value}\n\n").as_bytes());
        }
        out.freeze()
    }

    /// Returns the usage of both parts, given the usage of the second.
    pub(crate) fn whole_usage(&self, rest: Usage, prompt_tokens: Option<usize>) -> Usage {
        let prompt = self.prompt_tokens(rest.prompt, prompt_tokens);
        let cached = rest.cached.map(|cached| cached.min(prompt));
        let computed = prompt - cached.unwrap_or(0);
        Usage {
            prompt,
            completion: rest.completion + self.pieces,
            cached,
            cache_written: rest.cache_written.map(|written| written.min(computed)),
            ..rest
        }
    }

    /// Returns the event with the usage.
    pub(crate) fn usage_event(&self, kind: Option<Kind>, usage: &Usage) -> String {
        let object = if kind == Some(Kind::Completion) { "text_completion" } else { "chat.completion.chunk" };
        let event = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": [],
            "usage": {
                "prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
                "total_tokens": usage.prompt + usage.completion,
            },
        });
        format!("data: {event}\n\n")
    }

    /// Returns the tokens of the client's prompt: known, or the engine's count less the delivered output,
    /// which was in its prompt, too.
    fn prompt_tokens(&self, counted: usize, known: Option<usize>) -> usize {
        known.unwrap_or(counted.saturating_sub(self.pieces))
    }
}

/// Returns the reason why a request can never be continued in the middle, if there is one.
pub(crate) fn not_resumable_reason(kind: Option<Kind>, body: &RawBody) -> Option<&'static str> {
    let Some(kind) = kind else { return Some("this kind of answer cannot be taken up in the middle") };
    let has = |name: &str| body.get(name).is_some();
    if ["n", "best_of"].iter().any(|name| body.get(name).is_some_and(|count| count != "1")) {
        return Some("the stream has several choices");
    }
    let plain = body.get("response_format").is_none()
        || body.option("response_format").is_some_and(|format| format["type"] == "text");
    let guides = ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"];
    if !plain || guides.into_iter().chain(["json_schema", "regex", "ebnf"]).any(has) {
        return Some("guided decoding cannot be taken up in the middle");
    }
    let forces = body.get("tool_choice").is_some_and(|choice| choice != "\"auto\"" && choice != "\"none\"");
    if forces {
        return Some("a forced tool call cannot be taken up in the middle");
    }
    // Limits and penalties that an engine applies to the whole prompt would differ for the second half.
    let whole = ["truncate_prompt_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"];
    let forms =
        ["echo", "continue_final_message", "add_generation_prompt", "return_token_ids", "prompt_logprobs"];
    if whole.into_iter().chain(forms).chain(["use_beam_search"]).any(has) {
        return Some("an answer of this form cannot be taken up in the middle");
    }
    if kind == Kind::Completion
        && (has("logprobs") || body.get("prompt").is_none_or(|prompt| prompt.starts_with('[')))
    {
        return Some("an answer of this form cannot be taken up in the middle");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: Option<Kind> = Some(Kind::Chat);
    const COMPLETION: Option<Kind> = Some(Kind::Completion);
    const PROMPT: Option<usize> = Some(7);

    fn body(body: Value) -> RawBody {
        RawBody::parse(Bytes::from(body.to_string())).expect("parses")
    }

    fn event(value: Value) -> String {
        format!("data: {value}\n\n")
    }

    fn delta(delta: Value, finish: Value) -> String {
        event(
            json!({"id": "a", "created": 5, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}),
        )
    }

    #[test]
    fn a_stream_that_lacks_its_end_alone_is_told_its_usage() {
        let told = [
            delta(json!({"role": "assistant", "content": ""}), Value::Null),
            delta(json!({"content": "one "}), Value::Null),
            delta(json!({"content": "two"}), Value::Null),
        ];
        for (finish, ends_by_token) in [("length", false), ("stop", true)] {
            let sent = told.concat() + &delta(json!({}), json!(finish));
            let sent = DeliveredOutput::read(CHAT, sent.as_bytes()).expect("a stream");
            assert!(sent.is_finished && sent.ends_by_token == ends_by_token && sent.pieces == 2);
            let event = sent.usage_event(CHAT, &Usage { prompt: 7, completion: 3, ..Usage::default() });
            let event: Value = serde_json::from_slice(&data_of(event.as_bytes())).expect("an event");
            assert_eq!((&event["id"], &event["created"]), (&json!("a"), &json!(5)));
            assert_eq!(event["choices"], json!([]));
            let usage = json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10});
            assert_eq!(event["usage"], usage);
        }
    }

    #[test]
    fn a_chat_goes_on_where_it_stopped() {
        let first = [
            delta(json!({"role": "assistant", "content": ""}), Value::Null),
            delta(json!({"content": "one "}), Value::Null),
            delta(json!({"content": "two\""}), Value::Null),
        ];
        let sent = DeliveredOutput::read(CHAT, first.concat().as_bytes()).expect("can go on");
        assert_eq!((sent.text.as_str(), sent.pieces, sent.is_finished), ("one two\"", 2, false));
        let asked = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "min_tokens": 1});
        let rest = sent.continuation_body(CHAT, &body(asked)).expect("something is left");
        let rest: Value = serde_json::from_slice(&rest.to_bytes()).expect("JSON");
        assert_eq!(rest["messages"][1], json!({"role": "assistant", "content": "one two\""}));
        assert_eq!((&rest["max_tokens"], &rest["min_tokens"]), (&json!(7), &json!(0)));
        assert_eq!(
            (&rest["continue_final_message"], &rest["add_generation_prompt"]),
            (&json!(true), &json!(false))
        );
        let second = [
            event(
                json!({"id": "b", "created": 6, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
            ),
            event(
                json!({"id": "b", "created": 6, "choices": [{"index": 0, "delta": {"content": " three"}}]}),
            ),
            event(json!({"id": "b", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 5}}})),
            "data: [DONE]\n\n".to_owned(),
        ];
        let joined = sent.splice(second.concat().as_bytes(), PROMPT);
        let text = std::str::from_utf8(&joined).expect("UTF-8");
        let values: Vec<Value> =
            events(&joined).filter_map(|event| serde_json::from_slice(&data_of(event)).ok()).collect();
        assert_eq!(values.len(), 2, "{text}");
        assert_eq!((&values[0]["id"], &values[0]["created"]), (&json!("a"), &json!(5)));
        assert_eq!(
            values[1]["usage"],
            json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 4, "created_cache_tokens": 3}}),
            "no more of the prompt was cached and computed than there is"
        );
        assert!(text.ends_with("data: [DONE]\n\n"));
        let told =
            Usage { prompt: 9, completion: 1, cached: Some(4), cache_written: Some(5), ..Usage::default() };
        let whole = sent.whole_usage(told, PROMPT);
        assert_eq!((whole.prompt, whole.completion), (7, 3));
        assert_eq!((whole.cached, whole.cache_written), (Some(4), Some(3)));
    }

    #[test]
    fn a_completion_goes_on_behind_its_text() {
        let sent = event(json!({"id": "c", "choices": [{"index": 0, "text": " b"}]}));
        let sent = DeliveredOutput::read(COMPLETION, sent.as_bytes()).expect("can go on");
        let asked = body(json!({"prompt": "a", "max_tokens": 2}));
        let rest = sent.continuation_body(COMPLETION, &asked).expect("something is left");
        assert_eq!(rest.value("prompt"), Some(json!("a b")));
        assert!(DeliveredOutput { pieces: 2, ..sent }.continuation_body(COMPLETION, &asked).is_none());
    }

    #[test]
    fn what_cannot_be_joined_is_refused() {
        for sent in [
            delta(json!({"tool_calls": [{"index": 0}]}), Value::Null),
            delta(json!({"reasoning_content": "hm"}), Value::Null),
            event(json!({"choices": [{"index": 1, "delta": {"content": "x"}}]})),
            delta(json!({"content": "def f():\n    "}), Value::Null),
            delta(json!({"content": "<think>\nFirst I"}), Value::Null),
        ] {
            assert!(DeliveredOutput::read(CHAT, sent.as_bytes()).is_err(), "{sent}");
        }
        assert!(
            DeliveredOutput::read(CHAT, delta(json!({}), json!("stop")).as_bytes())
                .expect("reads")
                .is_finished
        );
        for (kind, asked) in [
            (CHAT, json!({"n": 2})),
            (CHAT, json!({"response_format": {"type": "json_object"}})),
            (CHAT, json!({"tool_choice": "required"})),
            (CHAT, json!({"structured_outputs": {"regex": "a"}})),
            (COMPLETION, json!({"prompt": ["a", "b"]})),
            (COMPLETION, json!({"prompt": "a", "logprobs": 1})),
            (None, json!({})),
        ] {
            assert!(not_resumable_reason(kind, &body(asked.clone())).is_some(), "{asked}");
        }
        let plain = json!({"n": 1, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"});
        assert_eq!(not_resumable_reason(CHAT, &body(plain)), None);
    }
}
