//! Answers, whole or piece by piece.
//!
//! A streamed piece is written by hand into one buffer: its constant head is rendered once per answer, only
//! the text goes through the JSON writer. That is one allocation and no tree per piece.

use serde_json::{Value, json};

use crate::{Kind, Usage};

/// Reason for which an output ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop string, a stop token or the model's own end.
    Stop,
    /// The token limit.
    Length,
    /// The model called tools.
    ToolCalls,
    /// The request was cancelled or its engine failed.
    Abort,
}

impl Finish {
    /// Name in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::Abort => "abort",
        }
    }

    /// Parses an engine's finish reason; unknown reasons count as a stop.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "length" => Self::Length,
            "tool_calls" => Self::ToolCalls,
            "abort" => Self::Abort,
            _ => Self::Stop,
        }
    }
}

/// A token and its log-probability.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token id.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// Bytes of the token, which may be part of a character.
    pub bytes: Vec<u8>,
    /// Log-probability of the token.
    pub logprob: f32,
}

/// A chosen token with its alternatives, most likely first.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub chosen: TokenLogprob,
    /// The most likely tokens at this position.
    pub top: Vec<TokenLogprob>,
}

/// One answer under construction: its id, time and model are the same in every piece.
#[derive(Debug, Clone)]
pub struct Answer {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    /// Whether log-probabilities name tokens as `token_id:N`.
    tokens_as_ids: bool,
    head: String,
}

