//! HTTP side: get, list, watch and writes of namespaced objects.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::Method;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::access::{Access, Call};
use crate::faults::{Draw, Faults};
use crate::selector::Selector;
use crate::store::{ChangeKind, Store};
use crate::writes;

/// Interval between two bookmarks of an idle watch. Kubernetes sends one a minute.
const BOOKMARK_EVERY: Duration = Duration::from_secs(1);

pub(crate) struct Shared {
    store: Mutex<Store>,
    access: Mutex<Access>,
    faults: Mutex<(Faults, Draw)>,
    /// The latest version, for waiting watches.
    version: watch::Sender<u64>,
    /// Counter whose changes end every watch.
    cut: watch::Sender<u64>,
    is_down: std::sync::atomic::AtomicBool,
}

/// A double of an API server. It stops when it is dropped.
pub struct ApiServer {
    shared: Arc<Shared>,
    listening: Option<(SocketAddr, JoinHandle<()>)>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Parameters {
    label_selector: String,
    field_selector: String,
    watch: bool,
    resource_version: String,
    allow_watch_bookmarks: bool,
    timeout_seconds: Option<u64>,
    limit: Option<usize>,
    #[serde(rename = "continue")]
    continued: String,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ApiServer {
    /// Creates a server without a port, whose faults are drawn from this seed: see [`Self::router`].
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            access: Mutex::default(),
            faults: Mutex::new((Faults::default(), Draw::new(seed))),
            version: watch::Sender::new(1),
            cut: watch::Sender::new(0),
            is_down: false.into(),
        });
        Self { shared, listening: None }
    }

    /// Creates a server on a port of this machine. Must be called within a Tokio runtime.
    pub async fn start(seed: u64) -> std::io::Result<Self> {
        let mut server = Self::new(seed);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let routes = server.router();
        let serving = tokio::spawn(async move {
            // The server ends with its task.
            let _ended = axum::serve(listener, routes).await;
        });
        server.listening = Some((address, serving));
        Ok(server)
    }

    /// Returns the routes, as a service that a client can use without a port: with Tokio's time paused, a run
    /// of minutes takes milliseconds, and equal seeds give equal runs.
    pub fn router(&self) -> Router {
        // The core group has a path of its own; all other paths contain the group.
        let core = "/api/{version}/namespaces/{namespace}/{resource}";
        let group = "/apis/{group}/{version}/namespaces/{namespace}/{resource}";
        let mut router = Router::new();
        for (path, answer) in crate::discovery::routes() {
            router = router.route(path, answer);
        }
        for path in [core, group] {
            router = router
                .route(path, calls())
                .route(&format!("{path}/{{name}}"), calls())
                .route(&format!("{path}/{{name}}/{{subresource}}"), calls());
        }
        router.with_state(Arc::clone(&self.shared))
    }

    /// Returns the server's address; empty without a port.
    #[must_use]
    pub fn url(&self) -> String {
        self.listening.as_ref().map(|(address, _)| format!("http://{address}")).unwrap_or_default()
    }

    /// Returns a kubeconfig for the server, with this namespace.
    #[must_use]
    pub fn kubeconfig(&self, namespace: &str) -> String {
        kubeconfig(&self.url(), namespace)
    }

    /// Changes objects, and sends the changes to watches.
    pub fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let (changed, version) = {
            let mut store = lock(&self.shared.store);
            (change(&mut store), store.version())
        };
        self.shared.version.send_replace(version);
        changed
    }

    /// Restricts callers to these rules from now on. Without rules every call is allowed.
    pub fn allow(&self, rules: Vec<crate::Rule>) {
        lock(&self.shared.access).rules = Some(rules);
    }

    /// Returns the kinds of calls so far, each once: `get apps deployments/scale`, for example.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        lock(&self.shared.access).seen.iter().cloned().collect()
    }

    /// Sets the frequencies of faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        lock(&self.shared.faults).0 = faults;
    }

    /// Ends every watch.
    pub fn cut_watches(&self) {
        self.shared.cut.send_modify(|count| *count += 1);
    }

    /// If `is_down`, answers every request with 503 from now on, and ends every watch; otherwise ends that
    /// state.
    pub fn set_down(&self, is_down: bool) {
        self.shared.is_down.store(is_down, std::sync::atomic::Ordering::SeqCst);
        self.cut_watches();
    }
}

/// Returns a kubeconfig for a server at this URL.
#[must_use]
pub fn kubeconfig(url: &str, namespace: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "double",
        "clusters": [{"name": "double", "cluster": {"server": url}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "double", "context": {"cluster": "double", "user": "nobody", "namespace": namespace}}],
    })
    .to_string()
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.cut_watches();
        if let Some((_, serving)) = &self.listening {
            serving.abort();
        }
    }
}

/// Returns a failure in the form of `metav1.Status`.
fn status(code: StatusCode, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code.as_u16()})
}

fn failure(code: StatusCode, reason: &str, message: &str) -> Response {
    json_response(code, &status(code, reason, message))
}

