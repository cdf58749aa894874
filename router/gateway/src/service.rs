//! HTTP: requests in, answers out.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption, Guard};
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use router_fleet::{Booking, Fleet, Pool, RetryBudget, Route, RouteRequest};
use router_openai::{ApiError, Surface, Usage};
use router_trace::Tracer;
use serde_json::{Value, json};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::access::{Access, SharedLimits, keep_keys, reload_credentials};
use crate::caller::{AtAdminListener, Caller};
use crate::compute::ComputePool;
use crate::guardrail::Guardrail;
use crate::memory::RequestMemory;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::request::{at, messages_count, named};
use crate::stored::{self, Stored};
use crate::traced::Traced;
use crate::{GatewayConfig, Tuning};
use crate::{page, status};

/// Lifetime of a cached preflight response in browsers.
const PREFLIGHT_HOLDS: Duration = Duration::from_secs(3600);
/// Largest message of a peer: loads of 4,096 ranks, and as many workers that administrators changed, about 600 bytes each.
const LOADS_BYTES_MAX: usize = 4 << 20;
/// Longest time for sending the last traces at shutdown.
const TRACES_WITHIN: Duration = Duration::from_secs(3);

/// Everything that the gateway's routes share.
pub struct Gateway {
    pub(crate) config: GatewayConfig,
    tuning: ArcSwap<Tuning>,
    pub(crate) models: Models,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) metrics: Metrics,
    pub(crate) retries: RetryBudget,
    pub(crate) inside: AtomicUsize,
    pub(crate) memory: RequestMemory,
    pub(crate) compute: Arc<ComputePool>,
    pub(crate) access: Access,
    pub(crate) tracer: Option<Arc<Tracer>>,
    pub(crate) started: u64,
    pub(crate) history: crate::history::History,
    /// The gateway is about to stop and should get no new requests.
    is_draining: AtomicBool,
    /// Guardrail service that checks requests and answers, if configured.
    pub(crate) guardrail: Option<Guardrail>,
    /// Objects that clients store here, if a database is configured.
    pub(crate) stored: Option<Arc<Stored>>,
    more_metrics: Mutex<Vec<MetricsSource>>,
    shown_configuration: ArcSwapOption<Value>,
    shown_discovery: ArcSwapOption<Value>,
    /// Latest plan that a planner posted.
    pub(crate) plan: ArcSwapOption<crate::plan::Plan>,
    pub(crate) host_latencies: crate::host_latencies::HostLatencies,
    pub(crate) lengths: crate::lengths::Lengths,
}

/// Appends series in the OpenMetrics text format.
pub type MetricsSource = Box<dyn Fn(&mut String) + Send + Sync>;

impl Gateway {
    /// Creates a gateway over a fleet; an error names the file or setting that cannot be used.
    pub fn new(config: GatewayConfig, tuning: Tuning, fleet: Arc<Fleet>) -> Result<Arc<Self>, String> {
        let access = Access::new(&config.access)?;
        let models = Models::new(&config, fleet.pools())?;
        let tracer = config.trace.clone().map(Tracer::new).transpose().map_err(|error| error.to_string())?;
        let compute = ComputePool::start(config.compute_threads);
        let compute = compute.map_err(|error| format!("threads for large requests: {error}"))?;
        let database = config.database.clone();
        let stored =
            database.map(|database| Stored::open(database, config.batch_requests_max)).transpose()?;
        let (stored, begun) = stored.map(|(stored, begun)| (Arc::new(stored), begun)).unzip();
        let guardrail = config.guardrail.clone();
        let guardrail = guardrail.map(|guardrail| Guardrail::new(guardrail, config.access.tls.as_ref()));
        let gateway = Arc::new(Self {
            guardrail,
            stored,
            tuning: ArcSwap::from_pointee(tuning),
            memory: RequestMemory::new(config.request_memory_max),
            config,
            models,
            fleet,
            metrics: Metrics::new(),
            retries: RetryBudget::default(),
            inside: AtomicUsize::new(0),
            compute,
            access,
            tracer,
            started: unix_time(),
            history: crate::history::History::default(),
            is_draining: AtomicBool::new(false),
            more_metrics: Mutex::default(),
            shown_configuration: ArcSwapOption::empty(),
            shown_discovery: ArcSwapOption::empty(),
            plan: ArcSwapOption::empty(),
            host_latencies: crate::host_latencies::HostLatencies::default(),
            lengths: crate::lengths::Lengths::default(),
        });
        let weak = || Arc::downgrade(&gateway);
        gateway.fleet.share(Box::new(SharedLimits(weak())));
        gateway.fleet.adopt([
            tokio::spawn(reload_credentials(weak())),
            tokio::spawn(keep_keys(weak())),
            tokio::spawn(crate::history::keep(weak())),
            tokio::spawn(crate::gate::keep(weak())),
        ]);
        if let Some(begun) = begun {
            gateway.fleet.adopt([tokio::spawn(stored::runner::run(weak(), begun))]);
        }
        Ok(gateway)
    }

