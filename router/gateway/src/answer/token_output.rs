//! One output of an engine that takes and gives token ids: the gateway makes its text.
//!
//! The generated tokens are known exactly, and the sampler draws by (seed, position): with a seed in every
//! request the output continues on another worker with the same tokens, from prompt and tokens so far.

use std::sync::Arc;

use router_engines::tokens::TokenEvent;
use router_openai::sse::{DONE, data_of, events};
use router_openai::{Finish, RawBody, Sampling, TokenLogprob, TokenLogprobs};
use router_tokens::{Detokenizer, StopStrings, Tokenizer};
use serde_json::{Map, Value, json};

use crate::models::Model;
use crate::upstream::{Continuation, EngineRequest, EventBatch, Output, OutputStep, Scanner};

/// Part of an output.
#[derive(Debug, Default)]
pub(crate) struct TokenDelta {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finish: Option<Finish>,
    pub(crate) cached_tokens: usize,
}

/// An output in progress.
pub(crate) struct TokenOutput {
    model: Arc<Model>,
    index: u32,
    prompt: Arc<Vec<u32>>,
    sampling: Sampling,
    salt: Option<String>,
    generated: Vec<u32>,
    cached_tokens: usize,
    /// Finish reason that the engine reported.
    engine_finish: Option<Finish>,
    detokenizer: Detokenizer,
    stop: StopStrings,
}

impl TokenOutput {
    pub(crate) fn new(
        model: &Arc<Model>,
        index: u32,
        prompt: &Arc<Vec<u32>>,
        sampling: Sampling,
        salt: Option<String>,
    ) -> Self {
        let tokenizer = model.text.tokenizer.clone();
        Self {
            model: Arc::clone(model),
            index,
            prompt: Arc::clone(prompt),
            detokenizer: Detokenizer::new(tokenizer, sampling.skip_special_tokens, prompt),
            stop: StopStrings::new(sampling.stop.clone(), sampling.include_stop),
            sampling,
            salt,
            generated: Vec::new(),
            cached_tokens: 0,
            engine_finish: None,
        }
    }

    /// Returns the request for the tokens that follow prompt and output so far.
    pub(crate) fn request(&self) -> Arc<EngineRequest> {
        let tokens = match self.generated.is_empty() {
            true => Arc::clone(&self.prompt),
            false => Arc::new(self.prompt.iter().chain(&self.generated).copied().collect()),
        };
        let mut body = RawBody::of_fields(&self.fields());
        // Serialized directly: a tree of thousands of JSON numbers would cost more than all the rest.
        body.set("prompt", serde_json::to_string(&*tokens).unwrap_or_default());
        Arc::new(EngineRequest { body, tokens, tokens_are_exact: true })
    }

    fn fields(&self) -> Map<String, Value> {
        let mut sampling = self.sampling.clone();
        // A chat without a limit runs to the end of the context. The limit must be explicit: engines get a
        // completion request with token ids, whose own default is 16 tokens.
        let context = self.model.pool.context_tokens();
        let room = context.checked_sub(self.prompt.len()).filter(|_| context > 0);
        let limit = sampling.max_tokens.or(room);
        sampling.max_tokens = limit.map(|max| max.saturating_sub(self.generated.len()).max(1));
        sampling.resumed_tokens += self.generated.len();
        let mut fields = sampling.to_engine_fields();
        let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
        put("model", json!(*self.model.pool.model()));
        put("stream", json!(true));
        put("stream_options", json!({ "include_usage": true, "continuous_usage_stats": true }));
        put("return_token_ids", json!(true));
        put("return_tokens_as_token_ids", json!(true));
        if let Some(salt) = &self.salt {
            put("cache_salt", json!(salt));
        }
        fields
    }

    /// Takes one event.
    fn piece(&mut self, event: TokenEvent) -> Option<TokenDelta> {
        if let Some(cached) = event.usage.and_then(|usage| usage.cached) {
            // After a failure the tokens so far count as prompt at the engine, but not for the client.
            self.cached_tokens = self.cached_tokens.max(cached.min(self.prompt.len()));
        }
        self.engine_finish = event.finish.or(self.engine_finish);
        if event.token_ids.is_empty() {
            return None;
        }
        let mut text = String::new();
        let mut stopped = false;
        for &id in &event.token_ids {
            self.generated.push(id);
            if !stopped && !self.is_end(id) {
                let (shown, found) = self.stop.push(&self.detokenizer.push(id));
                text.push_str(&shown);
                stopped |= found;
            }
        }
        let wanted = self.sampling.logprobs.map_or(0, |top| top as usize);
        Some(TokenDelta {
            index: self.index,
            text,
            logprobs: described(&self.model.text.tokenizer, &event, wanted),
            tokens: event.token_ids,
            finish: stopped.then_some(Finish::Stop),
            cached_tokens: self.cached_tokens,
        })
    }

