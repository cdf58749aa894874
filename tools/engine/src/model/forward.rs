//! The forward pass over a batch of requests, each at its own position.

use std::path::Path;

use super::ModelConfig;
use super::attention::{Span, attend};
use super::matrix::{View, multiply};
use super::rope::Rope;
use super::weights::{Layer, Weights};
use super::weights_image;
use crate::EngineError;
use crate::kv::{KEYS, KvPool, VALUES};

/// Rows whose logits are returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// No rows: the tokens only fill the cache.
    None,
    /// The last token's row.
    Last,
    /// Every token's row.
    All,
}

/// New tokens of one request.
#[derive(Debug, Clone)]
pub struct Item<'a> {
    /// The tokens, which follow the cached ones.
    pub tokens: &'a [u32],
    /// Position of the first of them.
    pub start: usize,
    /// Slots of the request's blocks, enough for every new token.
    pub table: Vec<u32>,
    /// Rows whose logits are returned.
    pub rows: Rows,
}

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    rope: Rope,
    fingerprint: u64,
}

impl Model {
    /// Returns the built-in model, with weights from this seed.
    #[must_use]
    pub fn tiny(seed: u64) -> Self {
        let config = ModelConfig::tiny();
        Self::assemble(Weights::from_seed(seed, &config), config)
    }

    /// Loads a model from a Hugging Face folder.
    pub fn from_folder(folder: &Path) -> Result<Self, EngineError> {
        let config = ModelConfig::from_folder(folder)?;
        Ok(Self::assemble(Weights::from_folder(folder, &config)?, config))
    }

    /// As [`Self::from_folder`], with an image of the weights: mapped if it belongs to this model, else written for the next
    /// process. Returns whether it was mapped. An unusable image, or a failed write, does not prevent the start.
    pub fn from_folder_and_image(folder: &Path, image: &Path) -> Result<(Self, bool), EngineError> {
        let config = ModelConfig::from_folder(folder)?;
        let key = weights_image::key(folder)?;
        match weights_image::open(image, &key, &config) {
            Ok((weights, fingerprint)) => {
                let rope = Rope::new(&config);
                return Ok((Self { config, weights, rope, fingerprint }, true));
            }
            Err(reason) => {
                tracing::info!("{}: the weights are read from the model's folder: {reason}", image.display())
            }
        }
        let model = Self::assemble(Weights::from_folder(folder, &config)?, config);
        if let Err(error) = weights_image::write(image, &key, &model.weights, model.fingerprint) {
            tracing::warn!("{}: the next process cannot map the weights: {error}", image.display());
        }
        Ok((model, false))
    }

    fn assemble(weights: Weights, config: ModelConfig) -> Self {
        let rope = Rope::new(&config);
        let fingerprint = fingerprint(&weights, &config);
        Self { config, weights, rope, fingerprint }
    }

    /// Shape of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sets whether keys and values are cached as f32. Must be called before the first pass.
    #[must_use]
    pub fn with_kv_f32(mut self, kv_f32: bool) -> Self {
        self.config.kv_f32 = kv_f32;
        self
    }

    /// Hash of the shape and every weight: differs between models whose KV blocks must not be mixed.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Computes the new tokens, stores their keys and values, and returns the logits of the wanted rows, one
    /// after the other. `after_layer` is called when a layer's keys and values of all tokens are stored.
    pub fn forward(&self, kv: &KvPool, items: &[Item<'_>], mut after_layer: impl FnMut(usize)) -> Vec<f32> {
        let hidden = self.config.hidden;
        let total: usize = items.iter().map(|item| item.tokens.len()).sum();
        let mut stream = Vec::with_capacity(total * hidden);
        for &token in items.iter().flat_map(|item| item.tokens) {
            let at = token as usize * hidden;
            stream.extend_from_slice(&self.weights.embedding[at..at + hidden]);
        }
        let mut row = 0;
        let spans: Vec<Span<'_>> = items
            .iter()
            .map(|item| {
                let span = Span { row, count: item.tokens.len(), start: item.start, table: &item.table };
                row += item.tokens.len();
                span
            })
            .collect();
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention_block(kv, index, layer, &spans, &mut stream, &mut after_layer);
            self.feed_forward_block(layer, &mut stream);
        }
        self.logits(items, &spans, &stream)
    }