    /// Puts other values in force, also for later steps of requests in flight. `keys_waiting` is the number
    /// of changed keys of the configuration that take effect at the next start.
    pub fn tune(&self, tuning: Tuning, keys_waiting: usize) {
        for pool in self.fleet.pools() {
            pool.set_routing(tuning.routing);
        }
        self.tuning.store(Arc::new(tuning));
        self.metrics.config_changes.inc();
        self.metrics.config_waiting.set(keys_waiting as i64);
    }

    /// Counts a configuration that was refused because of mistakes.
    pub fn refuse_configuration(&self) {
        self.metrics.config_refused.inc();
    }

    /// Returns the values in force. Takes no lock and does not allocate, even while they are changed; not
    /// to be held for long.
    pub(crate) fn tuning(&self) -> Guard<Arc<Tuning>> {
        self.tuning.load()
    }

    /// Lets `/metrics` show what the process around this gateway measures as well.
    pub fn show_also(&self, metrics: MetricsSource) {
        self.more_metrics.lock().unwrap_or_else(PoisonError::into_inner).push(metrics);
    }

    /// All metrics of the process, in OpenMetrics' text form.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        status::metrics_text(self)
    }

    /// Lets administrators see this as the configuration in force.
    pub fn show_configuration(&self, configuration: Value) {
        self.shown_configuration.store(Some(Arc::new(configuration)));
    }

    pub(crate) fn configuration(&self) -> Option<Arc<Value>> {
        self.shown_configuration.load_full()
    }

    /// Lets administrators see this as the state of discovery, beside the workers.
    pub fn show_discovery(&self, discovery: Value) {
        self.shown_discovery.store(Some(Arc::new(discovery)));
    }

    pub(crate) fn discovery(&self) -> Option<Arc<Value>> {
        self.shown_discovery.load_full()
    }

    pub(crate) fn append_metrics(&self, out: &mut String) {
        let more = self.more_metrics.lock().unwrap_or_else(PoisonError::into_inner);
        more.iter().for_each(|append| append(out));
        if let Some(plan) = &*self.plan.load() {
            crate::plan::append_metrics(plan, out);
        }
    }

    /// Reports not ready from now on; requests that still arrive are served.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    /// Whether load balancers should send requests here: some model has workers, and the gateway is not about to stop.
    pub(crate) fn takes_requests(&self) -> bool {
        self.models.can_serve() && !self.is_draining.load(Ordering::Relaxed)
    }

    /// Returns the number of requests in flight.
    #[must_use]
    pub fn requests_inside(&self) -> usize {
        self.inside.load(Ordering::Relaxed)
    }

    /// Reads files again and reopens logs, on a hang-up signal. Blocking.
    pub fn reload_files(&self) {
        self.access.reload_files();
    }

    /// Sends the remaining traces; to be called when the last request is over.
    pub async fn finish_traces(&self) {
        if let Some(tracer) = &self.tracer
            && !tracer.shutdown(TRACES_WITHIN).await
        {
            tracing::warn!("not all traces have reached the collector");
        }
    }

    /// Returns the number of requests that this gateway has booked on workers.
    #[must_use]
    pub fn booked(&self) -> u32 {
        self.fleet.ranks().iter().map(|rank| rank.run.load.own.get()[0]).sum()
    }

    /// The workers behind this gateway.
    #[must_use]
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Chooses the worker for a request, if one can take it now.
    pub(crate) fn route(
        &self,
        pool: &Pool,
        request: &RouteRequest<'_>,
        traced: Option<&Traced>,
    ) -> Option<(Route, Booking)> {
        let (route, booking) = self.fleet.route(pool, request)?;
        if let Some(traced) = traced {
            traced.routed(&route);
        }
        self.metrics.routing.observe(route.decided_in);
        Some((route, booking))
    }

    /// Like `route`, but waits until a deadline for a worker, since one may be restarting.
    pub(crate) async fn wait_for_route(
        &self,
        pool: &Pool,
        request: &RouteRequest<'_>,
        traced: Option<&Traced>,
        deadline: Instant,
    ) -> Result<(Route, Booking), ApiError> {
        let deadline = tokio::time::Instant::from_std(deadline);
        loop {
            let changed = self.fleet.changed.notified();
            if let Some(routed) = self.route(pool, request, traced) {
                return Ok(routed);
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(ApiError::unavailable("No worker is available."));
            }
        }
    }

    /// Counts the tokens that an engine reports.
    pub(crate) fn account(&self, usage: &Usage) {
        self.metrics.prompt_tokens.inc_by(usage.prompt as u64);
        self.metrics.generated_tokens.inc_by(usage.completion as u64);
        self.metrics.cached_tokens.inc_by(usage.cached.unwrap_or(0) as u64);
        self.lengths.record(usage);
    }
}

