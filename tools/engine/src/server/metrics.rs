//! `/metrics` under Kvasir's names; `/metrics?names=vllm` adds vLLM's, for dashboards and routers that are made for vLLM.
//! Written by hand: the exposition library appends suffixes that would change vLLM's names.

use std::fmt::Write;

use super::WorkerState;
use crate::EngineStats;

/// Metrics with two names: vLLM's, and Kvasir's after `kvasir_engine_`. A counter's name ends in `_total`.
const NAMES: [(&str, &str); 10] = [
    ("vllm:num_requests_running", "requests_running"),
    ("vllm:num_requests_waiting", "requests_waiting"),
    ("vllm:kv_cache_usage_perc", "kv_usage_ratio"),
    ("vllm:prompt_tokens_total", "prompt_tokens_total"),
    ("vllm:generation_tokens_total", "generation_tokens_total"),
    ("vllm:prefix_cache_queries_total", "prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits_total", "prefix_cache_hits_total"),
    ("vllm:num_preemptions_total", "preemptions_total"),
    ("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
    ("vllm:inter_token_latency_seconds", "inter_token_seconds"),
];

/// The names under which a metric is shown: Kvasir's, and vLLM's if it has one and they are wanted.
fn names_of(own: &str, with_vllm: bool) -> Vec<String> {
    let vllm = NAMES.iter().find(|(_, name)| *name == own).map(|(vllm, _)| (*vllm).to_owned());
    std::iter::once(format!("kvasir_engine_{own}")).chain(vllm.filter(|_| with_vllm)).collect()
}

pub(super) fn render(state: &WorkerState, with_vllm: bool) -> String {
    let stats = state.engine.stats();
    let description = &state.description;
    let labels = format!("engine=\"0\",model_name=\"{}\"", description.model.replace(['"', '\\', '\n'], "_"));
    let mut out = String::with_capacity(8192);
    // Read from the pool itself: the transfer thread also releases slots.
    let slots_used = state.slots.used_count() as f64;
    let evictable = EngineStats::get(&stats.slots_evictable) as f64;
    // As in vLLM, cached blocks without users count as free.
    let usage = (slots_used - evictable).max(0.0) / description.blocks.max(1) as f64;
    let mut put = |kind: &str, name: &str, help: &str, value: f64| {
        for name in names_of(name, with_vllm) {
            let family = name.strip_suffix("_total").unwrap_or(&name);
            let _infallible =
                writeln!(out, "# HELP {family} {help}.\n# TYPE {family} {kind}\n{name}{{{labels}}} {value}");
        }
    };
    let get = |counter| EngineStats::get(counter) as f64;
    put("gauge", "requests_running", "Requests in the running batch", get(&stats.running));
    let [with_grammar, for_grammar] = state.engine.grammars().map(|count| count as f64);
    // A request that waits for a grammar has not been submitted to the engine's thread yet.
    let waiting = get(&stats.waiting) + get(&stats.fetching) + for_grammar;
    put("gauge", "requests_waiting", "Requests that wait", waiting);
    put("gauge", "kv_usage_ratio", "Share of KV blocks that requests use, 1 is all", usage);
    put("counter", "prompt_tokens_total", "Prompt tokens", get(&stats.prompt_tokens));
    put("counter", "generation_tokens_total", "Generated tokens", get(&stats.generation_tokens));
    put("counter", "prefix_cache_queries_total", "Prompt tokens looked up", get(&stats.prefix_queries));
    put("counter", "prefix_cache_hits_total", "Prompt tokens found in a cache", get(&stats.prefix_hits));
    put("counter", "preemptions_total", "Preemptions", get(&stats.preemptions));
    put("counter", "requests_finished_total", "Requests finished", get(&stats.finished));
    put("counter", "requests_cancelled_total", "Requests cancelled", get(&stats.cancelled));
    let recomputed = get(&stats.recomputed_blocks);
    put("counter", "recomputed_blocks_total", "Blocks computed because a transfer failed", recomputed);
    put("gauge", "kv_slots_used", "KV slots with at least one reference", slots_used);
    put("gauge", "kv_slots_cached", "KV slots that the prefix cache refers to", get(&stats.slots_cached));
    put("gauge", "kv_slots_evictable", "Cached KV slots that no request uses", evictable);
    put("gauge", "grammars_running", "Requests that have a grammar", with_grammar);
    put("gauge", "grammars_waiting", "Requests that wait for a grammar", for_grammar);
    put("gauge", "requests_fetching", "Requests that wait for blocks", get(&stats.fetching));
    if with_vllm {
        let (tokens, blocks) = (description.block_tokens, description.blocks);
        let _infallible = writeln!(
            out,
            "# HELP vllm:cache_config_info The KV cache.\n# TYPE vllm:cache_config_info gauge\n\
             vllm:cache_config_info{{block_size=\"{tokens}\",num_gpu_blocks=\"{blocks}\",{labels}}} 1"
        );
    }
    for (name, help, histogram) in [
        ("time_to_first_token_seconds", "Time from request to first token", &stats.time_to_first_token),
        ("inter_token_seconds", "Between two tokens", &stats.inter_token),
        ("step_seconds", "Time of one step", &stats.step),
    ] {
        for name in names_of(name, with_vllm) {
            histogram.render(&name, help, &labels, &mut out);
        }
    }
    out
}
