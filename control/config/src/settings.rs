//! Configuration keys with their meaning, default and range.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::macros::section;
use crate::pools::{PoolSettings, SplitSettings};
use crate::value::{Bytes, Paths};

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

section! {
    /// The processes that `kvasir serve` starts.
    ServeSettings, "serve" {
        /// Prefill workers.
        prefill_workers: u64 = 1, in 0 => 16;
        /// Decode workers.
        decode_workers: u64 = 1, in 1 => 16;
        /// Pin each process to cores of its own when there are at least two cores for each process.
        pin_cores: bool = true;
        /// Longest time that Ctrl-C waits for requests in flight before `kvasir serve` stops anyway.
        drain: Duration = Duration::from_secs(30), in Duration::from_secs(0) => Duration::from_secs(3600);
        /// Pause before a worker that exited is started again. It doubles with each further exit.
        restart_pause: Duration = Duration::from_millis(200), in Duration::from_millis(10) => Duration::from_secs(60);
        /// Longest pause before a restart.
        restart_pause_max: Duration = Duration::from_secs(10), in Duration::from_millis(10) => Duration::from_secs(600);
    }
}

section! {
    /// Shutdown of a gateway on SIGTERM. (Ctrl-C and a second signal do not wait for load balancers.)
    DrainSettings, "drain" {
        /// Time for which the gateway continues to accept requests after it has reported that it is not ready
        /// (`/readyz`, `/health`), so that load balancers route requests elsewhere before the port closes.
        /// `kvasir serve` stops its own gateway without this delay.
        unready_for: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(600);
    }
}

section! {
    /// The planner, which decides how many workers there should be. `kvasir serve` plans for the workers that
    /// it starts itself; `kvasir control` for the workers behind running gateways. The engine's step times
    /// and sizes below are initial values: measured inter-token latencies and times to first token correct
    /// them, by a factor of at most sixteen.
    PlannerSettings, "planner" {
        /// `off` turns the planner off; `advise` shows the planned counts on the gateway's page and in its
        /// metrics; `act` also carries them out through `actuator`.
        mode: String = "advise".to_owned(), one_of &["off", "advise", "act"];
        /// Mechanism that carries out the planned counts. `processes`: `kvasir serve` starts and drains
        /// workers on its machine. The other values are for `kvasir control`: `kubernetes` sets the replicas
        /// of `prefill_target` and `decode_target` (needs a binary built with `--features kubernetes`);
        /// `keda` answers KEDA's external scaler at `control.keda_listen`; `webhook` posts each change to
        /// `control.webhook`.
        actuator: String = "processes".to_owned(), one_of &["processes", "kubernetes", "keda", "webhook"];
        /// Workload of the prefill workers, written like `Deployment/prefill`: a Deployment, StatefulSet,
        /// LeaderWorkerSet, DynamoGraphDeploymentScalingAdapter, or `PLURAL.VERSION.GROUP/NAME` for any other
        /// kind with a `scale` subresource.
        prefill_target: String = String::new();
        /// Workload of the decode workers, or of workers that both prefill and decode.
        decode_target: String = String::new();
        /// With `kubernetes`: before a workload is scaled down, mark the workers with the fewest cached
        /// blocks as the first to be deleted (`controller.kubernetes.io/pod-deletion-cost`; needs the right
        /// to patch pods). Only Deployments honour the mark.
        deletion_cost: bool = false;
        /// Service level: time to first token.
        ttft: Duration = Duration::from_millis(500), in Duration::from_millis(1) => Duration::from_secs(600);
        /// Service level: mean inter-token latency of an answer.
        itl: Duration = Duration::from_millis(50), in Duration::from_micros(100) => Duration::from_secs(60);
        /// Share of requests that must meet both `ttft` and `itl`.
        attainment: f64 = 0.99, in 0.5 => 0.999;
        /// Share of a worker's capacity that is used until enough demand is recorded to choose the share
        /// (`choose_after`). The rest is headroom for bursts and for the time that a worker takes to start.
        utilisation: f64 = 0.7, in 0.05 => 1.0;
        /// Period of demand that is kept, at most 241,920 intervals (14 days at 5 s). `"0s"` turns recording
        /// off, and `utilisation` is always used.
        history: Duration = Duration::from_secs(14 * 86400), in Duration::from_secs(0) => Duration::from_secs(90 * 86400);
        /// Existing folder in which recorded demand is saved across restarts; each control service needs its
        /// own. Empty: recorded demand is kept in memory only.
        history_folder: String = String::new();
        /// Amount of recorded demand from which on the share of capacity is chosen: the recorded demand is
        /// replayed with several shares in simulation, and the share that keeps the service level with the
        /// fewest workers is used.
        choose_after: Duration = Duration::from_secs(86400), in Duration::from_secs(1) => Duration::from_secs(14 * 86400);
        /// Interval between two choices of the share.
        choose_every: Duration = Duration::from_secs(3600), in Duration::from_secs(1) => Duration::from_secs(86400);
        /// Interval between two planning decisions.
        interval: Duration = Duration::from_secs(5), in Duration::from_millis(200) => Duration::from_secs(30);
        /// Time that a worker takes to start, used until starts have been measured. With `keda` and `webhook`
        /// no count is reported for this long after `kvasir control` has started: gateways do not see workers
        /// that are still starting, and a count without these workers would stop them.
        start_time: Duration = Duration::from_secs(120), in Duration::from_millis(100) => Duration::from_secs(7200);
        /// Time within which queued requests are to be served.
        clear_within: Duration = Duration::from_secs(60), in Duration::from_secs(1) => Duration::from_secs(3600);
        /// Time for which a lower count must have been sufficient before a worker is removed. Each time that
        /// a removed worker is needed again soon afterwards, this time is multiplied by four for a day, up to
        /// two hours.
        down_after: Duration = Duration::from_secs(120), in Duration::from_secs(1) => Duration::from_secs(86400);
        /// With `act`: time for which a worker count that was changed by hand (`kvasir drain`) is kept.
        manual_hold: Duration = Duration::from_secs(1800), in Duration::from_secs(0) => Duration::from_secs(86400);
        /// Sleeping workers of each role that are kept in addition to the planned ones; they are woken first
        /// when demand grows. Needs vLLM with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`, or SGLang
        /// with `--enable-memory-saver` and `--enable-weights-cpu-backup`. For `kvasir control` with `act`;
        /// `gpus_max` and the targets' counts include them, `prefill_max` and `decode_max` do not.
        spares: u64 = 0, in 0 => 1000;
        /// Periods after which demand repeats: `day`, `week`. A period is used once two of them have been
        /// observed without a restart of the planner.
        seasons: Vec<String> = vec!["day".to_owned(), "week".to_owned()];
        /// Most GPUs of all workers together, draining workers included.
        gpus_max: u64 = 8, in 1 => 100_000;
        /// GPUs of one worker.
        gpus: u64 = 1, in 0 => 64;
        /// Fewest prefill workers.
        prefill_min: u64 = 1, in 0 => 10_000;
        /// Most prefill workers. None are planned if there are no prefill workers.
        prefill_max: u64 = 4, in 0 => 10_000;
        /// Fewest decode workers, or workers that both prefill and decode.
        decode_min: u64 = 1, in 1 => 10_000;
        /// Most decode workers, or workers that both prefill and decode.
        decode_max: u64 = 4, in 1 => 10_000;
        /// Longest time that a worker to be removed may take for its running requests. After it, they
        /// continue on other workers.
        drain: Duration = Duration::from_secs(600), in Duration::from_secs(0) => Duration::from_secs(86400);
        /// Fixed time of an engine step, in microseconds. The defaults of this and the next four keys are
        /// those of vLLM with a 32-billion-parameter model on two H100.
        step_base_us: f64 = 13_780.0, in 0.001 => 1e9;
        /// Time that each running request adds to a step, in microseconds.
        step_per_request_us: f64 = 23.6, in 0.0 => 1e9;
        /// Time that each token of KV cache adds to a step, in microseconds.
        step_per_kv_token_us: f64 = 0.04233, in 0.0 => 1e6;
        /// Time that each prompt token adds to a step, in microseconds.
        step_per_prompt_token_us: f64 = 36.8, in 0.0 => 1e9;
        /// Time that a prompt adds to a step for the square of its token count, in microseconds.
        step_per_prompt_square_us: f64 = 0.0029, in 0.0 => 1e6;
        /// Capacity of an engine's KV cache, in tokens.
        kv_tokens: u64 = 350_000, in 16 => 1_000_000_000_000;
        /// Most prompt tokens and running requests of one step (`max_num_batched_tokens`).
        batch_tokens: u64 = 8192, in 1 => 10_000_000;
        /// Most requests that an engine runs at a time (`max_num_seqs`).
        running_max: u64 = 256, in 1 => 1_000_000;
    }
}

