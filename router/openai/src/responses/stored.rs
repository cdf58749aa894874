//! Request fields of stored responses and conversations, and the input with the items of earlier turns in front.

use serde_json::{Value, json};

use crate::{ApiError, RawBody};

/// The fields of a request that ask for stored responses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoredFields {
    /// Whether the response is to be stored, if the request says so.
    pub store: Option<bool>,
    /// The stored response that this one continues.
    pub previous_response_id: Option<String>,
    /// The conversation that the response belongs to.
    pub conversation: Option<String>,
}

impl StoredFields {
    /// Reads the fields of a request.
    ///
    /// # Errors
    ///
    /// A field of the wrong type, or fields that exclude each other.
    pub fn read(body: &RawBody) -> Result<Self, ApiError> {
        let fields = Self {
            store: body.flag("store")?,
            previous_response_id: body.text("previous_response_id")?.map(|id| id.into_owned()),
            conversation: match body.option("conversation") {
                None => body.text("conversation")?.map(|id| id.into_owned()),
                Some(Value::String(id)) => Some(id),
                Some(given) => match given["id"].as_str() {
                    Some(id) => Some(id.to_owned()),
                    None => {
                        let message =
                            "`conversation` must be a conversation's id, or an object with its `id`.";
                        return Err(ApiError::invalid("conversation", message));
                    }
                },
            },
        };
        if fields.previous_response_id.is_some() && fields.conversation.is_some() {
            let message = "`previous_response_id` and `conversation` exclude each other.";
            return Err(ApiError::invalid("previous_response_id", message));
        }
        if fields.conversation.is_some() && fields.store == Some(false) {
            let message = "A response of a conversation is stored: `store` cannot be false.";
            return Err(ApiError::invalid("store", message));
        }
        Ok(fields)
    }

    /// Takes the fields out of a request and puts what came before in front of its input.
    pub fn apply(request: &mut Value, history: Vec<Value>) {
        let Value::Object(fields) = request else { return };
        for name in ["store", "previous_response_id", "conversation"] {
            fields.remove(name);
        }
        if history.is_empty() {
            return;
        }
        let mut items = history;
        match fields.remove("input") {
            Some(Value::Array(input)) => items.extend(input),
            Some(Value::String(text)) => items.push(json!({ "role": "user", "content": text })),
            Some(Value::Null) | None => {}
            // The translation refuses another type.
            Some(other) => {
                fields.insert("input".to_owned(), other);
                return;
            }
        }
        fields.insert("input".to_owned(), items.into());
    }
}

/// The input of a request that was accepted, as items in the form in which the API returns them. `id` is the response's, without its
/// prefix.
#[must_use]
pub fn input_items(request: &Value, id: &str) -> Vec<Value> {
    match &request["input"] {
        Value::String(text) => vec![item(&json!({ "role": "user", "content": text }), id, 0)],
        Value::Array(items) => items.iter().enumerate().map(|(at, value)| item(value, id, at)).collect(),
        _ => Vec::new(),
    }
}

/// An item with an id, a type and a status.
#[must_use]
pub fn item(given: &Value, id: &str, place: usize) -> Value {
    let mut item = given.clone();
    // The translation refuses what is no item; here nothing may fail.
    if !item.is_object() {
        return item;
    }
    let kind = item["type"].as_str().unwrap_or("message").to_owned();
    if !item["id"].is_string() {
        let prefix = match kind.as_str() {
            "message" => "msg",
            "function_call" => "fc",
            "function_call_output" => "fco",
            "reasoning" => "rs",
            _ => "item",
        };
        item["id"] = format!("{prefix}_{id}_in{place}").into();
    }
    if kind == "message" {
        let part = if item["role"] == "assistant" { "output_text" } else { "input_text" };
        if let Some(text) = item["content"].as_str() {
            item["content"] = match part {
                "output_text" => json!([{ "type": part, "text": text, "annotations": [] }]),
                _ => json!([{ "type": part, "text": text }]),
            };
        }
    }
    item["type"] = kind.into();
    if item["status"].is_null() {
        item["status"] = "completed".into();
    }
    item
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::responses::to_chat;

    fn fields(text: &'static str) -> Result<StoredFields, ApiError> {
        StoredFields::read(&RawBody::parse(text.as_bytes().into()).expect("JSON"))
    }

    #[test]
    fn what_is_asked_of_stored_responses() {
        assert_eq!(fields("{\"store\":null}"), Ok(StoredFields::default()));
        let previous = fields(r#"{"store":false,"previous_response_id":"resp_1"}"#).expect("valid");
        assert_eq!((previous.store, previous.previous_response_id.as_deref()), (Some(false), Some("resp_1")));
        for text in [r#"{"conversation":"conv_1"}"#, r#"{"conversation":{"id":"conv_1"}}"#] {
            assert_eq!(fields(text).expect("valid").conversation.as_deref(), Some("conv_1"), "{text}");
        }
        for (text, param) in [
            (r#"{"store":1}"#, "store"),
            (r#"{"previous_response_id":{}}"#, "previous_response_id"),
            (r#"{"conversation":{"name":"c"}}"#, "conversation"),
            (r#"{"conversation":5}"#, "conversation"),
            (r#"{"conversation":"c","previous_response_id":"r"}"#, "previous_response_id"),
            (r#"{"conversation":"c","store":false}"#, "store"),
        ] {
            assert_eq!(fields(text).expect_err("invalid").param.as_deref(), Some(param), "{text}");
        }
    }

    #[test]
    fn what_came_before_is_in_front_of_the_input() {
        let history = vec![
            json!({ "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "A" }] }),
            json!({ "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                "content": [{ "type": "output_text", "text": "B", "annotations": [], "logprobs": [] }] }),
        ];
        for input in [json!("C"), json!([{ "role": "user", "content": "C" }])] {
            let mut request = json!({ "model": "m", "instructions": "S", "input": input, "store": true,
                "previous_response_id": "resp_1" });
            StoredFields::apply(&mut request, history.clone());
            let chat = to_chat(&request).expect("valid");
            assert_eq!(
                chat["messages"],
                json!([{ "role": "system", "content": "S" }, { "role": "user", "content": "A" },
                    { "role": "assistant", "content": "B" }, { "role": "user", "content": "C" }])
            );
        }
        let mut bad = json!({ "model": "m", "input": 5 });
        StoredFields::apply(&mut bad, history);
        assert_eq!(to_chat(&bad).expect_err("no input").param.as_deref(), Some("input"));
    }

    #[test]
    fn input_has_the_form_in_which_it_is_told() {
        let items = input_items(&json!({ "input": "Hi" }), "7");
        assert_eq!(
            items,
            [json!({ "role": "user", "content": [{ "type": "input_text", "text": "Hi" }],
                "id": "msg_7_in0", "type": "message", "status": "completed" })]
        );
        let call = json!({ "type": "function_call_output", "call_id": "c", "output": "1", "id": "own" });
        let said = json!({ "role": "assistant", "content": "Hi" });
        let items = input_items(&json!({ "input": [call, said] }), "7");
        assert_eq!((&items[0]["id"], &items[0]["status"]), (&json!("own"), &json!("completed")));
        assert_eq!(items[1]["content"][0]["type"], "output_text");
        assert_eq!(items[1]["id"], "msg_7_in1");
        for odd in [json!([[null]]), json!([5, "x", null]), json!({ "a": 1 }), json!(7)] {
            let _no_panic = input_items(&json!({ "input": odd }), "7");
            assert!(to_chat(&json!({ "model": "m", "input": odd })).is_err(), "{odd}");
        }
    }
}
