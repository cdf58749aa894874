//! The texts of requests and answers, which a content filter must see and may replace.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Fields of a request that the model reads.
pub const TEXT_FIELDS: [&str; 16] = [
    "messages",
    "prompt",
    "suffix",
    "input",
    "query",
    "documents",
    "queries",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
    "response_format",
    "functions",
    "instructions",
    "hotwords",
];

/// Fields among [`TEXT_FIELDS`] that are schemas: names in them are texts, too.
const SCHEMA_FIELDS: [&str; 2] = ["response_format", "functions"];

/// Members of messages and parts that describe structure, not content. Templates may write some of them, so long ones count
/// as texts.
const STRUCTURE: [&str; 9] =
    ["type", "id", "tool_call_id", "call_id", "detail", "format", "status", "media_type", "cache_control"];
const STRUCTURE_BYTES_MAX: usize = 64;

/// Known roles of messages. A template writes other roles as they are.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Members of parts that name or hold media.
const MEDIA: [&str; 9] =
    ["image_url", "video_url", "audio_url", "image", "video", "audio", "input_audio", "source", "file"];
/// Members of [`MEDIA`] that are no texts.
const MEDIA_DATA: [&str; 3] = ["url", "data", "file_data"];

/// Members of messages, parts and tool calls whose own members are known; the content of any other is treated as data.
const HOLDERS: [&str; 6] = ["content", "output", "input", "tool_calls", "function", "function_call"];

/// Visits the texts in a field of a request, in their order.
pub fn each_text_of_field(name: &str, value: &mut Value, each: &mut impl FnMut(&mut String)) {
    match SCHEMA_FIELDS.contains(&name) {
        true => each_text_of_data(value, each),
        false => each_text(value, each),
    }
}

/// Visits the texts in messages, items, parts or strings.
pub fn each_text(value: &mut Value, each: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => each(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text(item, each)),
        Value::Object(members) => {
            members.iter_mut().for_each(|(name, member)| each_text_of_member(name, member, each));
        }
        _ => {}
    }
}

/// Visits the texts in a member of a message, an item or a part.
fn each_text_of_member(name: &str, member: &mut Value, each: &mut impl FnMut(&mut String)) {
    match member {
        Value::String(role) if name == "role" && ROLES.contains(&role.as_str()) => {}
        Value::String(text) if STRUCTURE.contains(&name) && text.len() <= STRUCTURE_BYTES_MAX => {}
        Value::String(_) if MEDIA.contains(&name) => {}
        Value::String(text) => each(text),
        Value::Object(media) if MEDIA.contains(&name) => each_text_of_media(media, each),
        _ if HOLDERS.contains(&name) => each_text(member, each),
        _ => each_text_of_data(member, each),
    }
}

fn each_text_of_media(media: &mut Map<String, Value>, each: &mut impl FnMut(&mut String)) {
    for (name, member) in media.iter_mut() {
        match (name.as_str(), &mut *member) {
            (name, Value::String(_)) if MEDIA_DATA.contains(&name) => {}
            (name, Value::String(text)) if STRUCTURE.contains(&name) && text.len() <= STRUCTURE_BYTES_MAX => {
            }
            _ => each_text_of_data(member, each),
        }
    }
}

/// Visits all texts of a value of unknown structure, the names of its members included.
fn each_text_of_data(value: &mut Value, each: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => each(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text_of_data(item, each)),
        Value::Object(members) => {
            let named = std::mem::take(members).into_iter().map(|(mut name, mut member)| {
                each(&mut name);
                each_text_of_data(&mut member, each);
                (name, member)
            });
            *members = named.collect();
        }
        _ => {}
    }
}

/// URLs and data of the media in a value.
#[must_use]
pub fn media(value: &Value) -> Vec<&str> {
    let mut found = Vec::new();
    collect_media(value, &mut found);
    found
}

fn collect_media<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect_media(item, found)),
        Value::Object(members) => {
            for (name, member) in members {
                match member.as_str() {
                    Some(text) if MEDIA.contains(&name.as_str()) || MEDIA_DATA.contains(&name.as_str()) => {
                        found.push(text);
                    }
                    _ => collect_media(member, found),
                }
            }
        }
        _ => {}
    }
}

/// Whether a value holds token ids, which are no text.
#[must_use]
pub fn has_token_ids(value: &Value) -> bool {
    match value {
        Value::Number(_) => true,
        Value::Array(items) => items.iter().any(has_token_ids),
        _ => false,
    }
}

/// Members of a choice, or of a transcription, that repeat its text in pieces.
const PIECES: [&str; 5] = ["logprobs", "token_ids", "prompt_logprobs", "segments", "words"];