impl Answer {
    /// Starts an answer with this id, created at this Unix time.
    #[must_use]
    pub fn new(kind: Kind, id: String, created: u64, model: &str, tokens_as_ids: bool) -> Self {
        let object = match kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion.chunk",
        };
        let quoted = Value::from(model);
        let head = format!(
            "{{\"id\":{},\"object\":\"{object}\",\"created\":{created},\"model\":{quoted},\"choices\":[",
            Value::from(id.as_str())
        );
        Self { kind, id, created, model: model.to_owned(), tokens_as_ids, head }
    }

    /// The answer's id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The first piece of a chat stream, which only names the role.
    #[must_use]
    pub fn role_piece(&self, index: u32) -> String {
        let head = &self.head;
        format!(
            "data: {head}{{\"index\":{index},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        )
    }

    /// A piece of text as a server-sent event.
    #[must_use]
    pub fn piece(
        &self,
        index: u32,
        text: &str,
        logprobs: &[TokenLogprobs],
        text_offset: usize,
        token_ids: Option<&[u32]>,
        finish: Option<Finish>,
    ) -> String {
        use std::fmt::Write;
        let mut out = String::with_capacity(self.head.len() + text.len() + 96);
        out.push_str("data: ");
        out.push_str(&self.head);
        // Writing to a String cannot fail.
        let _infallible = write!(out, "{{\"index\":{index},");
        let quoted = Value::from(text);
        let _infallible = match self.kind {
            Kind::Chat if text.is_empty() => write!(out, "\"delta\":{{}},"),
            Kind::Chat => write!(out, "\"delta\":{{\"content\":{quoted}}},"),
            Kind::Completion => write!(out, "\"text\":{quoted},"),
        };
        let _infallible = write!(out, "\"logprobs\":{}", self.logprobs(logprobs, text_offset));
        if let Some(ids) = token_ids {
            let _infallible = write!(out, ",\"token_ids\":{}", json!(ids));
        }
        let _infallible = match finish {
            Some(finish) => write!(out, ",\"finish_reason\":\"{}\"}}]}}\n\n", finish.name()),
            None => write!(out, ",\"finish_reason\":null}}]}}\n\n"),
        };
        out
    }

    /// A piece of a chat stream with this delta, as a server-sent event.
    #[must_use]
    pub fn delta(
        &self,
        index: u32,
        delta: &Value,
        logprobs: &[TokenLogprobs],
        token_ids: Option<&[u32]>,
        finish: Option<Finish>,
    ) -> String {
        let mut choice = json!({
            "index": index, "delta": delta, "logprobs": self.logprobs(logprobs, 0),
            "finish_reason": finish.map(Finish::name),
        });
        if let Some(ids) = token_ids {
            choice["token_ids"] = json!(ids);
        }
        format!("data: {}{choice}]}}\n\n", self.head)
    }

    /// The usage piece that ends a stream on request.
    #[must_use]
    pub fn usage_piece(&self, usage: Usage) -> String {
        format!("data: {}],\"usage\":{}}}\n\n", self.head, usage.to_json())
    }

    /// One choice of a whole answer.
    #[must_use]
    pub fn choice(
        &self,
        index: u32,
        text: &str,
        logprobs: Option<&[TokenLogprobs]>,
        token_ids: Option<&[u32]>,
        finish: Finish,
    ) -> Value {
        let logprobs = logprobs.map_or(Value::Null, |logprobs| self.logprobs(logprobs, 0));
        let mut choice = match self.kind {
            Kind::Chat => json!({
                "index": index,
                "message": { "role": "assistant", "content": text, "refusal": null },
                "logprobs": logprobs,
                "finish_reason": finish.name(),
            }),
            Kind::Completion => json!({
                "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.name(),
            }),
        };
        if let Some(ids) = token_ids {
            choice["token_ids"] = json!(ids);
        }
        choice
    }

    /// A whole answer.
    #[must_use]
    pub fn whole(&self, choices: Vec<Value>, usage: Usage) -> Value {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage.to_json(), "system_fingerprint": null,
        })
    }

    fn token_name(&self, token: &TokenLogprob) -> String {
        if self.tokens_as_ids { format!("token_id:{}", token.id) } else { token.text.clone() }
    }

    fn logprobs(&self, tokens: &[TokenLogprobs], text_offset: usize) -> Value {
        if tokens.is_empty() {
            return Value::Null;
        }
        match self.kind {
            Kind::Chat => {
                let entry = |token: &TokenLogprob| json!({ "token": self.token_name(token), "logprob": token.logprob, "bytes": token.bytes });
                let content: Vec<Value> = tokens
                    .iter()
                    .map(|token| {
                        let mut chosen = entry(&token.chosen);
                        chosen["top_logprobs"] = token.top.iter().map(entry).collect();
                        chosen
                    })
                    .collect();
                json!({ "content": content, "refusal": null })
            }
            Kind::Completion => {
                let mut offset = text_offset;
                let mut offsets = Vec::with_capacity(tokens.len());
                for token in tokens {
                    offsets.push(offset);
                    offset += token.chosen.text.chars().count();
                }
                let top = |token: &TokenLogprobs| -> Value {
                    token
                        .top
                        .iter()
                        .chain(std::iter::once(&token.chosen))
                        .map(|token| (self.token_name(token), json!(token.logprob)))
                        .collect::<serde_json::Map<_, _>>()
                        .into()
                };
                json!({
                    "tokens": tokens.iter().map(|token| self.token_name(&token.chosen)).collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|token| token.chosen.logprob).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }
}

/// The answer of `/v1/models`.
#[must_use]
pub fn model_list(model: &str, created: u64, context: usize) -> Value {
    json!({
        "object": "list",
        "data": [{
            "id": model, "object": "model", "created": created, "owned_by": "kvasir",
            "root": model, "parent": null, "max_model_len": context,
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, text: &str, logprob: f32) -> TokenLogprob {
        TokenLogprob { id, text: text.to_owned(), bytes: text.as_bytes().to_vec(), logprob }
    }

    fn parsed(piece: &str) -> Value {
        let json = piece.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).expect("an event");
        serde_json::from_str(json).expect("JSON")
    }

    #[test]
    fn pieces_are_valid_json_whatever_the_text() {
        let tokens = [TokenLogprobs { chosen: token(5, "é\"", -0.5), top: vec![token(6, "\n", -0.25)] }];
        for kind in [Kind::Chat, Kind::Completion] {
            let answer = Answer::new(kind, "x-\"1".to_owned(), 7, "m\\n", false);
            let piece =
                parsed(&answer.piece(2, "a\"\\\n\u{1}😀", &tokens, 3, Some(&[5]), Some(Finish::Length)));
            assert_eq!(piece["id"], "x-\"1");
            assert_eq!(piece["choices"][0]["index"], 2);
            assert_eq!(piece["choices"][0]["finish_reason"], "length");
            assert_eq!(piece["choices"][0]["token_ids"], json!([5]));
            let text = match kind {
                Kind::Chat => &piece["choices"][0]["delta"]["content"],
                Kind::Completion => &piece["choices"][0]["text"],
            };
            assert_eq!(text, "a\"\\\n\u{1}😀");
            let usage = parsed(&answer.usage_piece(Usage { prompt: 3, completion: 2, ..Usage::default() }));
            assert_eq!(usage["choices"], json!([]));
            assert_eq!(usage["usage"]["total_tokens"], 5);
        }
    }

    #[test]
    fn logprobs_have_the_shape_of_their_surface() {
        let tokens = [TokenLogprobs {
            chosen: token(5, "a", -0.5),
            top: vec![token(5, "a", -0.5), token(6, "b", -1.0)],
        }];
        let chat = Answer::new(Kind::Chat, "x".into(), 0, "m", false).choice(
            0,
            "a",
            Some(&tokens),
            None,
            Finish::Stop,
        );
        assert_eq!(chat["logprobs"]["content"][0]["top_logprobs"][1]["token"], "b");
        assert_eq!(chat["logprobs"]["content"][0]["bytes"], json!([97]));
        let completion = Answer::new(Kind::Completion, "x".into(), 0, "m", true);
        let completion = completion.choice(0, "a", Some(&tokens), None, Finish::Stop);
        assert_eq!(completion["logprobs"]["tokens"], json!(["token_id:5"]));
        assert_eq!(
            completion["logprobs"]["top_logprobs"][0],
            json!({"token_id:5": -0.5, "token_id:6": -1.0})
        );
    }
}