fn json_response(code: StatusCode, body: &Value) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn expired(version: &str) -> Value {
    status(StatusCode::GONE, "Expired", &format!("too old resource version: {version}"))
}

/// Parameters of a call's path.
#[derive(Deserialize)]
struct ResourcePath {
    #[serde(default)]
    group: String,
    version: String,
    namespace: String,
    resource: String,
    name: Option<String>,
    subresource: Option<String>,
}

fn calls() -> MethodRouter<Arc<Shared>> {
    get(call).post(call).put(call).patch(call).delete(call)
}

async fn call(
    State(shared): State<Arc<Shared>>,
    method: Method,
    Path(place): Path<ResourcePath>,
    Query(parameters): Query<Parameters>,
    body: Bytes,
) -> Response {
    let verb = match (&method, &place.name) {
        (&Method::GET, None) if parameters.watch => "watch",
        (&Method::GET, None) => "list",
        (&Method::GET, Some(_)) => "get",
        (&Method::POST, _) => "create",
        (&Method::PUT, _) => "update",
        (&Method::PATCH, _) => "patch",
        _ => "delete",
    };
    let resource = match &place.subresource {
        Some(subresource) => format!("{}/{subresource}", place.resource),
        None => place.resource.clone(),
    };
    let call = Call {
        verb,
        group: place.group.clone(),
        resource,
        namespace: place.namespace.clone(),
        name: place.name.clone(),
    };
    if let Some(failure) = shared.fault() {
        return failure;
    }
    if !lock(&shared.access).admits(&call) {
        let message = format!(
            "{} is forbidden: cannot {verb} resource in the namespace {:?}",
            call.resource, call.namespace
        );
        return failure(StatusCode::FORBIDDEN, "Forbidden", &message);
    }
    let api_version = match place.group.as_str() {
        "" => place.version.clone(),
        group => format!("{group}/{}", place.version),
    };
    if ["list", "watch"].contains(&verb) {
        return list_or_watch(&shared, &api_version, &place.namespace, &place.resource, parameters);
    }
    let (outcome, version) = {
        let mut store = lock(&shared.store);
        let outcome =
            writes::carry_out(&mut store, &call, &place.resource, place.subresource.as_deref(), &body);
        (outcome, store.version())
    };
    shared.version.send_replace(version);
    match outcome {
        Ok(object) if verb == "create" => json_response(StatusCode::CREATED, &object),
        Ok(object) => json_response(StatusCode::OK, &object),
        Err(refusal) => failure(refusal.code, refusal.reason, &refusal.message),
    }
}

