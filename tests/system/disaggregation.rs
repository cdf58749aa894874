//! Disaggregated output equals aggregated output: token for token, log-probability for log-probability.

use crate::support;
use crate::support::{Cluster, get, prompt, request, wait_for};
use serde_json::Value;

const PROMPTS: u64 = 50;
const TOKENS: usize = 6;

/// Lengths from 1 to 1,500, including block boundaries; `KVASIR_TEST_LENGTHS=17,300` selects others, for slow
/// machines.
fn lengths() -> Vec<usize> {
    if let Ok(named) = std::env::var("KVASIR_TEST_LENGTHS") {
        return named.split(',').map(|len| len.parse().expect("a number of tokens")).collect();
    }
    let fixed = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, 511, 512, 513, 1499, 1500];
    let spread =
        (0..PROMPTS as usize - fixed.len()).map(|n| 20 + n * 1480 / (PROMPTS as usize - fixed.len()));
    fixed.into_iter().chain(spread).collect()
}

fn outputs(cluster: &Cluster) -> Vec<Value> {
    let outputs = lengths().into_iter().enumerate().map(|(seed, len)| {
        let answer = cluster.complete(&request(&prompt(seed as u64, len), TOKENS));
        let choice = answer["choices"][0].clone();
        assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(TOKENS), "{answer}");
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().map(Vec::len), Some(TOKENS), "{answer}");
        choice
    });
    outputs.collect()
}

/// Returns the two transports that every machine has; `KVASIR_TEST_TRANSPORTS=rdma` selects others.
fn transports() -> Vec<String> {
    let named = std::env::var("KVASIR_TEST_TRANSPORTS").unwrap_or_else(|_| "shm,tcp".to_owned());
    named.split(',').map(str::to_owned).collect()
}

/// Prompts with more than `threshold` uncached tokens go through the prefill worker.
fn disaggregated(name: &str, transfer: &str, more: &str) -> Cluster {
    let config =
        format!("[router]\ndisaggregate_above_tokens = 15\n[transfer]\ntransport = \"{transfer}\"\n{more}");
    Cluster::start(name, &["prefill", "decode"], &config)
}

fn assert_equal(expected: &[Value], found: &[Value], what: &str) {
    assert_eq!(expected.len(), found.len());
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_eq!(expected, found, "{what}: prompt {index} of {} tokens", lengths()[index]);
    }
}

/// The gateway's status, which `kvasir top` and the page show, contains its workers' hand-offs.
fn shown_by_the_gateway(cluster: &Cluster, bytes: u64, transfers: u64) {
    let of = |role: &str| {
        let (_, text) = get(&cluster.gateway.address, "/kvasir/status").expect("an answer");
        let mut status: Value = serde_json::from_str(&text).expect("JSON");
        let workers = status["workers"].as_array_mut().into_iter().flatten();
        workers
            .into_iter()
            .find(|worker| worker["role"] == role)
            .map(|worker| worker["transfers"].take())
            .unwrap_or_default()
    };
    wait_for("the status to tell of hand-offs", || of("prefill")["bytes_sent"] == bytes);
    let rails = of("prefill")["rails"].as_array().cloned().unwrap_or_default();
    let sum: u64 = rails.iter().filter_map(|rail| rail["bytes"].as_u64()).sum();
    assert_eq!(sum, bytes, "{rails:?}");
    wait_for("the status to tell of transfers", || of("decode")["completed"] == transfers);
    let whole = |stage: &Value| {
        let counts = stage["counts"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        (stage["stage"] == "whole").then(|| counts.sum::<u64>())
    };
    let stages = of("decode")["stages"].as_array().cloned().unwrap_or_default();
    assert_eq!(stages.iter().find_map(whole), Some(transfers), "{stages:?}");
}

#[test]
fn output_does_not_depend_on_where_the_prompt_was_computed() {
    let expected = {
        let aggregated = Cluster::start("aggregated", &["both"], "");
        outputs(&aggregated)
    };
    for transport in transports() {
        let cluster = disaggregated(&transport, &transport, "");
        assert_equal(&expected, &outputs(&cluster), &transport);
        let (prefill, decode) = (&cluster.workers[0], &cluster.workers[1]);
        let blocks = decode.metric("kvasir_transfer_blocks_received_total");
        let transfers = decode.metric("kvasir_transfer_completed_total");
        let bytes = prefill.metric("kvasir_transfer_bytes_sent_total");
        println!("{transport}: {transfers} transfers, {blocks} blocks, {bytes} bytes moved; output equal");
        let sent = lengths().into_iter().filter(|&len| len > 16);
        let (prompts, tokens) = (sent.clone().count() as f64, sent.sum::<usize>() as f64);
        assert!(transfers >= prompts * 0.9, "{transport}: only {transfers} transfers of {prompts} prompts");
        // The prompts share prefixes: cached blocks are not sent again.
        assert!(blocks >= tokens / 16.0 * 0.6, "{transport}: {blocks} blocks of {tokens} tokens");
        assert!(bytes >= blocks * 16384.0, "{transport}: {blocks} blocks, {bytes} bytes");
        assert_eq!(decode.metric("kvasir_transfer_checksum_failures_total"), 0.0);
        assert_eq!(decode.metric("kvasir_engine_recomputed_blocks_total"), 0.0);
        shown_by_the_gateway(&cluster, bytes as u64, transfers as u64);
    }
    for transport in transports() {
        let name = format!("corrupt-{transport}");
        let cluster = disaggregated(&name, &transport, "[faults]\ncorrupt_one_in = 40\nseed = 5\n");
        assert_equal(&expected, &outputs(&cluster), &name);
        let decode = &cluster.workers[1];
        let failures = decode.metric("kvasir_transfer_checksum_failures_total");
        let recomputed = decode.metric("kvasir_engine_recomputed_blocks_total");
        println!("{name}: {failures} pieces found corrupted, {recomputed} blocks recomputed; output equal");
        let scale = lengths().into_iter().sum::<usize>() as f64 / 35_000.0;
        assert!(failures > 10.0 * scale, "{name}: the faults must bite ({failures})");
        assert!(recomputed >= 10.0 * scale, "{name}: {recomputed} recomputed");
    }
}

/// Workers with a shared secret hand over as without one.
#[test]
fn workers_that_share_a_secret_hand_over() {
    let folder = support::Scratch::new("secret");
    let file = folder.0.join("secret");
    std::fs::write(&file, "s".repeat(40)).expect("a file");
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("permissions");
    let line = format!("secret_file = \"{}\"\n", file.display());
    for transport in transports() {
        let name = format!("secret-{transport}");
        let cluster = disaggregated(&name, &transport, &line);
        cluster.complete(&request(&prompt(7, 300), TOKENS));
        let decode = &cluster.workers[1];
        assert!(decode.metric("kvasir_transfer_completed_total") > 0.0, "{name}");
        assert_eq!(decode.metric("kvasir_engine_recomputed_blocks_total"), 0.0, "{name}");
    }
}
