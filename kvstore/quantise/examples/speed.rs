//! Speed of quantising and restoring as a ratio to copying the same source, in turn, median of several:
//! once within the caches and once with more bytes than they hold.

use std::hint::black_box;
use std::time::Instant;

use kvstore_block::{BlockLayout, ElementType};
use kvstore_quantise::testing::{Random, block};
use kvstore_quantise::{Format, Grouping, Isa, QuantiseError, QuantisedLayout, ScaleType, Scheme};

const ROUNDS: usize = 11;

fn main() -> Result<(), QuantiseError> {
    let layout = BlockLayout {
        layers: 32,
        parts: 2,
        tokens: 16,
        kv_heads: 8,
        head_dim: 128,
        element: ElementType::Bf16,
    };
    println!("time of memcpy of the source / time; bf16, one thread, median of {ROUNDS}");
    println!("{:<8}{:<10}{:<14}{:<10}{:>12}{:>12}", "KiB", "code", "groups", "path", "quantise", "restore");
    let block = block(&layout, 30.0, &mut Random::new(1));
    for blocks in [1, 48] {
        compare(&layout, &block.repeat(blocks))?;
    }
    Ok(())
}

fn compare(layout: &BlockLayout, source: &[u8]) -> Result<(), QuantiseError> {
    let kib = source.len() >> 10;
    for format in [Format::Fp8E4m3, Format::Int8] {
        for (name, grouping) in [("channel", Grouping::Channel), ("token × 128", Grouping::Token(128))] {
            let scheme = Scheme { format, scale: ScaleType::Bf16, keys: grouping, values: grouping };
            let quantised = QuantisedLayout::new(*layout, scheme)?;
            for (path, isa) in [("portable", Isa::PORTABLE), ("detected", Isa::detect())] {
                let [down, up] = ratios(&quantised, isa, source)?;
                println!(
                    "{kib:<8}{:<10}{:<14}{:<10}{:>12.3}{:>12.3}",
                    format!("{format:?}"),
                    name,
                    path,
                    down,
                    up
                );
            }
        }
    }
    Ok(())
}

fn ratios(quantised: &QuantisedLayout, isa: Isa, source: &[u8]) -> Result<[f64; 2], QuantiseError> {
    let part_bytes = quantised.layout().part_bytes();
    let plane_bytes = quantised.plane_bytes(0);
    let planes = source.len() / part_bytes;
    let mut codes = vec![0; planes * plane_bytes];
    let mut copy = vec![0; source.len()];
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        let start = Instant::now();
        black_box(&mut copy).copy_from_slice(black_box(source));
        times[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        for (plane, codes) in source.chunks_exact(part_bytes).zip(codes.chunks_exact_mut(plane_bytes)) {
            quantised.quantise_plane(isa, 0, plane, codes)?;
        }
        times[1].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        for (plane, codes) in copy.chunks_exact_mut(part_bytes).zip(codes.chunks_exact(plane_bytes)) {
            quantised.dequantise_plane(isa, 0, codes, plane)?;
        }
        times[2].push(start.elapsed().as_secs_f64());
    }
    let [copy, down, up] = times.map(|mut times: Vec<f64>| {
        times.sort_unstable_by(f64::total_cmp);
        times[ROUNDS / 2]
    });
    Ok([copy / down, copy / up])
}
