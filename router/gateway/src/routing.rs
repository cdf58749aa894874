//! Who gets a request: hashes → overlaps → policy → one worker, or a prefill and a decode worker.
//!
//! Runs on the request's own thread, without lock and without waiting; allocates the candidate lists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvstore_block::{SequenceHasher, sequence_hashes};
use router_policy::{Candidate, choose, is_worth_disaggregating};
use router_radix::Overlaps;

use crate::GatewayConfig;
use crate::fleet::{Fleet, Live, Worker};

/// Assumed until a worker has shown how fast it is.
const NANOS_PER_TOKEN_UNKNOWN: u64 = 50_000;

/// A worker's run together with its client.
#[derive(Clone)]
pub(crate) struct Picked {
    pub(crate) worker: Arc<Worker>,
    pub(crate) live: Arc<Live>,
}

/// Where a request goes.
pub(crate) struct Route {
    pub(crate) decode: Picked,
    pub(crate) prefill: Option<Picked>,
    pub(crate) blocks: u32,
    /// Leading blocks that the decode worker holds.
    pub(crate) overlap_blocks: u32,
    /// Tokens that somebody has to compute.
    pub(crate) uncached_tokens: usize,
    pub(crate) predicted: Duration,
    pub(crate) decided_in: Duration,
}

impl Route {
    /// For the response header.
    pub(crate) fn explain(&self) -> String {
        let prefill = self.prefill.as_ref().map_or("-", |picked| picked.worker.name.as_str());
        format!(
            "worker={}; prefill={prefill}; overlap_blocks={}/{}; predicted_ms={:.1}; decided_us={:.1}",
            self.decode.worker.name,
            self.overlap_blocks,
            self.blocks,
            self.predicted.as_secs_f64() * 1e3,
            self.decided_in.as_secs_f64() * 1e6,
        )
    }
}

/// Chooses workers. Turns and random numbers come from a counter.
#[derive(Debug, Default)]
pub(crate) struct Chooser {
    turn: AtomicU64,
}

impl Chooser {
    /// `None` when no worker can take it now. `avoid`: names of workers that have just failed this request.
    pub(crate) fn route(
        &self,
        fleet: &Fleet,
        config: &GatewayConfig,
        tokens: &[u32],
        salt: Option<&str>,
        avoid: &[String],
    ) -> Option<Route> {
        let started = Instant::now();
        let ready: Vec<Picked> = fleet
            .workers
            .iter()
            .filter_map(|worker| Some(Picked { live: worker.ready()?, worker: Arc::clone(worker) }))
            .collect();
        let block_tokens = ready.first()?.live.description.block_tokens;
        let mut hashes = Vec::with_capacity(tokens.len() / block_tokens);
        let extras: Vec<&str> = salt.into_iter().collect();
        sequence_hashes(SequenceHasher::with_extras(&extras), tokens, block_tokens, &mut hashes);
        let overlaps = fleet.index.overlaps(&hashes);
        let blocks = tokens.len().div_ceil(block_tokens) as u32;

        let decode = self.pick(config, blocks, &overlaps, avoid, &ready, |role| role != "prefill")?;
        let overlap_blocks = overlaps.any(decode.live.slot);
        let held = overlap_blocks as usize * block_tokens;
        let is_worth = decode.live.description.role != "both"
            && is_worth_disaggregating(tokens.len(), held, config.disaggregate_above_tokens);
        let prefill = is_worth
            .then(|| self.pick(config, blocks, &overlaps, avoid, &ready, |role| role == "prefill"))
            .flatten();
        let computing = prefill.as_ref().unwrap_or(&decode);
        let cached = overlaps.any(computing.live.slot).max(overlap_blocks) as usize * block_tokens;
        let uncached_tokens = tokens.len().saturating_sub(cached);
        let predicted = predict(&computing.live, uncached_tokens, block_tokens);
        Some(Route {
            decode,
            prefill,
            blocks,
            overlap_blocks,
            uncached_tokens,
            predicted,
            decided_in: started.elapsed(),
        })
    }

