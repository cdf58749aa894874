//! Outputs that match a JSON schema: `response_format`, forced tool calls, resumed answers. The model's
//! weights are random, so that only the grammar makes the outputs valid.

use crate::support::{Cluster, Events, MODEL, open, post_json, prompt};
use serde_json::{Value, json};

fn place_schema() -> Value {
    json!({
        "type": "object", "properties": {
            "city": {"enum": ["Köln", "Paris"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        }, "required": ["city", "stars"], "additionalProperties": false,
    })
}

fn assert_is_place(text: &Value) {
    let place: Value = serde_json::from_str(text.as_str().expect("a text")).expect("JSON");
    let members = place.as_object().expect("an object");
    assert!(members.len() == 2 && ["Köln", "Paris"].map(Value::from).contains(&members["city"]), "{place}");
    assert!(members["stars"].as_i64().is_some_and(|stars| (1..=5).contains(&stars)), "{place}");
}

#[test]
fn answers_follow_their_schemas_on_every_surface() {
    let cluster = Cluster::start("schemas", &["both"], "");
    let format = json!({"type": "json_schema", "json_schema": {"name": "place", "schema": place_schema()}});
    for seed in 0..5 {
        let body = json!({"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 200, "seed": seed,
            "min_tokens": 150, "n": 2, "response_format": format});
        let (status, answer) = post_json(&cluster.gateway.address, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        for choice in answer["choices"].as_array().expect("choices") {
            assert_eq!(choice["finish_reason"], "stop", "{answer}");
            assert_is_place(&choice["message"]["content"]);
        }
    }
    let body = json!({"prompt": "Where?", "max_tokens": 200, "response_format": format});
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["choices"][0]["text"]);
    let body = json!({"model": MODEL, "input": "Where?", "max_output_tokens": 200,
        "text": {"format": {"type": "json_schema", "name": "place", "schema": place_schema()}}});
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/responses", &body);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["output"][0]["content"][0]["text"]);
    let body = json!({"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Where?"}],
        "output_config": {"format": {"type": "json_schema", "schema": place_schema()}}});
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/messages", &body);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["content"][0]["text"]);
    for schema in [json!(5), json!({"type": "object", "properties": 5}), json!({"type": "nothing"})] {
        let body = json!({"messages": [{"role": "user", "content": "Where?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}});
        let (status, answer) = post_json(&cluster.gateway.address, "/v1/chat/completions", &body);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("response_format")), "{answer}");
    }
}

fn unit_schema() -> Value {
    json!({"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"],
        "additionalProperties": false})
}

fn forced(choice: Value, seed: u64) -> Value {
    let tool =
        |name: &str| json!({"type": "function", "function": {"name": name, "parameters": unit_schema()}});
    json!({"messages": [{"role": "user", "content": "How warm?"}], "max_tokens": 300, "seed": seed,
        "tools": [tool("inside"), tool("outside")], "tool_choice": choice, "parallel_tool_calls": false})
}

fn assert_is_unit(arguments: &Value) {
    let arguments: Value = serde_json::from_str(arguments.as_str().expect("a text")).expect("JSON");
    assert!(arguments == json!({"unit": "c"}) || arguments == json!({"unit": "f"}), "{arguments}");
}

#[test]
fn forced_tools_are_called() {
    let cluster = Cluster::start("forced", &["both"], "");
    let address = &cluster.gateway.address;
    for seed in 0..4 {
        let (status, answer) = post_json(address, "/v1/chat/completions", &forced("required".into(), seed));
        let choice = &answer["choices"][0];
        assert_eq!((status, &choice["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
        let calls = choice["message"]["tool_calls"].as_array().expect("calls");
        let name = calls[0]["function"]["name"].as_str();
        assert!(calls.len() == 1 && matches!(name, Some("inside" | "outside")), "{answer}");
        assert_is_unit(&calls[0]["function"]["arguments"]);
        let named = json!({"type": "function", "function": {"name": "outside"}});
        let (status, answer) = post_json(address, "/v1/chat/completions", &forced(named, seed));
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!((status, &call["name"]), (200, &json!("outside")), "{answer}");
        assert_is_unit(&call["arguments"]);
    }
    let message = json!({"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "How warm?"}],
        "tools": [{"name": "inside", "input_schema": unit_schema()}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let (status, answer) = post_json(address, "/v1/messages", &message);
    assert_eq!((status, &answer["stop_reason"]), (200, &json!("tool_use")), "{answer}");
    let call = &answer["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("inside")), "{answer}");
    let response = json!({"model": MODEL, "max_output_tokens": 300, "input": "How warm?",
        "tools": [{"type": "function", "name": "inside", "parameters": unit_schema()}], "tool_choice": "required",
        "parallel_tool_calls": false});
    let (status, answer) = post_json(address, "/v1/responses", &response);
    assert_eq!(status, 200, "{answer}");
    let call = &answer["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("inside")), "{answer}");
    assert_is_unit(&call["arguments"]);
}

#[test]
fn a_forced_call_is_streamed_as_a_call() {
    let cluster = Cluster::start("forced-stream", &["both"], "");
    let mut body = forced("required".into(), 9);
    body["stream"] = true.into();
    let stream = open(&cluster.gateway.address, "/v1/chat/completions", &body).expect("a connection");
    let mut events = Events::new(stream);
    assert!(events.head().starts_with("HTTP/1.1 200"));
    let (mut arguments, mut finish) = (String::new(), Value::Null);
    while let Some(data) = events.next_data().filter(|data| data != "[DONE]") {
        let event: Value = serde_json::from_str(&data).expect("JSON");
        let delta = &event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"];
        arguments.push_str(delta.as_str().unwrap_or_default());
        if event["choices"][0]["finish_reason"].is_string() {
            finish = event["choices"][0]["finish_reason"].clone();
        }
    }
    assert_eq!(finish, "tool_calls");
    assert_is_unit(&arguments.into());
}

#[test]
fn a_call_that_cannot_be_forced_names_the_field() {
    let cluster = Cluster::start("forced-errors", &["both"], "");
    let mut bad = forced("required".into(), 0);
    bad["tools"][0]["function"]["parameters"] =
        json!({"type": "object", "properties": {"a": {"type": "no"}}});
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/chat/completions", &bad);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")), "{answer}");
    bad["tools"] = json!([]);
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/chat/completions", &bad);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tool_choice")), "{answer}");
}

/// This grammar needs more states than allowed: the output ends there, and the engine stays healthy.
#[test]
fn a_grammar_that_grows_too_large_ends_its_output_only() {
    let cluster = Cluster::start("large", &["both"], "");
    let pattern = format!(
        "^({}){{200}}$",
        (0..24).map(|at| format!("(a|b)*a(a|b){{{at}}}")).collect::<Vec<_>>().join("|")
    );
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "pattern": pattern}}});
    let body = json!({"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 300, "response_format": format});
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/chat/completions", &body);
    let finish = &answer["choices"][0]["finish_reason"];
    assert!(
        (status == 200 && (finish == "length"))
            || (status == 400 && answer["error"]["param"] == "response_format"),
        "{answer}"
    );
    cluster.wait_ready(1);
    let plain = json!({"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 5});
    let (status, answer) = post_json(&cluster.gateway.address, "/v1/chat/completions", &plain);
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_resumed_answer_stays_within_its_schema() {
    let cluster = Cluster::start("resumed", &["both"], "");
    let resume = |prompt: &[u32], resumed: usize| {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 200, "seed": 11, "return_token_ids": true,
            "structured_outputs": {"json": place_schema()}, "vllm_xargs": {"kvasir_resumed_tokens": resumed}});
        // Queries the worker directly: a gateway reports this only for answers that it resumes.
        let (status, answer) = post_json(&cluster.workers[0].address, "/v1/completions", &body);
        let ids: Vec<u32> =
            serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap_or_default();
        (status, ids, answer)
    };
    let start = prompt(3, 40);
    let (status, whole, answer) = resume(&start, 0);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["choices"][0]["text"]);
    for at in [1, 5, whole.len() - 1] {
        let so_far: Vec<u32> = start.iter().chain(&whole[..at]).copied().collect();
        let (status, rest, answer) = resume(&so_far, at);
        assert_eq!((status, rest.as_slice()), (200, &whole[at..]), "behind {at} tokens: {answer}");
    }
    let (status, _, answer) = resume(&start, 40);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("vllm_xargs")), "{answer}");
}
