//! Weights: from safetensors files, or from a seed. Kept as f32, queries, keys and values fused into one
//! matrix, gate and up into another.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::ModelConfig;
use crate::EngineError;

/// One layer's weights, each matrix as (out × in).
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) qkv: Vec<f32>,
    pub(super) qkv_bias: Option<Vec<f32>>,
    pub(super) query_norm: Option<Vec<f32>>,
    pub(super) key_norm: Option<Vec<f32>>,
    pub(super) attention_out: Vec<f32>,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate_up: Vec<f32>,
    pub(super) down: Vec<f32>,
}

#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Vec<f32>,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Vec<f32>,
    /// `None`: the embedding matrix.
    pub(super) output: Option<Vec<f32>>,
}

/// Where tensors come from.
trait Source {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError>;
}

impl Weights {
    /// Reads a folder's safetensors, in one file or sharded by an index.
    pub(super) fn from_folder(folder: &Path, config: &ModelConfig) -> Result<Self, EngineError> {
        Self::build(config, &mut Files::open(folder)?)
    }

    /// Normally distributed weights from a seed; the same on every machine.
    pub(super) fn from_seed(seed: u64, config: &ModelConfig) -> Self {
        let built = Self::build(config, &mut Seeded { seed });
        built.unwrap_or_else(|error| unreachable!("a seed gives every tensor: {error}"))
    }

    /// Visits every tensor, in a fixed order.
    pub(super) fn for_each_tensor(&self, mut visit: impl FnMut(&[f32])) {
        visit(&self.embedding);
        for layer in &self.layers {
            let always = [
                &layer.attention_norm,
                &layer.qkv,
                &layer.attention_out,
                &layer.mlp_norm,
                &layer.gate_up,
                &layer.down,
            ];
            let sometimes = [&layer.qkv_bias, &layer.query_norm, &layer.key_norm];
            always.into_iter().chain(sometimes.into_iter().flatten()).for_each(|tensor| visit(tensor));
        }
        visit(&self.final_norm);
        self.output.iter().for_each(|tensor| visit(tensor));
    }

    fn build(config: &ModelConfig, source: &mut impl Source) -> Result<Self, EngineError> {
        let hidden = config.hidden;
        let embedding = source.tensor("model.embed_tokens.weight", &[config.vocabulary, hidden])?;
        let layers =
            (0..config.layers).map(|index| Layer::build(config, index, source)).collect::<Result<_, _>>()?;
        let final_norm = source.tensor("model.norm.weight", &[hidden])?;
        let output = match config.tied_embeddings {
            true => None,
            false => Some(source.tensor("lm_head.weight", &[config.vocabulary, hidden])?),
        };
        Ok(Self { embedding, layers, final_norm, output })
    }
}

impl Layer {
    fn build(config: &ModelConfig, index: usize, source: &mut impl Source) -> Result<Self, EngineError> {
        let hidden = config.hidden;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let mut get =
            |name: &str, shape: &[usize]| source.tensor(&format!("model.layers.{index}.{name}"), shape);
        let mut qkv = get("self_attn.q_proj.weight", &[queries, hidden])?;
        qkv.extend(get("self_attn.k_proj.weight", &[keys, hidden])?);
        qkv.extend(get("self_attn.v_proj.weight", &[keys, hidden])?);
        let qkv_bias = match config.qkv_bias {
            false => None,
            true => {
                let mut bias = get("self_attn.q_proj.bias", &[queries])?;
                bias.extend(get("self_attn.k_proj.bias", &[keys])?);
                bias.extend(get("self_attn.v_proj.bias", &[keys])?);
                Some(bias)
            }
        };
        let (query_norm, key_norm) = match config.qk_norm {
            false => (None, None),
            true => {
                let shape = [config.head_dim];
                (Some(get("self_attn.q_norm.weight", &shape)?), Some(get("self_attn.k_norm.weight", &shape)?))
            }
        };
        let mut gate_up = get("mlp.gate_proj.weight", &[config.intermediate, hidden])?;
        gate_up.extend(get("mlp.up_proj.weight", &[config.intermediate, hidden])?);
        Ok(Self {
            attention_norm: get("input_layernorm.weight", &[hidden])?,
            qkv,
            qkv_bias,
            query_norm,
            key_norm,
            attention_out: get("self_attn.o_proj.weight", &[hidden, queries])?,
            mlp_norm: get("post_attention_layernorm.weight", &[hidden])?,
            gate_up,
            down: get("mlp.down_proj.weight", &[hidden, config.intermediate])?,
        })
    }
}

