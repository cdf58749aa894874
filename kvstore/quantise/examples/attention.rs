//! What quantised KV does to the output of attention, on random data with outlier channels in the keys:
//! cosine similarity and greatest error of softmax(q·Kᵀ / √d)·V against the same in double precision.

use kvstore_block::{BlockLayout, ElementType};
use kvstore_quantise::testing::{Random, block, elements};
use kvstore_quantise::{Format, Grouping, QuantiseError, QuantisedLayout, ScaleType, Scheme};

const BLOCKS: usize = 16;
const QUERIES: usize = 64;
const HEAD_DIM: usize = 64;

fn main() -> Result<(), QuantiseError> {
    let layout = BlockLayout {
        layers: 1,
        parts: 2,
        tokens: 16,
        kv_heads: 1,
        head_dim: HEAD_DIM as u32,
        element: ElementType::Bf16,
    };
    let seed = 81;
    println!("seed {seed}; {} tokens of context, {QUERIES} queries, head of {HEAD_DIM}", BLOCKS * 16);
    println!("{:<10}{:<12}{:<12}{:>16}{:>16}", "code", "keys", "values", "least cosine", "greatest error");
    for outlier in [0.0, 20.0] {
        println!("outlier channels: {outlier}");
        for format in [Format::Fp8E4m3, Format::Int8] {
            let token = Grouping::Token(HEAD_DIM as u32);
            for (keys, values) in
                [(Grouping::Channel, token), (token, token), (Grouping::Channel, Grouping::Channel)]
            {
                let scheme = Scheme { format, scale: ScaleType::Bf16, keys, values };
                let (cosine, error) = compare(&QuantisedLayout::new(layout, scheme)?, outlier, seed)?;
                let name = |grouping| if grouping == Grouping::Channel { "channel" } else { "token" };
                println!(
                    "{:<10}{:<12}{:<12}{cosine:>16.6}{error:>16.5}",
                    format!("{format:?}"),
                    name(keys),
                    name(values)
                );
            }
        }
    }
    Ok(())
}

fn compare(quantised: &QuantisedLayout, outlier: f64, seed: u64) -> Result<(f64, f64), QuantiseError> {
    let mut random = Random::new(seed);
    let layout = quantised.layout();
    let (mut exact, mut restored) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let mut payload = vec![0; quantised.bytes()];
    let mut bytes = vec![0; layout.block_bytes()];
    for _ in 0..BLOCKS {
        // Outlier channels are the same in all blocks of a head in reality; here they are drawn for each.
        let source = block(layout, outlier, &mut random);
        quantised.quantise(&source, &mut payload)?;
        quantised.dequantise(&payload, &mut bytes)?;
        for part in 0..2 {
            let place = layout.offset(0, part, 0)..layout.offset(0, part, 0) + layout.part_bytes();
            exact[part].extend(elements(layout.element, &source[place.clone()]));
            restored[part].extend(elements(layout.element, &bytes[place]));
        }
    }
    let (mut least_cosine, mut greatest_error) = (1.0_f64, 0.0_f64);
    for _ in 0..QUERIES {
        // Small where keys may be large, as trained queries are: scores stay of order one.
        let query: Vec<f64> = (0..HEAD_DIM).map(|_| random.normal() / outlier.max(1.0).sqrt()).collect();
        let (wanted, found) = (attend(&query, &exact), attend(&query, &restored));
        let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a * b).sum::<f64>();
        let cosine = dot(&wanted, &found) / (dot(&wanted, &wanted) * dot(&found, &found)).sqrt();
        least_cosine = least_cosine.min(cosine);
        let errors = wanted.iter().zip(&found).map(|(a, b)| (a - b).abs());
        greatest_error = errors.fold(greatest_error, f64::max);
    }
    Ok((least_cosine, greatest_error))
}

fn attend(query: &[f64], [keys, values]: &[Vec<f64>; 2]) -> Vec<f64> {
    let score =
        |key: &[f64]| key.iter().zip(query).map(|(a, b)| a * b).sum::<f64>() / (HEAD_DIM as f64).sqrt();
    let scores: Vec<f64> = keys.chunks_exact(HEAD_DIM).map(score).collect();
    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut output = vec![0.0; HEAD_DIM];
    for (weight, value) in weights.iter().zip(values.chunks_exact(HEAD_DIM)) {
        for (output, value) in output.iter_mut().zip(value) {
            *output += weight / sum * value;
        }
    }
    output
}
