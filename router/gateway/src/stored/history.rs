//! Items of earlier turns: those of the stored responses from which a request continues, or of its
//! conversation.

use std::sync::Arc;

use axum::http::StatusCode;
use router_database::{Collection, Key, Snapshot};
use router_openai::responses::StoredFields;
use router_openai::{ApiError, JsonCounts};
use serde::Deserialize;
use serde_json::Value;

use super::conversations::Conversation;
use super::responses::{StoredResponse, from_document};
use super::{Stored, TenantPermit, refusal};
use crate::request::BodyKind;
use crate::service::Gateway;

/// Largest number of responses in the chain from which a request continues.
const CHAIN_MAX: usize = 1000;

/// Stored documents from which a request continues. They are parsed once there is memory for the trees.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Responses, the latest first, or a conversation.
    documents: Vec<Vec<u8>>,
    is_conversation: bool,
    /// Bytes of the documents.
    pub(crate) bytes: usize,
    /// Bytes of working memory for parsing the documents.
    pub(crate) work_bytes: usize,
    /// Held until the documents are parsed and dropped.
    permit: Option<TenantPermit>,
}

/// Documents that are read one after the other, and their size as trees.
struct Measured {
    bytes_max: usize,
    bytes: usize,
    nodes: usize,
    work_bytes: usize,
}

impl Measured {
    fn new(bytes_max: usize) -> Self {
        Self { bytes_max, bytes: 0, nodes: 0, work_bytes: 0 }
    }

    /// Counts a document before it is parsed.
    fn add(&mut self, document: &[u8]) -> Result<(), Problem> {
        let limits = BodyKind::Messages.limits();
        self.bytes += document.len();
        if self.bytes > self.bytes_max {
            return Err(Problem::TooLong);
        }
        let counts = JsonCounts::of(document, &limits).map_err(|_| Problem::TooLong)?;
        self.nodes += counts.nodes + counts.numbers;
        self.work_bytes += counts.work_bytes(document.len());
        if self.nodes > limits.nodes { Err(Problem::TooLong) } else { Ok(()) }
    }

    fn history(self, documents: Vec<Vec<u8>>, is_conversation: bool) -> History {
        History { documents, is_conversation, bytes: self.bytes, work_bytes: self.work_bytes, permit: None }
    }
}

/// References of a stored response to earlier ones; the rest is not parsed.
#[derive(Deserialize)]
struct Links {
    previous: Option<String>,
    conversation: Option<String>,
}

enum Problem {
    NoResponse(String),
    NoConversation(String),
    OfConversation(String),
    TooLong,
}

impl History {
    /// Reads the documents from which a tenant's request continues, at most `bytes_max` bytes. Waits for a
    /// permit.
    pub(crate) async fn read(
        gateway: &Gateway,
        stored: &Stored,
        tenant: &Arc<str>,
        fields: &StoredFields,
        bytes_max: usize,
    ) -> Result<Self, ApiError> {
        if fields.previous_response_id.is_none() && fields.conversation.is_none() {
            return Ok(Self::default());
        }
        let permit = gateway.in_line(stored.histories.take(tenant)).await?;
        let mut history = Self::documents(stored, tenant, fields, bytes_max).await?;
        history.permit = permit;
        Ok(history)
    }

    async fn documents(
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

    /// Returns the items, and the permit that is held until they are translated.
    pub(crate) fn into_items(self) -> Result<(Vec<Value>, Option<TenantPermit>), ApiError> {
        let broken = |error| refusal(&error);
        if self.is_conversation {
            let conversation = self.documents.first().map(|document| from_document::<Conversation>(document));
            let items = conversation.transpose().map_err(broken)?.map(|conversation| conversation.items);
            return Ok((items.unwrap_or_default(), self.permit));
        }
        let mut items = Vec::new();
        for document in self.documents.iter().rev() {
            items.extend(from_document::<StoredResponse>(document).map_err(broken)?.into_items());
        }
        Ok((items, self.permit))
    }
}

type Found = Result<History, Problem>;

fn chain(
    snapshot: &Snapshot,
    tenant: &Arc<str>,
    previous: String,
    bytes_max: usize,
) -> Result<Found, router_database::Error> {
    let (mut next, mut measured, mut found) = (Some(previous), Measured::new(bytes_max), Vec::new());
    while let Some(id) = next.take() {
        let document = snapshot.get(&Key::new(tenant, Collection::Response, id.as_str()))?;
        let Some(document) = document else { return Ok(Err(Problem::NoResponse(id))) };
        if found.len() == CHAIN_MAX {
            return Ok(Err(Problem::TooLong));
        }
        if let Err(problem) = measured.add(&document) {
            return Ok(Err(problem));
        }
        let links: Links = from_document(&document)?;
        if links.conversation.is_some() {
            return Ok(Err(Problem::OfConversation(id)));
        }
        next = links.previous;
        found.push(document);
    }
    Ok(Ok(measured.history(found, false)))
}

fn of_conversation(
    snapshot: &Snapshot,
    tenant: &Arc<str>,
    id: String,
    bytes_max: usize,
) -> Result<Found, router_database::Error> {
    let document = snapshot.get(&Key::new(tenant, Collection::Conversation, id.as_str()))?;
    let Some(document) = document else { return Ok(Err(Problem::NoConversation(id))) };
    let mut measured = Measured::new(bytes_max);
    if let Err(problem) = measured.add(&document) {
        return Ok(Err(problem));
    }
    Ok(Ok(measured.history(vec![document], true)))
}
