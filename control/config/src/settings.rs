//! Every key, with its meaning, default and range.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::macros::section;
use crate::pools::{PoolSettings, SplitSettings};
use crate::value::{Bytes, Paths};

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

section! {
    /// What `kvasir serve` starts.
    ServeSettings, "serve" {
        /// Prefill workers.
        prefill_workers: u64 = 1, in 0 => 16;
        /// Decode workers.
        decode_workers: u64 = 1, in 1 => 16;
        /// Give each process cores of its own when there are at least two for each.
        pin_cores: bool = true;
        /// How long Ctrl-C waits for requests in flight before it stops anyway.
        drain: Duration = Duration::from_secs(30), in Duration::from_secs(0) => Duration::from_secs(3600);
        /// First pause before a worker that died is started again; it doubles each time.
        restart_pause: Duration = Duration::from_millis(200), in Duration::from_millis(10) => Duration::from_secs(60);
        /// Longest pause before a restart.
        restart_pause_max: Duration = Duration::from_secs(10), in Duration::from_millis(10) => Duration::from_secs(600);
    }
}

section! {
    /// How a gateway stops on SIGTERM. (Ctrl-C and a second signal do not wait for load balancers.)
    DrainSettings, "drain" {
        /// How long it goes on accepting after it has said that it is not ready (`/readyz`, `/health`), so that load balancers
        /// send their requests elsewhere before its port closes. `kvasir serve` stops its own gateway without it.
        unready_for: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(600);
    }
}

section! {
    /// How many workers there should be. `kvasir serve` plans for the workers that it starts itself; `kvasir control` for those
    /// behind running gateways. Times and sizes of the engine are where learning begins: gaps between tokens and times to the
    /// first one correct them, by at most sixteen times.
    PlannerSettings, "planner" {
        /// `off`; `advise` shows on the gateway's page and in its metrics what is wanted; `act` carries it out by `actuator`.
        mode: String = "advise".to_owned(), one_of &["off", "advise", "act"];
        /// How counts are carried out. `processes`: `kvasir serve` starts and drains workers of its machine. The others are for
        /// `kvasir control`: `kubernetes` sets the replicas of `prefill_target` and `decode_target` (needs a binary that was
        /// built with `--features kubernetes`); `keda` answers KEDA's external scaler at `control.keda_listen`; `webhook` posts
        /// each change to `control.webhook`.
        actuator: String = "processes".to_owned(), one_of &["processes", "kubernetes", "keda", "webhook"];
        /// Workload of the prefill workers, as `Deployment/prefill`: a Deployment, StatefulSet, LeaderWorkerSet,
        /// DynamoGraphDeploymentScalingAdapter, or `PLURAL.VERSION.GROUP/NAME` for anything else with a `scale` subresource.
        prefill_target: String = String::new();
        /// Workload of the decode workers, or of workers that do both.
        decode_target: String = String::new();
        /// With `kubernetes`: before there are to be fewer workers, mark those with the fewest cached blocks as the first to be
        /// deleted (`controller.kubernetes.io/pod-deletion-cost`; needs the right to patch pods). Only Deployments heed it.
        deletion_cost: bool = false;
        /// Time to the first token that requests should keep.
        ttft: Duration = Duration::from_millis(500), in Duration::from_millis(1) => Duration::from_secs(600);
        /// Mean time between the tokens of an answer that requests should keep.
        itl: Duration = Duration::from_millis(50), in Duration::from_micros(100) => Duration::from_secs(60);
        /// Share of requests that should keep both.
        attainment: f64 = 0.99, in 0.5 => 0.999;
        /// Share of a worker's capacity that is used, until enough demand is recorded to choose it (`choose_after`); the rest is
        /// headroom for bursts and for the time that a worker takes to start.
        utilisation: f64 = 0.7, in 0.05 => 1.0;
        /// How far back demand is recorded, at most 241,920 intervals (14 days at 5 s); `"0s"` turns that off, and `utilisation` is
        /// used for good.
        history: Duration = Duration::from_secs(14 * 86400), in Duration::from_secs(0) => Duration::from_secs(90 * 86400);
        /// Existing folder in which recorded demand outlives this process, one for each control service; empty keeps it in memory
        /// alone.
        history_folder: String = String::new();
        /// From so much recorded demand on the share is chosen: it is replayed with several shares in simulation, and the one that
        /// keeps the service level with the fewest workers is used.
        choose_after: Duration = Duration::from_secs(86400), in Duration::from_secs(1) => Duration::from_secs(14 * 86400);
        /// How often it is chosen anew.
        choose_every: Duration = Duration::from_secs(3600), in Duration::from_secs(1) => Duration::from_secs(86400);
        /// Time between two decisions.
        interval: Duration = Duration::from_secs(5), in Duration::from_millis(200) => Duration::from_secs(30);
        /// Time that a worker takes to start, until starts have been measured. With `keda` and `webhook` no count is told for so
        /// long after `kvasir control` has started: workers that are starting then are not seen by gateways, and a count without
        /// them would stop them.
        start_time: Duration = Duration::from_secs(120), in Duration::from_millis(100) => Duration::from_secs(7200);
        /// Time in which requests that wait are to be worked off.
        clear_within: Duration = Duration::from_secs(60), in Duration::from_secs(1) => Duration::from_secs(3600);
        /// How long fewer workers must have been enough before one goes. Four times as long for a day, up to two hours, each time
        /// that one was missed soon after it went.
        down_after: Duration = Duration::from_secs(120), in Duration::from_secs(1) => Duration::from_secs(86400);
        /// With `act`: how long a number of workers that was changed by hand (`kvasir drain`) is kept.
        manual_hold: Duration = Duration::from_secs(1800), in Duration::from_secs(0) => Duration::from_secs(86400);
        /// Workers of each role that are kept asleep beside those that demand asks for, and woken first when it grows: vLLM with
        /// `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`, SGLang with `--enable-memory-saver` and
        /// `--enable-weights-cpu-backup`. For `kvasir control` with `act`; `gpus_max` and the targets' counts include them,
        /// `prefill_max` and `decode_max` do not.
        spares: u64 = 0, in 0 => 1000;
        /// Periods after which demand repeats: `day`, `week`. Each is used once two of them have been seen without a restart of
        /// the planner.
        seasons: Vec<String> = vec!["day".to_owned(), "week".to_owned()];
        /// GPUs of all workers together, draining ones included.
        gpus_max: u64 = 8, in 1 => 100_000;
        /// GPUs of one worker.
        gpus: u64 = 1, in 0 => 64;
        /// Prefill workers at least.
        prefill_min: u64 = 1, in 0 => 10_000;
        /// Prefill workers at most; none are planned where there are none.
        prefill_max: u64 = 4, in 0 => 10_000;
        /// Decode workers at least, or workers that do both.
        decode_min: u64 = 1, in 1 => 10_000;
        /// Decode workers at most, or workers that do both.
        decode_max: u64 = 4, in 1 => 10_000;
        /// How long a worker that is to go may take for the requests that it has. Then they go on elsewhere.
        drain: Duration = Duration::from_secs(600), in Duration::from_secs(0) => Duration::from_secs(86400);
        /// Microseconds of an engine's step by itself. These five are those of vLLM with a 32-billion-parameter model on two
        /// H100.
        step_base_us: f64 = 13_780.0, in 0.001 => 1e9;
        /// Microseconds that a running request adds to a step.
        step_per_request_us: f64 = 23.6, in 0.0 => 1e9;
        /// Microseconds that a token of KV adds to a step.
        step_per_kv_token_us: f64 = 0.04233, in 0.0 => 1e6;
        /// Microseconds that a prompt token adds to a step.
        step_per_prompt_token_us: f64 = 36.8, in 0.0 => 1e9;
        /// Microseconds of a prompt for the square of its tokens.
        step_per_prompt_square_us: f64 = 0.0029, in 0.0 => 1e6;
        /// Tokens that an engine's KV cache holds.
        kv_tokens: u64 = 350_000, in 16 => 1_000_000_000_000;
        /// Prompt tokens and running requests of one step at most (`max_num_batched_tokens`).
        batch_tokens: u64 = 8192, in 1 => 10_000_000;
        /// Requests that an engine runs at a time (`max_num_seqs`).
        running_max: u64 = 256, in 1 => 1_000_000;
    }
}