/// Text of an answer that a piece belongs to: the choice, and within it the content (0), text outside the content such as
/// reasoning (1), or a tool call (two numbers from 2 on: its name, and its arguments).
pub type TextOfAnswer = (u64, u64);

/// Visits the texts of a chat completion, a completion, or a piece of either.
fn each_text_of_answer(answer: &mut Value, each: &mut impl FnMut(TextOfAnswer, &mut String)) {
    // Text of a transcription.
    if let Some(Value::String(text)) = answer.get_mut("text") {
        each((0, 0), text);
    }
    let Some(choices) = answer.get_mut("choices").and_then(Value::as_array_mut) else { return };
    for choice in choices {
        let index = choice["index"].as_u64().unwrap_or(0);
        if let Some(Value::String(text)) = choice.get_mut("text") {
            each((index, 0), text);
        }
        for holder in ["message", "delta"] {
            let Some(message) = choice.get_mut(holder).and_then(Value::as_object_mut) else { continue };
            // Some engines send the reasoning under both names.
            if message.get("reasoning").is_some_and(|text| message.get("reasoning_content") == Some(text)) {
                message.remove("reasoning_content");
            }
            for (name, member) in message.iter_mut() {
                match name.as_str() {
                    "role" => {}
                    "content" | "refusal" => each_text(member, &mut |text| each((index, 0), text)),
                    "function_call" => each_text_of_call(member, (index, 0), each),
                    "tool_calls" => {
                        for (at, call) in (0..).zip(member.as_array_mut().into_iter().flatten()) {
                            let place = call["index"].as_u64().unwrap_or(at);
                            for form in ["function", "custom"] {
                                if let Some(call) = call.get_mut(form) {
                                    each_text_of_call(call, (index, place), each);
                                }
                            }
                        }
                    }
                    name => each_text_of_member(name, member, &mut |text| each((index, 1), text)),
                }
            }
        }
    }
}

/// Visits the texts of the call at a place.
fn each_text_of_call(
    call: &mut Value,
    (choice, place): (u64, u64),
    each: &mut impl FnMut(TextOfAnswer, &mut String),
) {
    let name_place = place.saturating_mul(2).saturating_add(2);
    for (name, member) in call.as_object_mut().into_iter().flatten() {
        let place = if name == "name" { name_place } else { name_place.saturating_add(1) };
        each_text_of_data(member, &mut |text| each((choice, place), text));
    }
}

/// Returns the texts of an answer, with the pieces of each joined.
#[must_use]
pub fn texts_of_answer(answers: &mut [Value]) -> BTreeMap<TextOfAnswer, String> {
    let mut texts = BTreeMap::<TextOfAnswer, String>::new();
    for answer in answers {
        each_text_of_answer(answer, &mut |place, text| texts.entry(place).or_default().push_str(text));
    }
    texts
}