/// The gateway's routes: those of clients, of peers, and about the gateway itself.
pub fn router(gateway: Arc<Gateway>) -> Router {
    let routes = client_routes().merge(peer_routes(&gateway));
    finished(routes.merge(admin_routes(&gateway)).merge(page_routes()), gateway)
}

/// The routes of clients and peers, where administrators have a listener of their own.
pub fn api_router(gateway: Arc<Gateway>) -> Router {
    finished(client_routes().merge(peer_routes(&gateway)), gateway)
}

/// The routes of clients alone.
pub(crate) fn client_router(gateway: Arc<Gateway>) -> Router {
    finished(client_routes(), gateway)
}

/// The routes of the administrators' listener. A gateway with keys asks for them here, too.
pub fn admin_router(gateway: Arc<Gateway>) -> Router {
    let routes = Router::new()
        .route("/health", get(health))
        .route("/livez", get(livez))
        .route("/readyz", get(health))
        .merge(page_routes());
    finished(routes.merge(admin_routes(&gateway)), gateway).layer(Extension(AtAdminListener))
}

/// Lets pages of the configured origins ask from a browser; `None` without any.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let listed: Vec<HeaderValue> =
        origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()).collect();
    let any = listed.iter().any(|origin| origin == "*");
    // Only the API: administrators' routes are not for pages of other origins.
    let allowed = AllowOrigin::predicate(move |origin, asked| {
        asked.uri.path().starts_with("/v1/") && (any || listed.contains(origin))
    });
    let exposed = ["x-request-id", "x-kvasir-route", "retry-after"].map(HeaderName::from_static);
    let layer =
        CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST, Method::DELETE]);
    // Client libraries send headers of their own (`x-stainless-…`): those that a preflight names are
    // allowed.
    Some(layer.allow_headers(AllowHeaders::mirror_request()).expose_headers(exposed).max_age(PREFLIGHT_HOLDS))
}

fn client_routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/v1/chat/completions", at(Surface::Chat))
        .route("/v1/completions", at(Surface::Completions))
        .route("/v1/embeddings", at(Surface::Embeddings))
        .route("/v1/rerank", at(Surface::Rerank))
        .route("/v2/rerank", at(Surface::Rerank))
        .route("/rerank", at(Surface::Rerank))
        .route("/v1/score", at(Surface::Score))
        .route("/score", at(Surface::Score))
        .route("/v1/audio/speech", at(Surface::Speech))
        .route("/v1/audio/transcriptions", at(Surface::Transcription))
        .route("/v1/audio/translations", at(Surface::Translation))
        .route("/tokenize", at(Surface::Tokenize))
        .route("/detokenize", at(Surface::Detokenize))
        .route("/v1/messages", at(Surface::Messages))
        .route("/v1/messages/count_tokens", post(messages_count))
        .route("/v1/responses", at(Surface::Responses))
        .route("/openapi.json", get(openapi))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/health", get(health))
        .route("/livez", get(livez))
        .route("/readyz", get(health))
        .merge(stored::routes())
}

