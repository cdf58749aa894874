//! Block bookkeeping of one tier: time and allocations per block of register, match, lease and evict, for the
//! shared catalog under each policy and for the single-threaded one of a slot pool.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Result, ensure};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_catalog::{
    Catalog, CatalogConfig, PolicyKind, PoolCatalog, Registration, TenantId, TierConfig, TierIndex,
};

use crate::measure::{RoundsArgs, allocations, median, time};
use crate::results::{self, Better};

const CHAIN: usize = 128;
const TIER: TierIndex = TierIndex(0);
const STEPS: [&str; 4] = ["register", "match", "lease", "evict"];

/// Times one round of each step in the order of `STEPS`; `None`: the side does not have the step.
type Round = Box<dyn FnMut(&[Vec<BlockIdentity>]) -> Result<[Option<StepCost>; 4]>>;

#[derive(Default)]
struct StepCost {
    nanos: f64,
    allocations: f64,
}

pub(crate) fn run(smoke: bool, rounds: RoundsArgs) -> Result<()> {
    let sizes: &[(usize, usize)] = if smoke { &[(4, 3)] } else { &[(256, 21), (4096, 7)] };
    for &(chains, default) in sizes {
        compare(chains, rounds.or(default))?;
    }
    Ok(())
}

fn compare(chains: usize, rounds: usize) -> Result<()> {
    let slots = (chains * CHAIN) as u32;
    println!(
        "# catalog: {slots} slots, chains of {CHAIN} blocks; nanoseconds a block, median (best) of {rounds} rounds"
    );
    let identities: Vec<Vec<BlockIdentity>> = (0..chains)
        .map(|chain| {
            let mut identity = IdentityChain::new(chain as u64, &[]);
            (0..CHAIN).map(|block| identity.next(&[block as u32; 16])).collect()
        })
        .collect();
    let mut sides: Vec<(String, Round)> = vec![("pool catalog (one thread)".into(), pool(slots)?)];
    for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost] {
        let name = format!("catalog, {policy:?}, {} B a slot", Catalog::bytes_per_slot(policy));
        sides.push((name, Box::new(move |identities| shared(policy, slots, identities))));
    }
    let mut results: Vec<[Vec<StepCost>; 4]> = sides.iter().map(|_| Default::default()).collect();
    for _ in 0..rounds {
        for ((_, round), results) in sides.iter_mut().zip(&mut results) {
            for (spent, result) in round(&identities)?.into_iter().zip(results) {
                result.extend(spent);
            }
        }
    }
    for ((name, _), results) in sides.iter().zip(results) {
        print!("{name:<34}");
        for (step, spent) in STEPS.iter().zip(results).filter(|(_, spent)| !spent.is_empty()) {
            let last = spent.last().map_or(0.0, |spent| spent.allocations);
            let best = spent.iter().map(|spent| spent.nanos).fold(f64::INFINITY, f64::min);
            let row = format!("{step}, {name}, {slots} slots");
            let values: Vec<f64> = spent.iter().map(|spent| spent.nanos).collect();
            results::add("catalog", &row, ("ns a block", Better::Lower), &values);
            let nanos = median(spent.iter().map(|spent| spent.nanos).collect());
            print!("  {step} {nanos:.0} ({best:.0}) ns, {last:.2} allocs;");
        }
        println!();
    }
    Ok(())
}

/// Measures the time and the allocations of `work` per block.
fn per_block(blocks: usize, work: impl FnOnce() -> usize) -> Result<Option<StepCost>> {
    let before = allocations().unwrap_or(0);
    let (spent, done) = time(work);
    let allocated = allocations().unwrap_or(0) - before;
    ensure!(done == blocks, "{done} blocks of {blocks}");
    let share = |total: u64| total as f64 / blocks as f64;
    Ok(Some(StepCost { nanos: share(spent.as_nanos() as u64), allocations: share(allocated) }))
}

fn pool(slot_count: u32) -> Result<Round> {
    let slab = Slab::create("bench", SlabLayout { slot_bytes: 64, slot_count }, PageSize::Standard)?;
    let pool = SlotPool::new(Arc::new(slab));
    Ok(Box::new(move |identities| {
        let blocks = identities.len() * CHAIN;
        let mut catalog = PoolCatalog::with_capacity(blocks);
        let register = per_block(blocks, || {
            let stored = identities.iter().flatten().map_while(|identity| {
                catalog.register(*identity, pool.acquire()?);
                Some(())
            });
            stored.count()
        })?;
        let mut slots = Vec::with_capacity(CHAIN);
        // A match pins the slots, so it is also a lease.
        let lease = per_block(blocks, || {
            let matched = identities.iter().map(|chain| {
                slots.clear();
                black_box(catalog.match_prefix(chain, &mut slots))
            });
            matched.sum()
        })?;
        slots.clear();
        let evict = per_block(blocks, || std::iter::from_fn(|| catalog.evict()).count())?;
        Ok([register, None, lease, evict])
    }))
}

fn shared(
    policy: PolicyKind,
    slots: u32,
    identities: &[Vec<BlockIdentity>],
) -> Result<[Option<StepCost>; 4]> {
    let blocks = identities.len() * CHAIN;
    let catalog = Catalog::new(&CatalogConfig::new(vec![TierConfig::new(slots, policy)]))?;
    let (mut evicted, mut reserved) = (Vec::with_capacity(CHAIN), Vec::with_capacity(CHAIN));
    let mut batch = Vec::with_capacity(CHAIN);
    // Through all states: reserve, fill, complete, register.
    let register = per_block(blocks, || {
        let stored = identities.iter().map(|chain| {
            catalog.reserve(TIER, CHAIN, TenantId(0), &mut evicted, &mut reserved);
            let mut parent = None;
            batch.extend(reserved.drain(..).zip(chain).map(|(slot, &identity)| Registration {
                complete: slot.fill().complete(1, 64),
                identity,
                parent: parent.replace(identity),
                recompute_seconds: 0.01,
            }));
            catalog.register(&mut batch).new
        });
        stored.sum()
    })?;
    let (mut places, mut leases) = (Vec::with_capacity(CHAIN), Vec::with_capacity(CHAIN));
    let look_up = per_block(blocks, || {
        let matched = identities.iter().map(|chain| {
            places.clear();
            black_box(catalog.match_prefix(chain, &mut places))
        });
        matched.sum()
    })?;
    let lease = per_block(blocks, || {
        let leased = identities.iter().map(|chain| {
            leases.clear();
            black_box(catalog.lease_prefix(TIER, chain, &mut leases))
        });
        leased.sum()
    })?;
    leases.clear();
    let mut evicting = Vec::with_capacity(CHAIN);
    let evict = per_block(blocks, || {
        let mut freed = 0;
        while catalog.evict(TIER, CHAIN, &mut evicting) > 0 {
            freed += catalog.finish(&mut evicting);
        }
        freed
    })?;
    Ok([register, look_up, lease, evict])
}
