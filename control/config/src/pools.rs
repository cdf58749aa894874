//! Sections that may occur several times: `[[pool]]` and `[[split]]`.

use crate::macros::section;

section! {
    /// A model with its own workers, in addition to the model of `gateway.workers`; the table may be
    /// repeated. Requests name the model, or one of its aliases, in `model`.
    PoolSettings, "pool" {
        /// Name of the pool in `fallback`, `split.pools`, metrics and commands.
        name: String = String::new();
        /// Name under which the pool's workers serve the model. Empty: the pool's name. A worker that serves
        /// a different name is shown with the reason and gets no requests.
        model: String = String::new();
        /// Other names under which clients may request the model.
        aliases: Vec<String> = Vec::new();
        /// URLs of the pool's workers.
        workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that prefill for decode workers, if their engine does not report this itself
        /// (vLLM).
        prefill_workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that decode from prompts that prefill workers computed, if their engine does not
        /// report this itself.
        decode_workers: Vec<String> = Vec::new(), live = true;
        /// Engine of the pool's workers; `auto` asks the workers. `openai` is a service outside the cluster
        /// with OpenAI's API: its health and load are not queried, it receives standard fields only, and its
        /// use is billed to the owner of the key in `gateway.engine_key_file`.
        engine: String = "auto".to_owned(), one_of &["auto", "native", "vllm", "sglang", "tensorrt-llm", "openai"];
        /// Hugging Face folder with the model's tokenizer and chat template. Without it, prompts of engines that publish KV
        /// events are routed by their bytes.
        model_folder: String = String::new();
        /// As `gateway.tool_parser`.
        tool_parser: String = "auto".to_owned(), one_of &["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "openai", "kimi_k2", "glm45", "pythonic"];
        /// As `gateway.reasoning_parser`.
        reasoning_parser: String = "auto".to_owned(), one_of &["auto", "none", "deepseek_r1", "qwen3", "glm45", "kimi_k2", "mistral", "openai_gptoss"];
        /// Routing strategy of the pool; `router` is the value of `router.strategy`.
        strategy: String = "router".to_owned(), one_of &["router", "predicted-time", "cost", "power-of-two", "session", "least-loaded", "round-robin", "random"];
        /// Most requests in progress. 0: the value of `gateway.requests_max`.
        requests_max: u64 = 0, in 0 => 1_000_000;
        /// Names of the pools, in order, that take the pool's requests while none of its own workers can;
        /// `gateway` is the pool of `gateway.workers`.
        fallback: Vec<String> = Vec::new();
    }
}

section! {
    /// A model name whose requests are split among pools by weight, for canaries; the table may be repeated.
    /// A conversation (header `x-session-id`) stays on one pool. A pool that cannot serve is left out.
    SplitSettings, "split" {
        /// Model name in requests.
        model: String = String::new();
        /// Pools with their weights, as `POOL=WEIGHT`; `gateway` is the pool of `gateway.workers`.
        pools: Vec<String> = Vec::new();
    }
}
