//! Block bookkeeping of one tier: register, match and evict, per block.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Context, Result};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_catalog::Catalog;

use crate::measure::{median, time};

const CHAIN: usize = 128;

pub(crate) fn run(smoke: bool) -> Result<()> {
    println!("# catalog: nanoseconds a block, chains of {CHAIN} blocks, median of rounds");
    let (chains, rounds) = if smoke { (4, 3) } else { (256, 21) };
    let slot_count = (chains * CHAIN) as u32;
    let slab = Slab::create("bench", SlabLayout { slot_bytes: 64, slot_count }, PageSize::Standard)?;
    let pool = SlotPool::new(Arc::new(slab));
    let identities: Vec<Vec<BlockIdentity>> = (0..chains)
        .map(|chain| {
            let mut identity = IdentityChain::new(chain as u64, &[]);
            (0..CHAIN).map(|block| identity.next(&[block as u32; 16])).collect()
        })
        .collect();
    let (mut register, mut lookup, mut evict) = (Vec::new(), Vec::new(), Vec::new());
    let per_block = |spent: std::time::Duration| spent.as_nanos() as f64 / f64::from(slot_count);
    for _ in 0..rounds {
        let mut catalog = Catalog::with_capacity(slot_count as usize);
        let (spent, registered) = time(|| {
            identities.iter().flatten().try_for_each(|identity| {
                catalog.register(*identity, pool.acquire()?);
                Some(())
            })
        });
        registered.context("enough slots")?;
        register.push(per_block(spent));
        let mut slots = Vec::with_capacity(CHAIN);
        let (spent, ()) = time(|| {
            for chain in &identities {
                slots.clear();
                assert_eq!(black_box(catalog.match_prefix(chain, &mut slots)), CHAIN);
            }
        });
        lookup.push(per_block(spent));
        slots.clear();
        let (spent, evicted) = time(|| std::iter::from_fn(|| catalog.evict()).count());
        assert_eq!(evicted, slot_count as usize);
        evict.push(per_block(spent));
    }
    println!(
        "register {:.0} ns, match {:.0} ns, evict {:.0} ns",
        median(register),
        median(lookup),
        median(evict)
    );
    Ok(())
}