section! {
    /// The process of `kvasir control`, which runs the planner beside gateways.
    ControlSettings, "control" {
        /// Gateways to observe, as `HOST:PORT` or `https://HOST:PORT`, where `--gateway` names none. A name behind `http` may have
        /// several addresses (a headless Service): each is a gateway.
        gateways: Vec<String> = vec!["127.0.0.1:8000".to_owned()];
        /// How often those names are resolved.
        gateways_interval: Duration = Duration::from_secs(10), in Duration::from_secs(1) => Duration::from_secs(3600);
        /// Where `/livez`, `/readyz`, `/metrics` and `/kvasir/plan` are, without credentials; empty is nowhere.
        listen: String = "127.0.0.1:8090".to_owned();
        /// Where KEDA's external scaler is answered, for the actuator `keda`. KEDA shows no credentials: let nothing else reach
        /// it (a NetworkPolicy).
        keda_listen: String = "127.0.0.1:8091".to_owned();
        /// Where changes are posted, for the actuator `webhook`. The variable KVASIR_WEBHOOK_KEY, if set, is shown as a bearer
        /// token.
        webhook: String = String::new();
        /// Election among several control services: `none` for one alone, `lease` for the holder of a Lease of Kubernetes, `etcd`
        /// for the holder of a key of `[etcd]`. For a planner that acts by `kubernetes`.
        leader: String = "none".to_owned(), one_of &["none", "lease", "etcd"];
        /// Name of that Lease or key.
        lease: String = "kvasir-control".to_owned();
        /// Reconcile the `KvasirGraph` objects of the namespace (`kvasir deploy operator`). Without a planner (`planner.mode` is
        /// `off`) that is all.
        graphs: bool = false;
        /// Kvasir's image for gateways of graphs that name none; empty is `kvasir` in this version.
        graph_image: String = String::new();
        /// Namespace of the Lease, of the targets and of graphs; empty is this pod's own, or that of the kubeconfig's context.
        namespace: String = String::new();
    }
}

section! {
    /// Where a gateway finds workers beside those that `gateway.workers`, `[[pool]]` and the command line name. A source that
    /// cannot be read, or has a mistake, changes nothing. An address that several sources name is one worker.
    DiscoverySettings, "discovery" {
        /// File that lists workers, or folder of such files; followed while the gateway runs. `.toml`: `[[worker]]` tables with
        /// `url` and, if wanted, `role` (`prefill`, `decode`, `both`), `pool`, `model`, `uid` (another one is another worker) and
        /// `draining`. `.yaml` and `.json`: llm-d's `endpoints` with `address`, `port` and `labels`.
        file: String = String::new();
        /// Names whose addresses are workers, as `http://engines.default.svc:8000` (a headless Service of Kubernetes).
        dns: Vec<String> = Vec::new();
        /// Pool of the workers behind those names; empty is that of `gateway.workers`.
        dns_pool: String = String::new();
        /// How often those names are resolved.
        dns_interval: Duration = Duration::from_secs(5), in Duration::from_secs(1) => Duration::from_secs(3600);
        /// Pods of Kubernetes that are workers, by label selector, as `app=vllm,tier!=test`. Needs a binary that was built with
        /// `--features kubernetes`, and the rights to list and watch pods of the namespace. Roles, models and ports are understood
        /// by the labels and annotations of llm-d, AIBrix, vLLM's production-stack and SGLang's gateway, and by `kvasir/role`,
        /// `kvasir/model`, `kvasir/pool`, `kvasir/port`. A pod that the next two select as well has their role.
        selector: String = String::new();
        /// Pods that compute prompts for others.
        prefill_selector: String = String::new();
        /// Pods that generate from prompts computed elsewhere.
        decode_selector: String = String::new();
        /// Name of an InferencePool (`inference.networking.k8s.io/v1`) whose selector and ports count; needs the rights to get, list
        /// and watch it as well.
        inference_pool: String = String::new();
        /// Namespace of those pods and of the InferencePool; empty is this pod's own, or that of the kubeconfig's context.
        namespace: String = String::new();
        /// Port of pods whose labels and annotations name none.
        port: u64 = 8000, in 1 => 65535;
        /// How often all pods are listed anew, beside the watch.
        relist: Duration = Duration::from_secs(300), in Duration::from_secs(1) => Duration::from_secs(86400);
        /// A list that lacks more than this share of its source's workers, without a deletion having been reported, is not
        /// believed: the missing ones are served as long as they answer their health checks, for `guard_time`. What lists of that
        /// time removed counts as missing. Files and names report no deletions: to remove most of their workers at once, set
        /// this to 1, or let them drain.
        guard_share: f64 = 0.5, in 0.0 => 1.0;
        /// How long workers stay that such a list lacks.
        guard_time: Duration = Duration::from_secs(600), in Duration::from_secs(0) => Duration::from_secs(86400);
    }
}

section! {
    /// etcd, version 3: gateways find workers below `PREFIX/workers/` (`kvasir register` puts them there), and control services
    /// elect their leader below `PREFIX/leaders/`. While etcd cannot be reached gateways keep the workers that they know, and no control service
    /// leads.
    EtcdSettings, "etcd" {
        /// Members of the cluster, as `http://HOST:PORT` or `https://HOST:PORT`; one is asked at a time. Empty: none.
        endpoints: Vec<String> = Vec::new();
        /// Beginning of all keys; one for each fleet.
        prefix: String = "/kvasir".to_owned();
        /// Name of a user, where etcd asks for one.
        user: String = String::new();
        /// File with that user's password, not readable by everybody.
        password_file: String = String::new();
        /// Certificate authority of the members (PEM); empty is the system's.
        ca_file: String = String::new();
        /// Certificate to show to them (PEM), where they ask for one.
        certificate_file: String = String::new();
        /// Its private key (PEM).
        key_file: String = String::new();
    }
}