    fn pick(
        &self,
        config: &GatewayConfig,
        blocks: u32,
        overlaps: &Overlaps,
        avoid: &[String],
        ready: &[Picked],
        wants: impl Fn(&str) -> bool,
    ) -> Option<Picked> {
        let fits = |picked: &&Picked| wants(&picked.live.description.role);
        let mut eligible: Vec<&Picked> =
            ready.iter().filter(fits).filter(|picked| !avoid.contains(&picked.worker.name)).collect();
        if eligible.is_empty() {
            // Better one that has failed than none: it may have been restarted since.
            eligible = ready.iter().filter(fits).collect();
        }
        let candidates: Vec<Candidate> = eligible
            .iter()
            .map(|picked| {
                let load = &picked.live.load;
                Candidate {
                    device_blocks: overlaps.device(picked.live.slot),
                    any_blocks: overlaps.any(picked.live.slot),
                    queued_prefill_blocks: load.queued_prefill_blocks.load(Ordering::Relaxed),
                    decoding_blocks: load.decoding_blocks.load(Ordering::Relaxed),
                    requests: load.requests.load(Ordering::Relaxed),
                }
            })
            .collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let choice = choose(config.strategy, blocks, &candidates, &config.weights, turn, turn)?;
        Some(eligible[choice.index].clone())
    }
}

/// Time to the first token: what is queued there and what this request adds, at the learned speed.
fn predict(live: &Live, uncached_tokens: usize, block_tokens: usize) -> Duration {
    let learned = live.load.nanos_per_token.load(Ordering::Relaxed);
    let per_token = if learned == 0 { NANOS_PER_TOKEN_UNKNOWN } else { learned };
    let queued = live.load.queued_prefill_blocks.load(Ordering::Relaxed) as usize * block_tokens;
    Duration::from_nanos(per_token * (queued + uncached_tokens.max(1)) as u64)
}

/// Counts a request against its workers until it is dropped.
pub(crate) struct Booking {
    pub(crate) decode_worker: Arc<Worker>,
    decode: Arc<Live>,
    computing: Arc<Live>,
    decoding_blocks: u32,
    prefill_blocks: u32,
    uncached_tokens: usize,
    started: Instant,
    is_prefilling: bool,
}

impl Booking {
    pub(crate) fn new(route: &Route) -> Self {
        let decode = Arc::clone(&route.decode.live);
        let computing =
            route.prefill.as_ref().map_or_else(|| Arc::clone(&decode), |picked| Arc::clone(&picked.live));
        let block_tokens = decode.description.block_tokens;
        let prefill_blocks = route.uncached_tokens.div_ceil(block_tokens) as u32;
        decode.load.requests.fetch_add(1, Ordering::Relaxed);
        decode.load.decoding_blocks.fetch_add(route.blocks, Ordering::Relaxed);
        computing.load.queued_prefill_blocks.fetch_add(prefill_blocks, Ordering::Relaxed);
        if route.prefill.is_some() {
            computing.load.requests.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            decode_worker: Arc::clone(&route.decode.worker),
            decode,
            computing,
            decoding_blocks: route.blocks,
            prefill_blocks,
            uncached_tokens: route.uncached_tokens,
            started: Instant::now(),
            is_prefilling: true,
        }
    }

    /// The first token is here: the prompt is no longer queued, and the worker's speed is known better.
    pub(crate) fn first_token(&mut self) {
        if !std::mem::replace(&mut self.is_prefilling, false) {
            return;
        }
        self.computing.load.queued_prefill_blocks.fetch_sub(self.prefill_blocks, Ordering::Relaxed);
        let nanos = self.started.elapsed().as_nanos() as u64 / self.uncached_tokens.max(1) as u64;
        let speed = &self.computing.load.nanos_per_token;
        let before = speed.load(Ordering::Relaxed);
        // An eighth of each new value; a lost race loses one sample.
        let learned = if before == 0 { nanos } else { before - before / 8 + nanos / 8 };
        speed.store(learned.max(1), Ordering::Relaxed);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.is_prefilling {
            self.computing.load.queued_prefill_blocks.fetch_sub(self.prefill_blocks, Ordering::Relaxed);
        }
        self.decode.load.requests.fetch_sub(1, Ordering::Relaxed);
        if !Arc::ptr_eq(&self.decode, &self.computing) {
            self.computing.load.requests.fetch_sub(1, Ordering::Relaxed);
        }
        self.decode.load.decoding_blocks.fetch_sub(self.decoding_blocks, Ordering::Relaxed);
    }
}
