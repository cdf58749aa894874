//! The reference engine's model by itself: prefill of 2,000 tokens and decode of one.

use anyhow::Result;
use dataplane_memory::PageSize;
use tools_engine::KvPool;
use tools_engine::model::{Item, Model, Rows};

use crate::measure::{RoundsArgs, median, time};
use crate::results::{self, Better};

const BLOCK_TOKENS: usize = 16;
const CHUNK: usize = 512;

pub(crate) fn run(smoke: bool, rounds: RoundsArgs) -> Result<()> {
    let (prompt, rounds) = if smoke { (100, rounds.or(1)) } else { (2000, rounds.or(5)) };
    println!("# engine: the built-in model, {prompt} tokens in chunks of {CHUNK}");
    let model = Model::tiny(7);
    let layout = KvPool::layout_of(model.config(), BLOCK_TOKENS)?;
    let kv = KvPool::new(layout, prompt / BLOCK_TOKENS + 2, PageSize::Standard)?;
    let slots: Vec<_> = std::iter::from_fn(|| kv.slots().acquire()).collect();
    let table: Vec<u32> = slots.iter().map(dataplane_memory::SlotRef::slot).collect();
    let tokens: Vec<u32> = (0..prompt as u32).map(|at| at * 31 % 256).collect();
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (spent, ()) = time(|| {
            for start in (0..prompt).step_by(CHUNK) {
                let tokens = &tokens[start..(start + CHUNK).min(prompt)];
                model.forward(&kv, &[Item { tokens, start, table: table.clone(), rows: Rows::None }], |_| {});
            }
        });
        prefill.push(spent.as_secs_f64());
        let (spent, logits) = time(|| {
            let item = Item { tokens: &[65], start: prompt, table: table.clone(), rows: Rows::Last };
            model.forward(&kv, &[item], |_| {})
        });
        assert_eq!(logits.len(), model.config().vocabulary);
        decode.push(spent.as_secs_f64());
    }
    results::add("engine", "prefill", ("s", Better::Lower), &prefill);
    results::add("engine", "one token", ("s", Better::Lower), &decode);
    println!("prefill {:.3} s, one token after it {:.2} ms", median(prefill), median(decode) * 1e3);
    Ok(())
}