section! {
    /// The endpoint picker: a proxy that speaks Envoy's `ext_proc` (Envoy itself, kgateway, GKE's gateway; of Istio see the README) asks it where to
    /// send each request, and sends it itself.
    PickerSettings, "picker" {
        /// Where proxies ask, as `0.0.0.0:9002`; empty is nowhere.
        listen: String = String::new();
        /// Where the gRPC health service is, in plain text, as `0.0.0.0:9003`; empty is nowhere.
        health_listen: String = String::new();
        /// `off` for plain text; `gateway` for the certificate of `[tls]`; `self-signed` for one that is made at the start, which is
        /// what gateways of the Gateway API expect by default.
        tls: String = "off".to_owned(), one_of &["off", "gateway", "self-signed"];
        /// Requests under way at a time; beyond that 503.
        requests_max: u64 = 16_384, in 1 => 1_000_000;
    }
}

section! {
    /// The OpenAI service.
    GatewaySettings, "gateway" {
        /// Where it listens.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 8000);
        /// Where `/metrics`, `/kvasir/…` and `/debug/route` are, as `127.0.0.1:9090` or `unix:/run/kvasir/admin.sock` (for the
        /// gateway's user alone); the API's port has none of them then. Empty: on the API's port, for an administrator's key; a
        /// gateway without keys answers processes of its own machine there, unless they come through a proxy or ask for it by
        /// another name than its address or `localhost`. What gateways tell each other stays on the API's port.
        admin_listen: String = String::new();
        /// URLs of the workers; `kvasir serve` fills this in itself.
        workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that compute prompts for others, when their engine does not say so itself (vLLM).
        prefill_workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that generate from prompts computed elsewhere, when their engine does not say so itself.
        decode_workers: Vec<String> = Vec::new(), live = true;
        /// The workers' make; `auto` asks them.
        engine: String = "auto".to_owned(), one_of &["auto", "native", "vllm", "sglang", "tensorrt-llm"];
        /// How prefill and decode workers meet; `auto` is what their make does by default (vLLM: `kvasir` where its connector is
        /// KvasirConnector, else `nixl`).
        handoff: String = "auto".to_owned(), one_of &["auto", "kvasir", "nixl", "mooncake", "bootstrap", "tensorrt-llm"];
        /// Hand-off `mooncake`: URL of the bootstrap server on a prefill worker; `*` stands for the worker's host.
        mooncake_bootstrap: String = "http://*:8998".to_owned();
        /// KV event endpoint of a worker's first rank, for engines that do not tell it; `*` stands for the worker's host, and a
        /// port `+1000` for one that is 1000 above the worker's own.
        /// `poll` asks a TensorRT-LLM worker for its events: it tells each only once, so no second gateway may do the same.
        kv_events: String = String::new();
        /// Where a worker's missed KV events can be had again, for engines that do not tell it.
        kv_replay: String = String::new();
        /// URLs of stores that workers share, as `http://10.0.0.5:7401` (`store.http` of each `kvasir store` in `remote_tier.nodes` of
        /// vLLM's KvasirConnector): requests go to workers that find their prompts there, too. With `KvasirConnector`, KV events and
        /// the model's tokenizer.
        stores: Vec<String> = Vec::new();
        /// File with the keys that engines ask for (`--api-key` of vLLM and SGLang, `worker.api_key_file`), not readable by
        /// everybody. A line is `KEY`, for all workers, or `URL KEY`, for one. They are shown as `Authorization: Bearer KEY`
        /// with every request to an engine, questions about health and load among them. Empty: `KVASIR_ENGINE_KEY` of the
        /// environment, for all workers; `kvasir serve` sees to its own.
        engine_key_file: String = String::new();
        /// Names of the pools (`[[pool]]`) that take the requests of these workers' model while none of them can, in order.
        fallback: Vec<String> = Vec::new();
        /// Name of the model; empty is what the workers say, who must agree on one: as long as they name two, the gateway is not
        /// ready and says so.
        model: String = String::new();
        /// Hugging Face folder with the model's tokenizer and chat template; empty is `engine.model_folder`. Without it,
        /// workers' KV events cannot be followed and routing goes by the text of requests.
        model_folder: String = String::new();
        /// Who makes the text of answers: `engine` relays what engines say; `gateway` asks them for token ids, makes text,
        /// tool calls and reasoning itself; JSON schemas, forced tool calls and images it relays to engines other than the
        /// reference engine; `auto` is `gateway` in front of the reference engine and `engine` in front of others.
        text: String = "auto".to_owned(), one_of &["auto", "engine", "gateway"];
        /// How the model writes tool calls, where the gateway makes the text; `auto` looks at the chat template.
        tool_parser: String = "auto".to_owned(), one_of &["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "openai", "kimi_k2", "glm45", "pythonic"];
        /// How the model writes its reasoning, where the gateway makes the text.
        reasoning_parser: String = "auto".to_owned(), one_of &["auto", "none", "deepseek_r1", "qwen3", "glm45", "kimi_k2", "mistral", "openai_gptoss"];
        /// Memory for pieces of conversations that have been tokenised.
        token_cache: Bytes = Bytes(256 << 20), in Bytes(1 << 20) => Bytes(1 << 40);
        /// Time to the first token of a stream, or to the end of an answer that is not streamed. Past it, a request goes to
        /// another worker only if its engine reports that it has none at all; else it ends with 503: a queue is no fault of the
        /// engine, and the request may still be computed there.
        answer_within: Duration = Duration::from_secs(600), in Duration::from_millis(10) => Duration::from_secs(86_400), live = true;
        /// A stream that has begun and says nothing for so long goes on with another worker.
        stall: Duration = Duration::from_secs(60), in Duration::from_millis(10) => Duration::from_secs(3600), live = true;
        /// A request that an engine has not begun to answer after this is sent to a second one as well, and the first answer
        /// counts; 0 is never. Such attempts come out of the same budget as retries. Hand-offs are not doubled, nor is what the
        /// gateway makes the text of.
        hedge_after: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(3600), live = true;
        /// Time that a request may take in all, also when it is streamed; 0 is any. A client may want less (header
        /// `x-request-timeout-ms`).
        request_time_max: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(86_400), live = true;
        /// Threads that serve requests, each with connections of its own; 0 is one for each core.
        threads: u64 = 0, in 0 => 1024;
        /// Threads that serve never sleep: they save a wake-up at each hop, and take a core each whatever there is to do. For
        /// machines with cores to spare.
        busy_poll: bool = false;
        /// Where the KServe v2 gRPC service (Open Inference Protocol) listens, as `0.0.0.0:8001`; empty is nowhere.
        grpc_listen: String = String::new();
        /// Origins whose pages may call the API from a browser (CORS), as `https://chat.example.com`; `*` is every one. Empty
        /// answers no preflight.
        cors_origins: Vec<String> = Vec::new();
        /// Let another gateway of the same user listen on the same address: one that starts takes new connections over before
        /// this one stops (SO_REUSEPORT).
        reuse_port: bool = false;
        /// Largest request body; a larger one is answered with 413.
        body_max: Bytes = Bytes(16 << 20), in Bytes(1 << 10) => Bytes(1 << 30);
        /// Let clients bring chat templates, any variables for them, and documents (`chat_template`, `chat_template_kwargs`,
        /// `documents`). A template is a program that the engine runs; without this they are answered with 400.
        client_templates: bool = false;
        /// Variables of the chat template that clients may set all the same (`chat_template_kwargs`), to a flag, a number or a
        /// short text.
        template_variables: Vec<String> = ["enable_thinking", "thinking", "reasoning_effort"].map(str::to_owned).to_vec();
        /// Schemes of URLs of images, sounds and videos in requests, which engines fetch; `data` is one that holds them itself.
        media_schemes: Vec<String> = ["https", "http", "data"].map(str::to_owned).to_vec();
        /// Hosts that such URLs may name: names, addresses, `*.example.com` for all below a name. Empty is every public one.
        /// Names are not looked up, and engines may follow redirects: only a list, or a network that engines cannot leave,
        /// keeps them from private addresses behind public names.
        media_hosts: Vec<String> = Vec::new();
        /// Let such URLs name hosts that are not public: private, local and link-local addresses, names without a dot or of a
        /// cluster. A host that stands in `media_hosts` itself needs no such leave.
        media_private_hosts: bool = false;
        /// Images, sounds and videos of a request.
        media_max: u64 = 64, in 0 => 10_000;
        /// Largest of them that stands in the request itself, in the letters of its base64.
        media_data_max: Bytes = Bytes(16 << 20), in Bytes(0) => Bytes(1 << 30);
        /// Who is told where a request went and why (header `x-kvasir-route`) and which workers failed it: `admin` is those with
        /// an administrator's key, which on a gateway without keys and tokens is everybody, unless
        /// clients must show certificates.
        explain: String = "admin".to_owned(), one_of &["admin", "all", "none"];
        /// Memory for requests in all: bodies, what is parsed of them, tokens. A request waits for room before its body is
        /// read, for at most `access.wait_max`, and is answered with 503 when there is none; one whose body could never fit (a
        /// fifth of it) with 413.
        request_memory: Bytes = Bytes(512 << 20), in Bytes(32 << 20) => Bytes(1 << 40);
        /// Threads that parse and tokenise large bodies for all threads that serve; 0 is one for each core.
        compute_threads: u64 = 0, in 0 => 1024;
        /// A client that takes no byte of what is there for it for so long has gone or has stopped reading: its connection
        /// is closed, and its place and its engine are free for others.
        write_timeout: Duration = Duration::from_secs(60), in Duration::from_millis(100) => Duration::from_secs(3600);
        /// Requests inside at a time; more wait (`access.waiting_max`).
        requests_max: u64 = 4096, in 1 => 1_000_000;
        /// Let in only as many requests as the engines can run, by what they report, and a few more; the others wait in the
        /// gateway, where priorities and fairness among tenants count, and not in the engines' own queues.
        follow_engines: bool = true;
        /// How often a request may go on with another worker after a failure.
        retries: u64 = 3, in 0 => 100, live = true;
        /// How often each worker is asked how it is.
        health_interval: Duration = Duration::from_secs(1), in Duration::from_millis(10) => Duration::from_secs(60);
        /// A worker whose health check takes longer gets no new requests until the answer comes.
        health_timeout: Duration = Duration::from_secs(5), in Duration::from_millis(10) => Duration::from_secs(600);
        /// A worker whose health check has no answer after so many times `health_timeout` is given up, and with it those of its
        /// requests that have received nothing since the first of them. A refused connection takes a worker out at once.
        health_misses: u64 = 3, in 2 => 100;
        /// How long a request waits when no worker is there, before it is answered with 503.
        worker_wait: Duration = Duration::from_secs(10), in Duration::from_millis(0) => Duration::from_secs(600), live = true;
        /// The longest time for which a client may have the blocks of its prompt retained in the stores of its engine, where nothing evicts
        /// them: `prompt_cache_retention` of OpenAI's requests, `cache_control` of Anthropic's. For vLLM with KvasirConnector and the
        /// reference engine. Such blocks fill a part of a store at most (`host_tier.retention_share`). `"0s"`: none is retained.
        prompt_cache_retention_max: Duration = Duration::from_secs(3600), in Duration::from_secs(0) => Duration::from_secs(30 * 24 * 3600), live = true;
        /// URLs of other gateways in front of the same workers: they tell each other what they have sent where, and one
        /// that starts takes over what the others know. They show each other `KVASIR_PEER_KEY` of the environment; without it
        /// only gateways of one machine, without keys of clients, believe each other.
        peers: Vec<String> = Vec::new();
        /// Where the index is saved, to be warm after a restart; empty is nowhere.
        snapshot_file: String = String::new();
        /// How often it is saved; it is also saved at the end.
        snapshot_interval: Duration = Duration::from_secs(30), in Duration::from_secs(1) => Duration::from_secs(86_400);
    }
}

section! {
    /// Who may use the gateway, and how much.
    AccessSettings, "access" {
        /// File with the keys of clients (`kvasir key new` makes one) and the names of their certificates; read again when it
        /// changes. Without it and without tokens everybody is let in.
        keys_file: String = String::new();
        /// File with the signing keys of an identity provider (JWKS), for bearer tokens; read again when it changes.
        jwks_file: String = String::new();
        /// URL of those keys, instead of a file; asked for again every ten minutes and when a token names another key. With
        /// neither, `token_issuer` is asked for it (OpenID Connect Discovery).
        jwks_url: String = String::new();
        /// Who must have issued a bearer token.
        token_issuer: String = String::new();
        /// Whom a bearer token must be meant for.
        token_audience: String = String::new();
        /// Tenant of bearer tokens that name none; empty refuses them.
        token_default_tenant: String = String::new();
        /// Let a client keep its cache apart from others of its tenant with a `cache_salt` of its own.
        own_salts: bool = false;
        /// Fields of requests that steer engines or transfers and are passed on all the same, as behind another router.
        allowed_fields: Vec<String> = Vec::new();
        /// File that gets one line of JSON for each request, without what was said; empty is none.
        audit_file: String = String::new();
        /// Requests that may wait for a place when as many are inside as the engines can take, or `gateway.requests_max`.
        waiting_max: u64 = 1024, in 0 => 1_000_000;
        /// Of those, requests of one tenant.
        tenant_waiting_max: u64 = 1024, in 0 => 1_000_000;
        /// Longest wait that a request is let into the queue for; if more is expected, it is sent away at once with the time
        /// after which to try again.
        wait_max: Duration = Duration::from_secs(30), in Duration::from_millis(1) => Duration::from_secs(3600);
    }
}

section! {
    /// Encryption of the gateway's connections. Files are read again when they change; connections that are open go on.
    TlsSettings, "tls" {
        /// Certificate chain of the gateway (PEM); without it, clients come over plain HTTP.
        certificate_file: String = String::new();
        /// Its private key (PEM).
        key_file: String = String::new();
        /// Certificate authorities of clients (PEM).
        client_ca_file: String = String::new();
        /// Whether clients show a certificate. A `[[certificate]]` of `access.keys_file` says by a name in it whose it is; with
        /// `required` and without such a file, those who show one are clients of one tenant, and no administrators.
        client_certificate: String = "off".to_owned(), one_of &["off", "optional", "required"];
        /// Certificate authorities of engines, other gateways, the identity provider and the trace collector, beside those of
        /// the system (PEM).
        upstream_ca_file: String = String::new();
        /// Certificate that the gateway shows them (PEM).
        upstream_certificate_file: String = String::new();
        /// Its private key (PEM).
        upstream_key_file: String = String::new();
    }
}

section! {
    /// Traces of requests, and metrics, for an OpenTelemetry collector. Headers for it, if it wants a secret, are in the environment
    /// variable `KVASIR_TRACE_HEADERS` (`name=value,name=value`).
    TraceSettings, "trace" {
        /// Where the collector listens for OTLP over gRPC, as `http://collector:4317`; empty is no traces.
        endpoint: String = String::new();
        /// Name of the service in traces.
        service_name: String = "kvasir".to_owned();
        /// Share of requests that are traced, of those whose client has not decided.
        sample_ratio: f64 = 0.01, in 0.0 => 1.0;
        /// Requests that may wait for the exporter; the traces of more are dropped and counted.
        queue_max: u64 = 2048, in 16 => 1_000_000;
        /// How often the collector is sent the gateway's metrics as well, those of `/metrics`; 0 is never.
        metrics_interval: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(3600);
    }
}

section! {
    /// A service that checks what clients ask and what they are answered (a guardrail), by LiteLLM's Generic Guardrail API: it is
    /// sent texts at `/beta/litellm_basic_guardrail_api`, and lets them pass, replaces them or blocks the request. A key for it, if
    /// it wants one, is in the environment variable `KVASIR_GUARDRAIL_KEY`.
    GuardrailSettings, "guardrail" {
        /// URL of the service, without that path; empty checks nothing.
        url: String = String::new();
        /// Whether requests, answers or both are checked. A checked stream is held back until its end.
        check: String = "both".to_owned(), one_of &["both", "requests", "answers"];
        /// Longest wait for the guardrail's verdict.
        timeout: Duration = Duration::from_secs(5), in Duration::from_millis(1) => Duration::from_secs(600);
        /// Whether requests and answers are refused (503) or pass while the guardrail fails.
        on_failure: String = "refuse".to_owned(), one_of &["refuse", "pass"];
    }
}

section! {
    /// What clients leave with a gateway: responses that later ones go on from, conversations, files, and batches of requests.
    /// Each gateway has a database of its own: clients must come back to the gateway that stored what they ask about.
    DatabaseSettings, "database" {
        /// File of the database; empty stores nothing. With it responses are stored unless a request says `store: false`, as
        /// OpenAI's are.
        file: String = String::new();
        /// How long something is kept after it was stored or changed.
        keep: Duration = Duration::from_secs(30 * 86_400), in Duration::from_secs(60) => Duration::from_secs(3650 * 86_400);
        /// Bytes of all that is stored.
        bytes_max: Bytes = Bytes(16 << 30), in Bytes(1 << 20) => Bytes(1 << 44);
        /// Bytes that one tenant may store.
        tenant_bytes_max: Bytes = Bytes(1 << 30), in Bytes(1 << 20) => Bytes(1 << 44);
        /// Requests of batches that are inside at a time, of all tenants together.
        batch_requests: u64 = 16, in 1 => 10_000;
    }
}

section! {
    /// Which worker gets a request.
    RouterSettings, "router" {
        /// How to choose: by the predicted time to the first token, by cost in blocks (cached, queued, decoding), the
        /// less loaded of two by chance, one worker for a session (header `x-session-id`), by fewest requests, in turn,
        /// or by chance.
        strategy: String = "predicted-time".to_owned(), one_of &["predicted-time", "cost", "power-of-two", "session", "least-loaded", "round-robin", "random"], live = true;
        /// Strategy `cost`: what a block to compute costs, relative to a block being decoded.
        prefill_weight: f64 = 1.0, in 0.0 => 1000.0, live = true;
        /// Strategy `cost`: what a block in a worker's host tier saves, relative to one in its own pool.
        host_credit: f64 = 0.75, in 0.0 => 1.0, live = true;
        /// Strategy `cost`: the same for a block on its disk.
        disk_credit: f64 = 0.5, in 0.0 => 1.0, live = true;
        /// Strategy `cost`: the same for a block further away.
        remote_credit: f64 = 0.25, in 0.0 => 1.0, live = true;
        /// Strategy `cost`: what each request on a worker costs, in blocks.
        request_weight: f64 = 0.0, in 0.0 => 1_000_000.0, live = true;
        /// Strategies `predicted-time` and `cost`: 0 takes the cheapest worker; larger values spread requests over more of them.
        temperature: f64 = 0.0, in 0.0 => 100.0, live = true;
        /// Share of requests that go to workers that have just come, until they are warm.
        warm_up_share: f64 = 0.0, in 0.0 => 1.0, live = true;
        /// Largest size of the index; beyond it new blocks are left out.
        index_memory: Bytes = Bytes(8 << 30), in Bytes(16 << 20) => Bytes(1 << 44);
        /// How long a prompt is taken to be where it was routed, on workers without KV events.
        approximate_ttl: Duration = Duration::from_secs(120), in Duration::from_secs(1) => Duration::from_secs(86_400);
        /// Prompts with more uncached tokens than this are computed by a prefill worker.
        disaggregate_above_tokens: u64 = 256, in 0 => 10_000_000, live = true;
    }
}

section! {
    /// The reference engine's model and batches.
    EngineSettings, "engine" {
        /// Hugging Face folder of a Llama or Qwen model; empty is the built-in tiny model.
        model_folder: String = String::new();
        /// Folder for images of the weights in f32, fused as they are computed with. The first worker writes the image; later
        /// workers of the machine with the same model map it instead of converting the files. Below `/dev/shm` it stays in memory
        /// when all workers have ended. Empty: none.
        weights_folder: String = String::new();
        /// Name under which the model is served; empty is the folder's name, or `kvasir-tiny`.
        model_name: String = String::new();
        /// Seed of the built-in model's weights.
        seed: u64 = 7;
        /// Type of cached keys and values: that of the model, or as given.
        kv_type: String = "auto".to_owned(), one_of &["auto", "bf16", "f32"];
        /// Tokens of a KV block.
        block_tokens: u64 = 16, in 1 => 1024;
        /// KV blocks of each worker.
        blocks: u64 = 2048, in 8 => 100_000_000;
        /// Tokens computed in one step at most.
        batch_tokens_max: u64 = 512, in 16 => 1_000_000;
        /// Requests running at a time.
        sequences_max: u64 = 64, in 1 => 65_536;
        /// Requests waiting at a time; more are refused.
        waiting_max: u64 = 4096, in 1 => 1_000_000;
        /// Longest sequence in tokens; the model's own limit and the pool's size also bound it.
        context_tokens: u64 = 4096, in 32 => 100_000_000;
        /// Threads for matrix products; 0 shares the cores among the workers.
        threads: u64 = 0, in 0 => 1024;
    }
}

section! {
    /// One worker process (`kvasir worker`); `kvasir serve` gives each of its workers its own.
    WorkerSettings, "worker" {
        /// Where its HTTP surface listens.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 8100);
        /// File with the key that each HTTP request but `/health` must show (`Authorization: Bearer KEY`), not readable by
        /// everybody; the gateway has it in `gateway.engine_key_file`. Empty: `KVASIR_WORKER_KEY` of the environment. With
        /// neither, workers of `kvasir serve` ask for `KVASIR_PEER_KEY`, which it makes up if need be, and others let everybody
        /// in.
        api_key_file: String = String::new();
        /// Certificate chain of the HTTP surface (PEM); without it, callers come over plain HTTP, as within `kvasir serve`
        /// always.
        certificate_file: String = String::new();
        /// Its private key (PEM).
        private_key_file: String = String::new();
        /// Certificate authorities of callers (PEM): with it, only those with a certificate are answered
        /// (`tls.upstream_certificate_file` of the gateway).
        client_ca_file: String = String::new();
        /// Where its KV events are published; port 0 lets the system choose.
        events: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Where missed KV events can be had again; port 0 lets the system choose.
        replay: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// KV events carry the token ids of blocks, as vLLM's do: for other routers than Kvasir's gateway. Whoever reaches the
        /// ports then reads every prompt and answer. Without, events carry 64-bit hashes of blocks, by which the gateway routes
        /// just as well, and `token_ids` is empty.
        event_tokens: bool = false;
    }
}

section! {
    /// How KV blocks move between workers.
    TransferSettings, "transfer" {
        /// Which transport: the best that both ends have, or only the given one.
        transport: String = "auto".to_owned(), one_of &["auto", "shm", "rdma", "tcp"];
        /// Where the TCP transport listens; port 0 lets the system choose.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Folder for the shared-memory transport's sockets; empty is the system's folder for temporary files.
        socket_folder: String = String::new();
        /// File with the secret that all workers, stores and engines of a cluster share, at least 32 bytes (`openssl rand -hex
        /// 32`), not readable by everybody; empty is the
        /// environment's `KVASIR_TRANSFER_SECRET`, if it is set. Neither side of a connection admits a peer with another one.
        /// Without a secret whoever reaches an address writes into this process's KV memory.
        secret_file: String = String::new();
        /// How long a decode worker waits for blocks before it computes them itself.
        deadline: Duration = Duration::from_secs(20), in Duration::from_millis(10) => Duration::from_secs(600);
        /// How long a prefill worker keeps blocks for a decode worker that does not come.
        lease: Duration = Duration::from_secs(30), in Duration::from_millis(10) => Duration::from_secs(600);
        /// Transfers of one worker at a time, in each direction.
        transfers_max: u64 = 4096, in 1 => 60_000;
        /// Use 2 MiB pages for KV memory when the system has enough of them reserved.
        huge_pages: bool = true;
        /// TCP connections to one peer for each of the two lanes (urgent, background).
        connections_per_peer: u64 = 2, in 1 => 8;
        /// TCP payloads of at least so many bytes are sent without a copy while the kernel can do that; `"0 B"` is
        /// never.
        zero_copy_from: Bytes = Bytes(64 << 10), in Bytes(0) => Bytes(1 << 30);
        /// A peer that is silent, or leaves bytes unacknowledged, for so long is dead (TCP; for RDMA the connection
        /// that made the queue pairs).
        peer_dead_after: Duration = Duration::from_secs(10), in Duration::from_secs(1) => Duration::from_secs(600);
        /// How long a thread that moves blocks (a worker's hand-offs, its remote tier, a store's pool) polls its transports in vain
        /// before it sleeps. `"0s"` sleeps at once.
        spin: Duration = Duration::from_micros(50), in Duration::ZERO => Duration::from_millis(1);
        /// These threads never sleep: each takes a core for the lowest latency.
        busy_poll: bool = false;
        /// Cores on which these threads run, as in `0-3,8`: of the NUMA node of the GPU and the NIC, and not those of the
        /// engine's threads. Empty: those of the process.
        cores: String = String::new();
        /// Shared memory: refuse processes of another user.
        same_user_only: bool = true;
        /// With several rails to a peer, requests are cut into slices of at most so many bytes.
        rail_slice: Bytes = Bytes(256 << 10), in Bytes(4 << 10) => Bytes(64 << 20);
        /// The longest wait before a peer that could not be reached is tried again.
        reconnect_max: Duration = Duration::from_secs(2), in Duration::from_millis(20) => Duration::from_secs(60);
    }
}

section! {
    /// RDMA: the rails of this node and how their queue pairs behave. Used when a device and libibverbs are there.
    RdmaSettings, "rdma" {
        /// Devices to use, by name (`mlx5_0`); empty: those nearest to the memory that `near` names.
        devices: Vec<String> = Vec::new();
        /// The memory that devices are chosen for: `gpu0`, a PCI address, `host`, `host:1` (a NUMA node). `auto` is the GPU of
        /// this process (its only one, or the first of `CUDA_VISIBLE_DEVICES`), else host memory of the NUMA node that its
        /// processors are of. GPUs are numbered by PCI address, as with `CUDA_DEVICE_ORDER=PCI_BUS_ID`. The log says which ports
        /// are used and why others are not. Host memory of a worker's or a store's tiers is taken from its NUMA node, as far as
        /// that has some.
        near: String = "auto".to_owned();
        /// Where peers connect to make queue pairs; with a port other than 0 each further rail takes the next one. An
        /// address other than loopback is needed for other hosts, which pass over a loopback one.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Connections to each peer over one device, each with its own queue pairs: over Ethernet with several ways (ECMP, link
        /// aggregation) each takes one. Each registers the memory anew and counts as a rail.
        connections_per_device: u64 = 1, in 1 => 8;
        /// Row of the port's GID table, or `auto`: RoCE v2 with an IPv4 address, else IPv6; row 0 on InfiniBand.
        gid: String = "auto".to_owned();
        /// Partition of the queue pairs by its P_Key, like `0x8001`; `default` is that of the port's first row. Peers in other
        /// partitions cannot be reached.
        partition: String = "default".to_owned();
        /// Most bytes of a packet. The smallest of both ends' and their ports' counts.
        path_mtu: String = "4096".to_owned(), one_of &["256", "512", "1024", "2048", "4096"];
        /// Service level of what a request waits for (on Ethernet the priority, 0 to 7).
        service_level_urgent: u64 = 0, in 0 => 15;
        /// Service level of offload and replication.
        service_level_background: u64 = 0, in 0 => 15;
        /// Traffic class of RoCE packets: the DSCP times four.
        traffic_class: u64 = 0, in 0 => 255;
        /// Routers that a packet may pass.
        hop_limit: u64 = 64, in 1 => 255;
        /// Acknowledgement timeout as an exponent: 4.096 us times two to it (14 is 67 ms).
        timeout: u64 = 14, in 1 => 31;
        /// Retries after that timeout before the rail has failed.
        retry_count: u64 = 7, in 0 => 7;
        /// Retries while the peer has no receive posted; 7 is without end.
        receiver_not_ready_retry: u64 = 7, in 0 => 7;
        /// Code of the wait between those (12 is 0.64 ms).
        receiver_not_ready_timer: u64 = 12, in 0 => 31;
        /// Reads in flight for each lane of a peer.
        reads_in_flight: u64 = 16, in 1 => 128;
        /// Work requests of one lane of a peer in the send queue.
        send_queue_depth: u64 = 512, in 16 => 32_768;
        /// Every so many work requests one asks for a completion.
        signal_every: u64 = 32, in 1 => 1024;
        /// Receives posted for all peers together.
        receive_buffers: u64 = 4096, in 16 => 32_768;
        /// Connections at a time.
        connections_max: u64 = 512, in 1 => 4096;
        /// How long the making of a connection may take.
        handshake_timeout: Duration = Duration::from_secs(5), in Duration::from_millis(10) => Duration::from_secs(300);
        /// Let the device reorder its writes to memory (PCIe relaxed ordering).
        relaxed_ordering: bool = true;
        /// Interrupt vector of the completion queues, modulo those that a device has. Give workers of a node that share a device
        /// different ones.
        completion_vector: u64 = 0, in 0 => 1023;
    }
}

section! {
    /// Programs in the kernel, attached by the gateway (`latency`: CAP_BPF and CAP_PERFMON, `admission_…`: CAP_BPF and
    /// CAP_NET_ADMIN, `redirect`: all three). Each is off unless asked for and goes with the process; a connection that is
    /// redirected stays so until it is closed.
    EbpfSettings, "ebpf" {
        /// Short-circuit TCP between the gateway and workers that are named by a loopback address. What is redirected
        /// passes neither netfilter nor tcpdump; a sender that never waits for its reader may get EACCES.
        redirect: bool = false;
        /// The cgroup v2 folder whose processes take part; empty: the gateway's own.
        cgroup: String = String::new();
        /// Longer messages take the TCP stream.
        redirect_message_max: Bytes = Bytes(16 << 10), in Bytes(1) => Bytes(512 << 10);
        /// Network interfaces on which new connections to the gateway's ports are judged before the kernel sees them. When
        /// this is set and cannot be done, the gateway does not start.
        admission_interfaces: Vec<String> = Vec::new();
        /// Further ports to judge there, of other processes.
        admission_ports: Vec<String> = Vec::new();
        /// Prefixes that may connect (`10.0.0.0/8`); empty: everybody. A shield against floods, not a firewall: packets with
        /// more than six IPv6 extension headers pass.
        admission_allow: Vec<String> = Vec::new();
        /// While more than nine tenths of `gateway.requests_max` are inside, drop up to this share of new connections, in
        /// percent; 0 never does.
        overload_max: u64 = 0, in 0 => 95;
        /// New connections per second of one source; 0 is no limit.
        syn_rate_per_source: u64 = 0, in 0 => 1_000_000;
        /// New connections that a source may open at once.
        syn_burst_per_source: u64 = 64, in 1 => 1_000_000;
        /// New connections per second of all sources together; 0 is no limit.
        syn_rate: u64 = 0, in 0 => 1_000_000;
        /// New connections that all may open at once.
        syn_burst: u64 = 1024, in 1 => 1_000_000;
        /// Measure connect times, lifetimes and block requests of this process in the kernel, for `/metrics`.
        latency: bool = false;
    }
}

section! {
    /// The host-memory tier behind each worker's pool. Blocks of the slower tiers pass through it.
    HostTierSettings, "host_tier" {
        /// Memory of each worker's tier; `"0 B"` turns it off, and with it the tiers below.
        capacity: Bytes = Bytes(256 << 20), in Bytes(0) => Bytes(1 << 44);
        /// Which block goes when one must: the least recently used one, S3-FIFO's choice (scans do not flush what is used
        /// often), or the one that saves the least recomputing for its bytes and its frequency.
        eviction: String = "s3-fifo".to_owned(), one_of &["lru", "s3-fifo", "cost"];
        /// When a block is copied here: as soon as it is complete (`through`), so that the pool's slot is free the moment that
        /// it is needed, or when it has to leave the pool (`back`).
        write: String = "through".to_owned(), one_of &["through", "back"];
        /// Bring the blocks of an idle conversation up from the slower tiers when it is likely to go on: when the chance that
        /// it does within `prefetch_lead`, learnt from the conversations before it, is at least `prefetch_chance`.
        prefetch: bool = true;
        /// The chance, from 0 to 1, from which on blocks are brought up ahead.
        prefetch_chance: f64 = 0.25, in 0.0 => 1.0;
        /// Blocks are brought up when the conversation is likely to go on within this time.
        prefetch_lead: Duration = Duration::from_secs(60), in Duration::from_millis(1) => Duration::from_secs(3600);
        /// The part of this tier, and of the disk tier, that the blocks of one tenant (one `cache_salt`; requests without one
        /// are a tenant together) may fill, wherever they come from; beyond 8,192 tenants with blocks the rest share one part.
        /// For workers.
        tenant_share: f64 = 1.0, in 0.001 => 1.0;
        /// The part of the disk tier, or of this tier where there is none, that retained blocks may fill
        /// (`gateway.prompt_cache_retention_max`), of a worker or of the pool of a store; at a worker one tenant's have `tenant_share` of it. 0: none is
        /// retained. A restart ends all retention.
        retention_share: f64 = 0.25, in 0.0 => 0.9;
        /// The longest time for which a block is retained, whatever the request asks for.
        retention_max: Duration = Duration::from_secs(24 * 3600), in Duration::from_secs(1) => Duration::from_secs(30 * 24 * 3600);
    }
}

section! {
    /// The SSD tier: a log of fixed slots in preallocated files, or on a device of its own. What it holds outlives the
    /// process.
    DiskTierSettings, "disk_tier" {
        /// Space of each worker's tier; `"0 B"` turns it off.
        capacity: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 50);
        /// A folder for the files (each worker of `kvasir serve` makes one of its own in it), a block device, `/dev/ngXnY` or a
        /// PCI address, as `engine` wants it. Of several devices a list of folders, one on each, to 64: blocks are spread over them.
        /// `capacity` has as many files of `segment` in each.
        path: Paths = Paths::default();
        /// How it reads and writes: `auto` is io_uring where the kernel allows it, else pread; `nvme-passthrough` needs
        /// `/dev/ngXnY`, `nvme-user` and `spdk` a device bound to vfio-pci; `spdk` needs the libraries of an installed SPDK, too.
        engine: String = "auto".to_owned(), one_of &["auto", "io_uring", "pread", "nvme-passthrough", "nvme-user", "spdk"];
        /// Size of one file.
        segment: Bytes = Bytes(256 << 20), in Bytes(1 << 20) => Bytes(64 << 30);
        /// Reads and writes in flight.
        depth: u64 = 64, in 1 => 1024;
        /// Which block goes when one must.
        eviction: String = "s3-fifo".to_owned(), one_of &["lru", "s3-fifo", "cost"];
        /// When a block is written: as soon as host memory has it (`through`), or when it has to leave there (`back`).
        write: String = "through".to_owned(), one_of &["through", "back"];
        /// Only blocks that were seen at least so often are written.
        write_frequency: u64 = 1, in 1 => 15;
        /// Bytes read and written per second at most; what requests wait for comes first, the rest waits. `"0 B"` is no limit.
        bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Bytes written per second at most, what is above is not written; `"0 B"` is no limit.
        write_bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Bytes written per day at most, for the device's endurance; `"0 B"` is no limit.
        write_per_day: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 50);
        /// Make the log anew when it was written for another model or another block size, instead of refusing to start.
        reformat: bool = false;
    }
}

