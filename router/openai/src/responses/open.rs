//! The open item of a streamed response.

use serde_json::{Value, json};

use super::items;

/// Kind of an item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Reasoning,
    Message,
    Call {
        /// Index among the chat's tool calls.
        index: u64,
        call_id: String,
        name: String,
    },
}

impl Kind {
    /// Prefix of the events with the item's text, without `.delta` and `.done`.
    pub(super) fn event(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text",
            Self::Message => "response.output_text",
            Self::Call { .. } => "response.function_call_arguments",
        }
    }

    /// Field of the final event that holds the whole text.
    pub(super) fn text_field(&self) -> &'static str {
        if matches!(self, Self::Call { .. }) { "arguments" } else { "text" }
    }

    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Call { .. } => "fc",
        }
    }
}

/// An item and its text so far.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) kind: Kind,
    pub(super) text: String,
    pub(super) logprobs: Vec<Value>,
    /// Constant beginning of the JSON of its deltas.
    pub(super) delta_head: String,
    id: String,
    place: usize,
}

impl Open {
    /// Starts an empty item at this place of the output.
    pub(super) fn new(kind: Kind, chat: &Value, place: usize) -> Self {
        let id = items::id(kind.prefix(), chat, place);
        let mut open =
            Self { kind, text: String::new(), logprobs: Vec::new(), delta_head: String::new(), id, place };
        let mut head = open.place();
        head["type"] = format!("{}.delta", open.kind.event()).into();
        let head = head.to_string();
        open.delta_head = format!("{},", head.strip_suffix('}').unwrap_or(&head));
        open
    }

    /// Whether the item is the call with this index.
    pub(super) fn is_call(&self, wanted: u64) -> bool {
        matches!(self.kind, Kind::Call { index, .. } if index == wanted)
    }

    /// Fields that locate the item's text in the output.
    pub(super) fn place(&self) -> Value {
        match self.kind {
            Kind::Call { .. } => json!({ "item_id": self.id, "output_index": self.place }),
            _ => json!({ "item_id": self.id, "output_index": self.place, "content_index": 0 }),
        }
    }

    /// Returns the one content part with this text; `None` for a call.
    pub(super) fn part(&self, text: &str, logprobs: &[Value]) -> Option<Value> {
        match self.kind {
            Kind::Reasoning => Some(items::reasoning_part(text)),
            Kind::Message => Some(items::text_part(text, logprobs)),
            Kind::Call { .. } => None,
        }
    }

    /// Returns the item with this content.
    pub(super) fn item(&self, content: &[Value], status: items::Status) -> Value {
        match &self.kind {
            Kind::Reasoning => items::reasoning(&self.id, content, status),
            Kind::Message => items::message(&self.id, content, status),
            Kind::Call { call_id, name, .. } => items::call(&self.id, call_id, name, &self.text, status),
        }
    }
}