/// The status page. It holds no state, so it needs no key.
fn page_routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/kvasir", get(page::to_page))
        .route("/kvasir/", get(page::page))
        .route("/kvasir/page.js", get(page::script))
        .route("/kvasir/page.css", get(page::style))
}

fn finished(routes: Router<Arc<Gateway>>, gateway: Arc<Gateway>) -> Router {
    let cors = cors(&gateway.config.cors_origins);
    let routes = routes.fallback(no_path).method_not_allowed_fallback(no_method).with_state(gateway);
    match cors {
        Some(layer) => routes.layer(layer),
        None => routes,
    }
}

async fn no_path(headers: HeaderMap) -> Response {
    let error = ApiError::new(StatusCode::NOT_FOUND, "There is no such path.", "not_found");
    named(&headers, error.into_response())
}

async fn no_method(headers: HeaderMap) -> Response {
    let message = "This path does not take this method.";
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message, "method_not_allowed");
    named(&headers, error.into_response())
}

/// The status, the roster and the plan for the process that started the gateway, guarded by the key of this
/// run alone. The administrators' listener may be elsewhere, guarded by other means.
pub fn status_router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/kvasir/status", get(status::status))
        .merge(crate::roster::routes(&gateway))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&gateway), supervisor))
        .with_state(gateway)
}

/// Routes about the gateway itself, for administrators.
fn admin_routes(gateway: &Arc<Gateway>) -> Router<Arc<Gateway>> {
    Router::new()
        .route("/debug/route", get(debug_route))
        .route("/metrics", get(status::metrics))
        .route("/kvasir/status", get(status::status))
        .route("/kvasir/decisions", get(status::decisions))
        .route("/kvasir/history", get(status::history))
        .merge(crate::roster::routes(gateway))
        .route_layer(middleware::from_fn_with_state(Arc::clone(gateway), administrators))
}

/// Routes among gateways of a fleet.
fn peer_routes(gateway: &Arc<Gateway>) -> Router<Arc<Gateway>> {
    Router::new()
        .route("/kvasir/snapshot", get(snapshot))
        .route("/kvasir/loads", post(loads).layer(DefaultBodyLimit::max(LOADS_BYTES_MAX)))
        .route_layer(middleware::from_fn_with_state(Arc::clone(gateway), peers))
}

