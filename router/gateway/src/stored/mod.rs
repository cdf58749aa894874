//! Stored responses, conversations, files and batches: documents in the gateway's database, separate for
//! each tenant.
//!
//! `responses` stores the answers of `POST /v1/responses` and returns them again, `conversations` keeps
//! their items together. A request that continues from either gets their items in front of its own input
//! (`history`) before it is translated and screened. `files` keeps what clients upload; `batches` are the
//! requests in such a file, and `runner` runs them.

pub(crate) mod batches;
pub(crate) mod conversations;
pub(crate) mod files;
pub(crate) mod history;
pub(crate) mod responses;
pub(crate) mod runner;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::extract::{ConnectInfo, FromRequest, FromRequestParts, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use router_access::{Charge, Grant, admit, retry_after_seconds};
use router_database::{Collection, Database, Error, Key};
use router_openai::ApiError;
use router_tls::PeerAddr;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use self::responses::from_document;
use self::runner::BatchName;
use crate::access::limited;
use crate::answer::buffered::{holding, json_answer};
use crate::caller::Caller;
use crate::compute::IsCancelled;
use crate::memory::Footprint;
use crate::request::{BodyKind, named, read_body};
use crate::service::Gateway;

/// Requests about stored documents in flight, each of which may hold a document: of all tenants, and of one
/// tenant.
const INSIDE_MAX: usize = 64;
const TENANT_INSIDE_MAX: usize = 16;
/// Uploads in flight: of all tenants, and of one tenant.
const UPLOADS_MAX: usize = 32;
const TENANT_UPLOADS_MAX: usize = 8;
/// Requests that read their history at a time: of all tenants, and of one tenant. More wait.
const HISTORIES_MAX: usize = 8;
const TENANT_HISTORIES_MAX: usize = 4;
/// Bytes of a conversation, and of a request about one: each change writes all of it.
pub(crate) const CONVERSATION_BYTES_MAX: usize = 1 << 20;
/// Batches that run at a time: of all tenants, and of one tenant. More wait.
const BATCHES_RUN_MAX: usize = 32;
const TENANT_BATCHES_RUN_MAX: usize = 2;
/// Largest number of files and of batches of a tenant: their lists are read as a whole.
const FILES_MAX: usize = 10_000;
const BATCHES_MAX: usize = 1_000;
/// Largest and default number of entries of a page.
const PAGE_MAX: usize = 100;
const PAGE: usize = 20;
/// Largest number of metadata pairs of an object, and largest lengths of a name and a value in characters.
const METADATA_MAX: usize = 16;
const METADATA_NAME_MAX: usize = 64;
const METADATA_VALUE_MAX: usize = 512;
/// Largest size of all metadata of an object.
const METADATA_BYTES_MAX: usize = 16 << 10;

/// The database, and the limits on requests that use it.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) database: Database,
    inside: TenantSemaphore,
    uploads: TenantSemaphore,
    histories: TenantSemaphore,
    runs: TenantSemaphore,
    /// Permits for requests of batches.
    lines: TenantSemaphore,
    /// Largest number of requests of one batch in flight.
    batch_lines_max: usize,
    /// Notifies the runner of batches that begin.
    begun: mpsc::UnboundedSender<BatchName>,
    /// Batches that are running, each with the sender that stops it.
    batches: Mutex<HashMap<BatchName, watch::Sender<bool>>>,
}

impl Stored {
    /// Opens the database. The receiver gets the batches that begin.
    pub(crate) fn open(
        config: router_database::Config,
        batch_requests_max: usize,
    ) -> Result<(Self, mpsc::UnboundedReceiver<BatchName>), String> {
        let database = Database::open(config).map_err(|error| error.to_string())?;
        let (begun, receiver) = mpsc::unbounded_channel();
        // A tenant leaves a quarter of the permits to other tenants.
        let batch_lines_max = (batch_requests_max - batch_requests_max / 4).max(1);
        let stored = Self {
            database,
            inside: TenantSemaphore::new(INSIDE_MAX, TENANT_INSIDE_MAX),
            uploads: TenantSemaphore::new(UPLOADS_MAX, TENANT_UPLOADS_MAX),
            histories: TenantSemaphore::new(HISTORIES_MAX, TENANT_HISTORIES_MAX),
            runs: TenantSemaphore::new(BATCHES_RUN_MAX, TENANT_BATCHES_RUN_MAX),
            lines: TenantSemaphore::new(batch_requests_max, batch_lines_max),
            batch_lines_max,
            begun,
            batches: Mutex::default(),
        };
        Ok((stored, receiver))
    }

