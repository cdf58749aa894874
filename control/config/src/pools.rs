//! Tables of which there may be several: `[[pool]]` and `[[split]]`.

use crate::macros::section;

section! {
    /// A model with workers of its own, beside the one that `gateway.workers` serve; there may be several. Requests name
    /// the model, or one of its aliases, in `model`.
    PoolSettings, "pool" {
        /// Its name in `fallback`, `split.pools`, metrics and commands.
        name: String = String::new();
        /// Name under which its workers serve the model; empty is the pool's name. A worker that does not is shown with the
        /// reason and gets no requests.
        model: String = String::new();
        /// Other names under which clients may ask for it.
        aliases: Vec<String> = Vec::new();
        /// URLs of its workers.
        workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that compute prompts for others, when their engine does not say so itself (vLLM).
        prefill_workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that generate from prompts computed elsewhere, when their engine does not say so itself.
        decode_workers: Vec<String> = Vec::new(), live = true;
        /// Its workers' make; `auto` asks them. `openai` is a service outside the cluster that speaks OpenAI's API: it is not
        /// asked for its health or load, gets standard fields alone, and is paid by whoever's key is in
        /// `gateway.engine_key_file`.
        engine: String = "auto".to_owned(), one_of &["auto", "native", "vllm", "sglang", "tensorrt-llm", "openai"];
        /// Hugging Face folder with the model's tokenizer and chat template. Without it, prompts of engines that publish KV
        /// events are routed by their bytes.
        model_folder: String = String::new();
        /// As `gateway.tool_parser`.
        tool_parser: String = "auto".to_owned(), one_of &["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "openai", "kimi_k2", "glm45", "pythonic"];
        /// As `gateway.reasoning_parser`.
        reasoning_parser: String = "auto".to_owned(), one_of &["auto", "none", "deepseek_r1", "qwen3", "glm45", "kimi_k2", "mistral", "openai_gptoss"];
        /// How a worker is chosen; `router` is `router.strategy`.
        strategy: String = "router".to_owned(), one_of &["router", "predicted-time", "cost", "power-of-two", "session", "least-loaded", "round-robin", "random"];
        /// Requests inside at a time; 0 is `gateway.requests_max`.
        requests_max: u64 = 0, in 0 => 1_000_000;
        /// Names of the pools that take its requests while none of its own workers can, in order; `gateway` is that of
        /// `gateway.workers`.
        fallback: Vec<String> = Vec::new();
    }
}

section! {
    /// A name whose requests are split among pools by weight, for canaries; there may be several. A conversation (header
    /// `x-session-id`) stays at one of them. A pool that cannot serve is left out.
    SplitSettings, "split" {
        /// The name that requests ask for.
        model: String = String::new();
        /// `POOL=WEIGHT`; `gateway` is the pool of `gateway.workers`.
        pools: Vec<String> = Vec::new();
    }
}