section! {
    /// The `kvasir control` process, which runs the planner separately from gateways.
    ControlSettings, "control" {
        /// Gateways to observe, as `HOST:PORT` or `https://HOST:PORT`; `--gateway` overrides the list. An
        /// `http` name may have several addresses (a headless Service): each is a gateway.
        gateways: Vec<String> = vec!["127.0.0.1:8000".to_owned()];
        /// Interval at which the names in `gateways` are resolved.
        gateways_interval: Duration = Duration::from_secs(10), in Duration::from_secs(1) => Duration::from_secs(3600);
        /// Address of `/livez`, `/readyz`, `/metrics` and `/kvasir/plan`, which need no credentials. Empty:
        /// they are not served.
        listen: String = "127.0.0.1:8090".to_owned();
        /// Address of the external scaler for KEDA, for the actuator `keda`. KEDA sends no credentials: deny
        /// access to all other clients (a NetworkPolicy).
        keda_listen: String = "127.0.0.1:8091".to_owned();
        /// URL to which changes are posted, for the actuator `webhook`. The environment variable
        /// `KVASIR_WEBHOOK_KEY`, if set, is sent as a bearer token.
        webhook: String = String::new();
        /// Leader election among several control services: `none` for a single one, `lease` for the holder of
        /// a Kubernetes Lease, `etcd` for the holder of a key of `[etcd]`. For a planner that acts through
        /// `kubernetes`.
        leader: String = "none".to_owned(), one_of &["none", "lease", "etcd"];
        /// Name of the Lease or key that `leader` uses.
        lease: String = "kvasir-control".to_owned();
        /// Reconcile the `KvasirGraph` objects of the namespace (`kvasir deploy operator`). If the planner is
        /// off (`planner.mode` is `off`), the process does nothing else.
        graphs: bool = false;
        /// Kvasir image for the gateways of graphs that name none. Empty: `kvasir` in this version.
        graph_image: String = String::new();
        /// Namespace of the Lease, the targets and the graphs. Empty: this pod's own, or that of the
        /// kubeconfig's context.
        namespace: String = String::new();
    }
}

section! {
    /// Sources of workers in addition to `gateway.workers`, `[[pool]]` and the command line. A source that
    /// cannot be read or has a mistake leaves the workers unchanged. An address that several sources name is
    /// one worker.
    DiscoverySettings, "discovery" {
        /// File that lists workers, or folder of such files; changes are followed while the gateway runs.
        /// `.toml`: `[[worker]]` tables with `url` and optional `role` (`prefill`, `decode`, `both`), `pool`,
        /// `model`, `uid` (a changed `uid` means a different worker) and `draining`. `.yaml` and `.json`:
        /// llm-d's `endpoints` with `address`, `port` and `labels`.
        file: String = String::new();
        /// Host names whose addresses are workers, written like `http://engines.default.svc:8000` (a headless
        /// Service of Kubernetes).
        dns: Vec<String> = Vec::new();
        /// Pool of the workers that `dns` names. Empty: the pool of `gateway.workers`.
        dns_pool: String = String::new();
        /// Interval at which the names in `dns` are resolved.
        dns_interval: Duration = Duration::from_secs(5), in Duration::from_secs(1) => Duration::from_secs(3600);
        /// Label selector of the Kubernetes pods that are workers, written like `app=vllm,tier!=test`. Needs
        /// a binary built with `--features kubernetes`, and the rights to list and watch pods of the
        /// namespace. Roles, models and ports are read from the labels and annotations of llm-d, AIBrix,
        /// vLLM's production-stack and SGLang's gateway, and from `kvasir/role`, `kvasir/model`,
        /// `kvasir/pool`, `kvasir/port`. A pod that `prefill_selector` or `decode_selector` also selects has
        /// that role.
        selector: String = String::new();
        /// Label selector of pods that prefill for decode workers.
        prefill_selector: String = String::new();
        /// Label selector of pods that decode from prompts that prefill workers computed.
        decode_selector: String = String::new();
        /// Name of an InferencePool (`inference.networking.k8s.io/v1`) whose selector and ports are used.
        /// Also needs the rights to get, list and watch it.
        inference_pool: String = String::new();
        /// Namespace of the pods and of the InferencePool. Empty: this pod's own, or that of the kubeconfig's
        /// context.
        namespace: String = String::new();
        /// Port of pods whose labels and annotations name none.
        port: u64 = 8000, in 1 => 65535;
        /// Interval at which all pods are listed again, in addition to the watch.
        relist: Duration = Duration::from_secs(300), in Duration::from_secs(1) => Duration::from_secs(86400);
        /// Share of a source's workers that one list may omit without reported deletions. If a list omits
        /// more, the missing workers are still served for `guard_time`, as long as they answer their health
        /// checks. Workers that earlier lists within `guard_time` removed count as missing. Files and names
        /// report no deletions: to remove most of their workers at once, set this to 1, or let the workers
        /// drain.
        guard_share: f64 = 0.5, in 0.0 => 1.0;
        /// Time for which workers missing from such a list are kept.
        guard_time: Duration = Duration::from_secs(600), in Duration::from_secs(0) => Duration::from_secs(86400);
    }
}

section! {
    /// etcd, version 3. Gateways find workers below `PREFIX/workers/` (written by `kvasir register`), and
    /// control services elect their leader below `PREFIX/leaders/`. While etcd is unreachable, gateways keep
    /// the workers that they know, and no control service leads.
    EtcdSettings, "etcd" {
        /// Members of the cluster, as `http://HOST:PORT` or `https://HOST:PORT`; requests go to one member at
        /// a time. Empty: etcd is not used.
        endpoints: Vec<String> = Vec::new();
        /// Prefix of all keys. Each fleet needs its own.
        prefix: String = "/kvasir".to_owned();
        /// User name, if etcd requires authentication.
        user: String = String::new();
        /// File with the password of `user`; it must not be readable by all users of the machine.
        password_file: String = String::new();
        /// Certificate authority of the members (PEM). Empty: the system's.
        ca_file: String = String::new();
        /// Client certificate (PEM), if the members require one.
        certificate_file: String = String::new();
        /// Private key of `certificate_file` (PEM).
        key_file: String = String::new();
    }
}