    /// Loads a document, which is parsed by the thread that reads it.
    pub(crate) async fn load<T: DeserializeOwned + Send + 'static>(
        &self,
        key: Key,
    ) -> Result<Option<T>, Error> {
        let read = self.database.read(move |snapshot| {
            let document = snapshot.get(&key)?;
            document.map(|document| from_document(&document)).transpose()
        });
        read.await
    }

    /// Loads all documents of a tenant's collection.
    pub(crate) async fn all<T: DeserializeOwned + Send + 'static>(
        &self,
        tenant: &Arc<str>,
        collection: Collection,
    ) -> Result<Vec<T>, Error> {
        let tenant = Arc::clone(tenant);
        let read = self.database.read(move |snapshot| {
            let mut documents = Vec::new();
            snapshot.walk(&tenant, collection, "", None, |_, document| {
                documents.push(from_document(document));
                documents.last().is_some_and(Result::is_ok)
            })?;
            documents.into_iter().collect()
        });
        read.await
    }

    /// Refuses another document in a collection whose lists are read as a whole, if the tenant has reached
    /// the limit.
    pub(crate) async fn has_room(
        &self,
        tenant: &Arc<str>,
        collection: Collection,
        most: usize,
    ) -> Result<(), ApiError> {
        let tenant = Arc::clone(tenant);
        let counted = self.database.read(move |snapshot| {
            let mut count = 0;
            snapshot.walk(&tenant, collection, "", None, |_, _| {
                count += 1;
                count < most
            })?;
            Ok(count)
        });
        match counted.await.map_err(|error| refusal(&error))? {
            count if count >= most => {
                let message = format!("There are {most} already: delete what is not needed.");
                Err(ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message, "storage_full"))
            }
            _ => Ok(()),
        }
    }

    fn batches(&self) -> MutexGuard<'_, HashMap<BatchName, watch::Sender<bool>>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the runner to start a batch.
    fn begin(&self, tenant: &Arc<str>, id: &str) {
        // The runner ends with the gateway; the next one finds the batch in the database.
        let _ended = self.begun.send((Arc::clone(tenant), id.to_owned()));
    }

    /// Marks a batch as running; returns the receiver of its stop signal. `None` when the batch is already
    /// running.
    fn running(&self, name: &BatchName) -> Option<watch::Receiver<bool>> {
        let mut batches = self.batches();
        if batches.contains_key(name) {
            return None;
        }
        let (sender, receiver) = watch::channel(false);
        batches.insert(name.clone(), sender);
        Some(receiver)
    }

    fn ended(&self, name: &BatchName) {
        self.batches().remove(name);
    }

    /// Stops a running batch.
    fn stop(&self, tenant: &Arc<str>, id: &str) {
        if let Some(sender) = self.batches().get(&(Arc::clone(tenant), id.to_owned())) {
            sender.send_replace(true);
        }
    }
}

/// Semaphore of which one tenant may take only a part.
#[derive(Debug)]
struct TenantSemaphore {
    all: Arc<Semaphore>,
    of_tenant_max: usize,
    of_tenants: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
}

/// A permit of a request, a history or a batch; given back on drop.
#[derive(Debug)]
pub(crate) struct TenantPermit {
    _of_all: OwnedSemaphorePermit,
    _of_tenant: OwnedSemaphorePermit,
}

impl TenantSemaphore {
    fn new(all: usize, of_tenant_max: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), of_tenant_max, of_tenants: Mutex::default() }
    }

    /// Returns the semaphore of a tenant. Removes the semaphores of tenants that hold no permit.
    fn of_tenant(&self, tenant: &Arc<str>) -> Arc<Semaphore> {
        let mut of_tenants = self.of_tenants.lock().unwrap_or_else(PoisonError::into_inner);
        of_tenants.retain(|_, permits| Arc::strong_count(permits) > 1);
        let permits = of_tenants
            .entry(Arc::clone(tenant))
            .or_insert_with(|| Arc::new(Semaphore::new(self.of_tenant_max)));
        Arc::clone(permits)
    }

    fn try_take(&self, tenant: &Arc<str>) -> Option<TenantPermit> {
        let of_tenant = self.of_tenant(tenant).try_acquire_owned().ok()?;
        let of_all = Arc::clone(&self.all).try_acquire_owned().ok()?;
        Some(TenantPermit { _of_all: of_all, _of_tenant: of_tenant })
    }

    /// Waits for a permit: first for one of the tenant's own, then for one of all tenants.
    async fn take(&self, tenant: &Arc<str>) -> Option<TenantPermit> {
        let of_tenant = self.of_tenant(tenant).acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some(TenantPermit { _of_all: of_all, _of_tenant: of_tenant })
    }
}

