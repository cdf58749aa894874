//! Batches of requests (`/v1/batches`): the requests in the lines of a file are run one after the other at
//! the lowest priority, and the answers become another file.
//!
//! All progress of a batch is in the database: a gateway that starts continues the batches that it finds
//! (`runner`).

use std::sync::Arc;

use axum::extract::Path;
use axum::response::Response;
use router_access::{Grant, LimitConfig, Models, Scope};
use router_database::{Collection, Error, Key, Transaction};
use router_openai::{ApiError, Surface};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::files::FileRecord;
use super::responses::{from_document, to_document};
use super::{BATCHES_MAX, ObjectBody, Owner, Paging, answered, metadata, not_found, refusal};
use crate::service::{Gateway, fresh_id, unix_time};

/// Longest duration of a batch in seconds: OpenAI's only window.
const WINDOW_SECONDS: u64 = 24 * 3600;
/// Priority of batch requests. A lower value is earlier: they come after all other requests of their key's
/// priority.
const PRIORITY: i32 = 1000;

/// Status of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    /// Whether the batch is not over.
    pub(crate) fn is_active(self) -> bool {
        matches!(self, Self::Validating | Self::InProgress | Self::Finalizing | Self::Cancelling)
    }
}

/// Key whose rights a batch uses. A key of the keys file is looked up by its name each time: a batch ends
/// when its key does.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Principal {
    name: String,
    is_subject: bool,
    /// Models that a token allows, since a token cannot be looked up again; `None` is all.
    models: Option<Vec<String>>,
    priority: i32,
    weight: u32,
}

impl Principal {
    fn of(grant: &Grant) -> Self {
        Self {
            name: grant.name.to_string(),
            is_subject: grant.scope == Scope::Subject,
            models: match &grant.models {
                Models::All => None,
                Models::Some(names) => Some(names.iter().map(|name| name.to_string()).collect()),
            },
            priority: grant.priority,
            weight: grant.weight,
        }
    }
}

/// A batch as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Batch {
    pub(crate) id: String,
    pub(crate) endpoint: String,
    pub(crate) input_file_id: String,
    pub(crate) status: BatchStatus,
    errors: Vec<Value>,
    pub(crate) output_file_id: String,
    pub(crate) error_file_id: String,
    created_at: u64,
    pub(crate) expires_at: u64,
    /// Time until which the batch and its files are kept.
    pub(crate) kept_until: u64,
    /// Time of each status change, by the field names of the API.
    times: serde_json::Map<String, Value>,
    pub(crate) total: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    metadata: Value,
    principal: Principal,
    /// Size of each of the two files so far.
    pub(crate) output: Written,
    pub(crate) error: Written,
}

/// Size of a file.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) parts: u32,
}

impl Batch {
    pub(crate) fn key(tenant: &Arc<str>, id: &str) -> Key {
        Key::new(tenant, Collection::Batch, id)
    }

    fn shown(&self) -> Value {
        let file = |id: &str, written: Written| {
            (!self.status.is_active() && written.bytes > 0).then(|| id.to_owned())
        };
        let time = |name: &str| self.times.get(name).cloned().unwrap_or_default();
        json!({
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "input_file_id": self.input_file_id,
            "completion_window": "24h", "status": self.status,
            "errors": (!self.errors.is_empty()).then(|| json!({ "object": "list", "data": self.errors })),
            "output_file_id": file(&self.output_file_id, self.output),
            "error_file_id": file(&self.error_file_id, self.error),
            "created_at": self.created_at, "expires_at": self.expires_at,
            "in_progress_at": time("in_progress_at"), "finalizing_at": time("finalizing_at"),
            "completed_at": time("completed_at"), "failed_at": time("failed_at"), "expired_at": time("expired_at"),
            "cancelling_at": time("cancelling_at"), "cancelled_at": time("cancelled_at"),
            "request_counts": { "total": self.total, "completed": self.completed, "failed": self.failed },
            "metadata": self.metadata,
        })
    }

    /// Changes the status.
    pub(crate) fn enter(&mut self, status: BatchStatus) {
        self.status = status;
        let name = json!(status);
        let name = format!("{}_at", name.as_str().unwrap_or_default());
        self.times.entry(name).or_insert_with(|| unix_time().into());
    }

    /// Marks the batch failed, with these errors.
    pub(crate) fn fail(&mut self, errors: Vec<Value>) {
        self.errors = errors;
        self.enter(BatchStatus::Failed);
    }

    /// Returns the number of answered lines.
    pub(crate) fn done(&self) -> u64 {
        self.completed + self.failed
    }

    /// Returns the grant of the batch's requests; `None` when its key no longer exists.
    pub(crate) fn grant(&self, gateway: &Gateway, tenant: &Arc<str>) -> Option<Arc<Grant>> {
        let principal = &self.principal;
        let access = &gateway.access;
        let mut grant = match principal.is_subject {
            false => Grant::clone(&*access.grant_named(&principal.name, tenant)?),
            true => Grant {
                name: principal.name.as_str().into(),
                scope: Scope::Subject,
                tenant: Arc::clone(tenant),
                is_admin: false,
                models: match &principal.models {
                    None => Models::All,
                    Some(names) => Models::from_names(names.iter().map(String::as_str)),
                },
                limits: LimitConfig::default(),
                tenant_limits: access.tenant_limits(tenant),
                priority: principal.priority,
                weight: principal.weight,
                expires: None,
            },
        };
        grant.priority = grant.priority.saturating_add(PRIORITY);
        Some(Arc::new(grant))
    }
}