section! {
    /// The endpoint picker. A proxy that speaks Envoy's `ext_proc` (Envoy itself, kgateway, GKE's gateway;
    /// for Istio see `router/README.md`) asks it for the destination of each request, and forwards the request
    /// itself.
    PickerSettings, "picker" {
        /// Address on which proxies reach the endpoint picker, as `0.0.0.0:9002`. Empty: the picker is off.
        listen: String = String::new();
        /// Address of the gRPC health service, in plain text, as `0.0.0.0:9003`. Empty: it is not served.
        health_listen: String = String::new();
        /// `off`: plain text. `gateway`: the certificate of `[tls]`. `self-signed`: a certificate made at
        /// start, which is the default expectation of gateways of the Gateway API.
        tls: String = "off".to_owned(), one_of &["off", "gateway", "self-signed"];
        /// Most requests in flight; further ones get 503.
        requests_max: u64 = 16_384, in 1 => 1_000_000;
    }
}

section! {
    /// The OpenAI service.
    GatewaySettings, "gateway" {
        /// Address on which the gateway listens.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 8000);
        /// Address of `/metrics`, `/kvasir/…` and `/debug/route`, as `127.0.0.1:9090` or
        /// `unix:/run/kvasir/admin.sock` (accessible to the gateway's user only); they are then not served on
        /// the API's port. Empty: they are on the API's port and need an administrator's key. A gateway
        /// without keys answers processes on its own machine there, unless the request comes through a proxy
        /// or names a host other than the gateway's address or `localhost`. Messages between gateways stay on
        /// the API's port.
        admin_listen: String = String::new();
        /// URLs of the workers; `kvasir serve` sets this itself.
        workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that prefill for decode workers, if their engine does not report this itself
        /// (vLLM).
        prefill_workers: Vec<String> = Vec::new(), live = true;
        /// URLs of workers that decode from prompts that prefill workers computed, if their engine does not
        /// report this itself.
        decode_workers: Vec<String> = Vec::new(), live = true;
        /// Engine of the workers; `auto` asks the workers.
        engine: String = "auto".to_owned(), one_of &["auto", "native", "vllm", "sglang", "tensorrt-llm"];
        /// Hand-off protocol between prefill and decode workers; `auto` is the default of their engine (vLLM:
        /// `kvasir` if its connector is KvasirConnector, else `nixl`).
        handoff: String = "auto".to_owned(), one_of &["auto", "kvasir", "nixl", "mooncake", "bootstrap", "tensorrt-llm"];
        /// Hand-off `mooncake`: URL of the bootstrap server on a prefill worker; `*` stands for the worker's
        /// host.
        mooncake_bootstrap: String = "http://*:8998".to_owned();
        /// KV event endpoint of a worker's first rank, for engines that do not report it; `*` stands for the
        /// worker's host, and a port `+1000` for the port 1000 above the worker's own. `poll` asks a
        /// TensorRT-LLM worker for its events: the worker returns each event only once, so no second gateway
        /// may poll it.
        kv_events: String = String::new();
        /// Endpoint that replays a worker's missed KV events, for engines that do not report it.
        kv_replay: String = String::new();
        /// URLs of stores that workers share, as `http://10.0.0.5:7401` (`store.http` of each `kvasir store`
        /// in `remote_tier.nodes` of vLLM's KvasirConnector). Routing counts the blocks in these stores as
        /// well. Needs `KvasirConnector`, KV events and the model's tokenizer.
        stores: Vec<String> = Vec::new();
        /// File with the API keys of the engines (`--api-key` of vLLM and SGLang, `worker.api_key_file`); it
        /// must not be readable by all users of the machine. A line is `KEY`, for all workers, or `URL KEY`,
        /// for one. The key is sent as `Authorization: Bearer KEY` with every request to an engine, including
        /// health and load queries. Empty: `KVASIR_ENGINE_KEY` of the environment, for all workers; `kvasir
        /// serve` sets the keys of its own workers.
        engine_key_file: String = String::new();
        /// Names of the pools (`[[pool]]`), in order, that take the requests for these workers' model while
        /// no worker of this pool can.
        fallback: Vec<String> = Vec::new();
        /// Name of the model. Empty: the name that the workers report. While workers report different names,
        /// the gateway is not ready and reports the conflict.
        model: String = String::new();
        /// Hugging Face folder with the model's tokenizer and chat template. Empty: `engine.model_folder`.
        /// Without a folder, the workers' KV events cannot be followed and routing uses the text of requests.
        model_folder: String = String::new();
        /// Process that makes the text of answers. `engine`: the gateway relays the engine's text. `gateway`:
        /// the gateway requests token ids and makes text, tool calls and reasoning itself; requests with JSON
        /// schemas, forced tool calls and images are relayed to engines other than the reference engine.
        /// `auto`: `gateway` in front of the reference engine, `engine` in front of other engines.
        text: String = "auto".to_owned(), one_of &["auto", "engine", "gateway"];
        /// Format of the model's tool calls, if the gateway makes the text; `auto` derives it from the chat
        /// template.
        tool_parser: String = "auto".to_owned(), one_of &["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "openai", "kimi_k2", "glm45", "pythonic"];
        /// Format of the model's reasoning, if the gateway makes the text.
        reasoning_parser: String = "auto".to_owned(), one_of &["auto", "none", "deepseek_r1", "qwen3", "glm45", "kimi_k2", "mistral", "openai_gptoss"];
        /// Memory for the cache of tokenised pieces of conversations, of each model.
        token_cache: Bytes = Bytes(256 << 20), in Bytes(1 << 20) => Bytes(1 << 40);
        /// Longest time to the first token of a stream, or to the end of an answer that is not streamed.
        /// After it, a request goes to another worker only if its engine reports that it has no requests;
        /// otherwise the request ends with 503, because a queue is no fault of the engine and the request may
        /// still be computed there.
        answer_within: Duration = Duration::from_secs(600), in Duration::from_millis(10) => Duration::from_secs(86_400), live = true;
        /// Time without output after which a stream that has begun continues on another worker.
        stall: Duration = Duration::from_secs(60), in Duration::from_millis(10) => Duration::from_secs(3600), live = true;
        /// Time without the start of an answer after which a request is sent to a second engine as well; the
        /// first answer is used. 0: never. These attempts share the retry budget. Hand-offs and answers whose
        /// text the gateway makes are not hedged.
        hedge_after: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(3600), live = true;
        /// Longest total time of a request, also of a streamed one. 0: no limit. A client may set a shorter
        /// time (header `x-request-timeout-ms`).
        request_time_max: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(86_400), live = true;
        /// Threads that serve requests, each with its own connections. 0: one for each core.
        threads: u64 = 0, in 0 => 1024;
        /// Serving threads poll instead of sleeping: this saves a wake-up at each hop, and each thread keeps
        /// a core busy even when idle. For machines with spare cores.
        busy_poll: bool = false;
        /// Address of the KServe v2 gRPC service (Open Inference Protocol), as `0.0.0.0:8001`. Empty: it is
        /// not served.
        grpc_listen: String = String::new();
        /// Origins whose pages may call the API from a browser (CORS), as `https://chat.example.com`; `*` is
        /// every origin. Empty: preflight requests are not answered.
        cors_origins: Vec<String> = Vec::new();
        /// Let another gateway of the same user listen on the same address, so that a new gateway accepts
        /// connections before this one stops (SO_REUSEPORT).
        reuse_port: bool = false;
        /// Largest request body; a larger one is answered with 413.
        body_max: Bytes = Bytes(16 << 20), in Bytes(1 << 10) => Bytes(1 << 30);
        /// Let clients send chat templates, arbitrary template variables, and documents (`chat_template`,
        /// `chat_template_kwargs`, `documents`). A template is a program that the engine runs. If false, such
        /// requests are answered with 400.
        client_templates: bool = false;
        /// Variables of the chat template that clients may set even if `client_templates` is false
        /// (`chat_template_kwargs`), to a flag, a number or a short text.
        template_variables: Vec<String> = ["enable_thinking", "thinking", "reasoning_effort"].map(str::to_owned).to_vec();
        /// Allowed schemes of URLs of images, sounds and videos in requests, which engines fetch; `data` URLs
        /// hold the content themselves.
        media_schemes: Vec<String> = ["https", "http", "data"].map(str::to_owned).to_vec();
        /// Hosts that such URLs may name: names, addresses, `*.example.com` for all names below one. Empty:
        /// every public host. Names are not resolved, and engines may follow redirects: only a list, or a
        /// network that confines the engines, keeps them from private addresses behind public names.
        media_hosts: Vec<String> = Vec::new();
        /// Allow such URLs to name hosts that are not public: private, local and link-local addresses, and
        /// names that have no dot or belong to a cluster. A host listed in `media_hosts` is allowed
        /// regardless.
        media_private_hosts: bool = false;
        /// Most images, sounds and videos of a request.
        media_max: u64 = 64, in 0 => 10_000;
        /// Largest image, sound or video inside the request itself, measured in base64 characters.
        media_data_max: Bytes = Bytes(16 << 20), in Bytes(0) => Bytes(1 << 30);
        /// Clients that are told the route of a request and its reason (header `x-kvasir-route`) and the
        /// workers that failed it. `admin`: clients with an administrator's key; on a gateway without keys
        /// and tokens, all clients, unless clients must show certificates.
        explain: String = "admin".to_owned(), one_of &["admin", "all", "none"];
        /// Memory for all requests together: bodies, parsed bodies, tokens. A request waits for memory before
        /// its body is read, for at most `access.wait_max`, and is answered with 503 if there is none by
        /// then. A request whose body could never fit (a fifth of this) is answered with 413.
        request_memory: Bytes = Bytes(512 << 20), in Bytes(32 << 20) => Bytes(1 << 40);
        /// Threads that parse and tokenise large bodies for all serving threads. 0: one for each core.
        compute_threads: u64 = 0, in 0 => 1024;
        /// Time without reading after which a client that has output pending is considered gone: its
        /// connection is closed, and its slots in the gateway and in the engine are freed.
        write_timeout: Duration = Duration::from_secs(60), in Duration::from_millis(100) => Duration::from_secs(3600);
        /// Most requests in progress; further ones wait (`access.waiting_max`).
        requests_max: u64 = 4096, in 1 => 1_000_000;
        /// Admit only slightly more requests than the engines report that they can run. The other requests
        /// wait in the gateway, where priorities and fairness among tenants apply, instead of in the engines'
        /// own queues.
        follow_engines: bool = true;
        /// Most times that a request continues on another worker after a failure.
        retries: u64 = 3, in 0 => 100, live = true;
        /// Interval between the health checks of a worker.
        health_interval: Duration = Duration::from_secs(1), in Duration::from_millis(10) => Duration::from_secs(60);
        /// Time without an answer to a health check after which a worker gets no new requests until the
        /// answer arrives.
        health_timeout: Duration = Duration::from_secs(5), in Duration::from_millis(10) => Duration::from_secs(600);
        /// Multiples of `health_timeout` after which a worker whose health check is still unanswered is
        /// considered dead. Its requests that have received nothing since the first missed check fail over. A
        /// refused connection takes a worker out of service at once.
        health_misses: u64 = 3, in 2 => 100;
        /// Longest time that a request waits while no worker is available; after it, the request is answered
        /// with 503.
        worker_wait: Duration = Duration::from_secs(10), in Duration::from_millis(0) => Duration::from_secs(600), live = true;
        /// The longest time for which a client may have the blocks of its prompt retained in the stores of
        /// its engine, exempt from eviction: `prompt_cache_retention` of OpenAI's requests, `cache_control`
        /// of Anthropic's. For vLLM with KvasirConnector and the reference engine. Retained blocks fill at
        /// most a part of a store (`host_tier.retention_share`). `"0s"`: none is retained.
        prompt_cache_retention_max: Duration = Duration::from_secs(3600), in Duration::from_secs(0) => Duration::from_secs(30 * 24 * 3600), live = true;
        /// URLs of other gateways in front of the same workers. The gateways exchange the destinations of
        /// their requests, and a starting gateway loads the state of the others. They authenticate with
        /// `KVASIR_PEER_KEY` of the environment; without it, only gateways on one machine, without client
        /// keys, accept each other.
        peers: Vec<String> = Vec::new();
        /// Path of the saved index, which is loaded after a restart. Empty: the index is not saved.
        snapshot_file: String = String::new();
        /// Interval at which the index is saved. The index is also saved at shutdown.
        snapshot_interval: Duration = Duration::from_secs(30), in Duration::from_secs(1) => Duration::from_secs(86_400);
    }
}

section! {
    /// Access control of the gateway, and its limits.
    AccessSettings, "access" {
        /// File with the keys of clients (`kvasir key new` makes one) and the names of their certificates; it
        /// is read again when it changes. Without this file and without tokens, all clients are admitted.
        keys_file: String = String::new();
        /// File with the signing keys of an identity provider (JWKS), for bearer tokens; it is read again
        /// when it changes.
        jwks_file: String = String::new();
        /// URL of the signing keys, instead of a file; fetched again every ten minutes and when a token names
        /// an unknown key. If neither is set, `token_issuer` is asked for it (OpenID Connect Discovery).
        jwks_url: String = String::new();
        /// Required issuer of bearer tokens.
        token_issuer: String = String::new();
        /// Required audience of bearer tokens.
        token_audience: String = String::new();
        /// Tenant of bearer tokens that name none. Empty: such tokens are refused.
        token_default_tenant: String = String::new();
        /// Let a client separate its cache from that of its tenant's other clients with its own `cache_salt`.
        own_salts: bool = false;
        /// Request fields that control engines or transfers and are passed on to the engine even so, as
        /// behind another router.
        allowed_fields: Vec<String> = Vec::new();
        /// File that gets one line of JSON for each request, without its content. Empty: no audit log.
        audit_file: String = String::new();
        /// Most requests that wait while the engines, or `gateway.requests_max`, allow no more requests in
        /// progress.
        waiting_max: u64 = 1024, in 0 => 1_000_000;
        /// Most waiting requests of one tenant.
        tenant_waiting_max: u64 = 1024, in 0 => 1_000_000;
        /// Longest expected wait with which a request is queued. If the expected wait is longer, the request
        /// is rejected at once with the time after which to try again.
        wait_max: Duration = Duration::from_secs(30), in Duration::from_millis(1) => Duration::from_secs(3600);
    }
}

section! {
    /// TLS for the gateway's connections. Files are read again when they change; open connections continue.
    TlsSettings, "tls" {
        /// Certificate chain of the gateway (PEM). Empty: clients connect over plain HTTP.
        certificate_file: String = String::new();
        /// Private key of `certificate_file` (PEM).
        key_file: String = String::new();
        /// Certificate authorities of clients (PEM).
        client_ca_file: String = String::new();
        /// Client certificates: `off`, `optional` or `required`. A `[[certificate]]` of `access.keys_file`
        /// maps a name in the certificate to its client. With `required` and without such a file, all clients
        /// with a certificate belong to one tenant, and none is an administrator.
        client_certificate: String = "off".to_owned(), one_of &["off", "optional", "required"];
        /// Certificate authorities of engines, other gateways, the identity provider and the trace collector,
        /// in addition to those of the system (PEM).
        upstream_ca_file: String = String::new();
        /// Client certificate that the gateway shows to these servers (PEM).
        upstream_certificate_file: String = String::new();
        /// Private key of `upstream_certificate_file` (PEM).
        upstream_key_file: String = String::new();
    }
}

section! {
    /// Traces of requests, and metrics, for an OpenTelemetry collector. The environment variable
    /// `KVASIR_TRACE_HEADERS` (`name=value,name=value`) holds headers for the collector, for example a
    /// secret.
    TraceSettings, "trace" {
        /// Address of the collector's OTLP over gRPC, as `http://collector:4317`. Empty: no traces.
        endpoint: String = String::new();
        /// Name of the service in traces.
        service_name: String = "kvasir".to_owned();
        /// Share of requests that are traced, among those whose client has not decided.
        sample_ratio: f64 = 0.01, in 0.0 => 1.0;
        /// Most requests that wait for the exporter; the traces of further ones are dropped and counted.
        queue_max: u64 = 2048, in 16 => 1_000_000;
        /// Interval at which the gateway's metrics, those of `/metrics`, are also sent to the collector. 0:
        /// never.
        metrics_interval: Duration = Duration::from_secs(0), in Duration::from_secs(0) => Duration::from_secs(3600);
    }
}

section! {
    /// A service that checks requests and answers (a guardrail), with LiteLLM's Generic Guardrail API: the
    /// gateway sends texts to `/beta/litellm_basic_guardrail_api`, and the service passes them, replaces them
    /// or blocks the request. The environment variable `KVASIR_GUARDRAIL_KEY` holds its key, if it needs one.
    GuardrailSettings, "guardrail" {
        /// URL of the service, without that path. Empty: nothing is checked.
        url: String = String::new();
        /// Whether requests, answers or both are checked. A checked stream is held back until it is complete.
        check: String = "both".to_owned(), one_of &["both", "requests", "answers"];
        /// Longest wait for the guardrail's verdict.
        timeout: Duration = Duration::from_secs(5), in Duration::from_millis(1) => Duration::from_secs(600);
        /// Whether requests and answers are refused (503) or pass while the guardrail service fails.
        on_failure: String = "refuse".to_owned(), one_of &["refuse", "pass"];
    }
}

section! {
    /// The database for objects that clients store with a gateway: responses that later ones continue,
    /// conversations, files, and batches of requests. Each gateway has its own database: a client must return
    /// to the gateway that stored its objects.
    DatabaseSettings, "database" {
        /// File of the database. Empty: nothing is stored. If set, responses are stored unless a request says
        /// `store: false`, as with OpenAI.
        file: String = String::new();
        /// Time for which an object is kept after it was stored or changed.
        keep: Duration = Duration::from_secs(30 * 86_400), in Duration::from_secs(60) => Duration::from_secs(3650 * 86_400);
        /// Most bytes of all stored objects together.
        bytes_max: Bytes = Bytes(16 << 30), in Bytes(1 << 20) => Bytes(1 << 44);
        /// Most bytes that one tenant may store.
        tenant_bytes_max: Bytes = Bytes(1 << 30), in Bytes(1 << 20) => Bytes(1 << 44);
        /// Most batch requests in progress, of all tenants together.
        batch_requests: u64 = 16, in 1 => 10_000;
    }
}

section! {
    /// Choice of a worker for each request.
    RouterSettings, "router" {
        /// Routing strategy. `predicted-time`: the lowest predicted time to first token. `cost`: the lowest
        /// cost in blocks (cached, queued, decoding). `power-of-two`: the less loaded of two random workers.
        /// `session`: one worker for a session (header `x-session-id`). `least-loaded`: the fewest requests.
        /// `round-robin`: each worker in turn. `random`: a random worker.
        strategy: String = "predicted-time".to_owned(), one_of &["predicted-time", "cost", "power-of-two", "session", "least-loaded", "round-robin", "random"], live = true;
        /// Strategy `cost`: cost of a block to compute, relative to a block being decoded.
        prefill_weight: f64 = 1.0, in 0.0 => 1000.0, live = true;
        /// Strategy `cost`: saving of a block in a worker's host tier, relative to a block in the worker's
        /// own pool.
        host_credit: f64 = 0.75, in 0.0 => 1.0, live = true;
        /// Strategy `cost`: saving of a block in a worker's disk tier, on the same scale.
        disk_credit: f64 = 0.5, in 0.0 => 1.0, live = true;
        /// Strategy `cost`: saving of a block in a tier beyond the worker's disk, on the same scale.
        remote_credit: f64 = 0.25, in 0.0 => 1.0, live = true;
        /// Strategy `cost`: cost of each request on a worker, in blocks.
        request_weight: f64 = 0.0, in 0.0 => 1_000_000.0, live = true;
        /// Strategies `predicted-time` and `cost`: 0 always chooses the cheapest worker; larger values spread
        /// requests over more workers.
        temperature: f64 = 0.0, in 0.0 => 100.0, live = true;
        /// Share of requests that go to new workers until these are warm.
        warm_up_share: f64 = 0.0, in 0.0 => 1.0, live = true;
        /// Most memory of the index. When it is full, new blocks are not indexed.
        index_memory: Bytes = Bytes(8 << 30), in Bytes(16 << 20) => Bytes(1 << 44);
        /// Time for which a prompt is assumed to be cached on the worker that it was routed to, for workers
        /// without KV events.
        approximate_ttl: Duration = Duration::from_secs(120), in Duration::from_secs(1) => Duration::from_secs(86_400);
        /// Most uncached tokens of a prompt that a decode worker computes itself; prompts with more are
        /// computed by a prefill worker.
        disaggregate_above_tokens: u64 = 256, in 0 => 10_000_000, live = true;
    }
}

section! {
    /// Model and batch limits of the reference engine.
    EngineSettings, "engine" {
        /// Hugging Face folder of a Llama or Qwen model. Empty: the built-in tiny model.
        model_folder: String = String::new();
        /// Folder for images of the weights in f32, fused as the computation uses them. The first worker
        /// writes the image; later workers on the machine with the same model map it instead of converting
        /// the files. Below `/dev/shm` the image stays in memory after all workers have ended. Empty: no
        /// image.
        weights_folder: String = String::new();
        /// Name under which the model is served. Empty: the folder's name, or `kvasir-tiny`.
        model_name: String = String::new();
        /// Seed of the built-in model's weights.
        seed: u64 = 7;
        /// Type of cached keys and values; `auto` is the type of the model.
        kv_type: String = "auto".to_owned(), one_of &["auto", "bf16", "f32"];
        /// Tokens of a KV block.
        block_tokens: u64 = 16, in 1 => 1024;
        /// KV blocks of each worker.
        blocks: u64 = 2048, in 8 => 100_000_000;
        /// Most tokens computed in one step.
        batch_tokens_max: u64 = 512, in 16 => 1_000_000;
        /// Most requests running at a time.
        sequences_max: u64 = 64, in 1 => 65_536;
        /// Most requests waiting at a time; further ones are refused.
        waiting_max: u64 = 4096, in 1 => 1_000_000;
        /// Longest sequence in tokens; the model's own limit and the pool's size also bound it.
        context_tokens: u64 = 4096, in 32 => 100_000_000;
        /// Threads for matrix products. 0: the cores are shared among the workers.
        threads: u64 = 0, in 0 => 1024;
    }
}

section! {
    /// One worker process (`kvasir worker`). `kvasir serve` sets `listen` for each of its workers.
    WorkerSettings, "worker" {
        /// Address of the HTTP API.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 8100);
        /// File with the key that each HTTP request except `/health` must carry (`Authorization: Bearer
        /// KEY`); it must not be readable by all users of the machine. The gateway has the key in
        /// `gateway.engine_key_file`. Empty: `KVASIR_WORKER_KEY` of the environment. If neither is set,
        /// workers of `kvasir serve` require `KVASIR_PEER_KEY`, which `kvasir serve` generates if it is
        /// unset, and other workers admit all clients.
        api_key_file: String = String::new();
        /// Certificate chain of the HTTP API (PEM). Empty: callers connect over plain HTTP, as they always do
        /// within `kvasir serve`.
        certificate_file: String = String::new();
        /// Private key of `certificate_file` (PEM).
        private_key_file: String = String::new();
        /// Certificate authorities of callers (PEM). If set, only callers with a certificate are answered
        /// (`tls.upstream_certificate_file` of the gateway).
        client_ca_file: String = String::new();
        /// Address on which KV events are published; port 0 lets the system choose.
        events: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Address on which missed KV events are replayed; port 0 lets the system choose.
        replay: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Whether KV events carry the token ids of blocks, as vLLM's do: for routers other than Kvasir's
        /// gateway. Any process that reaches the ports then reads every prompt and answer. If false, events
        /// carry 64-bit hashes of blocks, with which the gateway routes equally well, and `token_ids` is
        /// empty.
        event_tokens: bool = false;
    }
}

section! {
    /// Transfer of KV blocks between workers.
    TransferSettings, "transfer" {
        /// Transport: `auto` uses the best that both ends have, any other value only the given one.
        transport: String = "auto".to_owned(), one_of &["auto", "shm", "rdma", "tcp"];
        /// Address of the TCP transport; port 0 lets the system choose.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Folder for the shared-memory transport's sockets. Empty: the system's folder for temporary files.
        socket_folder: String = String::new();
        /// File with the secret that all workers, stores and engines of a cluster share, at least 32 bytes
        /// (`openssl rand -hex 32`); it must not be readable by all users of the machine. Empty:
        /// `KVASIR_TRANSFER_SECRET` of the environment, if it is set. Each side of a connection refuses a
        /// peer with a different secret. Without a secret, any host that reaches an address can write into
        /// this process's KV memory.
        secret_file: String = String::new();
        /// Longest time that a decode worker waits for blocks before it computes them itself.
        deadline: Duration = Duration::from_secs(20), in Duration::from_millis(10) => Duration::from_secs(600);
        /// Longest time that a prefill worker keeps blocks for a decode worker that has not fetched them.
        lease: Duration = Duration::from_secs(30), in Duration::from_millis(10) => Duration::from_secs(600);
        /// Most transfers of one worker at a time, in each direction.
        transfers_max: u64 = 4096, in 1 => 60_000;
        /// Use 2 MiB pages for KV memory when the system has enough of them reserved.
        huge_pages: bool = true;
        /// TCP connections to one peer for each of the two lanes (urgent, background).
        connections_per_peer: u64 = 2, in 1 => 8;
        /// Smallest TCP payload that is sent without a copy, if the kernel supports it. `"0 B"`: never.
        zero_copy_from: Bytes = Bytes(64 << 10), in Bytes(0) => Bytes(1 << 30);
        /// Time of silence, or with unacknowledged bytes, after which a peer is considered dead (TCP; for
        /// RDMA, the connection that set up the queue pairs).
        peer_dead_after: Duration = Duration::from_secs(10), in Duration::from_secs(1) => Duration::from_secs(600);
        /// Time for which a thread that moves blocks (a worker's hand-offs, its remote tier, a store's pool)
        /// polls idle transports before it sleeps. `"0s"`: it sleeps at once.
        spin: Duration = Duration::from_micros(50), in Duration::ZERO => Duration::from_millis(1);
        /// Whether these threads poll instead of sleeping. Each then keeps a core busy, for the lowest
        /// latency.
        busy_poll: bool = false;
        /// Cores on which these threads run, as in `0-3,8`. Choose cores of the NUMA node of the GPU and the
        /// NIC that the engine's threads do not use. Empty: the cores of the process.
        cores: String = String::new();
        /// Whether the shared-memory transport refuses processes of another user.
        same_user_only: bool = true;
        /// Largest slice of a request when there are several rails to a peer.
        rail_slice: Bytes = Bytes(256 << 10), in Bytes(4 << 10) => Bytes(64 << 20);
        /// Longest pause between attempts to reach an unreachable peer.
        reconnect_max: Duration = Duration::from_secs(2), in Duration::from_millis(20) => Duration::from_secs(60);
    }
}

section! {
    /// RDMA: the rails of this node and the settings of their queue pairs. Used if a device and libibverbs
    /// are present.
    RdmaSettings, "rdma" {
        /// Devices to use, by name (`mlx5_0`). Empty: the devices nearest to the memory that `near` names.
        devices: Vec<String> = Vec::new();
        /// Memory for which devices are chosen: `gpu0`, a PCI address, `host`, `host:1` (a NUMA node). `auto`
        /// is the GPU of this process (its only one, or the first of `CUDA_VISIBLE_DEVICES`), or else host
        /// memory of the NUMA node of the process's CPUs. GPUs are numbered by PCI address, as with
        /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`. The log names the ports in use and the reason why other ports are
        /// not. The host memory of a worker's or a store's tiers is allocated on the same NUMA node, as far
        /// as that node has memory.
        near: String = "auto".to_owned();
        /// Address on which peers connect to set up queue pairs; with a port other than 0 each further rail
        /// uses the next port. Peers on other hosts need an address other than loopback, and ignore a
        /// loopback one.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 0);
        /// Connections to each peer over one device, each with its own queue pairs: over Ethernet with
        /// several paths (ECMP, link aggregation) each connection takes one path. Each registers the memory
        /// again and counts as a rail.
        connections_per_device: u64 = 1, in 1 => 8;
        /// Index in the port's GID table, or `auto`: RoCE v2 with an IPv4 address, else IPv6; index 0 on
        /// InfiniBand.
        gid: String = "auto".to_owned();
        /// P_Key of the queue pairs' partition, as `0x8001`; `default` is the first entry of the port's
        /// table. Peers in other partitions are unreachable.
        partition: String = "default".to_owned();
        /// Path MTU: most bytes of a packet. The smallest value of both ends and their ports is used.
        path_mtu: String = "4096".to_owned(), one_of &["256", "512", "1024", "2048", "4096"];
        /// Service level of transfers that a request waits for (on Ethernet the priority, 0 to 7).
        service_level_urgent: u64 = 0, in 0 => 15;
        /// Service level of offload and replication.
        service_level_background: u64 = 0, in 0 => 15;
        /// Traffic class of RoCE packets: the DSCP multiplied by four.
        traffic_class: u64 = 0, in 0 => 255;
        /// Most routers on the path of a packet.
        hop_limit: u64 = 64, in 1 => 255;
        /// Acknowledgement timeout as an exponent: 4.096 us times two to the power of the value (14 is 67
        /// ms).
        timeout: u64 = 14, in 1 => 31;
        /// Retries after that timeout before the rail is considered failed.
        retry_count: u64 = 7, in 0 => 7;
        /// Retries while the peer has no receive posted. 7: without limit.
        receiver_not_ready_retry: u64 = 7, in 0 => 7;
        /// Code of the pause between these retries (12 is 0.64 ms).
        receiver_not_ready_timer: u64 = 12, in 0 => 31;
        /// Most reads in flight for each lane of a peer.
        reads_in_flight: u64 = 16, in 1 => 128;
        /// Most work requests of one lane of a peer in the send queue.
        send_queue_depth: u64 = 512, in 16 => 32_768;
        /// Work requests for each one that requests a completion.
        signal_every: u64 = 32, in 1 => 1024;
        /// Receives posted for all peers together.
        receive_buffers: u64 = 4096, in 16 => 32_768;
        /// Most connections at a time.
        connections_max: u64 = 512, in 1 => 4096;
        /// Longest time to set up a connection.
        handshake_timeout: Duration = Duration::from_secs(5), in Duration::from_millis(10) => Duration::from_secs(300);
        /// Let the device reorder its writes to memory (PCIe relaxed ordering).
        relaxed_ordering: bool = true;
        /// Interrupt vector of the completion queues, modulo the number of vectors of the device. Give
        /// workers of a node that share a device different ones.
        completion_vector: u64 = 0, in 0 => 1023;
    }
}

section! {
    /// eBPF programs in the kernel, attached by the gateway (`latency`: CAP_BPF and CAP_PERFMON,
    /// `admission_…`: CAP_BPF and CAP_NET_ADMIN, `redirect`: all three). Each is off by default and is
    /// detached when the process ends; a redirected connection stays redirected until it is closed.
    EbpfSettings, "ebpf" {
        /// Short-circuit TCP between the gateway and workers with a loopback address. Redirected data passes
        /// neither netfilter nor tcpdump; a sender that never waits for its reader may get EACCES.
        redirect: bool = false;
        /// The cgroup v2 folder whose processes take part. Empty: the gateway's own.
        cgroup: String = String::new();
        /// Largest redirected message; longer ones take the TCP stream.
        redirect_message_max: Bytes = Bytes(16 << 10), in Bytes(1) => Bytes(512 << 10);
        /// Network interfaces on which new connections to the gateway's ports are filtered before the
        /// kernel's TCP stack sees them. If this is set and the filter cannot be attached, the gateway does
        /// not start.
        admission_interfaces: Vec<String> = Vec::new();
        /// Further ports to filter there, of other processes.
        admission_ports: Vec<String> = Vec::new();
        /// Prefixes that may connect (`10.0.0.0/8`). Empty: all. This protects against floods and is not a
        /// firewall: packets with more than six IPv6 extension headers pass.
        admission_allow: Vec<String> = Vec::new();
        /// While more than nine tenths of `gateway.requests_max` are in use, drop up to this share of new
        /// connections, in percent. 0: never.
        overload_max: u64 = 0, in 0 => 95;
        /// Most new connections per second from one source. 0: no limit.
        syn_rate_per_source: u64 = 0, in 0 => 1_000_000;
        /// Most new connections that one source may open at once.
        syn_burst_per_source: u64 = 64, in 1 => 1_000_000;
        /// Most new connections per second from all sources together. 0: no limit.
        syn_rate: u64 = 0, in 0 => 1_000_000;
        /// Most new connections that all sources together may open at once.
        syn_burst: u64 = 1024, in 1 => 1_000_000;
        /// Measure connect times, lifetimes and block requests of this process in the kernel, for `/metrics`.
        latency: bool = false;
    }
}

section! {
    /// The host-memory tier behind each worker's pool. Blocks to and from the slower tiers pass through it.
    HostTierSettings, "host_tier" {
        /// Memory of each worker's tier. `"0 B"` turns off this tier and the tiers below it.
        capacity: Bytes = Bytes(256 << 20), in Bytes(0) => Bytes(1 << 44);
        /// Eviction policy. `lru`: the least recently used block. `s3-fifo`: S3-FIFO, in which scans do not
        /// flush frequently used blocks. `cost`: the block that saves the least recomputing for its bytes and
        /// its frequency.
        eviction: String = "s3-fifo".to_owned(), one_of &["lru", "s3-fifo", "cost"];
        /// Time at which a block is copied to this tier. `through`: as soon as it is complete, so that the
        /// pool's slot is free the moment that it is needed. `back`: when the pool evicts it.
        write: String = "through".to_owned(), one_of &["through", "back"];
        /// Prefetch the blocks of an idle conversation from the slower tiers when the probability that it
        /// continues within `prefetch_lead`, learnt from earlier conversations, is at least
        /// `prefetch_chance`.
        prefetch: bool = true;
        /// Probability, from 0 to 1, from which on blocks are prefetched.
        prefetch_chance: f64 = 0.25, in 0.0 => 1.0;
        /// Time within which the conversation must be likely to continue for its blocks to be prefetched.
        prefetch_lead: Duration = Duration::from_secs(60), in Duration::from_millis(1) => Duration::from_secs(3600);
        /// Share of this tier, and of the disk tier, that the blocks of one tenant (one `cache_salt`; all
        /// requests without one are one tenant) may fill, whatever their source. Beyond 8,192 tenants with
        /// blocks, the remaining tenants share one part. For workers.
        tenant_share: f64 = 1.0, in 0.001 => 1.0;
        /// Share of the disk tier, or of this tier if there is no disk tier, that retained blocks may fill
        /// (`gateway.prompt_cache_retention_max`), on a worker or in the pool of a store. On a worker, one
        /// tenant gets at most `tenant_share` of it. 0: no block is retained. A restart ends all retention.
        retention_share: f64 = 0.25, in 0.0 => 0.9;
        /// Longest time for which a block is retained, even if a request asks for more.
        retention_max: Duration = Duration::from_secs(24 * 3600), in Duration::from_secs(1) => Duration::from_secs(30 * 24 * 3600);
    }
}

section! {
    /// The SSD tier: a log of fixed slots in preallocated files, or on its own device. Its blocks survive a
    /// restart of the process.
    DiskTierSettings, "disk_tier" {
        /// Space of each worker's tier. `"0 B"` turns the tier off.
        capacity: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 50);
        /// A folder for the files (each worker of `kvasir serve` makes its own folder in it), a block device,
        /// `/dev/ngXnY` or a PCI address, depending on `engine`. For several devices, a list of folders, one
        /// on each, up to 64: blocks are spread over them. `capacity` divided by `segment` must be a multiple
        /// of the number of folders.
        path: Paths = Paths::default();
        /// I/O engine. `auto`: io_uring if the kernel allows it, else pread. `nvme-passthrough` needs
        /// `/dev/ngXnY`; `nvme-user` and `spdk` need a device bound to vfio-pci; `spdk` also needs the
        /// libraries of an installed SPDK.
        engine: String = "auto".to_owned(), one_of &["auto", "io_uring", "pread", "nvme-passthrough", "nvme-user", "spdk"];
        /// Size of one file.
        segment: Bytes = Bytes(256 << 20), in Bytes(1 << 20) => Bytes(64 << 30);
        /// Most reads and writes in flight.
        depth: u64 = 64, in 1 => 1024;
        /// Eviction policy, as for `[host_tier]`.
        eviction: String = "s3-fifo".to_owned(), one_of &["lru", "s3-fifo", "cost"];
        /// Time at which a block is written to the disk. `through`: as soon as host memory has it. `back`:
        /// when host memory evicts it.
        write: String = "through".to_owned(), one_of &["through", "back"];
        /// Times that a block must have been seen before it is written.
        write_frequency: u64 = 1, in 1 => 15;
        /// Most bytes read and written per second. Transfers that requests wait for come first; other
        /// transfers wait. `"0 B"`: no limit.
        bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Most bytes written per second; blocks above the limit are not written. `"0 B"`: no limit.
        write_bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Most bytes written per day, for the device's endurance. `"0 B"`: no limit.
        write_per_day: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 50);
        /// Recreate the log if it was written for another model or another block size, instead of refusing to
        /// start.
        reformat: bool = false;
    }
}

section! {
    /// Host memory of other nodes (`kvasir store`), used as a tier.
    RemoteTierSettings, "remote_tier" {
        /// Addresses of the nodes' pools, `name=address`, as each node prints at its start. The names
        /// determine the node of each block, so all clients must use the same names.
        nodes: Vec<String> = Vec::new();
        /// Longest time for a look-up and the reads that follow; after it the blocks are a miss. Below
        /// `"200ms"`, blocks that only a pool's disk holds may also be a miss.
        deadline: Duration = Duration::from_millis(200), in Duration::from_millis(1) => Duration::from_secs(60);
        /// Most bytes read and written per second. Transfers that requests wait for come first; new blocks
        /// above the limit wait, and are dropped if host memory evicts them first. `"0 B"`: no limit.
        bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Blocks of a chain that are kept on one node; it must be equal on all clients.
        group: u64 = 32, in 1 => 64;
        /// Nodes that keep a frequently requested group of blocks.
        replicas: u64 = 2, in 1 => 2;
    }
}

section! {
    /// Objects in S3 or a folder, used as a tier, which clusters can share.
    ObjectTierSettings, "object_tier" {
        /// URL of the objects: `s3://bucket/prefix` or `file:///folder`. Empty: the tier is off.
        url: String = String::new();
        /// Endpoint of the S3 service, if it is not Amazon's.
        endpoint: String = String::new();
        /// Region of the bucket.
        region: String = "us-east-1".to_owned();
        /// File in the format of AWS's `credentials`, of which section `default` is read, again every minute;
        /// it must not be readable by all users of the machine. Empty: `AWS_ACCESS_KEY_ID` and
        /// `AWS_SECRET_ACCESS_KEY` of the environment.
        credentials_file: String = String::new();
        /// Allow plain HTTP.
        allow_http: bool = false;
        /// Blocks of a chain in one object; it must be equal in all clusters that share the objects.
        run: String = "16".to_owned(), one_of &["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"];
        /// Age after which objects are misses and are deleted.
        ttl: Duration = Duration::from_secs(604_800), in Duration::from_secs(60) => Duration::from_secs(315_360_000);
        /// Memory of each worker for objects in transfer, a quarter of it for writes; one object in each
        /// direction always fits.
        buffers: Bytes = Bytes(1 << 30), in Bytes(1 << 20) => Bytes(1 << 40);
        /// Most bytes read and written per second, as for `[remote_tier]`.
        bandwidth: Bytes = Bytes(0), in Bytes(0) => Bytes(1 << 40);
        /// Longest time for a look-up and a read; after it the blocks are a miss.
        deadline: Duration = Duration::from_secs(2), in Duration::from_millis(1) => Duration::from_secs(600);
    }
}

section! {
    /// A node that stores blocks for workers on other nodes (`kvasir store`).
    StoreSettings, "store" {
        /// Name of the node among the store nodes, and of its shared-memory socket, `kvasir-NAME-pool.sock`:
        /// nodes that use one `transfer.socket_folder` need different names.
        name: String = "store".to_owned();
        /// Host memory that other nodes may use. If `resp` is empty, `[disk_tier]` keeps the pool's blocks
        /// over restarts; `write` must then be `through` and `write_frequency` 1.
        pool: Bytes = Bytes(256 << 20), in Bytes(0) => Bytes(1 << 44);
        /// Bytes of one slot of the pool and of the tiers behind the RESP service. A worker's block must fit
        /// in a slot.
        slot: Bytes = Bytes(128 << 10), in Bytes(4 << 10) => Bytes(1 << 30);
        /// Address of the pool over TCP. Any client that reaches it and holds the secret of `[transfer]`, or
        /// any client at all if there is no secret, can read and write the pool.
        listen: SocketAddr = SocketAddr::new(LOCALHOST, 7400);
        /// Address of `/metrics` and `/health`, and of the gateways' queries for the blocks in the pool
        /// (`gateway.stores`).
        http: SocketAddr = SocketAddr::new(LOCALHOST, 7401);
        /// Longest time that a client may hold blocks that it has looked up.
        lease: Duration = Duration::from_secs(10), in Duration::from_secs(5) => Duration::from_secs(600);
        /// Addresses of the Redis protocol. Empty: it is not served. An address other than loopback needs a
        /// password.
        resp: Vec<String> = vec!["127.0.0.1:7379".to_owned()];
        /// File with the password of the Redis protocol; it must not be readable by all users of the machine.
        /// Empty: no password.
        resp_password_file: String = String::new();
        /// Renamed commands of the Redis protocol, as `FLUSHALL=NEW-NAME`; without a new name (`FLUSHALL=`)
        /// the command is disabled.
        resp_rename: Vec<String> = Vec::new();
    }
}

section! {
    /// Fault injection, for tests: never in production.
    FaultSettings, "faults" {
        /// One in this many block writes between workers gets a wrong byte. 0: never.
        corrupt_one_in: u64 = 0;
        /// Seed that selects the corrupted writes.
        seed: u64 = 1;
    }
}

/// The whole configuration file.
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