/// Safetensors files; one is held in memory at a time.
struct Files {
    folder: PathBuf,
    /// Tensor name → file, of a sharded model.
    shards: HashMap<String, String>,
    loaded: Option<(String, Vec<u8>)>,
}

impl Files {
    fn open(folder: &Path) -> Result<Self, EngineError> {
        let index = folder.join("model.safetensors.index.json");
        let mut shards = HashMap::new();
        if index.exists() {
            let text = std::fs::read_to_string(&index).map_err(|error| EngineError::file(&index, error))?;
            let json: Value =
                serde_json::from_str(&text).map_err(|error| EngineError::file(&index, error))?;
            let map = json["weight_map"].as_object();
            let map = map.ok_or_else(|| EngineError::file(&index, "`weight_map` is missing"))?;
            for (tensor, file) in map {
                let file = file.as_str().filter(|file| !file.contains('/'));
                let file =
                    file.ok_or_else(|| EngineError::file(&index, format!("bad file name for {tensor}")))?;
                shards.insert(tensor.clone(), file.to_owned());
            }
        }
        Ok(Self { folder: folder.to_owned(), shards, loaded: None })
    }
}

impl Source for Files {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let file = match self.shards.get(name) {
            Some(file) => file.clone(),
            None if self.shards.is_empty() => "model.safetensors".to_owned(),
            None => return Err(EngineError::Weights(format!("the index names no file for {name}"))),
        };
        let path = self.folder.join(&file);
        if self.loaded.as_ref().is_none_or(|(loaded, _)| *loaded != file) {
            let bytes = std::fs::read(&path).map_err(|error| EngineError::file(&path, error))?;
            self.loaded = Some((file, bytes));
        }
        let bytes = self.loaded.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| EngineError::file(&path, error))?;
        let tensor = tensors.tensor(name).map_err(|error| EngineError::file(&path, error))?;
        if tensor.shape() != shape {
            let reason = format!("{name} has shape {:?}, but config.json implies {shape:?}", tensor.shape());
            return Err(EngineError::file(&path, reason));
        }
        to_f32(tensor.dtype(), tensor.data()).ok_or_else(|| {
            EngineError::file(
                &path,
                format!("{name} is {:?}; BF16, F16 and F32 are supported", tensor.dtype()),
            )
        })
    }
}

fn to_f32(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let halves = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::BF16 => Some(halves().map(|pair| half::bf16::from_le_bytes(pair).to_f32()).collect()),
        Dtype::F16 => Some(halves().map(|pair| half::f16::from_le_bytes(pair).to_f32()).collect()),
        Dtype::F32 => Some(
            bytes
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect(),
        ),
        _ => None,
    }
}

/// Tensors from a seed and their own name, so that the order of asking does not matter.
struct Seeded {
    seed: u64,
}

impl Source for Seeded {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let count: usize = shape.iter().product();
        if name.ends_with("norm.weight") {
            return Ok(vec![1.0; count]);
        }
        // Wide enough that tokens differ clearly, narrow enough that no layer saturates.
        let inputs = shape.last().copied().unwrap_or(1) as f32;
        let deviation = if name.starts_with("lm_head") { 3.0 / inputs.sqrt() } else { 1.2 / inputs.sqrt() };
        let deviation = if name.starts_with("model.embed") { 1.0 } else { deviation };
        let mut state = xxhash_rust::xxh3::xxh3_64_with_seed(name.as_bytes(), self.seed);
        let mut uniform = || {
            // splitmix64
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut word = state;
            word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((word ^ (word >> 31)) >> 40) as f32 / (1_u64 << 24) as f32
        };
        // The sum of four uniforms is normal enough and, unlike a logarithm, the same on every machine.
        let mut normal = || (uniform() + uniform() + uniform() + uniform() - 2.0) * 3.0_f32.sqrt();
        Ok((0..count).map(|_| half::bf16::from_f32(normal() * deviation).to_f32()).collect())
    }
}
