//! The model of a simulated cluster: a transformer of a few thousand weights, and a tokenizer with one token
//! per byte.
//!
//! Converting tokens to text and back gives the same tokens, so an answer that is continued on another engine
//! equals the reference. An engine's answer depends on its whole KV cache: one wrong block changes the
//! answer.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::kernel::random::Random;

const HIDDEN: usize = 32;
const INTERMEDIATE: usize = 48;
const LAYERS: usize = 2;
const HEADS: usize = 2;
const HEAD: usize = 16;
const VOCABULARY: usize = 512;
const EOS: u64 = 1;
/// Model name in requests.
pub(crate) const MODEL_NAME: &str = "tiny";
/// Longest sequence, in tokens.
pub(crate) const CONTEXT: usize = 2048;

/// Writes the model's folder.
pub(crate) fn write(folder: &Path) -> Result<()> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/golden/llama");
    std::fs::create_dir_all(folder)?;
    let name = "tokenizer_config.json";
    std::fs::copy(fixture.join(name), folder.join(name)).context(name)?;
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(fixture.join("tokenizer.json"))?)?;
    let added: Vec<Value> = tokenizer["added_tokens"].as_array().cloned().unwrap_or_default();
    let is_added = |text: &str| added.iter().any(|token| token["content"] == text);
    tokenizer["model"]["merges"] = json!([]);
    let mut said = vec![EOS];
    if let Some(vocabulary) = tokenizer["model"]["vocab"].as_object_mut() {
        vocabulary.retain(|text, _| text.chars().count() == 1 || is_added(text));
        let is_plain = |text: &str| text.len() == 1 && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        said.extend(vocabulary.iter().filter(|(text, _)| is_plain(text)).filter_map(|(_, id)| id.as_u64()));
    }
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?;
    let suppressed: Vec<u64> = (0..VOCABULARY as u64).filter(|id| !said.contains(id)).collect();
    let generation = json!({ "bos_token_id": 0, "eos_token_id": EOS, "suppress_tokens": suppressed });
    std::fs::write(folder.join("generation_config.json"), generation.to_string())?;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "attention_bias": false, "mlp_bias": false, "bos_token_id": 0, "eos_token_id": EOS, "head_dim": HEAD,
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": VOCABULARY,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    std::fs::write(folder.join("model.safetensors"), weights()).context("the weights")
}

/// Returns random weights as safetensors: the length of a JSON header, the header, then all numbers.
fn weights() -> Vec<u8> {
    let mut random = Random::new(7);
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut add = |name: &str, shape: &[usize], scale: f32| {
        let begin = data.len();
        for _ in 0..shape.iter().product() {
            // Uniform distribution with this standard deviation; norms are ones.
            let unit = (random.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0) * 3_f32.sqrt();
            let value = if scale == 0.0 { 1.0 } else { unit * scale };
            data.extend_from_slice(&value.to_le_bytes());
        }
        header.insert(
            name.to_owned(),
            json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()] }),
        );
    };
    let scale = |inputs: usize| 2.0 / (inputs as f32).sqrt();
    add("model.embed_tokens.weight", &[VOCABULARY, HIDDEN], 1.0);
    add("lm_head.weight", &[VOCABULARY, HIDDEN], scale(HIDDEN));
    add("model.norm.weight", &[HIDDEN], 0.0);
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[usize], scale: f32| {
            add(&format!("model.layers.{layer}.{name}"), shape, scale)
        };
        add("input_layernorm.weight", &[HIDDEN], 0.0);
        add("post_attention_layernorm.weight", &[HIDDEN], 0.0);
        add("self_attn.q_proj.weight", &[HEADS * HEAD, HIDDEN], scale(HIDDEN));
        add("self_attn.k_proj.weight", &[HEAD, HIDDEN], scale(HIDDEN));
        add("self_attn.v_proj.weight", &[HEAD, HIDDEN], scale(HIDDEN));
        add("self_attn.o_proj.weight", &[HIDDEN, HEADS * HEAD], scale(HIDDEN));
        add("mlp.gate_proj.weight", &[INTERMEDIATE, HIDDEN], scale(HIDDEN));
        add("mlp.up_proj.weight", &[INTERMEDIATE, HIDDEN], scale(HIDDEN));
        add("mlp.down_proj.weight", &[HIDDEN, INTERMEDIATE], scale(INTERMEDIATE));
    }
    let mut text = Value::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text.as_bytes());
    file.extend_from_slice(&data);
    file
}
