//! Prefixes behind an artificially slow disk: is the plan as good as the better of the extremes?
//!
//! Two parts are simulated: the disk, which is memory with a latency and a bandwidth, and computing, which is a
//! wait for the time that a worker of a given speed would take. For each length and speed three ways are
//! measured in turn: all blocks from the disk, all computed, and the plan's choice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use crossbeam_channel::{Receiver, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog};
use kvstore_io::testing::{MemoryEngine, MemoryFiles};
use kvstore_store::{
    DISK_META_BYTES_MAX, Description, DiskTier, HostTier, Offload, Onboard, Plan, Prompt, RemoteCoverage,
    Store, StoreBuilder, StoreConfig, StoreEvent, TenantId,
};

use super::slow::SlowEngine;
use crate::measure::median;
use crate::results::{self, Better};

const BLOCK_TOKENS: usize = 16;
const BLOCK_BYTES: usize = 64 << 10;
/// Host memory holds only blocks in transit, so that every block comes from the disk.
const HOST_SLOTS: u32 = 4;

/// The sweep.
#[derive(Args, Clone)]
pub(crate) struct SweepArgs {
    /// Blocks of 16 tokens and 64 KiB.
    #[arg(long, value_delimiter = ',', default_value = "4,16,64,256")]
    blocks: Vec<usize>,
    /// Bandwidths of the disk, in MB/s.
    #[arg(long, value_delimiter = ',', default_value = "5,20,80,320,1280")]
    bandwidth: Vec<f64>,
    /// Latency of the disk, in microseconds.
    #[arg(long, default_value_t = 500)]
    latency_us: u64,
    /// Tokens that the worker computes per second.
    #[arg(long, default_value_t = 20_000.0)]
    tokens_per_s: f64,
    /// Rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

impl Default for SweepArgs {
    fn default() -> Self {
        Self {
            blocks: vec![4, 16, 64, 256],
            bandwidth: vec![5.0, 20.0, 80.0, 320.0, 1280.0],
            latency_us: 500,
            tokens_per_s: 20_000.0,
            rounds: 5,
        }
    }
}

pub(crate) fn run(smoke: bool, args: &SweepArgs) -> Result<()> {
    let mut args = args.clone();
    if smoke {
        (args.blocks, args.bandwidth, args.rounds) = (vec![4, 16], vec![20.0, 320.0], 1);
    }
    println!(
        "# tier sweep: blocks of {} KiB and {BLOCK_TOKENS} tokens, a worker of {} tokens/s, a disk with {} us of latency",
        BLOCK_BYTES >> 10,
        args.tokens_per_s,
        args.latency_us
    );
    println!(
        "disk MB/s | blocks | all onboarded ms | all computed ms | the plan ms | onboards | beside the better"
    );
    let mut worst: f64 = 0.0;
    for &bandwidth in &args.bandwidth {
        let most = args.blocks.iter().copied().max().context("at least one length")?;
        let rig = Rig::new(&args, bandwidth * 1e6, most)?;
        for &blocks in &args.blocks {
            worst = worst.max(rig.measure(&args, bandwidth, blocks)?);
        }
    }
    println!("worst: {worst:.3} of the better of the two");
    Ok(())
}

struct Rig {
    store: Store,
    moved: Receiver<StoreEvent>,
    pool: Arc<SlotPool>,
    chain: Vec<BlockIdentity>,
    token_s: f64,
}

impl Rig {
    fn new(args: &SweepArgs, bytes_per_s: f64, blocks: usize) -> Result<Self> {
        let slot_count = blocks as u32 + 8;
        let layout = SlabLayout { slot_bytes: BLOCK_BYTES, slot_count };
        let pool = SlotPool::new(Arc::new(Slab::create("kvasir-bench-pool", layout, PageSize::Standard)?));
        let segment_bytes =
            (u64::from(slot_count) * BLOCK_BYTES as u64 + (4 << 20)).next_multiple_of(1 << 20);
        let latency = Duration::from_micros(args.latency_us);
        let open = move || {
            let files = MemoryFiles::new(&[segment_bytes as usize]);
            let engine = SlowEngine::new(MemoryEngine::new(&files, 4096, 1 << 20, 64), latency, bytes_per_s);
            let config = DiskConfig {
                slot_bytes: BLOCK_BYTES as u32,
                meta_bytes_max: DISK_META_BYTES_MAX as u16,
                operations_max: 64,
                operation_timeout: Duration::from_secs(600),
                ..DiskConfig::default()
            };
            let areas = [Area { file: 0, offset: 0, bytes: segment_bytes }];
            Ok((DiskLog::format(config, &areas, Box::new(engine), 1, ClockReading::now())?, Vec::new()))
        };
        let disk = DiskTier {
            open: Box::new(open),
            depth: 64,
            eviction: PolicyKind::Lru,
            admission: AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() },
        };
        let host = HostTier { slots: HOST_SLOTS, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let builder = StoreBuilder::new(StoreConfig::new(BLOCK_BYTES, BLOCK_TOKENS as u32), host)?.disk(disk);
        let (sender, moved) = unbounded();
        let notify = move |event| {
            // The benchmark may have ended.
            let _over = sender.send(event);
        };
        let (store, _) = builder.start(notify)?;
        let mut identity = IdentityChain::new(1, &[]);
        let chain: Vec<BlockIdentity> =
            (0..blocks as u32).map(|block| identity.next(&[block; BLOCK_TOKENS])).collect();
        let rig = Self { store, moved, pool, chain, token_s: 1.0 / args.tokens_per_s };
        rig.fill()?;
        Ok(rig)
    }

