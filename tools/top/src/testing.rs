//! A gateway's answers for tests.

use std::ops::Range;

use serde_json::json;

use crate::poll::Answer;
use crate::wire::Status;

/// Status of a gateway with four workers in its `second`: ten requests a second.
pub(crate) fn status(second: u64) -> Status {
    let worker = |port: u64, blocks: Option<u64>| {
        json!({
            "name": format!("127.0.0.1:{port}"), "ready": true, "engine": "vllm", "version": "0.32.0",
            "role": "both", "events": true, "is_out": false, "ejections": 0, "requests": port - 8000,
            "peers_requests": 0, "engine_running": 2, "engine_waiting": 0, "kv_usage": 0.31, "slowness": 1.0,
            "pools": [{ "tier": "device", "blocks": 1024, "indexed": 280 },
                      { "tier": "host", "blocks": blocks, "indexed": 40 }],
            "predictions": { "requests": 10, "exact": 9, "predicted_tokens": 640, "reported_tokens": 640 },
            "transfers": { "bytes_sent": (second - 1) << 20, "blocks_received": 77, "completed": 5, "incomplete": 1,
                "rails": [{ "name": "rdma mlx5_0", "bytes": 3 << 20, "nanoseconds_per_kib": 41 },
                          { "name": "rdma mlx5_1", "bytes": 1 << 20, "nanoseconds_per_kib": 977, "is_slow": true,
                            "failures": 1, "retries": 12 }],
                "stages": [{ "stage": "verify", "le": [0.001, 0.002], "counts": [8, 2, 0], "sum": 0.006 }] },
        })
    };
    let requests = second * 10;
    let histogram = |low: u64| {
        json!({ "le": [0.005, 0.01, 0.02, 0.05, 0.1],
            "counts": [low, requests - low, 0, 0, 0, 0], "sum": requests as f64 * 0.006, "count": requests })
    };
    let mut spread = histogram(requests / 2);
    spread["counts"] = json!([0, requests / 2, requests / 2 - second, second, 0, 0]);
    let body = json!({
        "version": "0.1.0", "model": "qwen3", "strategy": "predicted-time", "started_unix": 1_760_000_000,
        "now_unix_ms": (1_760_003_600 + second) * 1000, "active": 3, "waiting": 1, "requests": requests,
        "failed": 2, "shed": 0, "migrations": 0, "disaggregated": 0, "hedged": 0, "broken_streams": 0,
        "prompt_tokens": requests * 100, "cached_tokens": requests * 64, "generated_tokens": requests * 20,
        "index": { "blocks": 1000, "bytes": 32000, "nodes": 77 },
        "histograms": { "time_to_first_token": spread, "inter_token": histogram(requests / 4),
            "routing": histogram(requests) },
        "workers": [worker(8001, Some(4096)), worker(8002, Some(4096)), worker(8003, None),
            { "name": "127.0.0.1:8004", "ready": false }],
    });
    serde_json::from_value(body).expect("a status")
}

/// An answer of that second, with these decisions.
pub(crate) fn answer(second: u64, decisions: Range<u64>) -> Answer {
    let decision = |sequence: u64| {
        json!({
            "sequence": sequence, "unix_ms": (1_760_003_600 + sequence) * 1000, "worker": "127.0.0.1:8001",
            "prefill": null, "prompt_tokens": 512, "blocks": 32, "overlap_blocks": 20, "uncached_tokens": 192,
            "predicted_ms": 12.1, "decided_us": 3.2, "candidates": 4,
            "runner_up": { "worker": "127.0.0.1:8002", "overlap_blocks": 0, "predicted_ms": 55.0 },
            "reason": "20 of 32 blocks are here; the next best has 0 and would take 55.0 ms",
        })
    };
    let last = decisions.clone().last();
    let decisions: Vec<serde_json::Value> = decisions.map(decision).collect();
    let decisions = serde_json::from_value(json!({ "last": last, "decisions": decisions }));
    Answer {
        status: status(second),
        decisions: Ok(decisions.expect("decisions")),
        is_new_run: false,
        samples: Vec::new(),
    }
}
