//! A prefix that was evicted from the worker's pool comes back from host memory, with equal output, faster
//! than it could be computed again.

use std::time::{Duration, Instant};

use crate::support::{Cluster, Events, open, prompt, request, wait_for};
use serde_json::{Value, json};

/// Tokens of the prefix: 75 blocks of the pool's 160.
const PREFIX: usize = 1200;
/// Blocks of the prefix that must come back.
const BLOCKS: f64 = 70.0;
/// Rounds in which the blocks come back, and rounds that may be needed for this on a machine with busy cores.
const ROUNDS: usize = 5;
const ROUNDS_MAX: u64 = 20;

fn first_token_after(cluster: &Cluster, body: &Value) -> Duration {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let started = Instant::now();
    let mut events = Events::new(open(&cluster.gateway.address, "/v1/completions", &body).expect("open"));
    assert!(events.next_data().is_some());
    let elapsed = started.elapsed();
    while events.next_data().is_some_and(|data| data != "[DONE]") {}
    elapsed
}

/// Sends requests with other prompts until the prefix has been evicted from the pool.
fn push_out(cluster: &Cluster, round: u64) {
    for other in 0..3 {
        cluster.complete(&request(&prompt(1000 + round * 10 + other, PREFIX), 1));
    }
}

#[test]
fn evicted_prefixes_come_back_from_host_memory() {
    let engine = "[engine]\nblocks = 160\n";
    let with_tier =
        Cluster::start("tier", &["both"], &format!("{engine}[host_tier]\ncapacity = \"64 MiB\"\n"));
    let without = Cluster::start("no-tier", &["both"], &format!("{engine}[host_tier]\ncapacity = \"0 B\"\n"));
    let body = request(&prompt(7, PREFIX), 8);
    let expected = without.complete(&body)["choices"][0].clone();
    assert_eq!(with_tier.complete(&body)["choices"][0], expected);

    let (mut onboarding, mut recomputing) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS_MAX {
        push_out(&with_tier, round);
        push_out(&without, round);
        let worker = &with_tier.workers[0];
        wait_for("offloads to settle", || worker.metric("kvasir_host_leased_slots") == 0.0);
        let recomputed = first_token_after(&without, &body);
        let before = worker.metrics();
        let onboarded = first_token_after(&with_tier, &body);
        let after = worker.metrics();
        let passed = |name: &str| {
            let name = format!("kvasir_host_{name}_blocks_total");
            after[&name] - before[&name]
        };
        // A worker whose threads did not get a core gives up on late blocks, and learns that copies are slow.
        let (brought, late, too_dear) = (passed("onboarded"), passed("late"), passed("recomputed"));
        assert!(
            brought + late + too_dear >= BLOCKS,
            "round {round}: the host tier had only {brought} + {late} late + {too_dear} not worth their way"
        );
        if brought >= BLOCKS {
            recomputing.push(recomputed);
            onboarding.push(onboarded);
        }
        let answer = with_tier.complete(&body);
        assert_eq!(answer["choices"][0], expected, "round {round}");
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
        assert!(cached as usize >= PREFIX - 16, "{cached} cached tokens");
        if onboarding.len() == ROUNDS {
            break;
        }
    }
    assert_eq!(
        onboarding.len(),
        ROUNDS,
        "rounds of {ROUNDS_MAX} in which all blocks came from the host tier"
    );
    assert_eq!(with_tier.workers[0].metric("kvasir_host_checksum_failures_total"), 0.0);
    onboarding.sort();
    recomputing.sort();
    let (host, compute) = (onboarding[ROUNDS / 2], recomputing[ROUNDS / 2]);
    println!(
        "TTFT of {PREFIX} evicted tokens, median of {ROUNDS}: {:.1} ms from the host tier, {:.1} ms recomputed, ratio {:.2}",
        host.as_secs_f64() * 1e3,
        compute.as_secs_f64() * 1e3,
        host.as_secs_f64() / compute.as_secs_f64()
    );
    assert!(host < compute, "the tier must win: {host:?} against {compute:?}");
}

/// A client has its prompt retained: its blocks outlast those that fill host memory afterwards.
#[test]
fn a_prompt_that_is_to_be_kept_outlasts_others() {
    let config = "[engine]\nblocks = 160\n[host_tier]\ncapacity = \"6 MiB\"\nretention_share = 0.5\n";
    let cluster = Cluster::start("tier-kept", &["both"], config);
    let worker = &cluster.workers[0];
    let mut body = request(&prompt(7, PREFIX), 2);
    body["prompt_cache_retention"] = json!("10m");
    cluster.complete(&body);
    wait_for("its blocks to be retained", || worker.metric("kvasir_host_retained_blocks") >= BLOCKS);
    let other = request(&prompt(8, PREFIX), 2);
    cluster.complete(&other);
    let cached = |body: &Value| {
        let answer = cluster.complete(body);
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number") as usize
    };
    let fill = |first_round: u64| {
        (first_round..first_round + 4).for_each(|round| push_out(&cluster, round));
        wait_for("offloads to settle", || worker.metric("kvasir_host_leased_slots") == 0.0);
    };
    fill(0);
    let evicted = worker.metric("kvasir_host_evicted_blocks_total");
    assert!(evicted > 8.0 * BLOCKS, "others have filled host memory: {evicted}");
    let gone = cached(&other);
    assert!(gone < PREFIX / 2, "{gone} tokens of the other prompt are still cached");
    // A worker whose threads did not get a core gives up on late blocks, and computes them.
    let mut kept = cached(&body);
    for attempt in 1..5 {
        if kept < PREFIX - 16 {
            let left = |name: &str| worker.metric(&format!("kvasir_host_{name}_blocks_total"));
            assert!(
                left("late") + left("recomputed") > 0.0,
                "{kept} tokens, and nothing was late or too dear"
            );
            fill(10 * attempt);
            kept = cached(&body);
        }
    }
    println!("{kept} tokens of the prompt that was to be kept are cached, {gone} of another");
    assert!(kept >= PREFIX - 16, "{kept}");
    assert_eq!(worker.metric("kvasir_host_retention_refused_blocks_total"), 0.0);
}

/// The router tracks offloaded blocks: a prefix in a worker's host tier still attracts its requests.
#[test]
fn the_index_follows_blocks_into_the_host_tier() {
    let config = "[engine]\nblocks = 160\n[host_tier]\ncapacity = \"64 MiB\"\n";
    let cluster = Cluster::start("tier-index", &["both", "both"], config);
    let body = request(&prompt(7, PREFIX), 2);
    let cached = |answer: &Value| {
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
    };
    cluster.complete(&body);
    for round in 0..4 {
        push_out(&cluster, round);
    }
    wait_for("the events to arrive", || {
        cluster.workers.iter().all(|worker| worker.metric("kvasir_host_leased_slots") == 0.0)
    });
    std::thread::sleep(Duration::from_millis(100));
    for _ in 0..4 {
        assert!(
            cached(&cluster.complete(&body)) as usize >= PREFIX - 16,
            "the request went to the wrong worker"
        );
    }
}