section! {
    /// Host memory of other nodes (`kvasir store`) as a tier.
    RemoteTierSettings, "remote_tier" {
        /// Where the nodes' pools are reached, `name=address`: what each prints at its start. The names decide which blocks are
        /// whose, so all clients must use the same ones.
        nodes: Vec<String> = Vec::new();
        /// How long a look-up and the reads that follow may take before they are a miss. Below `"200ms"` so may be blocks that only a
        /// pool's disk has.
        deadline: Duration = Duration::from_millis(200), in Duration::from_millis(1) => Duration::from_secs(60);
        /// Bytes read and written per second at most; what requests wait for comes first, and new blocks that exceed it wait, and are
        /// left out if host memory evicts them first. `"0 B"` is no limit.
        bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Blocks of a chain that are kept on one node; equal at all clients.
        group: u64 = 32, in 1 => 64;
        /// Nodes that keep a group of blocks that is asked for often.
        replicas: u64 = 2, in 1 => 2;
    }
}

section! {
    /// Objects in S3 or a folder as a tier, which clusters can share.
    ObjectTierSettings, "object_tier" {
        /// `s3://bucket/prefix` or `file:///folder`; empty turns it off.
        url: String = String::new();
        /// The S3 service, when it is not Amazon's.
        endpoint: String = String::new();
        /// Region.
        region: String = "us-east-1".to_owned();
        /// File in the form of AWS's `credentials`, whose section `default` is read, again every minute; it must not be readable
        /// by everybody. Empty: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` of the environment.
        credentials_file: String = String::new();
        /// Allow plain HTTP.
        allow_http: bool = false;
        /// Blocks of a chain in one object; equal in all clusters that share it.
        run: String = "16".to_owned(), one_of &["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"];
        /// Objects older than that are misses and are deleted.
        ttl: Duration = Duration::from_secs(604_800), in Duration::from_secs(60) => Duration::from_secs(315_360_000);
        /// Memory of each worker for objects on their way, a quarter of it for writes; one object each way always fits.
        buffers: Bytes = Bytes(1 << 30), in Bytes(1 << 20) => Bytes(1 << 40);
        /// Bytes read and written per second at most, as for `[remote_tier]`.
        bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// How long a look-up and a read may take before they are a miss.
        deadline: Duration = Duration::from_secs(2), in Duration::from_millis(1) => Duration::from_secs(600);
    }
}