impl Shared {
    /// Returns the answer of an injected fault, if one is drawn.
    fn fault(&self) -> Option<Response> {
        if self.is_down.load(std::sync::atomic::Ordering::SeqCst) {
            return Some(failure(
                StatusCode::SERVICE_UNAVAILABLE,
                "ServiceUnavailable",
                "the server is down",
            ));
        }
        let (faults, draw) = &mut *lock(&self.faults);
        if draw.hits(faults.fail) {
            return Some(failure(
                StatusCode::INTERNAL_SERVER_ERROR,
                "InternalError",
                "etcdserver: no leader",
            ));
        }
        let is_throttled = draw.hits(faults.throttle);
        is_throttled.then(|| failure(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", "too many requests"))
    }
}

/// Filters by labels and, of the fields, by name: other field selectors are not used by callers of this
/// double.
fn filter(parameters: &Parameters) -> Option<impl Fn(&Value) -> bool + Send + 'static> {
    let labels = Selector::parse(&parameters.label_selector)?;
    let name = match parameters.field_selector.as_str() {
        "" => None,
        field => Some(field.strip_prefix("metadata.name=")?.to_owned()),
    };
    Some(move |object: &Value| {
        labels.matches(object) && name.as_ref().is_none_or(|name| object["metadata"]["name"] == **name)
    })
}

fn list_or_watch(
    shared: &Arc<Shared>,
    api_version: &str,
    namespace: &str,
    resource: &str,
    parameters: Parameters,
) -> Response {
    let Some(filter) = filter(&parameters) else {
        return failure(StatusCode::BAD_REQUEST, "BadRequest", "unable to parse the selector");
    };
    if parameters.watch {
        return watch_response(shared, api_version, namespace, resource, &parameters, filter);
    }
    let store = lock(&shared.store);
    let matching = store.list(resource, namespace).filter(|object| filter(object));
    let from: usize = parameters.continued.parse().unwrap_or(0);
    let mut items: Vec<Value> = matching.skip(from).cloned().collect();
    let mut metadata = json!({"resourceVersion": store.version().to_string()});
    if let Some(limit) = parameters.limit.filter(|limit| *limit > 0 && items.len() > *limit) {
        items.truncate(limit);
        // The token of this double is a position: unlike in a real server, changes between two pages may show
        // or hide an object.
        metadata["continue"] = json!((from + limit).to_string());
    }
    let kind = items.first().and_then(|item| item["kind"].as_str()).unwrap_or("Pod");
    json_response(
        StatusCode::OK,
        &json!({"kind": format!("{kind}List"), "apiVersion": api_version, "metadata": metadata, "items": items}),
    )
}

struct Watching<F> {
    shared: Arc<Shared>,
    api_version: String,
    namespace: String,
    resource: String,
    version: u64,
    filter: F,
    has_bookmarks: bool,
    until: tokio::time::Instant,
    news: watch::Receiver<u64>,
    cut: watch::Receiver<u64>,
    is_over: bool,
}

fn watch_response(
    shared: &Arc<Shared>,
    api_version: &str,
    namespace: &str,
    resource: &str,
    parameters: &Parameters,
    filter: impl Fn(&Value) -> bool + Send + 'static,
) -> Response {
    let news = shared.version.subscribe();
    let asked = parameters.resource_version.as_str();
    let version = {
        let store = lock(&shared.store);
        let version =
            if asked.is_empty() || asked == "0" { Some(store.version()) } else { asked.parse().ok() };
        match version {
            Some(version) if store.since(version).is_some() => version,
            // Real servers answer with an error in the stream; according to the documents, the request itself
            // may be refused as well.
            _ if lock(&shared.faults).1.hits(500) => {
                return json_response(StatusCode::GONE, &expired(asked));
            }
            version => version.unwrap_or(0),
        }
    };
    let watching = Watching {
        shared: Arc::clone(shared),
        api_version: api_version.to_owned(),
        namespace: namespace.to_owned(),
        resource: resource.to_owned(),
        version,
        filter,
        has_bookmarks: parameters.allow_watch_bookmarks,
        until: tokio::time::Instant::now() + Duration::from_secs(parameters.timeout_seconds.unwrap_or(300)),
        news,
        cut: shared.cut.subscribe(),
        is_over: false,
    };
    let lines = stream::unfold(watching, async |mut watching| {
        let lines = watching.next().await?;
        Some((Ok::<Bytes, std::io::Error>(lines.into()), watching))
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

impl<F: Fn(&Value) -> bool> Watching<F> {
    /// Returns the next lines of the watch; `None` at its end.
    async fn next(&mut self) -> Option<String> {
        loop {
            if self.is_over {
                return None;
            }
            let lines = self.lines();
            if !lines.is_empty() || self.is_over {
                return (!lines.is_empty()).then_some(lines);
            }
            tokio::select! {
                _ = self.news.changed() => {}
                _ = self.cut.changed() => return None,
                () = tokio::time::sleep_until(self.until) => return None,
                () = tokio::time::sleep(BOOKMARK_EVERY), if self.has_bookmarks => return Some(self.bookmark()),
            }
        }
    }

    fn bookmark(&self) -> String {
        let object = json!({"kind": "Pod", "apiVersion": self.api_version,
            "metadata": {"resourceVersion": self.version.to_string()}});
        format!("{}\n", json!({"type": "BOOKMARK", "object": object}))
    }

    /// Returns the lines of the changes since the last call.
    fn lines(&mut self) -> String {
        let store = lock(&self.shared.store);
        let (faults, draw) = &mut *lock(&self.shared.faults);
        let mut lines = String::new();
        let error = |lines: &mut String, version: u64| {
            let object = expired(&version.to_string());
            lines.push_str(&format!("{}\n", json!({"type": "ERROR", "object": object})));
        };
        let Some(changes) = store.since(self.version) else {
            error(&mut lines, self.version);
            self.is_over = true;
            return lines;
        };
        for change in changes {
            let object = &change.object;
            if change.resource == self.resource && object["metadata"]["namespace"] == *self.namespace {
                if draw.hits(faults.cut) {
                    self.is_over = true;
                    return lines;
                }
                if draw.hits(faults.expire) {
                    error(&mut lines, self.version);
                    self.is_over = true;
                    return lines;
                }
                let (is, was) = (
                    change.kind != ChangeKind::Deleted && (self.filter)(object),
                    change.before.as_ref().is_some_and(&self.filter),
                );
                let kind = match (was, is) {
                    (false, true) => Some("ADDED"),
                    (true, true) => Some("MODIFIED"),
                    (true, false) => Some("DELETED"),
                    (false, false) => None,
                };
                for kind in kind.into_iter().cycle().take(1 + usize::from(draw.hits(faults.repeat))) {
                    lines.push_str(&format!("{}\n", json!({"type": kind, "object": object})));
                }
            }
            self.version = change.version;
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_names_the_server_and_the_namespace() {
        let server = ApiServer::start(1).await.expect("a port");
        let config: Value = serde_json::from_str(&server.kubeconfig("llm")).expect("JSON is YAML");
        assert_eq!(config["clusters"][0]["cluster"]["server"], server.url());
        assert_eq!(config["contexts"][0]["context"]["namespace"], "llm");
    }
}
