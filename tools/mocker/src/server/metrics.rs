//! `/metrics` with the names of the engines, written by hand: exposition libraries append suffixes of their own.

use std::fmt::Write;

use super::handoff::DATA_PLANE;
use crate::Dialect;
use crate::stats::{MockStats, get};
use crate::worker::Worker;

pub(super) fn render(worker: &Worker) -> String {
    let stats = worker.stats();
    let mut out = String::with_capacity(8192);
    // Writing to a String cannot fail.
    let _infallible = match worker.config.dialect {
        Dialect::Vllm => vllm(worker, &stats, &mut out),
        Dialect::Sglang => sglang(worker, &stats, &mut out),
    };
    for (kind, count) in &stats.faults {
        let _infallible = writeln!(out, "mock:faults_total{{kind=\"{kind}\"}} {count}");
    }
    out
}

fn model_label(worker: &Worker) -> String {
    worker.config.model.replace(['"', '\\', '\n'], "_")
}

fn vllm(worker: &Worker, stats: &MockStats, out: &mut String) -> std::fmt::Result {
    if worker.config.tells_start {
        let started = worker.start_seconds;
        writeln!(
            out,
            "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n\
             # TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {started}"
        )?;
    }
    let (config, counters) = (&worker.config, &worker.counters);
    let labels = format!("engine=\"0\",model_name=\"{}\"", model_label(worker));
    let usage = stats.held_blocks as f64 / config.usable_blocks().max(1) as f64;
    let mut put = |kind: &str, name: &str, further: &[(&str, f64)]| -> std::fmt::Result {
        writeln!(out, "# HELP vllm:{name} Of a mock engine.\n# TYPE vllm:{name} {kind}")?;
        for (label, value) in further {
            let comma = if label.is_empty() { "" } else { "," };
            writeln!(out, "vllm:{name}{{{labels}{comma}{label}}} {value:?}")?;
        }
        Ok(())
    };
    let of = |counter| get(counter) as f64;
    let local = stats.prefix_hits as f64;
    let external = stats.external_hits as f64;
    put("gauge", "num_requests_running", &[("", stats.running as f64)])?;
    put("gauge", "num_requests_waiting", &[("", stats.waiting as f64)])?;
    put(
        "gauge",
        "num_requests_waiting_by_reason",
        &[("reason=\"capacity\"", stats.waiting as f64), ("reason=\"deferred\"", 0.0)],
    )?;
    let sleep = [
        ("sleep_state=\"awake\"", 1.0),
        ("sleep_state=\"weights_offloaded\"", 0.0),
        ("sleep_state=\"discard_all\"", 0.0),
    ];
    put("gauge", "engine_sleep_state", &sleep)?;
    put("gauge", "kv_cache_usage_perc", &[("", usage)])?;
    put("counter", "prefix_cache_queries_total", &[("", of(&counters.prefix_queries))])?;
    put("counter", "prefix_cache_hits_total", &[("", local)])?;
    put("counter", "external_prefix_cache_queries_total", &[("", of(&counters.external_queries))])?;
    put("counter", "external_prefix_cache_hits_total", &[("", external)])?;
    put("counter", "num_preemptions_total", &[("", stats.preemptions as f64)])?;
    put("counter", "prompt_tokens_total", &[("", stats.prompt_tokens as f64)])?;
    let computed = (stats.prompt_tokens as f64 - local - external).max(0.0);
    let sources = [
        ("source=\"local_compute\"", computed),
        ("source=\"local_cache_hit\"", local),
        ("source=\"external_kv_transfer\"", external),
    ];
    put("counter", "prompt_tokens_by_source_total", &sources)?;
    put("counter", "prompt_tokens_cached_total", &[("", local + external)])?;
    let tiers = [
        ("source=\"device\"", local),
        ("source=\"host\"", 0.0),
        ("source=\"p2p\"", external),
        ("source=\"disk\"", 0.0),
        ("source=\"external_unspecified\"", 0.0),
    ];
    put("counter", "prompt_tokens_cached_by_source_total", &tiers)?;
    put("counter", "generation_tokens_total", &[("", stats.generation_tokens as f64)])?;
    let ends = [
        ("finished_reason=\"stop\"", of(&counters.finished_stop)),
        ("finished_reason=\"length\"", of(&counters.finished_length)),
        ("finished_reason=\"abort\"", stats.aborted as f64),
        ("finished_reason=\"error\"", stats.failed as f64),
    ];
    put("counter", "request_success_total", &ends)?;
    put(
        "counter",
        "admission_rejections_total",
        &[("reason=\"max_num_queued_reqs\"", stats.refused_full as f64)],
    )?;
    if config.has_data_plane {
        writeln!(
            out,
            "# TYPE vllm:kvasir_store_retained gauge\nvllm:kvasir_store_retained{{engine=\"0\",model_name=\"{}\",worker=\"0\"}} 0.0",
            model_label(worker),
        )?;
        // No process listens on this address: blocks move within the mock.
        writeln!(
            out,
            "# TYPE vllm:kvasir_data_plane gauge\nvllm:kvasir_data_plane{{engine=\"0\",host=\"mock/0\",model_name=\"{}\",processes=\"1\",rdma=\"\",shm=\"\",tcp=\"{DATA_PLANE}\"}} 1.0",
            model_label(worker),
        )?;
    }
    let (block, count) = (config.block_tokens, config.blocks);
    writeln!(
        out,
        "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{_block_size_resolved=\"True\",block_size=\"{block}\",cache_dtype=\"auto\",effective_attention_block_size=\"{block}\",enable_prefix_caching=\"True\",engine=\"0\",hash_block_size=\"None\",kv_cache_size_tokens=\"{}\",num_cpu_blocks=\"None\",num_gpu_blocks=\"{count}\",num_gpu_blocks_override=\"None\",prefix_caching_hash_algo=\"sha256\",sliding_window=\"None\"}} 1.0",
        block * count,
    )
}

