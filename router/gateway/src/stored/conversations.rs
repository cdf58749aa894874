//! Conversations: items that several responses share (`/v1/conversations`). A conversation is one document and is kept for as long
//! as responses are, counted from its last change.

use std::sync::Arc;

use axum::extract::{Path, Request};
use axum::response::Response;
use router_database::{Collection, Error, Key, Transaction};
use router_openai::responses::{self, to_chat};
use router_openai::{ApiError, Shape};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::responses::{from_document, to_document};
use super::{Owner, PageQuery, Paging, answered, metadata, not_found, object, refusal};
use crate::request::BodyKind;
use crate::service::{fresh_id, unix_time};

/// Items that may be added at a time, as OpenAI allows.
const ADDED_MAX: usize = 20;

/// A conversation as it is kept.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Conversation {
    id: String,
    created_at: u64,
    metadata: Value,
    pub(crate) items: Vec<Value>,
}

impl Conversation {
    /// As it is written. One that is larger than a request may be, or more of a tree, could not be gone on with.
    pub(crate) fn to_document(&self, bytes_max: usize) -> Result<Vec<u8>, Error> {
        let document = to_document(self);
        if document.len() > bytes_max {
            return Err(Error::Refused(format!("The conversation would have more than {bytes_max} bytes.")));
        }
        match Shape::of(&document, &BodyKind::Messages.limits()) {
            Ok(_) => Ok(document),
            Err(excess) => Err(Error::Refused(excess.replace("The body", "The conversation"))),
        }
    }

    fn shown(&self) -> Value {
        json!({
            "id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata,
        })
    }
}

fn key(owner: &Owner, id: &str) -> Key {
    Key::new(&owner.tenant, Collection::Conversation, id)
}

fn missing(id: &str) -> ApiError {
    not_found("Conversation", id)
}

/// The items that a request adds, in the form in which they are told.
fn items_of(object: &Map<String, Value>) -> Result<Vec<Value>, ApiError> {
    let items = match object.get("items") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(items)) if items.is_empty() => return Ok(Vec::new()),
        Some(Value::Array(items)) if items.len() > ADDED_MAX => {
            let message = format!("`items` has more than {ADDED_MAX} items.");
            return Err(ApiError::invalid("items", message));
        }
        Some(Value::Array(items)) => items,
        Some(_) => return Err(ApiError::invalid("items", "`items` must be an array.")),
    };
    // Items that a later response could not take up are refused now.
    to_chat(&json!({ "model": "", "input": items })).map_err(|error| {
        let param = error.param.as_deref().map(|param| param.replacen("input", "items", 1));
        ApiError { message: error.message.replacen("`input", "`items", 1), param, ..error }
    })?;
    let id = fresh_id();
    Ok(items.iter().enumerate().map(|(place, given)| responses::item(given, &id, place)).collect())
}

/// Changes a conversation; `None` when there is none of this id.
async fn change<T: Send + 'static>(
    owner: &Owner,
    id: &str,
    change: impl FnOnce(&mut Conversation) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let key = key(owner, id);
    let expires = owner.stored.database.expires();
    let bytes_max = owner.gateway.config.body_bytes_max;
    let write = move |transaction: &mut Transaction<'_>| {
        let Some(before) = transaction.get(&key)? else { return Ok(None) };
        let mut conversation: Conversation = from_document(&before)?;
        let done = change(&mut conversation);
        transaction.put(key, expires, conversation.to_document(bytes_max)?)?;
        Ok(Some(done))
    };
    let changed = owner.stored.database.write(write).await.map_err(|error| refusal(&error))?;
    changed.ok_or_else(|| missing(id))
}

async fn load(owner: &Owner, id: &str) -> Result<Conversation, ApiError> {
    let found = owner.stored.load(key(owner, id)).await.map_err(|error| refusal(&error))?;
    found.ok_or_else(|| missing(id))
}