pub(crate) fn routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/conversations", post(conversations::create))
        .route(
            "/v1/conversations/{id}",
            get(conversations::retrieve).post(conversations::update).delete(conversations::delete),
        )
        .route("/v1/conversations/{id}/items", get(conversations::items).post(conversations::add_items))
        .route(
            "/v1/conversations/{id}/items/{item}",
            get(conversations::item).delete(conversations::delete_item),
        )
        .route("/v1/files", get(files::list).post(files::create))
        .route("/v1/files/{id}", get(files::retrieve).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", get(batches::list).post(batches::create))
        .route("/v1/batches/{id}", get(batches::retrieve))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        .route_layer(middleware::from_fn(name_answer))
}

async fn name_answer(request: Request, next: Next) -> Response {
    let headers = request.headers().clone();
    named(&headers, next.run(request).await)
}

/// Tenant whose documents a request is about, with the request's charge and permit.
pub(crate) struct Owner {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) stored: Arc<Stored>,
    pub(crate) tenant: Arc<str>,
    pub(crate) grant: Arc<Grant>,
    _charge: Charge,
    _permit: TenantPermit,
}

/// A client that may access its documents.
struct Client {
    gateway: Arc<Gateway>,
    stored: Arc<Stored>,
    grant: Arc<Grant>,
    charge: Charge,
}

impl Client {
    fn of(parts: &Parts, gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        let peer = parts.extensions.get::<ConnectInfo<PeerAddr>>().map(|peer| &peer.0);
        let access = &gateway.access;
        let grant = access.identify(&Caller::at_api(&parts.headers, peer))?;
        let [own, tenant] = access.limiters(&grant)?;
        let charge = admit(own.as_ref(), tenant.as_ref(), 0, access.now()).map_err(|refusal| {
            let after = refusal.retry_after.map(retry_after_seconds);
            limited(&refusal).retry_after(after)
        })?;
        let Some(stored) = gateway.stored.clone() else {
            let message = "This gateway stores nothing: `database.file` is not set.";
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message, "not_stored"));
        };
        Ok(Self { gateway: Arc::clone(gateway), stored, grant, charge })
    }

    fn enter(self, semaphore: impl FnOnce(&Stored) -> &TenantSemaphore) -> Result<Owner, ApiError> {
        let Self { gateway, stored, grant, charge } = self;
        let permit = semaphore(&stored).try_take(&grant.tenant);
        let permit = permit.ok_or_else(|| ApiError::unavailable("Too many requests are being served."))?;
        let tenant = Arc::clone(&grant.tenant);
        Ok(Owner { gateway, stored, tenant, grant, _charge: charge, _permit: permit })
    }
}

impl FromRequestParts<Arc<Gateway>> for Owner {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        Client::of(parts, gateway)?.enter(|stored| &stored.inside)
    }
}

/// The owner of a file that is being uploaded.
pub(crate) struct Uploader(pub(crate) Owner);

impl FromRequestParts<Arc<Gateway>> for Uploader {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        Client::of(parts, gateway)?.enter(|stored| &stored.uploads).map(Self)
    }
}

/// A client's JSON object. The owner takes its permit once the object has arrived: slow senders hold no
/// permit.
pub(crate) struct ObjectBody {
    pub(crate) owner: Owner,
    pub(crate) object: Map<String, Value>,
    _footprint: Footprint,
}

impl FromRequest<Arc<Gateway>> for ObjectBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let client = Client::of(&parts, gateway)?;
        let bytes_max = gateway.config.body_bytes_max.min(CONVERSATION_BYTES_MAX);
        let request = Request::from_parts(parts, body);
        let (bytes, footprint) = read_body(gateway, request, BodyKind::Messages, bytes_max).await?;
        let owner = client.enter(|stored| &stored.inside)?;
        if bytes.is_empty() {
            return Ok(Self { owner, object: Map::new(), _footprint: footprint });
        }
        let work = gateway.work(bytes.len(), &footprint).await?;
        let parsed = work.run(move |_: IsCancelled<'_>| serde_json::from_slice(&bytes)).await?;
        let object = parsed
            .map_err(|error| ApiError::malformed(format!("The body must be a JSON object: {error}.")))?;
        Ok(Self { owner, object, _footprint: footprint })
    }
}

