//! What came before a request: the items of the stored responses that it goes on from, or of its conversation.

use std::sync::Arc;

use axum::http::StatusCode;
use router_database::{Collection, Key, Snapshot};
use router_openai::ApiError;
use router_openai::responses::StoredFields;
use serde_json::Value;

use super::conversations::Conversation;
use super::responses::StoredResponse;
use super::{Stored, refusal};

/// Responses that one may go on from, one after the other.
const CHAIN_MAX: usize = 1000;

/// Items, and the bytes of their documents.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) items: Vec<Value>,
    pub(crate) bytes: usize,
}

enum Problem {
    NoResponse(String),
    NoConversation(String),
    OfConversation(String),
    TooLong,
}

impl History {
    /// What a request of this tenant goes on from; not more than so many bytes.
    pub(crate) async fn read(
        stored: &Stored,
        tenant: &Arc<str>,
        fields: &StoredFields,
        bytes_max: usize,
    ) -> Result<Self, ApiError> {
        let (tenant, previous) = (Arc::clone(tenant), fields.previous_response_id.clone());
        let found = match (previous, fields.conversation.clone()) {
            (Some(previous), _) => {
                stored.database.read(move |snapshot| chain(snapshot, &tenant, previous, bytes_max)).await
            }
            (None, Some(conversation)) => {
                let read =
                    move |snapshot: &Snapshot| of_conversation(snapshot, &tenant, conversation, bytes_max);
                stored.database.read(read).await
            }
            (None, None) => return Ok(Self::default()),
        };
        found.map_err(|error| refusal(&error))?.map_err(|problem| match problem {
            Problem::NoResponse(id) => ApiError {
                code: Some("previous_response_not_found"),
                ..ApiError::invalid(
                    "previous_response_id",
                    format!("Previous response with id {id:?} not found."),
                )
            },
            Problem::NoConversation(id) => {
                let message = format!("Conversation with id {id:?} not found.");
                let error = ApiError::new(StatusCode::NOT_FOUND, message, "conversation_not_found");
                ApiError { param: Some("conversation".to_owned()), ..error }
            }
            Problem::OfConversation(id) => {
                let message =
                    format!("The response {id:?} belongs to a conversation: go on with `conversation`.");
                ApiError::invalid("previous_response_id", message)
            }
            Problem::TooLong => {
                let message = "The request is too large together with what it goes on from.";
                ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message, "body_too_large")
            }
        })
    }
}

type Found = Result<History, Problem>;

fn chain(
    snapshot: &Snapshot,
    tenant: &Arc<str>,
    previous: String,
    bytes_max: usize,
) -> Result<Found, router_database::Error> {
    let (mut next, mut bytes, mut found) = (Some(previous), 0, Vec::new());
    while let Some(id) = next.take() {
        let document = snapshot.get(&Key::new(tenant, Collection::Response, id.as_str()))?;
        let Some(document) = document else { return Ok(Err(Problem::NoResponse(id))) };
        bytes += document.len();
        if bytes > bytes_max || found.len() == CHAIN_MAX {
            return Ok(Err(Problem::TooLong));
        }
        let response: StoredResponse = super::responses::parse(&document)?;
        if response.conversation.is_some() {
            return Ok(Err(Problem::OfConversation(id)));
        }
        next.clone_from(&response.previous);
        found.push(response);
    }
    let items = found.into_iter().rev().flat_map(StoredResponse::into_items).collect();
    Ok(Ok(History { items, bytes }))
}

fn of_conversation(
    snapshot: &Snapshot,
    tenant: &Arc<str>,
    id: String,
    bytes_max: usize,
) -> Result<Found, router_database::Error> {
    let document = snapshot.get(&Key::new(tenant, Collection::Conversation, id.as_str()))?;
    let Some(document) = document else { return Ok(Err(Problem::NoConversation(id))) };
    let bytes = document.len();
    if bytes > bytes_max {
        return Ok(Err(Problem::TooLong));
    }
    let conversation: Conversation = super::responses::parse(&document)?;
    Ok(Ok(History { items: conversation.items, bytes }))
}
