//! Conversations: items that several responses share (`/v1/conversations`). A conversation is one document,
//! small enough to be rewritten with each change. It is kept for as long as responses are, counted from its
//! last change.

use std::sync::Arc;

use axum::extract::Path;
use axum::response::Response;
use router_database::{Collection, Error, Key, Transaction};
use router_openai::responses::{self, to_chat};
use router_openai::{ApiError, JsonCounts};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::responses::{from_document, to_document};
use super::{
    CONVERSATION_BYTES_MAX, ObjectBody, Owner, PageQuery, Paging, answered, metadata, not_found, refusal,
};
use crate::request::BodyKind;
use crate::service::{fresh_id, unix_time};

/// Items that may be added at a time, as OpenAI allows.
const ADDED_MAX: usize = 20;

/// A conversation as it is stored.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Conversation {
    id: String,
    created_at: u64,
    metadata: Value,
    pub(crate) items: Vec<Value>,
}

impl Conversation {
    /// Returns the serialized conversation, if it is not too large.
    pub(crate) fn to_document(&self) -> Result<Vec<u8>, Error> {
        let document = to_document(self);
        if document.len() > CONVERSATION_BYTES_MAX {
            let message = format!("The conversation would have more than {CONVERSATION_BYTES_MAX} bytes.");
            return Err(Error::Refused(message));
        }
        match JsonCounts::of(&document, &BodyKind::Messages.limits()) {
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

/// Returns the items that a request adds, in the form in which they are shown.
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
    // Items that a later response could not use are refused now.
    to_chat(&json!({ "model": "", "input": items })).map_err(|error| {
        let param = error.param.as_deref().map(|param| param.replacen("input", "items", 1));
        ApiError { message: error.message.replacen("`input", "`items", 1), param, ..error }
    })?;
    let id = fresh_id();
    Ok(items.iter().enumerate().map(|(place, given)| responses::item(given, &id, place)).collect())
}

/// Changes a conversation; 404 when there is none of this id.
async fn change<T: Send + 'static>(
    owner: &Owner,
    id: &str,
    change: impl FnOnce(&mut Conversation) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let key = key(owner, id);
    let expires = owner.stored.database.expires();
    let write = move |transaction: &mut Transaction<'_>| {
        let Some(before) = transaction.get(&key)? else { return Ok(None) };
        let mut conversation: Conversation = from_document(&before)?;
        let done = change(&mut conversation);
        transaction.put(key, expires, conversation.to_document()?)?;
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
pub(crate) async fn create(ObjectBody { owner, object, .. }: ObjectBody) -> Response {
    let created = async {
        let conversation = Conversation {
            id: format!("conv_{}", fresh_id()),
            created_at: unix_time(),
            metadata: metadata(&object)?.unwrap_or_else(|| json!({})),
            items: items_of(&object)?,
        };
        let (key, expires) = (key(&owner, &conversation.id), owner.stored.database.expires());
        let document = conversation.to_document().map_err(|error| refusal(&error))?;
        let write = move |transaction: &mut Transaction<'_>| transaction.put(key, expires, document);
        owner.stored.database.write(write).await.map_err(|error| refusal(&error))?;
        Ok(conversation.shown())
    };
    let created = created.await;
    answered(owner, created)
}

/// `GET /v1/conversations/{id}`.
pub(crate) async fn retrieve(owner: Owner, Path(id): Path<String>) -> Response {
    let found = load(&owner, &id).await.map(|conversation| conversation.shown());
    answered(owner, found)
}

/// `POST /v1/conversations/{id}`, which replaces the metadata.
pub(crate) async fn update(Path(id): Path<String>, ObjectBody { owner, object, .. }: ObjectBody) -> Response {
    let updated = async {
        let metadata = metadata(&object)?;
        let metadata = metadata.ok_or_else(|| ApiError::invalid("metadata", "`metadata` is required."))?;
        change(&owner, &id, move |conversation| {
            conversation.metadata = metadata;
            conversation.shown()
        })
        .await
    };
    let updated = updated.await;
    answered(owner, updated)
}

/// `DELETE /v1/conversations/{id}`. The conversation's responses are kept.
pub(crate) async fn delete(owner: Owner, Path(id): Path<String>) -> Response {
    let key = key(&owner, &id);
    let deleted = owner.stored.database.write(move |transaction| transaction.delete(key)).await;
    let deleted = match deleted {
        Ok(true) => Ok(json!({ "id": id, "object": "conversation.deleted", "deleted": true })),
        Ok(false) => Err(missing(&id)),
        Err(error) => Err(refusal(&error)),
    };
    answered(owner, deleted)
}

/// `GET /v1/conversations/{id}/items`.
pub(crate) async fn items(owner: Owner, Path(id): Path<String>, Paging(query): Paging) -> Response {
    let page = load(&owner, &id).await.and_then(|conversation| query.page(conversation.items));
    answered(owner, page)
}

/// `POST /v1/conversations/{id}/items`.
pub(crate) async fn add_items(
    Path(id): Path<String>,
    ObjectBody { owner, object, .. }: ObjectBody,
) -> Response {
    let added = async {
        let items = items_of(&object)?;
        let added = items.clone();
        change(&owner, &id, move |conversation| conversation.items.extend(items)).await?;
        let query: PageQuery =
            PageQuery { limit: Some(ADDED_MAX), order: Some("asc".to_owned()), ..PageQuery::default() };
        query.page(added)
    };
    let added = added.await;
    answered(owner, added)
}

/// `GET /v1/conversations/{id}/items/{item}`.
pub(crate) async fn item(owner: Owner, Path((id, item)): Path<(String, String)>) -> Response {
    let item = load(&owner, &id).await.and_then(|conversation| {
        let mut items = conversation.items.into_iter();
        items.find(|other| other["id"] == item.as_str()).ok_or_else(|| not_found("Item", &item))
    });
    answered(owner, item)
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
    let deleted = deleted.await.and_then(|shown| shown.ok_or_else(|| not_found("Item", &name)));
    answered(owner, deleted)
}