/// Page of a list that a request asks for.
pub(crate) struct Paging(pub(crate) PageQuery);

impl FromRequestParts<Arc<Gateway>> for Paging {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        let query = Query::<PageQuery>::from_request_parts(parts, gateway).await;
        query.map(|Query(query)| Self(query)).map_err(|error| ApiError::malformed(error.body_text()))
    }
}

/// Returns the metadata of a client's object, if there is any.
fn metadata(object: &Map<String, Value>) -> Result<Option<Value>, ApiError> {
    let refused = |message: &str| Err(ApiError::invalid("metadata", message));
    match object.get("metadata") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(pairs)) if pairs.len() > METADATA_MAX => {
            refused(&format!("`metadata` has more than {METADATA_MAX} pairs."))
        }
        Some(Value::Object(pairs)) => {
            let is_short = |(name, value): (&String, &Value)| {
                let value = value.as_str().map(|value| value.chars().count());
                name.chars().count() <= METADATA_NAME_MAX
                    && value.is_some_and(|len| len <= METADATA_VALUE_MAX)
            };
            let bytes: usize = pairs.iter().map(|(name, value)| name.len() + value.to_string().len()).sum();
            if bytes > METADATA_BYTES_MAX {
                return refused(&format!("`metadata` has more than {METADATA_BYTES_MAX} bytes."));
            }
            match pairs.iter().all(is_short) {
                true => Ok(Some(Value::Object(pairs.clone()))),
                false => refused(&format!(
                    "`metadata` has names of up to {METADATA_NAME_MAX} letters and strings of up to {METADATA_VALUE_MAX}."
                )),
            }
        }
        Some(_) => refused("`metadata` must be an object."),
    }
}

/// Query of a page of a list.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct PageQuery {
    limit: Option<usize>,
    order: Option<String>,
    after: Option<String>,
    /// Only used for files.
    pub(crate) purpose: Option<String>,
}

impl PageQuery {
    /// Returns a page of a list of objects, given oldest first.
    pub(crate) fn page(&self, all: Vec<Value>) -> Result<Value, ApiError> {
        self.page_of(all, |entry| entry["id"].as_str().unwrap_or_default(), |entry| entry)
    }

    /// Returns a page of a list of values that have ids and are converted to objects.
    pub(crate) fn page_of<T>(
        &self,
        mut all: Vec<T>,
        id: impl Fn(&T) -> &str,
        shown: impl Fn(T) -> Value,
    ) -> Result<Value, ApiError> {
        let limit = self.limit.unwrap_or(PAGE);
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(ApiError::invalid("limit", format!("`limit` must be 1 to {PAGE_MAX}, not {limit}.")));
        }
        match self.order.as_deref() {
            None | Some("desc") => all.reverse(),
            Some("asc") => {}
            Some(other) => {
                let message = format!("`order` must be `asc` or `desc`, not {other:?}.");
                return Err(ApiError::invalid("order", message));
            }
        }
        let start = match &self.after {
            None => 0,
            Some(after) => match all.iter().position(|entry| id(entry) == after) {
                Some(at) => at + 1,
                None => {
                    return Err(ApiError::invalid("after", format!("There is no {after:?} in this list.")));
                }
            },
        };
        let has_more = all.len() - start > limit;
        let page: Vec<Value> = all.into_iter().skip(start).take(limit).map(shown).collect();
        let id = |entry: Option<&Value>| entry.map_or(Value::Null, |entry| entry["id"].clone());
        Ok(json!({
            "object": "list", "first_id": id(page.first()), "last_id": id(page.last()), "has_more": has_more,
            "data": page,
        }))
    }
}

/// Returns the client's error when the database has refused or failed.
pub(crate) fn refusal(error: &Error) -> ApiError {
    match error {
        Error::Busy => ApiError::unavailable("Too many requests are being stored; try again later."),
        Error::TenantFull(_) | Error::Full => {
            tracing::warn!(%error, "a document is not stored: the storage quota is used up");
            let message = "There is no room to store this: delete what is not needed.";
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message, "storage_full")
        }
        Error::Refused(why) => ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why, "conversation_too_large"),
        Error::Storage(_) => {
            tracing::error!(%error, "stored documents cannot be read");
            ApiError::internal("Stored documents cannot be read.")
        }
    }
}

