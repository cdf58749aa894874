//! `/metrics` with vLLM's names, so that dashboards and routers made for vLLM work unchanged, and a few of our
//! own. Written by hand: the exposition library appends suffixes that would change vLLM's names.

use std::fmt::Write;

use super::WorkerState;
use crate::EngineStats;

pub(super) fn render(state: &WorkerState) -> String {
    let stats = state.engine.stats();
    let description = &state.description;
    let labels = format!("engine=\"0\",model_name=\"{}\"", description.model.replace(['"', '\\', '\n'], "_"));
    let mut out = String::with_capacity(8192);
    // Read at the source: the transfer thread gives slots back without the engine's doing.
    let slots_used = state.slots.used_count() as f64;
    let usage = slots_used / description.blocks.max(1) as f64;
    let mut put = |kind: &str, name: &str, help: &str, value: f64| {
        let family = name.strip_suffix("_total").unwrap_or(name);
        let _infallible =
            writeln!(out, "# HELP {family} {help}\n# TYPE {family} {kind}\n{name}{{{labels}}} {value}");
    };
    let get = |counter| EngineStats::get(counter) as f64;
    put("gauge", "vllm:num_requests_running", "Requests in the running batch", get(&stats.running));
    let waiting = get(&stats.waiting) + get(&stats.fetching);
    put("gauge", "vllm:num_requests_waiting", "Requests that wait", waiting);
    put("gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", usage);
    put("counter", "vllm:prompt_tokens_total", "Prompt tokens", get(&stats.prompt_tokens));
    put("counter", "vllm:generation_tokens_total", "Generated tokens", get(&stats.generation_tokens));
    put("counter", "vllm:prefix_cache_queries_total", "Prompt tokens looked up", get(&stats.prefix_queries));
    put("counter", "vllm:prefix_cache_hits_total", "Prompt tokens found in a cache", get(&stats.prefix_hits));
    put("counter", "vllm:num_preemptions_total", "Preemptions", get(&stats.preemptions));
    put("counter", "kvasir:requests_finished_total", "Requests finished", get(&stats.finished));
    put("counter", "kvasir:requests_cancelled_total", "Requests cancelled", get(&stats.cancelled));
    let recomputed = get(&stats.recomputed_blocks);
    put("counter", "kvasir:recomputed_blocks_total", "Blocks computed because a transfer failed", recomputed);
    put("gauge", "kvasir:kv_slots_used", "KV slots with at least one reference", slots_used);
    put(
        "gauge",
        "kvasir:kv_slots_cached",
        "KV slots that the prefix cache refers to",
        get(&stats.slots_cached),
    );
    put("gauge", "kvasir:requests_fetching", "Requests that wait for blocks", get(&stats.fetching));
    let _infallible = writeln!(
        out,
        "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{block_size=\"{}\",num_gpu_blocks=\"{}\",{labels}}} 1",
        description.block_tokens, description.blocks
    );
    stats.time_to_first_token.render("vllm:time_to_first_token_seconds", &labels, &mut out);
    stats.inter_token.render("vllm:inter_token_latency_seconds", &labels, &mut out);
    stats.step.render("kvasir:engine_step_seconds", &labels, &mut out);
    out
}