    /// Writes the whole chain to the disk, block by block.
    fn fill(&self) -> Result<()> {
        for (position, &identity) in self.chain.iter().enumerate() {
            let slot = self.pool.acquire().context("a slot")?;
            slot.slab().write(slot.slot(), 0, &[position as u8; BLOCK_BYTES]);
            let parent = position.checked_sub(1).map(|parent| self.chain[parent]);
            let description =
                Description { parent, position: position as u32, meta: Arc::from([]), tenant: TenantId(0) };
            ensure!(
                self.store.offload(Offload { identity, description, slot }).is_ok(),
                "the store takes it"
            );
            let started = Instant::now();
            while self.store.blocks()[1] <= position as u64 {
                ensure!(started.elapsed() < Duration::from_secs(10), "block {position} was not written");
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Returns the time of onboarding `blocks` blocks and computing the rest of `of`.
    fn onboard(&self, request: u64, blocks: usize, of: usize, deadline: Instant) -> Result<Duration> {
        let started = Instant::now();
        let targets: Option<Vec<SlotRef>> = (0..blocks).map(|_| self.pool.acquire()).collect();
        let targets = targets.context("slots")?;
        let chain = self.chain[..blocks].to_vec();
        ensure!(
            self.store.onboard(Onboard { request, chain, first: 0, targets, deadline }).is_ok(),
            "the store takes it"
        );
        let verified = loop {
            match self.moved.recv_timeout(Duration::from_secs(60))? {
                StoreEvent::Onboarded { request: answered, verified, .. } if answered == request => {
                    break verified;
                }
                _ => {}
            }
        };
        self.compute(verified, of);
        Ok(started.elapsed())
    }

    /// Waits for the time that computing the blocks from `from` on would take, and reports it to the store.
    fn compute(&self, from: usize, of: usize) -> Duration {
        let started = Instant::now();
        let tokens = (of - from) * BLOCK_TOKENS + 1;
        let time = Duration::from_secs_f64(tokens as f64 * self.token_s);
        std::thread::sleep(time.saturating_sub(Duration::from_micros(100)));
        while started.elapsed() < time {
            std::hint::spin_loop();
        }
        let elapsed = started.elapsed();
        self.store.observe_prefill(tokens, from * BLOCK_TOKENS, elapsed);
        elapsed
    }

    fn measure(&self, args: &SweepArgs, bandwidth: f64, blocks: usize) -> Result<f64> {
        let (mut all, mut none, mut planned, mut chosen) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let forever = || Instant::now() + Duration::from_secs(600);
        let rounds = args.rounds | 1;
        for round in 0..rounds as u64 {
            all.push(self.onboard(round * 2, blocks, blocks, forever())?.as_secs_f64());
            none.push(self.compute(0, blocks).as_secs_f64());
            let prompt = Prompt {
                chain: &self.chain[..blocks],
                groups: &[],
                device_blocks: 0,
                tokens: blocks * BLOCK_TOKENS + 1,
                block_tokens: BLOCK_TOKENS,
                queued_tokens: 0,
            };
            let started = Instant::now();
            match self.store.plan(&prompt, RemoteCoverage::Asked) {
                Plan::Onboard { blocks: some, deadline } => {
                    chosen = some;
                    self.onboard(round * 2 + 1, some, blocks, deadline)?;
                }
                Plan::Recompute | Plan::AskOthers { .. } => {
                    chosen = 0;
                    self.compute(0, blocks);
                }
            }
            planned.push(started.elapsed().as_secs_f64());
        }
        // The better way of each round, not of the medians.
        let ratios: Vec<f64> = (planned.iter().zip(all.iter().zip(&none)))
            .map(|(planned, (all, none))| planned / f64::min(*all, *none))
            .collect();
        let row = format!("plan over the better way, {bandwidth:.0} MB/s, {blocks} blocks");
        results::add("tier", &row, ("ratio", Better::Lower), &ratios);
        let (all, none, planned) = (median(all), median(none), median(planned));
        let ratio = planned / all.min(none);
        println!(
            "{bandwidth:.0} | {blocks} | {:.2} | {:.2} | {:.2} | {chosen} | {ratio:.3}",
            all * 1e3,
            none * 1e3,
            planned * 1e3
        );
        Ok(ratio)
    }
}