fn not_found(what: &str, id: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("{what} with id {id:?} not found."), "not_found")
}

/// Returns the response. The owner's permit and the answer's memory are held until the client has read it.
fn answered(owner: Owner, answer: Result<Value, ApiError>) -> Response {
    let held = answer.and_then(|answer| {
        let answer = json_answer(StatusCode::OK, answer.to_string());
        let memory = owner.gateway.memory.try_hold(answer.body().len());
        let memory = memory.ok_or_else(|| owner.gateway.memory_in_use())?;
        Ok(holding(answer, (owner, memory)))
    });
    held.unwrap_or_else(IntoResponse::into_response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> PageQuery {
        serde_json::from_str(text).expect("a query")
    }

    #[test]
    fn a_list_is_told_in_pages() {
        let all: Vec<Value> = (0..25).map(|number| json!({ "id": format!("i{number}") })).collect();
        let ids = |page: &Value| -> Vec<String> {
            let data = page["data"].as_array().expect("a list");
            data.iter().filter_map(|entry| entry["id"].as_str().map(str::to_owned)).collect()
        };
        let newest = query("{}").page(all.clone()).expect("a page");
        assert_eq!(
            (ids(&newest).len(), &newest["first_id"], &newest["has_more"]),
            (20, &json!("i24"), &json!(true))
        );
        let rest = query(r#"{"after":"i5"}"#).page(all.clone()).expect("a page");
        assert_eq!(
            (ids(&rest), &rest["has_more"]),
            (["i4", "i3", "i2", "i1", "i0"].map(str::to_owned).to_vec(), &json!(false))
        );
        let oldest = query(r#"{"order":"asc","limit":2}"#).page(all.clone()).expect("a page");
        assert_eq!(
            (ids(&oldest), &oldest["last_id"]),
            (vec!["i0".to_owned(), "i1".to_owned()], &json!("i1"))
        );
        let none = query(r#"{"after":"i0"}"#).page(all.clone()).expect("a page");
        assert_eq!(
            (ids(&none).len(), &none["first_id"], &none["has_more"]),
            (0, &Value::Null, &json!(false))
        );
        for (bad, param) in [
            (r#"{"limit":0}"#, "limit"),
            (r#"{"limit":101}"#, "limit"),
            (r#"{"order":"up"}"#, "order"),
            (r#"{"after":"x"}"#, "after"),
        ] {
            assert_eq!(query(bad).page(all.clone()).expect_err("bad").param.as_deref(), Some(param));
        }
    }

    #[tokio::test]
    async fn one_tenant_leaves_permits_for_others() {
        let permits = TenantSemaphore::new(3, 2);
        let (one, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        let taken = [permits.try_take(&one).expect("a permit"), permits.try_take(&one).expect("a permit")];
        assert!(permits.try_take(&one).is_none());
        let last = permits.try_take(&other).expect("the last permit");
        assert!(permits.try_take(&other).is_none() && permits.try_take(&"third".into()).is_none());
        drop(last);
        // A tenant that waits for a permit of its own does not block other tenants.
        let mut waits = std::pin::pin!(permits.take(&one));
        assert!(futures_util::poll!(waits.as_mut()).is_pending());
        assert!(permits.try_take(&other).is_some());
        drop(taken);
        assert!(waits.await.is_some());
        assert!(permits.of_tenant(&other).available_permits() == 2 && permits.all.available_permits() == 3);
    }

    #[test]
    fn metadata_is_small() {
        let of = |value: Value| metadata(json!({ "metadata": value }).as_object().expect("an object"));
        assert_eq!(of(json!(null)), Ok(None));
        assert_eq!(of(json!({ "a": "b" })), Ok(Some(json!({ "a": "b" }))));
        let many: Map<String, Value> = (0..17).map(|number| (number.to_string(), "x".into())).collect();
        for bad in [
            json!("x"),
            json!({ "a": 1 }),
            json!({ "a": "x".repeat(513) }),
            json!({ "n".repeat(65): "x" }),
            Value::Object(many),
        ] {
            assert!(of(bad.clone()).is_err(), "{bad}");
        }
    }
}