    fn attention_block(
        &self,
        kv: &KvPool,
        index: usize,
        layer: &Layer,
        spans: &[Span<'_>],
        stream: &mut [f32],
        after_layer: &mut impl FnMut(usize),
    ) {
        let config = &self.config;
        let rows = stream.len() / config.hidden;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let width = queries + 2 * keys;
        let normed = rms_norm(stream, &layer.attention_norm, config.norm_epsilon);
        let mut qkv = vec![0.0; rows * width];
        linear(&normed, config.hidden, &layer.qkv, width, &mut qkv);
        for (row, span_row) in
            spans.iter().flat_map(|span| (0..span.count).map(move |at| (span, at))).enumerate()
        {
            let (span, at) = span_row;
            let qkv = &mut qkv[row * width..(row + 1) * width];
            if let Some(bias) = &layer.qkv_bias {
                qkv.iter_mut().zip(bias.iter()).for_each(|(value, bias)| *value += bias);
            }
            let position = span.start + at;
            let (heads, values) = qkv.split_at_mut(queries + keys);
            for (head, vector) in heads.chunks_exact_mut(config.head_dim).enumerate() {
                let norm = if head < config.heads { &layer.query_norm } else { &layer.key_norm };
                if let Some(weights) = norm {
                    rms_norm_in_place(vector, weights, config.norm_epsilon);
                }
                self.rope.apply(vector, position);
            }
            kv.store(span.table, position, index, KEYS, &heads[queries..]);
            kv.store(span.table, position, index, VALUES, values);
        }
        after_layer(index);
        let mut attended = vec![0.0; rows * queries];
        attend(config, kv, index, spans, &qkv, width, &mut attended);
        let mut projected = vec![0.0; rows * config.hidden];
        linear(&attended, queries, &layer.attention_out, config.hidden, &mut projected);
        stream.iter_mut().zip(&projected).for_each(|(value, delta)| *value += delta);
    }

    fn feed_forward_block(&self, layer: &Layer, stream: &mut [f32]) {
        let config = &self.config;
        let rows = stream.len() / config.hidden;
        let normed = rms_norm(stream, &layer.mlp_norm, config.norm_epsilon);
        let mut gate_up = vec![0.0; rows * 2 * config.intermediate];
        linear(&normed, config.hidden, &layer.gate_up, 2 * config.intermediate, &mut gate_up);
        let mut activated = vec![0.0; rows * config.intermediate];
        for (out, both) in
            activated.chunks_exact_mut(config.intermediate).zip(gate_up.chunks_exact(2 * config.intermediate))
        {
            let (gate, up) = both.split_at(config.intermediate);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + (-gate).exp()) * up;
            }
        }
        let mut projected = vec![0.0; rows * config.hidden];
        linear(&activated, config.intermediate, &layer.down, config.hidden, &mut projected);
        stream.iter_mut().zip(&projected).for_each(|(value, delta)| *value += delta);
    }

    fn logits(&self, items: &[Item<'_>], spans: &[Span<'_>], stream: &[f32]) -> Vec<f32> {
        let hidden = self.config.hidden;
        let mut wanted = Vec::new();
        for (item, span) in items.iter().zip(spans) {
            let rows = match item.rows {
                Rows::None => span.row..span.row,
                Rows::Last => span.row + span.count - 1..span.row + span.count,
                Rows::All => span.row..span.row + span.count,
            };
            wanted.extend_from_slice(&stream[rows.start * hidden..rows.end * hidden]);
        }
        let rows = wanted.len() / hidden;
        let normed = rms_norm(&wanted, &self.weights.final_norm, self.config.norm_epsilon);
        let mut logits = vec![0.0; rows * self.config.vocabulary];
        let output = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
        linear(&normed, hidden, output, self.config.vocabulary, &mut logits);
        logits
    }
}

/// `out = input · weightsᵀ`, weights as (outputs × inputs).
fn linear(input: &[f32], inputs: usize, weights: &[f32], outputs: usize, out: &mut [f32]) {
    let rows = input.len() / inputs;
    multiply(
        View::dense(input, rows, inputs),
        View::dense(weights, outputs, inputs).transposed(),
        out,
        outputs,
    );
}

fn rms_norm(rows: &[f32], weights: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = rows.to_vec();
    out.chunks_exact_mut(weights.len()).for_each(|row| rms_norm_in_place(row, weights, epsilon));
    out
}

fn rms_norm_in_place(row: &mut [f32], weights: &[f32], epsilon: f32) {
    let mean = row.iter().map(|value| value * value).sum::<f32>() / row.len() as f32;
    let scale = 1.0 / (mean + epsilon).sqrt();
    row.iter_mut().zip(weights).for_each(|(value, weight)| *value = *value * scale * weight);
}

fn fingerprint(weights: &Weights, config: &ModelConfig) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    hasher.update(format!("{config:?}").as_bytes());
    weights.for_each_tensor(|_, tensor| {
        let mut bytes = [0; 1024];
        for chunk in tensor.chunks(bytes.len() / 4) {
            for (value, out) in chunk.iter().zip(bytes.chunks_exact_mut(4)) {
                out.copy_from_slice(&value.to_le_bytes());
            }
            hasher.update(&bytes[..chunk.len() * 4]);
        }
    });
    hasher.digest()
}
