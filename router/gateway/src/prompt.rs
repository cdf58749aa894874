//! What a prompt looks like to the index: its tokens, or a stand-in when the engine alone can make them.

use router_engines::body::RawBody;
use router_engines::openai::ApiError;
use serde_json::{Map, Value};

use crate::service::Gateway;

/// Texts longer than this are tokenised off the async threads.
const INLINE_TEXT_BYTES: usize = 16 << 10;

/// Runs short work here and long work on a thread of its own.
pub(crate) async fn off_thread<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= INLINE_TEXT_BYTES {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(error.to_string()))
}

/// A prompt as the index sees it.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) tokens: Vec<u32>,
    /// They are the engine's own, as far as the gateway can tell.
    pub(crate) is_exact: bool,
    /// How many prompts the request has, about as long as this one.
    pub(crate) prompts: u64,
}

/// Without the model's tokenizer four bytes of the request stand for a token: prefixes stay prefixes.
fn stand_in(text: &str) -> Seen {
    let word = |bytes: &[u8]| {
        let mut word = [0_u8; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(word)
    };
    Seen { tokens: text.as_bytes().chunks(4).map(word).collect(), is_exact: false, prompts: 1 }
}

/// Fields of a chat that are variables of the template.
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

/// The prompt of a chat. What cannot be rendered here is left to the engine to judge: the request is routed without it.
pub(crate) async fn of_chat(gateway: &Gateway, body: &RawBody) -> Result<Seen, ApiError> {
    let Some(raw) = body.get("messages") else { return Ok(Seen::default()) };
    if !gateway.config.has_tokenizer || body.get("chat_template").is_some() {
        return Ok(stand_in(raw));
    }
    let Ok(messages) = serde_json::from_str::<Value>(raw) else { return Ok(Seen::default()) };
    let extras = template_extras(body);
    let generate = body.flag("add_generation_prompt").ok().flatten().unwrap_or(true);
    let continues = body.flag("continue_final_message").ok().flatten().unwrap_or(false);
    let text = gateway.text.clone();
    let work = move || text.encode_conversation(messages, generate, continues, &extras);
    match off_thread(raw.len(), work).await? {
        Ok(encoded) => Ok(Seen { tokens: encoded.ids, is_exact: encoded.is_exact, prompts: 1 }),
        Err(error) => {
            tracing::debug!(%error, "routed without its prompt");
            Ok(Seen::default())
        }
    }
}

/// The prompt of a completion: a text, ids, or the longest of several.
pub(crate) async fn of_completion(gateway: &Gateway, body: &RawBody) -> Result<Seen, ApiError> {
    let Some(raw) = body.get("prompt").or_else(|| body.get("input")) else { return Ok(Seen::default()) };
    if raw.starts_with('[') {
        if let Ok(tokens) = serde_json::from_str::<Vec<u32>>(raw) {
            return Ok(Seen { tokens, is_exact: gateway.config.has_tokenizer, prompts: 1 });
        }
        let mut prompts = 1;
        let first = match serde_json::from_str::<Vec<Vec<u32>>>(raw) {
            Ok(several) => {
                prompts = several.len() as u64;
                several.into_iter().max_by_key(Vec::len).unwrap_or_default()
            }
            Err(_) => match serde_json::from_str::<Vec<String>>(raw) {
                Ok(texts) => {
                    let longest = texts.iter().max_by_key(|text| text.len()).map_or("", String::as_str);
                    return Ok(Seen { prompts: texts.len() as u64, ..stand_in(longest) });
                }
                Err(_) => Vec::new(),
            },
        };
        return Ok(Seen { tokens: first, is_exact: false, prompts });
    }
    if !gateway.config.has_tokenizer {
        return Ok(stand_in(raw));
    }
    let Ok(text) = serde_json::from_str::<String>(raw) else { return Ok(Seen::default()) };
    of_text(gateway, text).await
}

/// The prompt that a text is.
pub(crate) async fn of_text(gateway: &Gateway, text: String) -> Result<Seen, ApiError> {
    if !gateway.config.has_tokenizer {
        return Ok(stand_in(&text));
    }
    let tokenizer = gateway.text.tokenizer.clone();
    match off_thread(text.len(), move || tokenizer.encode(&text, true)).await? {
        Ok(tokens) => Ok(Seen { tokens, is_exact: true, prompts: 1 }),
        Err(_) => Ok(Seen::default()),
    }
}
