//! Plans for models of which some layers need the last blocks before the next token only.

use std::time::Duration;

use crate::plan::speed::SpeedSnapshot;
use crate::plan::tests::sweep::{self, PREFILL};
use crate::plan::tests::testing::{Random, SimulatedNode, speed};
use crate::plan::{Choice, Group, PlanConfig, RecomputeModel, Request, TIERS, Tier, TierSet, loadable, plan};

const DISK: TierSet = TierSet::EMPTY.with(Tier::Disk);

/// Knows [`PREFILL`].
fn worker() -> RecomputeModel {
    let mut node = SimulatedNode::new(1, [speed(Duration::ZERO, 1e9); TIERS], PREFILL, PlanConfig::default());
    sweep::warm_up(&mut node, 1, 200);
    node.recompute
}

/// Seconds to the first token after loading `blocks` from the disk; none where a group lacks one that is needed. By counting,
/// without anything of the planner's.
fn seconds(
    request: &Request<'_>,
    speeds: &SpeedSnapshot,
    worker: &RecomputeModel,
    blocks: usize,
) -> Option<f64> {
    let needed = request.groups.iter().map(|group| {
        let first = blocks.saturating_sub(group.window_blocks).max(request.device_blocks);
        let missing = group.held[first..blocks].iter().any(|tiers| tiers.is_empty());
        (!missing).then_some(blocks - first)
    });
    let of_groups: usize = needed.sum::<Option<usize>>()?;
    let loaded = blocks - request.device_blocks + of_groups;
    let disk = &speeds[Tier::Disk.index()];
    let bytes = loaded as f64 * request.block_bytes[Tier::Disk.index()] as f64;
    let loading = if loaded == 0 { 0.0 } else { disk.latency_s + bytes * disk.seconds_per_byte };
    let context = blocks as u32 * request.block_tokens;
    Some(loading + worker.expected(request.prompt_tokens - context, context, 0).as_secs_f64())
}

#[test]
fn a_plan_has_all_that_groups_need_and_is_as_good_as_any_that_has() {
    let (worker, config) = (worker(), PlanConfig::default());
    let mut loads = [0; 2];
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let blocks = 1 + (random.uniform() * 60.0) as usize;
        let device_blocks = (random.uniform() * random.uniform() * blocks as f64) as usize;
        let mut speeds = [speed(Duration::ZERO, 3e9 * (1.0 + 4.0 * random.uniform())); TIERS];
        speeds.iter_mut().for_each(|tier| tier.samples = u64::MAX);
        let held = vec![DISK; blocks];
        let holes = random.uniform() * 0.5;
        let of_groups: Vec<(Vec<TierSet>, usize)> = (0..1 + seed % 4)
            .map(|_| {
                let held = (0..blocks).map(|_| if random.uniform() < holes { TierSet::EMPTY } else { DISK });
                (held.collect(), [1, 2, 8, usize::MAX][(random.uniform() * 4.0) as usize])
            })
            .collect();
        let groups: Vec<Group<'_>> = of_groups
            .iter()
            .map(|(held, window_blocks)| Group { held, window_blocks: *window_blocks })
            .collect();
        let request = Request { groups: &groups, device_blocks, ..sweep::request(&held, Choice::Recompute) };
        let chosen = plan(&config, &request, &speeds, &worker);
        let most =
            (device_blocks..=blocks).rev().find(|&end| seconds(&request, &speeds, &worker, end).is_some());
        assert_eq!(Some(loadable(&held, &groups, device_blocks)), most, "seed {seed}");
        let reached = seconds(&request, &speeds, &worker, chosen.recompute_from);
        let reached = reached.unwrap_or_else(|| panic!("seed {seed}: {} has holes", chosen.recompute_from));
        let all = (device_blocks..=blocks).filter_map(|blocks| seconds(&request, &speeds, &worker, blocks));
        let best = all.fold(f64::INFINITY, f64::min);
        assert!(reached <= best * 1.031, "seed {seed}: {reached} s, and {best} s are possible");
        loads[usize::from(chosen.recompute_from > device_blocks)] += 1;
    }
    println!("{} plans compute, {} load", loads[0], loads[1]);
    assert!(loads.iter().all(|count| *count > 30), "{loads:?}");
}

#[test]
fn blocks_of_groups_count_in_time() {
    let (worker, config) = (worker(), PlanConfig::default());
    let mut speeds = [speed(Duration::ZERO, 2e10); TIERS];
    speeds.iter_mut().for_each(|tier| tier.samples = u64::MAX);
    let held = [DISK; 64];
    let alone = sweep::request(&held, Choice::Recompute);
    let group = Group { held: &held, window_blocks: usize::MAX };
    assert_eq!(plan(&config, &alone, &speeds, &worker).recompute_from, 64);
    let one = Request { groups: &[group], ..alone };
    let (few, more) = (plan(&config, &alone, &speeds, &worker), plan(&config, &one, &speeds, &worker));
    assert!(more.predicted_onboard > few.predicted_onboard * 19 / 10, "{more:?}");
    let many = Request { groups: &[group; 20], ..alone };
    assert_eq!(plan(&config, &many, &speeds, &worker).choice(), Choice::Recompute);
    let last_only = Request { groups: &[Group { window_blocks: 1, ..group }; 20], ..alone };
    assert_eq!(plan(&config, &last_only, &speeds, &worker).recompute_from, 64);
}

#[test]
fn blocks_of_groups_come_from_the_first_tier_that_holds_them() {
    let (worker, config) = (worker(), PlanConfig::default());
    let mut speeds = [speed(Duration::ZERO, 2e10); TIERS];
    speeds.iter_mut().for_each(|tier| (tier.samples, tier.tail_factor) = (u64::MAX, 3.0));
    speeds[Tier::Disk.index()].seconds_per_byte *= 100.0;
    let (prefix, both) = ([TierSet::EMPTY.with(Tier::Host); 64], [DISK.with(Tier::Host); 64]);
    let group = Group { held: &both, window_blocks: usize::MAX };
    let on_host = Request { groups: &[group], ..sweep::request(&prefix, Choice::Recompute) };
    let quick = plan(&config, &on_host, &speeds, &worker);
    assert_eq!(quick.recompute_from, 64, "none of it waits for the disk");
    let tail = quick.predicted_onboard_tail.abs_diff(quick.predicted_onboard * 3);
    assert!(tail < Duration::from_micros(1), "{quick:?}");
    let disk = [DISK; 64];
    let group = Group { held: &disk, window_blocks: usize::MAX };
    let on_disk = Request { groups: &[group], ..on_host };
    assert_eq!(plan(&config, &on_disk, &speeds, &worker).choice(), Choice::Recompute);
}

#[test]
fn a_tier_that_nobody_has_measured_is_asked_for_few_blocks_with_those_of_groups() {
    let (worker, config) = (worker(), PlanConfig::default());
    let mut speeds = [speed(Duration::ZERO, 2e10); TIERS];
    speeds.iter_mut().for_each(|tier| (tier.samples, tier.largest_bytes) = (0, 0));
    let held = [DISK; 64];
    let group = Group { held: &held, window_blocks: usize::MAX };
    for groups in [1, 3] {
        let request = Request { groups: &vec![group; groups], ..sweep::request(&held, Choice::Recompute) };
        let blocks = plan(&config, &request, &speeds, &worker).recompute_from;
        assert_eq!(blocks, config.first_blocks as usize / (groups + 1), "{groups} groups");
    }
}
