//! Causal attention of new tokens over a paged prefix.
//!
//! Per request and key/value head: scores = Q·Kᵀ for all new tokens and all query heads of the group at once,
//! a softmax per row over exactly the positions that the row may see, and P·V. Positions that a row may not
//! see get a weight of exactly zero, which adds exactly nothing, so a row's result does not depend on how
//! many rows were computed with it.

use rayon::prelude::*;

use super::ModelConfig;
use super::matrix::{View, multiply};
use crate::kv::{KEYS, KvPool, VALUES};

/// The new tokens of one request.
pub(super) struct Span<'a> {
    /// Row of the first one in the batch.
    pub(super) row: usize,
    /// Number of new tokens.
    pub(super) count: usize,
    /// Position of the first one.
    pub(super) start: usize,
    /// Slots of the request's blocks.
    pub(super) table: &'a [u32],
}

/// `out` (rows × heads·dim) from `queries` (rows with stride `query_stride`).
pub(super) fn attend(
    config: &ModelConfig,
    kv: &KvPool,
    layer: usize,
    spans: &[Span<'_>],
    queries: &[f32],
    query_stride: usize,
    out: &mut [f32],
) {
    let width = config.heads * config.head_dim;
    // Spans are consecutive rows, so the output can be split into one part for each.
    let mut parts = Vec::with_capacity(spans.len());
    let mut rest = out;
    for span in spans {
        let (part, after) = rest.split_at_mut(span.count * width);
        parts.push((span, part));
        rest = after;
    }
    parts
        .into_par_iter()
        .for_each(|(span, part)| attend_span(config, kv, layer, span, queries, query_stride, part));
}

fn attend_span(
    config: &ModelConfig,
    kv: &KvPool,
    layer: usize,
    span: &Span<'_>,
    queries: &[f32],
    query_stride: usize,
    out: &mut [f32],
) {
    let (dim, context) = (config.head_dim, span.start + span.count);
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    kv.load(span.table, context, layer, KEYS, &mut keys);
    kv.load(span.table, context, layer, VALUES, &mut values);
    let heads: Vec<Vec<f32>> = (0..config.heads)
        .into_par_iter()
        .map(|head| {
            let first = span.row * query_stride + head * dim;
            let kv_head = head / (config.heads / config.kv_heads);
            let part = |data| View {
                data: head_part(data, kv_head * dim),
                rows: context,
                columns: dim,
                row_stride: config.kv_heads * dim,
                column_stride: 1,
            };
            let queries = View {
                data: &queries[first..],
                rows: span.count,
                columns: dim,
                row_stride: query_stride,
                column_stride: 1,
            };
            let mut scores = vec![0.0; span.count * context];
            multiply(queries, part(&keys).transposed(), &mut scores, context);
            for (row, scores) in scores.chunks_exact_mut(context).enumerate() {
                softmax(scores, span.start + row + 1, 1.0 / (dim as f32).sqrt());
            }
            let mut result = vec![0.0; span.count * dim];
            multiply(View::dense(&scores, span.count, context), part(&values), &mut result, dim);
            result
        })
        .collect();
    for (head, result) in heads.iter().enumerate() {
        for (row, values) in result.chunks_exact(dim).enumerate() {
            let at = row * config.heads * dim + head * dim;
            out[at..at + dim].copy_from_slice(values);
        }
    }
}

fn head_part(data: &[f32], offset: usize) -> &[f32] {
    &data[offset..]
}

/// Softmax over the first `visible` scores; the rest becomes exactly zero.
fn softmax(scores: &mut [f32], visible: usize, scale: f32) {
    let (seen, hidden) = scores.split_at_mut(visible);
    let largest = seen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in seen.iter_mut() {
        *score = ((*score - largest) * scale).exp();
        sum += *score;
    }
    let inverse = 1.0 / sum;
    seen.iter_mut().for_each(|score| *score *= inverse);
    hidden.fill(0.0);
}