/// `POST /v1/conversations`.
pub(crate) async fn create(owner: Owner, request: Request) -> Response {
    let created = async {
        let (object, _footprint) = object(&owner, request).await?;
        let conversation = Conversation {
            id: format!("conv_{}", fresh_id()),
            created_at: unix_time(),
            metadata: metadata(&object)?.unwrap_or_else(|| json!({})),
            items: items_of(&object)?,
        };
        let (key, expires) = (key(&owner, &conversation.id), owner.stored.database.expires());
        let document = to_document(&conversation);
        let write = move |transaction: &mut Transaction<'_>| transaction.put(key, expires, document);
        owner.stored.database.write(write).await.map_err(|error| refusal(&error))?;
        Ok(conversation.shown())
    };
    answered(created.await)
}

/// `GET /v1/conversations/{id}`.
pub(crate) async fn retrieve(owner: Owner, Path(id): Path<String>) -> Response {
    answered(load(&owner, &id).await.map(|conversation| conversation.shown()))
}

/// `POST /v1/conversations/{id}` with other metadata.
pub(crate) async fn update(owner: Owner, Path(id): Path<String>, request: Request) -> Response {
    let updated = async {
        let (object, _footprint) = object(&owner, request).await?;
        let metadata = metadata(&object)?;
        let metadata = metadata.ok_or_else(|| ApiError::invalid("metadata", "`metadata` is required."))?;
        change(&owner, &id, move |conversation| {
            conversation.metadata = metadata;
            conversation.shown()
        })
        .await
    };
    answered(updated.await)
}

/// `DELETE /v1/conversations/{id}`. Responses of it stay.
pub(crate) async fn delete(owner: Owner, Path(id): Path<String>) -> Response {
    let key = key(&owner, &id);
    let deleted = owner.stored.database.write(move |transaction| transaction.delete(key)).await;
    answered(match deleted {
        Ok(true) => Ok(json!({ "id": id, "object": "conversation.deleted", "deleted": true })),
        Ok(false) => Err(missing(&id)),
        Err(error) => Err(refusal(&error)),
    })
}

/// `GET /v1/conversations/{id}/items`.
pub(crate) async fn items(owner: Owner, Path(id): Path<String>, Paging(query): Paging) -> Response {
    answered(load(&owner, &id).await.and_then(|conversation| query.page(conversation.items)))
}

/// `POST /v1/conversations/{id}/items`.
pub(crate) async fn add_items(owner: Owner, Path(id): Path<String>, request: Request) -> Response {
    let added = async {
        let (object, _footprint) = object(&owner, request).await?;
        let items = items_of(&object)?;
        let added = items.clone();
        change(&owner, &id, move |conversation| conversation.items.extend(items)).await?;
        let query: PageQuery =
            PageQuery { limit: Some(ADDED_MAX), order: Some("asc".to_owned()), ..PageQuery::default() };
        query.page(added)
    };
    answered(added.await)
}

/// `GET /v1/conversations/{id}/items/{item}`.
pub(crate) async fn item(owner: Owner, Path((id, item)): Path<(String, String)>) -> Response {
    let item = load(&owner, &id).await.and_then(|conversation| {
        let mut items = conversation.items.into_iter();
        items.find(|other| other["id"] == item.as_str()).ok_or_else(|| not_found("Item", &item))
    });
    answered(item)
}

/// `DELETE /v1/conversations/{id}/items/{item}`.
pub(crate) async fn delete_item(owner: Owner, Path((id, item)): Path<(String, String)>) -> Response {
    let name: Arc<str> = item.into();
    let gone = Arc::clone(&name);
    let deleted = change(&owner, &id, move |conversation| {
        let before = conversation.items.len();
        conversation.items.retain(|other| other["id"] != *gone);
        (conversation.items.len() < before).then(|| conversation.shown())
    });
    answered(deleted.await.and_then(|shown| shown.ok_or_else(|| not_found("Item", &name))))
}