    /// Returns the last piece: the text that was held back, and the finish reason.
    fn last_piece(&mut self, finish: Finish) -> TokenDelta {
        let (mut text, stopped) = self.stop.push(&self.detokenizer.finish());
        if !stopped {
            text.push_str(&self.stop.finish());
        }
        TokenDelta {
            index: self.index,
            text,
            finish: Some(if stopped { Finish::Stop } else { finish }),
            cached_tokens: self.cached_tokens,
            ..TokenDelta::default()
        }
    }

    /// Returns the finish reason if the output is complete: by the engine's report, by the last token or by
    /// the limits.
    fn complete(&self) -> Option<Finish> {
        if let Some(finish) = self.engine_finish.filter(|finish| *finish != Finish::Abort) {
            return Some(finish);
        }
        if self.generated.last().is_some_and(|&id| self.is_end(id)) {
            return Some(Finish::Stop);
        }
        let context = self.model.pool.context_tokens();
        let len = self.prompt.len() + self.generated.len();
        let is_full = self.sampling.max_tokens == Some(self.generated.len())
            || (context > 0 && !self.generated.is_empty() && len >= context);
        is_full.then_some(Finish::Length)
    }

    /// Whether a token ends the output and is therefore not part of its text.
    fn is_end(&self, id: u32) -> bool {
        let sampling = &self.sampling;
        sampling.stop_token_ids.contains(&id)
            || (!sampling.ignore_eos && self.model.text.eos_ids.contains(&id))
    }
}

impl Output for TokenOutput {
    type Item = Vec<TokenDelta>;

    fn scanner(&self) -> Scanner {
        Scanner::reading()
    }

    fn prefill_cached(&mut self, tokens: usize) {
        self.cached_tokens = self.cached_tokens.max(tokens.min(self.prompt.len()));
    }

    fn take(&mut self, batch: EventBatch) -> OutputStep<Vec<TokenDelta>> {
        let mut taken = OutputStep { item: None, usage: None, is_complete: false, failure: None };
        let mut pieces = Vec::new();
        for event in events(&batch.out) {
            let data = data_of(event);
            if data.is_empty() || data[..] == *DONE {
                continue;
            }
            let event = match TokenEvent::parse(&data) {
                Ok(event) => event,
                Err(reason) => {
                    taken.failure = Some(reason);
                    break;
                }
            };
            taken.usage = event.usage.or(taken.usage);
            let piece = self.piece(event);
            if self.sampling.max_tokens.is_some_and(|most| self.generated.len() > most) {
                taken.failure = Some("more tokens than were asked for".to_owned());
                break;
            }
            if let Some(piece) = piece {
                taken.is_complete = piece.finish.is_some();
                pieces.push(piece);
                if taken.is_complete {
                    break;
                }
            }
        }
        taken.item = (!pieces.is_empty()).then_some(pieces);
        taken
    }

    fn finish(&mut self) -> Result<Option<Vec<TokenDelta>>, String> {
        match self.engine_finish {
            Some(Finish::Abort) => Err("it gave the request up".to_owned()),
            Some(finish) => Ok(Some(vec![self.last_piece(finish)])),
            None => Err("the stream has no finish reason".to_owned()),
        }
    }

    fn continuation(&mut self) -> Continuation<Vec<TokenDelta>> {
        if let Some(finish) = self.complete() {
            // The worker failed after its last token: nothing is left to compute.
            return Continuation::Complete(Some(vec![self.last_piece(finish)]));
        }
        self.engine_finish = None;
        Continuation::Request(self.request())
    }
}

fn described(tokenizer: &Tokenizer, event: &TokenEvent, wanted: usize) -> Vec<TokenLogprobs> {
    let token = |id: u32, logprob: f32| TokenLogprob {
        id,
        text: tokenizer.decode(&[id], false),
        bytes: tokenizer.bytes_of(id),
        logprob,
    };
    let pairs = event.token_ids.iter().zip(&event.probabilities);
    pairs
        .map(|(&id, (logprob, top))| TokenLogprobs {
            chosen: token(id, *logprob),
            top: top.iter().take(wanted).map(|&(id, logprob)| token(id, logprob)).collect(),
        })
        .collect()
}
