//! How a stream goes on after its worker failed: the same request again, with what the client has already as the
//! beginning of the answer.
//!
//! Engines continue a last message of the assistant when they are told so (`continue_final_message`), and a completion
//! continues any prompt. What has been sent is read only now, after the failure. What an engine cannot take up in the
//! middle is refused with the reason: the client hears that its stream broke, and gets no answer that is made of two
//! halves which do not belong together.

use bytes::BytesMut;
use router_engines::body::RawBody;
use serde_json::{Value, json};

use super::events::{data_of, events};
use super::{RelayRequest, Surface};

/// What was sent before the failure.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Sent {
    pub(crate) text: String,
    /// Events that brought some of it; about as many tokens, since engines send each as it comes.
    pub(crate) pieces: usize,
    /// `id` and `created` of the answer.
    pub(crate) id: Value,
    pub(crate) created: Value,
    /// The engine has said why it ended: only the end of the stream is missing.
    pub(crate) is_finished: bool,
}

/// Reads what was sent; an error says why no engine can go on from there.
pub(crate) fn read(surface: Surface, sent: &[u8]) -> Result<Sent, &'static str> {
    let mut all = Sent::default();
    for event in events(sent) {
        let Ok(value) = serde_json::from_slice::<Value>(data_of(event)) else { continue };
        if all.id.is_null() {
            all.id = value["id"].clone();
            all.created = value["created"].clone();
        }
        let choice = &value["choices"][0];
        if choice["index"].as_u64().is_some_and(|index| index > 0) {
            return Err("several choices were on their way");
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
    }
    // Templates trim the last message, and take thoughts out of it: what is continued would not be what was sent.
    let is_changed = || all.text.trim() != all.text || all.text.contains("<think");
    if surface == Surface::Chat && !all.is_finished && is_changed() {
        return Err("a template would change what has been sent");
    }
    Ok(all)
}

/// Why a request can never be taken up in the middle, if it cannot.
pub(crate) fn obstacle(surface: Surface, body: &RawBody) -> Option<&'static str> {
    if surface == Surface::Other {
        return Some("this kind of answer cannot be taken up in the middle");
    }
    let has = |name: &str| body.get(name).is_some();
    if body.value("n").is_some_and(|n| n != 1) || body.get("best_of").is_some_and(|best| best != "1") {
        return Some("several choices were on their way");
    }
    let plain = body.value("response_format").is_none_or(|format| format["type"] == "text");
    let guides = ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"];
    if !plain || guides.into_iter().chain(["json_schema", "regex", "ebnf"]).any(has) {
        return Some("guided decoding cannot be taken up in the middle");
    }
    let forces = body.value("tool_choice").is_some_and(|choice| choice != "auto" && choice != "none");
    if forces {
        return Some("a forced tool call cannot be taken up in the middle");
    }
    // What an engine counts or cuts over the whole of a prompt would differ for its second half.
    let whole = ["truncate_prompt_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"];
    let forms =
        ["echo", "continue_final_message", "add_generation_prompt", "return_token_ids", "prompt_logprobs"];
    if whole.into_iter().chain(forms).chain(["use_beam_search"]).any(has) {
        return Some("an answer of this form cannot be taken up in the middle");
    }
    if surface == Surface::Completion
        && (has("logprobs") || body.value("prompt").is_none_or(|prompt| prompt.is_array()))
    {
        return Some("an answer of this form cannot be taken up in the middle");
    }
    None
}

/// The request for the rest; `None` when nothing is left to ask for.
pub(crate) fn rest(request: &RelayRequest, sent: &Sent) -> Option<RawBody> {
    let mut body = request.body.clone();
    for name in ["max_tokens", "max_completion_tokens"] {
        if let Some(most) = body.value(name).and_then(|most| most.as_u64()) {
            let left = most.saturating_sub(sent.pieces as u64);
            if left == 0 {
                return None;
            }
            body.set(name, left.to_string());
        }
    }
    if let Some(least) = body.value("min_tokens").and_then(|least| least.as_u64()) {
        body.set("min_tokens", least.saturating_sub(sent.pieces as u64).to_string());
    }
    if sent.text.is_empty() {
        return Some(body);
    }
    match request.surface {
        Surface::Completion => {
            let prompt = body.value("prompt").unwrap_or_default();
            let text = format!("{}{}", prompt.as_str().unwrap_or_default(), sent.text);
            body.set("prompt", json!(text).to_string());
        }
        _ => {
            // The client's messages stay as they are written; one is put behind them.
            let messages = body.get("messages").unwrap_or("[]").trim_end();
            let open = messages.strip_suffix(']').unwrap_or(messages).trim_end();
            let comma = if open.ends_with('[') { "" } else { "," };
            let last = json!({ "role": "assistant", "content": sent.text });
            body.set("messages", format!("{open}{comma}{last}]"));
            body.set("add_generation_prompt", "false");
            body.set("continue_final_message", "true");
        }
    }
    Some(body)
}

