//! `config.json` of the Llama and Qwen families.

use std::path::Path;

use serde_json::Value;

use crate::EngineError;

/// Llama 3's scaling of rotary frequencies ("rope_type": "llama3").
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    /// Factor by which the context is extended.
    pub factor: f32,
    /// Frequencies with fewer turns than this over the original context are scaled fully.
    pub low_freq_factor: f32,
    /// Frequencies with more turns than this are unchanged.
    pub high_freq_factor: f32,
    /// Context length of the model's first training.
    pub original_context: f32,
}

/// Shape of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Number of token ids.
    pub vocabulary: usize,
    /// Longest sequence in tokens.
    pub context_tokens: usize,
    /// Added under the root of RMSNorm.
    pub norm_epsilon: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Llama 3 scaling; `None`: no scaling.
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    /// Biases on query, key and value (Qwen 2).
    pub qkv_bias: bool,
    /// RMSNorm on each query and key head (Qwen 3).
    pub qk_norm: bool,
    /// Whether keys and values are cached as f32; otherwise as bf16.
    pub kv_f32: bool,
    /// Tokens that are never generated, unless a grammar leaves no other.
    pub suppressed: Vec<u32>,
}

impl ModelConfig {
    /// The built-in model: small enough to load instantly, large enough that attention matters.
    #[must_use]
    pub fn tiny() -> Self {
        let printable = |id: &u32| matches!(id, 0x20..=0x7E | 0x0A | 257);
        Self {
            hidden: 128,
            intermediate: 256,
            layers: 4,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            vocabulary: router_tokens::TINY_VOCABULARY,
            context_tokens: 4096,
            norm_epsilon: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            tied_embeddings: false,
            qkv_bias: false,
            qk_norm: false,
            kv_f32: false,
            // Random weights would generate control characters and partial UTF-8.
            suppressed: (0..router_tokens::TINY_VOCABULARY as u32).filter(|id| !printable(id)).collect(),
        }
    }

    /// Reads `config.json` and `generation_config.json` of a Hugging Face folder.
    pub fn from_folder(folder: &Path) -> Result<Self, EngineError> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|error| EngineError::file(&path, error))?;
        let json: Value = serde_json::from_str(&text).map_err(|error| EngineError::file(&path, error))?;
        let mut config = Self::from_json(&json).map_err(|reason| EngineError::file(&path, reason))?;
        let generation = folder.join("generation_config.json");
        if let Ok(text) = std::fs::read_to_string(&generation) {
            let json: Value =
                serde_json::from_str(&text).map_err(|error| EngineError::file(&generation, error))?;
            let ids = json["suppress_tokens"].as_array().into_iter().flatten();
            config.suppressed = ids.filter_map(|id| id.as_u64().map(|id| id as u32)).collect();
        }
        Ok(config)
    }

    fn from_json(json: &Value) -> Result<Self, String> {
        let family = json["model_type"].as_str().ok_or("`model_type` is missing")?;
        if !matches!(family, "llama" | "qwen2" | "qwen3") {
            return Err(format!("model_type {family:?} is not supported (llama, qwen2, qwen3 are)"));
        }
        let count = |name: &str| {
            let value = json[name].as_u64().filter(|&value| value > 0 && value < 1 << 24);
            value.map(|value| value as usize).ok_or_else(|| format!("`{name}` must be a positive integer"))
        };
        let flag = |name: &str| json[name].as_bool().unwrap_or(false);
        if json["hidden_act"].as_str().is_some_and(|act| act != "silu") {
            return Err(format!("hidden_act {} is not supported (silu is)", json["hidden_act"]));
        }
        if flag("use_sliding_window") || flag("mlp_bias") {
            return Err("sliding windows and feed-forward biases are not supported".to_owned());
        }
        let (hidden, heads) = (count("hidden_size")?, count("num_attention_heads")?);
        let kv_heads =
            if json["num_key_value_heads"].is_null() { heads } else { count("num_key_value_heads")? };
        let head_dim = if json["head_dim"].is_null() { hidden / heads } else { count("head_dim")? };
        if heads % kv_heads != 0 || head_dim % 2 != 0 {
            return Err(format!(
                "{heads} heads, {kv_heads} key/value heads of {head_dim} elements do not fit together"
            ));
        }
        // transformers 5 nests the rotary settings, older versions do not.
        let nested = &json["rope_parameters"];
        let scaling = if nested.is_object() { nested } else { &json["rope_scaling"] };
        let theta = nested["rope_theta"].as_f64().or_else(|| json["rope_theta"].as_f64()).unwrap_or(10_000.0);
        let dtype = json["dtype"].as_str().or_else(|| json["torch_dtype"].as_str()).unwrap_or("bfloat16");
        Ok(Self {
            hidden,
            intermediate: count("intermediate_size")?,
            layers: count("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            vocabulary: count("vocab_size")?,
            context_tokens: count("max_position_embeddings")?,
            norm_epsilon: json["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
            rope_theta: theta as f32,
            rope_scaling: rope_scaling(scaling)?,
            tied_embeddings: flag("tie_word_embeddings"),
            qkv_bias: family == "qwen2" || flag("attention_bias"),
            qk_norm: family == "qwen3",
            kv_f32: dtype == "float32",
            suppressed: Vec::new(),
        })
    }
}

fn rope_scaling(json: &Value) -> Result<Option<RopeScaling>, String> {
    let kind = json["rope_type"].as_str().or_else(|| json["type"].as_str()).unwrap_or("default");
    match kind {
        "default" => Ok(None),
        "llama3" => {
            let number = |name: &str| {
                let value = json[name].as_f64().filter(|&value| value > 0.0);
                value.map(|value| value as f32).ok_or_else(|| format!("rotary scaling needs `{name}`"))
            };
            Ok(Some(RopeScaling {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_context: number("original_max_position_embeddings")?,
            }))
        }
        other => Err(format!("rotary scaling {other:?} is not supported (llama3 is)")),
    }
}
