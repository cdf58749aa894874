//! Disaggregated output equals aggregated output: token for token, log-probability for log-probability.

mod support;

use serde_json::Value;
use support::{Cluster, prompt, request};

const PROMPTS: u64 = 50;
const TOKENS: usize = 6;

/// Lengths from 1 to 1,500, with the block borders among them.
fn lengths() -> Vec<usize> {
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

/// Everything above `threshold` uncached tokens goes through the prefill worker.
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

#[test]
fn output_does_not_depend_on_where_the_prompt_was_computed() {
    let expected = {
        let aggregated = Cluster::start("aggregated", &["both"], "");
        outputs(&aggregated)
    };
    for transport in ["shm", "tcp"] {
        let cluster = disaggregated(transport, transport, "");
        assert_equal(&expected, &outputs(&cluster), transport);
        let (prefill, decode) = (&cluster.workers[0], &cluster.workers[1]);
        let blocks = decode.metric("kvasir:transfer_blocks_received");
        let transfers = decode.metric("kvasir:transfer_completed");
        let bytes = prefill.metric("kvasir:transfer_bytes_sent");
        println!("{transport}: {transfers} transfers, {blocks} blocks, {bytes} bytes moved; output equal");
        assert!(transfers >= 40.0, "{transport}: only {transfers} transfers");
        assert!(blocks > 1500.0 && bytes >= blocks * 16384.0, "{transport}: {blocks} blocks, {bytes} bytes");
        assert_eq!(decode.metric("kvasir:transfer_checksum_failures"), 0.0);
        assert_eq!(decode.metric("kvasir:recomputed_blocks_total"), 0.0);
    }
    for transport in ["shm", "tcp"] {
        let name = format!("corrupt-{transport}");
        let cluster = disaggregated(&name, transport, "[faults]\ncorrupt_one_in = 40\nseed = 5\n");
        assert_equal(&expected, &outputs(&cluster), &name);
        let decode = &cluster.workers[1];
        let failures = decode.metric("kvasir:transfer_checksum_failures");
        let recomputed = decode.metric("kvasir:recomputed_blocks_total");
        println!("{name}: {failures} pieces found corrupted, {recomputed} blocks recomputed; output equal");
        assert!(failures > 10.0, "{name}: the faults must bite ({failures})");
        assert!(recomputed >= 10.0, "{name}: {recomputed} recomputed");
    }
}