/// Makes the rest of a stream look like the continuation that it is: the same id and time, no second beginning, and one
/// usage for both parts.
pub(crate) fn join(batch: &[u8], sent: &Sent, request: &RelayRequest) -> BytesMut {
    let mut out = BytesMut::with_capacity(batch.len() + 64);
    for event in events(batch) {
        let Ok(mut value) = serde_json::from_slice::<Value>(data_of(event)) else {
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
        if begins && !sent.id.is_null() {
            continue;
        }
        if !sent.id.is_null() {
            value["id"] = sent.id.clone();
            value["created"] = sent.created.clone();
        }
        if let Some(usage) = value.get_mut("usage").filter(|usage| usage.is_object()) {
            let count = |value: &Value| value.as_u64().unwrap_or(0);
            let prompt = request.prompt_tokens.map_or(count(&usage["prompt_tokens"]), |tokens| tokens as u64);
            let completion = count(&usage["completion_tokens"]) + sent.pieces as u64;
            usage["prompt_tokens"] = json!(prompt);
            usage["completion_tokens"] = json!(completion);
            usage["total_tokens"] = json!(prompt + completion);
        }
        out.extend_from_slice(format!("data: {value}\n\n").as_bytes());
    }
    out
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn request(surface: Surface, body: Value) -> RelayRequest {
        let body = RawBody::parse(Bytes::from(body.to_string())).expect("parses");
        RelayRequest { surface, body, prompt_tokens: Some(7), ..RelayRequest::empty() }
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
    fn a_chat_goes_on_where_it_stopped() {
        let first = [
            delta(json!({"role": "assistant", "content": ""}), Value::Null),
            delta(json!({"content": "one "}), Value::Null),
            delta(json!({"content": "two\""}), Value::Null),
        ];
        let sent = read(Surface::Chat, first.concat().as_bytes()).expect("can go on");
        assert_eq!((sent.text.as_str(), sent.pieces, sent.is_finished), ("one two\"", 2, false));
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "min_tokens": 1});
        let request = request(Surface::Chat, body);
        let rest = rest(&request, &sent).expect("something is left");
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
            event(json!({"id": "b", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})),
            "data: [DONE]\n\n".to_owned(),
        ];
        let joined = join(second.concat().as_bytes(), &sent, &request);
        let text = std::str::from_utf8(&joined).expect("UTF-8");
        let values: Vec<Value> =
            events(&joined).filter_map(|event| serde_json::from_slice(data_of(event)).ok()).collect();
        assert_eq!(values.len(), 2, "{text}");
        assert_eq!((&values[0]["id"], &values[0]["created"]), (&json!("a"), &json!(5)));
        assert_eq!(
            values[1]["usage"],
            json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
        );
        assert!(text.ends_with("data: [DONE]\n\n"));
    }

    #[test]
    fn a_completion_goes_on_behind_its_text() {
        let sent = event(json!({"id": "c", "choices": [{"index": 0, "text": " b"}]}));
        let sent = read(Surface::Completion, sent.as_bytes()).expect("can go on");
        let request = request(Surface::Completion, json!({"prompt": "a", "max_tokens": 2}));
        let rest = rest(&request, &sent).expect("something is left");
        assert_eq!(rest.value("prompt"), Some(json!("a b")));
        assert_eq!(super::rest(&request, &Sent { pieces: 2, ..sent }).map(|_| ()), None);
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
            assert!(read(Surface::Chat, sent.as_bytes()).is_err(), "{sent}");
        }
        assert!(read(Surface::Chat, delta(json!({}), json!("stop")).as_bytes()).expect("reads").is_finished);
        for (surface, body) in [
            (Surface::Chat, json!({"n": 2})),
            (Surface::Chat, json!({"response_format": {"type": "json_object"}})),
            (Surface::Chat, json!({"tool_choice": "required"})),
            (Surface::Chat, json!({"structured_outputs": {"regex": "a"}})),
            (Surface::Completion, json!({"prompt": ["a", "b"]})),
            (Surface::Completion, json!({"prompt": "a", "logprobs": 1})),
            (Surface::Other, json!({})),
        ] {
            let body = RawBody::parse(Bytes::from(body.to_string())).expect("parses");
            assert!(obstacle(surface, &body).is_some(), "{body:?}");
        }
        let plain = json!({"n": 1, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"});
        let plain = RawBody::parse(Bytes::from(plain.to_string())).expect("parses");
        assert_eq!(obstacle(Surface::Chat, &plain), None);
    }
}