/// Returns the surface of a batch's endpoint, if batches support it.
pub(crate) fn surface_of(endpoint: &str) -> Option<Surface> {
    [Surface::Chat, Surface::Completions, Surface::Embeddings, Surface::Responses]
        .into_iter()
        .find(|surface| surface.client_path() == endpoint)
}

/// Changes a batch and returns it; `None` when there is none of this id.
pub(crate) fn change(
    transaction: &mut Transaction<'_>,
    key: Key,
    change: impl FnOnce(&mut Batch),
) -> Result<Option<Batch>, Error> {
    let Some(before) = transaction.get(&key)? else { return Ok(None) };
    let mut batch: Batch = from_document(&before)?;
    change(&mut batch);
    // A batch ends even where its tenant's quota is used up.
    transaction.put_beyond_quota(key, batch.kept_until, to_document(&batch))?;
    Ok(Some(batch))
}

async fn begin(owner: &Owner, object: &Map<String, Value>) -> Result<Value, ApiError> {
    owner.stored.has_room(&owner.tenant, Collection::Batch, BATCHES_MAX).await?;
    let text = |name: &str| {
        let text = object.get(name).and_then(Value::as_str);
        text.ok_or_else(|| ApiError::invalid(name, format!("`{name}` is required.")))
    };
    let (input, endpoint) = (text("input_file_id")?, text("endpoint")?);
    if surface_of(endpoint).is_none() {
        let message = format!("A batch for {endpoint:?} is not supported.");
        return Err(ApiError::invalid("endpoint", message));
    }
    if text("completion_window")? != "24h" {
        return Err(ApiError::invalid("completion_window", "`completion_window` must be `24h`."));
    }
    let file =
        FileRecord::find(&owner.stored, &owner.tenant, input).await.map_err(|error| refusal(&error))?;
    let Some(_) = file.filter(|file| file.purpose == "batch") else {
        let message = format!("There is no file {input:?} with the purpose `batch`.");
        return Err(ApiError::invalid("input_file_id", message));
    };
    let (created_at, kept_until) = (unix_time(), owner.stored.database.expires());
    let batch = Batch {
        id: format!("batch_{}", fresh_id()),
        endpoint: endpoint.to_owned(),
        input_file_id: input.to_owned(),
        status: BatchStatus::Validating,
        errors: Vec::new(),
        output_file_id: format!("file-{}", fresh_id()),
        error_file_id: format!("file-{}", fresh_id()),
        created_at,
        expires_at: created_at + WINDOW_SECONDS,
        kept_until,
        times: serde_json::Map::new(),
        total: 0,
        completed: 0,
        failed: 0,
        metadata: metadata(object)?.unwrap_or(Value::Null),
        principal: Principal::of(&owner.grant),
        output: Written::default(),
        error: Written::default(),
    };
    let (key, document) = (Batch::key(&owner.tenant, &batch.id), to_document(&batch));
    let write = move |transaction: &mut Transaction<'_>| transaction.put(key, kept_until, document);
    owner.stored.database.write(write).await.map_err(|error| refusal(&error))?;
    owner.stored.begin(&owner.tenant, &batch.id);
    Ok(batch.shown())
}

/// `POST /v1/batches`.
pub(crate) async fn create(ObjectBody { owner, object, .. }: ObjectBody) -> Response {
    let begun = begin(&owner, &object).await;
    answered(owner, begun)
}

async fn load(owner: &Owner, id: &str) -> Result<Batch, ApiError> {
    let found = owner.stored.load(Batch::key(&owner.tenant, id)).await.map_err(|error| refusal(&error))?;
    found.ok_or_else(|| not_found("Batch", id))
}

/// `GET /v1/batches/{id}`.
pub(crate) async fn retrieve(owner: Owner, Path(id): Path<String>) -> Response {
    let found = load(&owner, &id).await.map(|batch| batch.shown());
    answered(owner, found)
}

/// `GET /v1/batches`.
pub(crate) async fn list(owner: Owner, Paging(query): Paging) -> Response {
    let batches = owner.stored.all::<Batch>(&owner.tenant, Collection::Batch);
    let listed = batches.await.map_err(|error| refusal(&error)).and_then(|mut batches| {
        batches.sort_by_key(|batch| batch.created_at);
        query.page_of(batches, |batch| &batch.id, |batch| batch.shown())
    });
    answered(owner, listed)
}

/// `POST /v1/batches/{id}/cancel`. Existing answers are kept.
pub(crate) async fn cancel(owner: Owner, Path(id): Path<String>) -> Response {
    let key = Batch::key(&owner.tenant, &id);
    let cancelled = owner.stored.database.write(move |transaction| {
        change(transaction, key, |batch| {
            if batch.status.is_active() {
                batch.enter(BatchStatus::Cancelling);
            }
        })
    });
    let cancelled = match cancelled.await {
        Ok(Some(batch)) => {
            owner.stored.stop(&owner.tenant, &id);
            Ok(batch.shown())
        }
        Ok(None) => Err(not_found("Batch", &id)),
        Err(error) => Err(refusal(&error)),
    };
    answered(owner, cancelled)
}