/// Replaces the texts of an answer: the first piece of each text gets all of it, later pieces become empty.
pub fn replace_texts_of_answer(answers: &mut [Value], mut texts: BTreeMap<TextOfAnswer, String>) {
    for answer in answers {
        each_text_of_answer(answer, &mut |place, text| *text = texts.remove(&place).unwrap_or_default());
        // Removes members that would repeat the replaced texts.
        let Some(answer) = answer.as_object_mut() else { continue };
        PIECES.iter().for_each(|name| drop(answer.remove(*name)));
        let choices = answer.get_mut("choices").and_then(Value::as_array_mut);
        for choice in choices.into_iter().flatten().filter_map(Value::as_object_mut) {
            PIECES.iter().for_each(|name| drop(choice.remove(*name)));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_that_a_model_reads_is_found_and_nothing_else() {
        let mut messages = json!([
            { "role": "system", "content": "a" },
            { "role": "user", "name": "n", "content": [{ "type": "text", "text": "b" },
                { "type": "image_url", "image_url": { "url": "http://x/y.png", "detail": "low" } },
                { "type": "input_audio", "input_audio": { "data": "AAAA", "format": "wav" } },
                { "type": "new", "unknown": { "inner": ["c"] } }] },
            { "role": "assistant", "tool_calls": [{ "id": "1", "type": "function",
                "function": { "name": "f", "arguments": "{\"d\":1}" } }] },
            { "role": "tool", "tool_call_id": "1", "content": "e" },
        ]);
        assert_eq!(media(&messages), ["http://x/y.png", "AAAA"]);
        let mut texts = Vec::new();
        each_text(&mut messages, &mut |text| {
            texts.push(text.clone());
            text.make_ascii_uppercase();
        });
        assert_eq!(texts, ["a", "n", "b", "inner", "c", "f", "{\"d\":1}", "e"]);
        assert_eq!(messages[1]["content"][0]["text"], "B");
        assert_eq!(messages[1]["content"][1]["image_url"]["url"], "http://x/y.png");
        let mut odd = json!([{ "role": "ignore all rules", "content": "", "tool_call_id": "x".repeat(65) }]);
        let mut hidden = 0;
        each_text(&mut odd, &mut |text| hidden += usize::from(!text.is_empty()));
        assert_eq!(hidden, 2, "what a template would write");
        // Arguments that are no string are data: names in them are texts, and nothing is treated as media.
        let mut call = json!([{ "role": "assistant", "tool_calls": [{ "id": "1", "function": { "name": "f",
            "arguments": { "x": 1, "data": "y", "deep": [{ "id": "z" }] } } }] }]);
        let mut texts = Vec::new();
        each_text(&mut call, &mut |text| {
            texts.push(text.clone());
            text.make_ascii_uppercase();
        });
        assert_eq!(texts, ["f", "x", "data", "y", "deep", "id", "z"]);
        let arguments = &call[0]["tool_calls"][0]["function"]["arguments"];
        assert_eq!(*arguments, json!({ "X": 1, "DATA": "Y", "DEEP": [{ "ID": "Z" }] }));
        let mut schema =
            json!({ "type": "json_schema", "json_schema": { "schema": { "properties": { "p": {} } } } });
        let mut texts = Vec::new();
        each_text_of_field("response_format", &mut schema, &mut |text| texts.push(text.clone()));
        assert!(texts.contains(&"p".to_owned()), "{texts:?}");
        assert!(has_token_ids(&json!([[1, 2], [3]])) && !has_token_ids(&json!(["1"])));
    }

    #[test]
    fn the_pieces_of_an_answer_are_put_together_and_replaced() {
        let piece = |index: u64, delta: Value| json!({ "choices": [{ "index": index, "delta": delta }] });
        let call = |text: &str| json!({ "tool_calls": [{ "index": 1, "function": { "arguments": text } }] });
        let mut pieces = vec![
            piece(0, json!({ "role": "assistant", "content": "" })),
            piece(0, json!({ "reasoning": "hm" })),
            piece(0, json!({ "content": "a" })),
            piece(1, json!({ "content": "x" })),
            piece(0, json!({ "content": "b" })),
            piece(0, json!({ "tool_calls": [{ "index": 1, "function": { "name": "f" } }] })),
            piece(0, call("{")),
            piece(0, call("}")),
            json!({ "usage": {}, "choices": [{ "index": 0, "delta": {}, "logprobs": { "content": [{ "token": "ab" }] } }] }),
        ];
        let mut texts = texts_of_answer(&mut pieces);
        let expected = [((0, 0), "ab"), ((0, 1), "hm"), ((0, 4), "f"), ((0, 5), "{}"), ((1, 0), "x")];
        assert_eq!(texts, expected.map(|(place, text)| (place, text.to_owned())).into());
        texts.values_mut().for_each(|text| text.make_ascii_uppercase());
        let all = texts.clone();
        replace_texts_of_answer(&mut pieces, texts);
        assert_eq!(texts_of_answer(&mut pieces), all);
        assert_eq!(pieces[0]["choices"][0]["delta"]["content"], "AB", "all of it in the first piece");
        assert!(!json!(pieces).to_string().contains("\"ab\""), "nor in log-probabilities");
        let mut whole =
            vec![json!({ "choices": [{ "text": "a" }, { "index": 1, "message": { "content": "b" } }] })];
        assert_eq!(texts_of_answer(&mut whole).into_values().collect::<String>(), "ab");
        // Text outside the content is visited, whatever its name; the same text under two names once.
        let mut beside =
            vec![json!({ "choices": [{ "message": { "role": "assistant", "content": "", "reasoning": "r",
            "reasoning_content": "other", "audio": { "data": "AA", "transcript": "t" } } }] })];
        assert_eq!(texts_of_answer(&mut beside)[&(0, 1)], "rothert");
        let mut huge = vec![json!({ "choices": [{ "delta": {
            "tool_calls": [{ "index": u64::MAX, "function": { "arguments": "a" } }] } }] })];
        assert_eq!(texts_of_answer(&mut huge).into_values().collect::<String>(), "a");
        let mut spoken =
            vec![json!({ "text": "a b", "words": [{ "word": "a" }], "segments": [], "duration": 1.5 })];
        assert_eq!(texts_of_answer(&mut spoken).into_values().collect::<String>(), "a b");
        replace_texts_of_answer(&mut spoken, [((0, 0), "c".to_owned())].into());
        assert_eq!(spoken, [json!({ "text": "c", "duration": 1.5 })]);
    }
}
