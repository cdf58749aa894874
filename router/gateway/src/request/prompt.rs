//! The prompt's representation in the index: its tokens, or pseudo tokens when only the engine can tokenize
//! it.

use router_openai::ApiError;
use router_openai::RawBody;
use router_tokens::ModelText;
use serde_json::{Map, Value};

use crate::compute::{IsCancelled, Work};
use crate::memory::Footprint;
use crate::models::Model;
use crate::service::Gateway;

/// A prompt as the index sees it.
#[derive(Debug, Default)]
pub(crate) struct PromptTokens {
    pub(crate) tokens: Vec<u32>,
    /// Whether the tokens equal the engine's, as far as the gateway can tell.
    pub(crate) is_exact: bool,
    /// Number of prompts in the request, all assumed as long as this one.
    pub(crate) prompts: u64,
}

/// Without the model's tokenizer every four bytes of the request become a token: common prefixes stay
/// common.
fn pseudo_tokens(text: &str) -> PromptTokens {
    let (words, rest) = text.as_bytes().as_chunks::<4>();
    let mut tokens = Vec::with_capacity(words.len() + 1);
    tokens.extend(words.iter().map(|&word| u32::from_le_bytes(word)));
    if !rest.is_empty() {
        let mut word = [0; 4];
        word[..rest.len()].copy_from_slice(rest);
        tokens.push(u32::from_le_bytes(word));
    }
    PromptTokens { tokens, is_exact: false, prompts: 1 }
}

/// Returns the fields of a chat that are variables of the template.
fn template_extras(body: &RawBody) -> Map<String, Value> {
    let mut extras = match body.value("chat_template_kwargs") {
        Some(Value::Object(extras)) => extras,
        _ => Map::new(),
    };
    for name in ["tools", "documents", "reasoning_effort"] {
        if let Some(value) = body.value(name) {
            extras.insert(name.to_owned(), value);
        }
    }
    extras
}

/// Tokenizes prompts.
#[derive(Debug, Clone)]
struct Reader {
    text: ModelText,
    has_tokenizer: bool,
}

impl Reader {
    fn of(model: &Model) -> Self {
        Self { text: model.text.clone(), has_tokenizer: model.knows_tokens() }
    }

    fn chat(&self, body: &RawBody, is_cancelled: IsCancelled<'_>) -> PromptTokens {
        let Some(raw) = body.get("messages") else { return PromptTokens::default() };
        if !self.has_tokenizer || body.get("chat_template").is_some() {
            return pseudo_tokens(raw);
        }
        let Ok(messages) = serde_json::from_str::<Value>(raw) else { return PromptTokens::default() };
        let extras = template_extras(body);
        let generate = body.flag("add_generation_prompt").ok().flatten().unwrap_or(true);
        let continues = body.flag("continue_final_message").ok().flatten().unwrap_or(false);
        if is_cancelled() {
            return PromptTokens::default();
        }
        match self.text.encode_conversation(messages, generate, continues, &extras) {
            Ok(encoded) => PromptTokens { tokens: encoded.ids, is_exact: encoded.is_exact, prompts: 1 },
            Err(error) => {
                tracing::debug!(%error, "the prompt cannot be tokenized: routed without prefixes");
                PromptTokens::default()
            }
        }
    }

    fn completion(&self, body: &RawBody, is_cancelled: IsCancelled<'_>) -> PromptTokens {
        let Some(raw) = body.get("prompt").or_else(|| body.get("input")) else {
            return PromptTokens::default();
        };
        if raw.starts_with('[') {
            return self.list(raw);
        }
        if !self.has_tokenizer {
            return pseudo_tokens(raw);
        }
        match serde_json::from_str::<String>(raw) {
            Ok(text) if !is_cancelled() => self.text(&text),
            _ => PromptTokens::default(),
        }
    }

    /// Reads a list: token ids, or several prompts.
    fn list(&self, raw: &str) -> PromptTokens {
        if let Ok(tokens) = serde_json::from_str::<Vec<u32>>(raw) {
            return PromptTokens { tokens, is_exact: self.has_tokenizer, prompts: 1 };
        }
        if let Ok(several) = serde_json::from_str::<Vec<Vec<u32>>>(raw) {
            let prompts = several.len() as u64;
            let longest = several.into_iter().max_by_key(Vec::len).unwrap_or_default();
            return PromptTokens { tokens: longest, is_exact: false, prompts };
        }
        if let Ok(texts) = serde_json::from_str::<Vec<String>>(raw) {
            let longest = texts.iter().max_by_key(|text| text.len()).map_or("", String::as_str);
            return PromptTokens { prompts: texts.len() as u64, ..pseudo_tokens(longest) };
        }
        PromptTokens { prompts: 1, ..PromptTokens::default() }
    }

    fn text(&self, text: &str) -> PromptTokens {
        if !self.has_tokenizer {
            return pseudo_tokens(text);
        }
        match self.text.tokenizer.encode(text, true) {
            Ok(tokens) => PromptTokens { tokens, is_exact: true, prompts: 1 },
            Err(_) => PromptTokens::default(),
        }
    }
}

/// Returns the prompt of a chat. A chat that cannot be rendered here is routed without tokens; the engine
/// accepts or refuses it.
pub(crate) async fn of_chat(model: &Model, body: &RawBody, work: &Work) -> Result<PromptTokens, ApiError> {
    let reader = Reader::of(model);
    if work.is_inline() {
        return Ok(reader.chat(body, &|| false));
    }
    let body = body.clone();
    work.run(move |is_cancelled| reader.chat(&body, is_cancelled)).await
}

/// Returns the prompt of a completion: a text, ids, or the longest of several.
pub(crate) async fn of_completion(
    model: &Model,
    body: &RawBody,
    work: &Work,
) -> Result<PromptTokens, ApiError> {
    let reader = Reader::of(model);
    if work.is_inline() {
        return Ok(reader.completion(body, &|| false));
    }
    let body = body.clone();
    work.run(move |is_cancelled| reader.completion(&body, is_cancelled)).await
}

/// Returns the prompt that consists of a text.
pub(crate) async fn of_text(
    gateway: &Gateway,
    model: &Model,
    text: String,
) -> Result<PromptTokens, ApiError> {
    let reader = Reader::of(model);
    let work = gateway.work(text.len(), &Footprint::default()).await?;
    work.run(move |_| reader.text(&text)).await
}
