//! Everything textual that a model folder holds.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;

use crate::conversation::prepare;
use crate::{ChatTemplate, Tokenizer, TokensError};

/// Special tokens of the built-in model, from id 256 on.
pub const TINY_SPECIALS: [&str; 5] = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"];
/// Ids of the built-in model: the bytes, the specials, and padding to a round number.
pub const TINY_VOCABULARY: usize = 264;

const TINY_TEMPLATE: &str = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}\
                             {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Tokenizer, chat template and special tokens of one model. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if the model has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Ids that end a generation.
    pub eos_ids: Vec<u32>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

/// Token ids of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChat {
    /// The ids.
    pub ids: Vec<u32>,
    /// Nothing was left out: images and the like become tokens that only the engine knows.
    pub is_exact: bool,
}

impl ModelText {
    /// The built-in tiny model's.
    pub fn tiny() -> Result<Self, TokensError> {
        Ok(Self {
            tokenizer: Tokenizer::bytes(),
            template: Some(Arc::new(ChatTemplate::new(TINY_TEMPLATE)?)),
            eos_ids: vec![257],
            bos_token: Some("<s>".to_owned()),
            eos_token: Some("</s>".to_owned()),
        })
    }

    /// Loads a Hugging Face folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`,
    /// `generation_config.json`, `config.json`. Only the first must exist.
    pub fn from_folder(folder: &Path) -> Result<Self, TokensError> {
        let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json"))?;
        let settings = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
        let bos_token = token_text(&settings["bos_token"]);
        let eos_token = token_text(&settings["eos_token"]);
        let mut eos_ids = Vec::new();
        for file in ["generation_config.json", "config.json"] {
            if eos_ids.is_empty() {
                let found = read_json(&folder.join(file))?.unwrap_or(Json::Null);
                eos_ids = token_ids(&found["eos_token_id"]);
            }
        }
        if eos_ids.is_empty() {
            eos_ids.extend(eos_token.as_deref().and_then(|token| tokenizer.id_of(token)));
        }
        let template = match find_template(folder, &settings)? {
            None => None,
            Some((path, source)) => {
                Some(Arc::new(ChatTemplate::new(&source).map_err(|error| TokensError::file(&path, error))?))
            }
        };
        Ok(Self { tokenizer, template, eos_ids, bos_token, eos_token })
    }

    /// Token ids of a conversation as a client sent it, made what engines make of it first. With `continues`, the last
    /// message is not closed: generation goes on behind it. `extras` are further template variables (`tools`,
    /// `enable_thinking`, …).
    pub fn encode_conversation(
        &self,
        mut messages: Json,
        add_generation_prompt: bool,
        continues: bool,
        extras: &serde_json::Map<String, Json>,
    ) -> Result<EncodedChat, TokensError> {
        let features = self.template.as_ref().map(|template| template.features);
        let is_exact = features.is_none_or(|features| prepare(&mut messages, features));
        let mut text = self.render_chat(&messages, add_generation_prompt && !continues, extras)?;
        if continues {
            let last = messages.as_array().and_then(|messages| messages.last()).map(|last| &last["content"]);
            let last = last.and_then(Json::as_str).unwrap_or_default().trim();
            if let Some(at) = text.rfind(last).filter(|_| !last.is_empty()) {
                text.truncate(at + last.len());
            }
        }
        Ok(EncodedChat { ids: self.tokenizer.encode(&text, false)?, is_exact })
    }

    /// The prompt text of a conversation.
    pub fn render_chat(
        &self,
        messages: &Json,
        add_generation_prompt: bool,
        extras: &serde_json::Map<String, Json>,
    ) -> Result<String, TokensError> {
        let template = self
            .template
            .as_ref()
            .ok_or_else(|| TokensError::Template("this model has none; use /v1/completions".to_owned()))?;
        let generate = Json::from(add_generation_prompt);
        let specials = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)];
        let specials = specials.map(|(name, token)| (name, token.as_deref().map(Json::from)));
        // Nothing is copied: a conversation may be as large as a body.
        let mut context: BTreeMap<&str, &Json> =
            specials.iter().filter_map(|(name, token)| Some((*name, token.as_ref()?))).collect();
        context.extend(extras.iter().map(|(name, value)| (name.as_str(), value)));
        // A client's variables do not take the place of what is being rendered.
        context.insert("messages", messages);
        context.insert("add_generation_prompt", &generate);
        template.render(&context)
    }
}

fn find_template(
    folder: &Path,
    settings: &Json,
) -> Result<Option<(std::path::PathBuf, String)>, TokensError> {
    let file = folder.join("chat_template.jinja");
    if file.exists() {
        let source = std::fs::read_to_string(&file).map_err(|error| TokensError::file(&file, error))?;
        return Ok(Some((file, source)));
    }
    let source = match &settings["chat_template"] {
        Json::String(source) => Some(source.clone()),
        // Several templates by name: `default` is the one for chats.
        Json::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    };
    Ok(source.map(|source| (folder.join("tokenizer_config.json"), source)))
}

fn read_json(path: &Path) -> Result<Option<Json>, TokensError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(path).map_err(|error| TokensError::file(path, error))?;
    serde_json::from_str(&text).map(Some).map_err(|error| TokensError::file(path, error))
}

/// A token is written as a string or as an object with `content`.
fn token_text(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn token_ids(value: &Json) -> Vec<u32> {
    let single = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Json::Array(several) => several.iter().filter_map(single).collect(),
        one => single(one).into_iter().collect(),
    }
}