/// Lets other gateways of the fleet in, and administrators.
async fn peers(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let allowed = gateway.access.peer(&Caller::of(&request));
    match allowed {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Lets in the process that started this gateway; it shows the key that it gave the gateway.
async fn supervisor(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    if gateway.access.shows_peer_key(&Caller::of(&request)) {
        return next.run(request).await;
    }
    ApiError::new(StatusCode::FORBIDDEN, "This listener is for `kvasir serve`.", "forbidden").into_response()
}

/// Lets administrators in, and other gateways of the fleet.
async fn administrators(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let allowed = gateway.access.administrator(&Caller::of(&request));
    match allowed {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Explains which worker a prompt would be routed to and why.
async fn debug_route(
    State(gateway): State<Arc<Gateway>>,
    Query(query): Query<Vec<(String, String)>>,
) -> Response {
    let get = |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let explained = async {
        let prompt = get("prompt").filter(|prompt| !prompt.is_empty());
        let prompt = prompt.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is required."))?;
        let target = gateway.target(get("model"), None, Duration::ZERO).await?;
        let seen = crate::request::prompt::of_text(&gateway, &target.model, prompt.to_owned()).await?;
        // On a closed gateway a tenant's blocks are found only under its salt.
        let salt = get("tenant").and_then(|tenant| gateway.access.salt_of(tenant, get("cache_salt")));
        let wanted = RouteRequest {
            tokens: &seen.tokens,
            salt: salt.as_deref().or(get("cache_salt")),
            session: None,
            adapter: target.adapter.as_deref(),
            without_prefill: false,
            tokens_are_exact: false,
            avoid: &[],
            allowed_workers: None,
        };
        Ok::<_, ApiError>(gateway.fleet.explain(&target.model.pool, &wanted))
    };
    match explained.await {
        Ok(explained) => json_response(StatusCode::OK, explained.to_string()),
        Err(error) => error.into_response(),
    }
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}

fn described(gateway: &Gateway, name: &str) -> Value {
    let target = gateway.models.named(name);
    let (root, context) = target.as_ref().map_or((Arc::default(), 0), |target| {
        (target.model.pool.model(), target.model.pool.context_tokens())
    });
    let parent = (*root != name).then(|| root.as_str());
    json!({
        "id": name, "object": "model", "created": gateway.started, "owned_by": "kvasir",
        "root": *root, "parent": parent, "max_model_len": context,
    })
}

async fn models(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    model_list(&gateway, &Caller::of(&request))
}

/// The models that a caller may ask for.
pub(crate) fn model_list(gateway: &Gateway, caller: &Caller<'_>) -> Response {
    let grant = match gateway.access.identify(caller) {
        Ok(grant) => grant,
        Err(error) => return error.into_response(),
    };
    let models = gateway.models.names();
    let allowed = models.iter().filter(|name| grant.models.allows(name));
    let models: Vec<Value> = allowed.map(|name| described(gateway, name)).collect();
    json_response(StatusCode::OK, json!({ "object": "list", "data": models }).to_string())
}

async fn model(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>, request: Request) -> Response {
    let grant = match gateway.access.identify(&Caller::of(&request)) {
        Ok(grant) => grant,
        Err(error) => return error.into_response(),
    };
    if !gateway.models.names().contains(&name) || !grant.models.allows(&name) {
        return named(request.headers(), ApiError::no_such_model(&name).into_response());
    }
    json_response(StatusCode::OK, described(&gateway, &name).to_string())
}

/// Whether the process runs: for liveness probes, which must not restart a gateway whose workers are away.
async fn livez() -> StatusCode {
    StatusCode::OK
}

async fn health(State(gateway): State<Arc<Gateway>>) -> Response {
    match gateway.models.problem() {
        _ if gateway.is_draining.load(Ordering::Relaxed) => {
            ApiError::unavailable("The gateway is draining.").into_response()
        }
        Some(error) => error.into_response(),
        None if gateway.models.can_serve() => StatusCode::OK.into_response(),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Returns the serialized index, for a gateway that starts.
async fn snapshot(State(gateway): State<Arc<Gateway>>) -> Response {
    match tokio::task::spawn_blocking(move || gateway.fleet.snapshot()).await {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Receives the loads that another gateway has put on workers.
async fn loads(State(gateway): State<Arc<Gateway>>, body: Bytes) -> Response {
    let refused =
        |message: String| ApiError::new(StatusCode::BAD_REQUEST, message, "bad_loads").into_response();
    if !gateway.fleet.has_peers() {
        return refused("This gateway has no peers: set `gateway.peers`.".to_owned());
    }
    match gateway.fleet.receive_loads(&body) {
        Ok(answer) => json_response(StatusCode::OK, answer),
        Err(problem) => refused(problem),
    }
}

/// Returns a number that cannot be guessed or repeated: transfers and hand-offs are identified by it alone.
pub(crate) fn fresh_number() -> u64 {
    router_access::random_number()
}

/// Returns a request id that cannot be guessed or repeated: 128 random bits.
pub(crate) fn fresh_id() -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let number = u128::from(fresh_number()) << 64 | u128::from(fresh_number());
    let mut id = String::with_capacity(32);
    for byte in number.to_be_bytes() {
        id.push(char::from(DIGITS[usize::from(byte >> 4)]));
        id.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    id
}

pub(crate) fn unix_time() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

pub(crate) fn unix_millis() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

pub(crate) fn json_response(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