section! {
    /// A node that keeps blocks for others (`kvasir store`).
    StoreSettings, "store" {
        /// Name of the node among the others, and of its socket for shared memory, `kvasir-NAME-pool.sock`: nodes that have one
        /// `transfer.socket_folder` need different names.
        name: String = "store".to_owned();
        /// Host memory that other nodes may use. If `resp` is empty, `[disk_tier]` keeps its blocks over restarts; `write` must be
        /// `through` and `write_frequency` 1 then.
        pool: Bytes = Bytes(256 << 20), in Bytes(0) => Bytes(1 << 44);
        /// Bytes of one slot of the pool and of the tiers behind the RESP service. Workers' blocks must fit.
        slot: Bytes = Bytes(128 << 10), in Bytes(4 << 10) => Bytes(1 << 30);
        /// Where the pool is reached over TCP. Whoever reaches it and holds the secret of `[transfer]`, or anybody when there is
        /// none, can read and write the pool.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 7400);
        /// Where `/metrics` and `/health` are, and where gateways ask which blocks the pool holds (`gateway.stores`).
        http: SocketAddr = SocketAddr::new(LOCALHOST, 7401);
        /// How long a client may hold blocks that it has looked up.
        lease: Duration = Duration::from_secs(10), in Duration::from_secs(5) => Duration::from_secs(600);
        /// Where the Redis protocol is served; empty turns it off. An address other than loopback needs a password.
        resp: Vec<String> = vec!["127.0.0.1:7379".to_owned()];
        /// File with the password of the Redis protocol, not readable by everybody; empty: none.
        resp_password_file: String = String::new();
        /// Commands of the Redis protocol that go by another name, as `FLUSHALL=NEW-NAME`; without a new name (`FLUSHALL=`) the
        /// command is turned off.
        resp_rename: Vec<String> = Vec::new();
    }
}