fn sglang(worker: &Worker, stats: &MockStats, out: &mut String) -> std::fmt::Result {
    let config = &worker.config;
    let labels = format!("model_name=\"{}\",tp_rank=\"0\"", model_label(worker));
    let usage = stats.held_blocks as f64 / config.usable_blocks().max(1) as f64;
    let hit_rate = stats.prefix_hits as f64 / stats.prompt_tokens.max(1) as f64;
    for (kind, name, value) in [
        ("gauge", "num_running_reqs", stats.running as f64),
        ("gauge", "num_queue_reqs", stats.waiting as f64),
        ("gauge", "num_used_tokens", (stats.held_blocks * config.block_tokens) as f64),
        ("gauge", "token_usage", usage),
        ("gauge", "cache_hit_rate", hit_rate),
        ("gauge", "num_prefill_bootstrap_queue_reqs", 0.0),
        ("gauge", "num_decode_transfer_queue_reqs", 0.0),
        ("gauge", "num_decode_prealloc_queue_reqs", 0.0),
        ("counter", "prompt_tokens_total", stats.prompt_tokens as f64),
        ("counter", "generation_tokens_total", stats.generation_tokens as f64),
        ("counter", "cached_tokens_total", stats.prefix_hits as f64),
        ("counter", "num_requests_total", stats.finished as f64),
        ("counter", "num_aborted_requests_total", stats.aborted as f64),
    ] {
        writeln!(out, "# TYPE sglang:{name} {kind}\nsglang:{name}{{{labels}}} {value:?}")?;
    }
    writeln!(
        out,
        "# TYPE sglang:cache_config_info gauge\nsglang:cache_config_info{{page_size=\"{}\",num_pages=\"{}\",{labels}}} 1.0",
        config.block_tokens, config.blocks
    )
}
