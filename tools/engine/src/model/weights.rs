//! Weights: from safetensors files, from a seed, or from an image of such weights. Kept as f32, queries, keys and values fused
//! into one matrix, gate and up into another.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::ModelConfig;
use super::weights_image::MappedTensor;
use crate::EngineError;

/// One layer's weights, each matrix as (out × in).
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Tensor,
    pub(super) qkv: Tensor,
    pub(super) qkv_bias: Option<Tensor>,
    pub(super) query_norm: Option<Tensor>,
    pub(super) key_norm: Option<Tensor>,
    pub(super) attention_out: Tensor,
    pub(super) mlp_norm: Tensor,
    pub(super) gate_up: Tensor,
    pub(super) down: Tensor,
}

#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Tensor,
    /// Output matrix; `None`: the embedding matrix.
    pub(super) output: Option<Tensor>,
}

/// One tensor, or several concatenated along their rows.
#[derive(Debug)]
pub(super) enum Tensor {
    /// In the process's own memory.
    Owned(Vec<f32>),
    /// In a mapped image, shared with other processes.
    Mapped(MappedTensor),
}

impl Deref for Tensor {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Owned(values) => values,
            Self::Mapped(mapped) => mapped,
        }
    }
}

/// A source of tensors.
pub(super) trait Source {
    /// Returns the tensor of this name.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError>;

    /// Returns tensors concatenated along their rows. `name` is that of the result.
    fn stacked(&mut self, _name: &str, parts: &[(String, Vec<usize>)]) -> Result<Tensor, EngineError> {
        let mut all = Vec::new();
        for (name, shape) in parts {
            all.extend(self.tensor(name, shape)?);
        }
        Ok(Tensor::Owned(all))
    }
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

    /// Calls `visit` for every tensor with its name, in a fixed order.
    pub(super) fn for_each_tensor<'a>(&'a self, mut visit: impl FnMut(String, &'a Tensor)) {
        visit("embedding".to_owned(), &self.embedding);
        for (index, layer) in self.layers.iter().enumerate() {
            let always = [
                ("attention_norm", &layer.attention_norm),
                ("qkv", &layer.qkv),
                ("attention_out", &layer.attention_out),
                ("mlp_norm", &layer.mlp_norm),
                ("gate_up", &layer.gate_up),
                ("down", &layer.down),
            ];
            always.into_iter().for_each(|(name, tensor)| visit(in_layer(index, name), tensor));
            let sometimes = [
                ("qkv_bias", &layer.qkv_bias),
                ("query_norm", &layer.query_norm),
                ("key_norm", &layer.key_norm),
            ];
            for (name, tensor) in sometimes {
                tensor.iter().for_each(|tensor| visit(in_layer(index, name), tensor));
            }
        }
        visit("final_norm".to_owned(), &self.final_norm);
        self.output.iter().for_each(|tensor| visit("output".to_owned(), tensor));
    }

    pub(super) fn build(config: &ModelConfig, source: &mut impl Source) -> Result<Self, EngineError> {
        let hidden = config.hidden;
        let one = |of: &str, shape: &[usize]| [(of.to_owned(), shape.to_vec())];
        let vocabulary = [config.vocabulary, hidden];
        // In the order of most files, since only one file of a sharded model is held at a time.
        let embedding = source.stacked("embedding", &one("model.embed_tokens.weight", &vocabulary))?;
        let layers =
            (0..config.layers).map(|index| Layer::build(config, index, source)).collect::<Result<_, _>>()?;
        let final_norm = source.stacked("final_norm", &one("model.norm.weight", &[hidden]))?;
        let output = match config.tied_embeddings {
            true => None,
            false => Some(source.stacked("output", &one("lm_head.weight", &vocabulary))?),
        };
        Ok(Self { embedding, layers, final_norm, output })
    }
}

/// Name of a layer's tensor.
fn in_layer(index: usize, name: &str) -> String {
    format!("layers.{index}.{name}")
}

impl Layer {
    fn build(config: &ModelConfig, index: usize, source: &mut impl Source) -> Result<Self, EngineError> {
        let hidden = config.hidden;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let mut get = |name: &str, parts: &[(&str, &[usize])]| {
            let parts: Vec<(String, Vec<usize>)> = parts
                .iter()
                .map(|(of, shape)| (format!("model.layers.{index}.{of}"), shape.to_vec()))
                .collect();
            source.stacked(&in_layer(index, name), &parts)
        };
        let (q, k, v) = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj");
        let [q_weight, k_weight, v_weight] = [q, k, v].map(|of| format!("{of}.weight"));
        let [q_bias, k_bias, v_bias] = [q, k, v].map(|of| format!("{of}.bias"));
        let head = [config.head_dim];
        Ok(Self {
            attention_norm: get("attention_norm", &[("input_layernorm.weight", &[hidden])])?,
            qkv: get(
                "qkv",
                &[
                    (&q_weight, &[queries, hidden]),
                    (&k_weight, &[keys, hidden]),
                    (&v_weight, &[keys, hidden]),
                ],
            )?,
            qkv_bias: match config.qkv_bias {
                true => {
                    Some(get("qkv_bias", &[(&q_bias, &[queries]), (&k_bias, &[keys]), (&v_bias, &[keys])])?)
                }
                false => None,
            },
            query_norm: match config.qk_norm {
                true => Some(get("query_norm", &[("self_attn.q_norm.weight", &head)])?),
                false => None,
            },
            key_norm: match config.qk_norm {
                true => Some(get("key_norm", &[("self_attn.k_norm.weight", &head)])?),
                false => None,
            },
            attention_out: get("attention_out", &[("self_attn.o_proj.weight", &[hidden, queries])])?,
            mlp_norm: get("mlp_norm", &[("post_attention_layernorm.weight", &[hidden])])?,
            gate_up: get(
                "gate_up",
                &[
                    ("mlp.gate_proj.weight", &[config.intermediate, hidden]),
                    ("mlp.up_proj.weight", &[config.intermediate, hidden]),
                ],
            )?,
            down: get("down", &[("mlp.down_proj.weight", &[hidden, config.intermediate])])?,
        })
    }
}

/// Safetensors files; one is held in memory at a time.
struct Files {
    folder: PathBuf,
    /// File by tensor name, for a sharded model.
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

/// Tensors from a seed and their own name, independent of the order of calls.
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
        // The sum of four uniforms is close enough to normal and, unlike a logarithm, equal on every machine.
        let mut normal = || (uniform() + uniform() + uniform() + uniform() - 2.0) * 3.0_f32.sqrt();
        Ok((0..count).map(|_| half::bf16::from_f32(normal() * deviation).to_f32()).collect())
    }
}
