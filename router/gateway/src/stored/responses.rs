//! Stored responses: `GET` and `DELETE /v1/responses/{id}`, and their input.

use std::sync::Arc;

use axum::extract::Path;
use axum::response::Response;
use router_database::{Collection, Error, Key, Transaction};
use router_openai::ApiError;
use router_openai::responses::StoredFields;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::conversations::Conversation;
use super::{Owner, Paging, Stored, answered, not_found, refusal};
use crate::service::Gateway;

/// A response, with the parts of its request that later requests need.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StoredResponse {
    response: Value,
    /// Items of its own request, without those of earlier turns.
    input: Vec<Value>,
    /// The response from which it continues.
    pub(crate) previous: Option<String>,
    pub(crate) conversation: Option<String>,
}

impl StoredResponse {
    /// Returns the items that the response adds to a conversation.
    pub(crate) fn into_items(mut self) -> impl Iterator<Item = Value> {
        let output = match self.response["output"].take() {
            Value::Array(output) => output,
            _ => Vec::new(),
        };
        self.input.into_iter().chain(output)
    }
}

/// Parses a document that `to_document` wrote.
pub(crate) fn from_document<T: DeserializeOwned>(document: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(document).map_err(|error| Error::Storage(format!("a document is broken: {error}")))
}

pub(crate) fn to_document(document: &impl Serialize) -> Vec<u8> {
    // Serializing these structs of texts and trees cannot fail.
    serde_json::to_vec(document).unwrap_or_default()
}

/// A response in progress that is stored when it is complete.
pub(crate) struct ResponseRecord {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) stored: Arc<Stored>,
    pub(crate) tenant: Arc<str>,
    pub(crate) id: String,
    pub(crate) fields: StoredFields,
    pub(crate) input: Vec<Value>,
}

impl ResponseRecord {
    /// Whether a response is to be stored: the request does not forbid it, and there is a database.
    pub(crate) fn is_wanted(gateway: &Gateway, fields: &StoredFields) -> bool {
        gateway.stored.is_some() && fields.store.unwrap_or(true)
    }

    /// Stores the response, and its items in its conversation. On failure `store` is false in the response.
    pub(crate) async fn save(self, mut response: Value) -> Value {
        let Self { gateway, stored, tenant, id, fields, input } = self;
        let document = StoredResponse {
            response: response.clone(),
            input,
            previous: fields.previous_response_id,
            conversation: fields.conversation,
        };
        let (expires, bytes) = (stored.database.expires(), to_document(&document));
        let write = move |transaction: &mut Transaction<'_>| {
            transaction.put(Key::new(&tenant, Collection::Response, id), expires, bytes)?;
            if let Some(conversation) = document.conversation.clone() {
                let key = Key::new(&tenant, Collection::Conversation, conversation);
                // A conversation that was deleted meanwhile stays deleted.
                if let Some(before) = transaction.get(&key)? {
                    let mut conversation: Conversation = from_document(&before)?;
                    conversation.items.extend(document.into_items());
                    transaction.put(key, expires, conversation.to_document()?)?;
                }
            }
            Ok(())
        };
        if let Err(error) = stored.database.write(write).await {
            tracing::warn!(%error, "a response is not stored");
            gateway.metrics.not_stored.inc();
            response["store"] = false.into();
        }
        response
    }
}

async fn load(owner: &Owner, id: &str) -> Result<StoredResponse, ApiError> {
    let key = Key::new(&owner.tenant, Collection::Response, id);
    let found = owner.stored.load(key).await.map_err(|error| refusal(&error))?;
    found.ok_or_else(|| not_found("Response", id))
}

/// `GET /v1/responses/{id}`.
pub(crate) async fn retrieve(owner: Owner, Path(id): Path<String>) -> Response {
    let found = load(&owner, &id).await.map(|stored| stored.response);
    answered(owner, found)
}

/// `DELETE /v1/responses/{id}`.
pub(crate) async fn delete(owner: Owner, Path(id): Path<String>) -> Response {
    let key = Key::new(&owner.tenant, Collection::Response, id.as_str());
    let deleted = owner.stored.database.write(move |transaction| transaction.delete(key)).await;
    let deleted = match deleted {
        Ok(true) => Ok(json!({ "id": id, "object": "response", "deleted": true })),
        Ok(false) => Err(not_found("Response", &id)),
        Err(error) => Err(refusal(&error)),
    };
    answered(owner, deleted)
}

/// `GET /v1/responses/{id}/input_items`.
pub(crate) async fn input_items(owner: Owner, Path(id): Path<String>, Paging(query): Paging) -> Response {
    let page = load(&owner, &id).await.and_then(|stored| query.page(stored.input));
    answered(owner, page)
}
