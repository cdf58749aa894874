//! Writes example translations into a folder, for `tests/client/surface_types.py` to hold against the official clients.
//!
//!     cargo run -p router-surfaces --example samples -- /tmp/samples

use std::fs;
use std::path::Path;

use router_openai::{anthropic, responses};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let folder = std::env::args().nth(1).ok_or("which folder?")?;
    let folder = Path::new(&folder);
    fs::create_dir_all(folder)?;
    for (name, message, finish) in cases() {
        write(folder, name, &message, finish)?;
    }
    let count = anthropic::count_answer(14).to_string();
    fs::write(folder.join("anthropic_count.json"), count)?;
    let status = http::StatusCode::NOT_FOUND;
    fs::write(
        folder.join("anthropic_error.json"),
        anthropic::error_body(status, "No such model.").to_string(),
    )?;
    failures(folder)
}

/// A message of the assistant and why it ended.
fn cases() -> Vec<(&'static str, Value, Value)> {
    let call = |id: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": "weather", "arguments": arguments } });
    let calls = json!([call("call_1", "{\"city\": \"Bergen\"}"), call("call_2", "{}")]);
    let said = "Grüße, \"world\"\n😀";
    let stop = |reason: &str| json!({ "finish_reason": reason });
    vec![
        ("text", json!({ "content": said }), stop("stop")),
        ("cut", json!({ "content": said }), stop("length")),
        ("sequence", json!({ "content": said }), json!({ "finish_reason": "stop", "stop_reason": "END" })),
        ("empty", json!({ "content": "" }), stop("stop")),
        ("thinking", json!({ "content": said, "reasoning": "Let me see." }), stop("stop")),
        ("tools", json!({ "content": null, "tool_calls": calls }), stop("tool_calls")),
        (
            "all",
            json!({ "content": said, "reasoning_content": "Hm.", "tool_calls": calls }),
            stop("tool_calls"),
        ),
    ]
}

fn request() -> Value {
    json!({
        "model": "tiny", "max_tokens": 64, "messages": [{ "role": "user", "content": "Hi" }], "input": "Hi",
        "tools": [{ "type": "function", "name": "weather", "parameters": { "type": "object" } }],
        "thinking": { "type": "adaptive" }, "metadata": { "a": "b" }, "temperature": 0.5, "max_output_tokens": 64, "instructions": "Be brief.",
    })
}

fn usage() -> Value {
    json!({ "prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27,
            "prompt_tokens_details": { "cached_tokens": 16 } })
}

fn write(folder: &Path, name: &str, message: &Value, ending: Value) -> Result<(), Failure> {
    let mut choice = ending.clone();
    choice["index"] = 0.into();
    choice["message"] = message.clone();
    let answer = json!({ "id": "chatcmpl-7f", "object": "chat.completion", "created": 1_795_277_147, "model": "tiny",
                         "choices": [choice], "usage": usage() });
    let request = request();
    let (messages, response) = (anthropic::Facts::of(&request), responses::Facts::of(&request));
    let save = |surface: &str, kind: &str, text: String| {
        fs::write(folder.join(format!("{surface}_{name}.{kind}")), text)
    };
    save("chat", "json", answer.to_string())?;
    save("anthropic", "json", anthropic::from_chat(&answer, &messages).to_string())?;
    save("responses", "json", responses::from_chat(&answer, &response).to_string())?;
    let (mut first, mut second) = (anthropic::Stream::new(messages), responses::Stream::new(response));
    let (mut first_out, mut second_out) = (String::new(), String::new());
    for chunk in chunks(message, &ending) {
        first.event(&chunk, &mut first_out);
        second.event(&chunk, &mut second_out);
    }
    first.end(&mut first_out);
    second.end(&mut second_out);
    save("anthropic", "sse", first_out)?;
    save("responses", "sse", second_out)?;
    Ok(())
}

/// A message as an engine streams it: texts by the character, calls head first.
fn chunks(message: &Value, ending: &Value) -> Vec<Value> {
    let mut deltas = vec![json!({ "role": "assistant", "content": "" })];
    for field in ["reasoning", "reasoning_content", "content"] {
        let text = message[field].as_str().unwrap_or_default();
        deltas.extend(text.chars().map(|letter| json!({ field: letter.to_string() })));
    }
    for (index, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
        let head = json!({ "name": call["function"]["name"], "arguments": "" });
        deltas.push(json!({ "tool_calls": [{ "index": index, "id": call["id"], "function": head }] }));
        let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
        deltas.extend(arguments.chars().map(|letter| {
            json!({ "tool_calls": [{ "index": index, "function": { "arguments": letter.to_string() } }] })
        }));
    }
    let chunk = |choices: Value| json!({ "id": "chatcmpl-7f", "created": 1_795_277_147, "choices": choices });
    let mut chunks: Vec<Value> =
        deltas.iter().map(|delta| chunk(json!([{ "delta": delta, "finish_reason": null }]))).collect();
    let mut last = ending.clone();
    last["delta"] = json!({});
    chunks.push(chunk(json!([last])));
    let mut counts = chunk(json!([]));
    counts["usage"] = usage();
    chunks.push(counts);
    chunks
}

/// Streams that break off.
fn failures(folder: &Path) -> Result<(), Failure> {
    let error = json!({ "error": { "message": "The engine died.", "type": "server_error", "code": 503 } });
    let piece = json!({ "id": "chatcmpl-7f", "choices": [{ "delta": { "content": "Hi" } }] });
    let (mut first, mut second) = (
        anthropic::Stream::new(anthropic::Facts::of(&request())),
        responses::Stream::new(responses::Facts::of(&request())),
    );
    let (mut first_out, mut second_out) = (String::new(), String::new());
    first.event(&piece, &mut first_out);
    second.event(&piece, &mut second_out);
    first.error(&error, &mut first_out);
    second.error(&error, &mut second_out);
    fs::write(folder.join("anthropic_failed.stream"), first_out)?;
    fs::write(folder.join("responses_failed.stream"), second_out)?;
    Ok(())
}