section! {
    /// Damage on purpose, for tests: never in production.
    FaultSettings, "faults" {
        /// One in so many block writes between workers lands with a wrong byte; 0 is never.
        corrupt_one_in: u64 = 0;
        /// Seed of the choice.
        seed: u64 = 1;
    }
}

/// The whole file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// `[serve]`
    pub serve: ServeSettings,
    /// `[drain]`.
    pub drain: DrainSettings,
    /// `[planner]`
    pub planner: PlannerSettings,
    /// `[control]`
    pub control: ControlSettings,
    /// `[discovery]`
    pub discovery: DiscoverySettings,
    /// `[etcd]`
    pub etcd: EtcdSettings,
    /// `[gateway]`
    pub gateway: GatewaySettings,
    /// `[picker]`
    pub picker: PickerSettings,
    /// `[access]`
    pub access: AccessSettings,
    /// `[tls]`
    pub tls: TlsSettings,
    /// `[trace]`
    pub trace: TraceSettings,
    /// `[guardrail]`
    pub guardrail: GuardrailSettings,
    /// `[database]`
    pub database: DatabaseSettings,
    /// `[router]`
    pub router: RouterSettings,
    /// `[engine]`
    pub engine: EngineSettings,
    /// `[worker]`
    pub worker: WorkerSettings,
    /// `[transfer]`
    pub transfer: TransferSettings,
    /// `[rdma]`
    pub rdma: RdmaSettings,
    /// `[ebpf]`
    pub ebpf: EbpfSettings,
    /// `[host_tier]`
    pub host_tier: HostTierSettings,
    /// `[disk_tier]`
    pub disk_tier: DiskTierSettings,
    /// `[remote_tier]`
    pub remote_tier: RemoteTierSettings,
    /// `[object_tier]`
    pub object_tier: ObjectTierSettings,
    /// `[store]`
    pub store: StoreSettings,
    /// `[faults]`
    pub faults: FaultSettings,
    /// `[[pool]]`
    pub pools: Vec<PoolSettings>,
    /// `[[split]]`
    pub splits: Vec<SplitSettings>,
}
