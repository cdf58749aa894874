//! Memory plan of a node: each pool, and the sum.

use anyhow::Result;
use control_config::{Bytes, Settings};
use tools_engine::KvPool;
use tools_engine::model::ModelConfig;

use crate::compose;

struct Line {
    what: String,
    count: u64,
    bytes: u64,
}

/// Returns the plan of `workers` worker processes, one line for each pool, and the sum.
pub(crate) fn render(settings: &Settings, workers: u64) -> Result<String> {
    let model = compose::model_config(settings)?;
    let layout = KvPool::layout_of(&model, settings.engine.block_tokens as usize)?;
    let block = layout.block_bytes() as u64;
    let mut lines = vec![
        Line {
            what: format!("KV blocks of {} tokens", layout.tokens),
            count: settings.engine.blocks,
            bytes: block,
        },
        Line {
            what: "host-tier blocks".to_owned(),
            count: compose::host_blocks(settings, &layout) as u64,
            bytes: block,
        },
        Line { what: "weights (f32)".to_owned(), count: parameters(&model), bytes: 4 },
    ];
    if !settings.object_tier.url.is_empty() {
        let (what, bytes) = ("objects on their way".to_owned(), settings.object_tier.buffers.0);
        lines.push(Line { what, count: 1, bytes });
    }
    let mut out = format!("Memory plan, for each of {workers} workers:\n");
    let mut sum = 0;
    for line in &lines {
        let total = line.count * line.bytes;
        sum += total;
        out.push_str(&format!(
            "  {:<28} {:>10} x {:>9} B = {:>11}\n",
            line.what,
            line.count,
            line.bytes,
            human(total)
        ));
    }
    out.push_str(&format!("  {:<28} {:>37}\n", "sum of one worker", human(sum)));
    out.push_str(&format!("  {:<28} {:>37}\n", "sum of all workers", human(sum * workers)));
    Ok(out)
}

fn human(bytes: u64) -> String {
    match bytes {
        0..10_240 => Bytes(bytes).to_string(),
        10_240..10_485_760 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

fn parameters(model: &ModelConfig) -> u64 {
    let (hidden, inner) = (model.hidden, model.intermediate);
    let (queries, keys) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner + 2 * hidden;
    let embeddings = model.vocabulary * hidden * if model.tied_embeddings { 1 } else { 2 };
    (layer * model.layers + embeddings + hidden) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_adds_up() {
        let mut settings = Settings::default();
        settings.engine.blocks = 100;
        settings.host_tier.capacity = Bytes(32 << 10);
        let plan = render(&settings, 2).expect("the built-in model");
        // The tiny model's block: 4 layers x 2 x 16 tokens x 2 heads x 32 x 2 B = 16 KiB.
        assert!(plan.contains("100 x     16384 B"), "{plan}");
        assert!(plan.contains("2 x     16384 B"), "{plan}");
        assert!(!plan.contains("objects"), "{plan}");
    }

    #[test]
    fn objects_on_their_way_are_in_the_plan() {
        let mut settings = Settings::default();
        settings.object_tier.url = "file:///objects".to_owned();
        settings.object_tier.buffers = Bytes(64 << 20);
        let plan = render(&settings, 1).expect("the built-in model");
        assert!(plan.contains("1 x  67108864 B =    64.0 MiB"), "{plan}");
    }
}
