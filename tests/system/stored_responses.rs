//! Responses and conversations in the gateway's database: continuation, ownership, and survival of a restart
//! of the gateway's process.

use crate::support::site::{Site, mock, official_client};
use crate::support::{Process, Scratch, client, raw, wait_for};
use serde_json::{Value, json};
use tools_mocker::{Dialect, MockConfig, Role};

fn asked(gateway: &Process, key: Option<&str>, path: &str, body: Option<&Value>) -> (u16, Value) {
    let (status, _, text) = client(&gateway.address, key, path, body);
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

fn deleted(gateway: &Process, key: Option<&str>, path: &str) -> String {
    let authorization = key.map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
    let request = format!("DELETE {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{authorization}\r\n");
    raw(&gateway.address, &request)
}

fn text(response: &Value) -> &str {
    let last = response["output"].as_array().and_then(|output| output.last());
    last.and_then(|item| item["content"][0]["text"].as_str()).unwrap_or_else(|| panic!("{response}"))
}

/// Creates a folder for a database, and the configuration that names it.
fn database(name: &str) -> (Scratch, String) {
    let scratch = Scratch::new(&format!("{name}-database"));
    let file = scratch.0.join("documents.redb").display().to_string();
    let config = format!("[database]\nfile = {file:?}\n");
    (scratch, config)
}

fn turn(input: &Value, extra: &Value) -> Value {
    let mut request = json!({ "input": input, "max_output_tokens": 8, "model": "tiny" });
    for (name, value) in extra.as_object().expect("an object") {
        request[name] = value.clone();
    }
    request
}

#[test]
fn the_official_client_finds_what_it_stored() {
    let (_folder, config) = database("stored-client");
    let tiny = || MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    let site = Site::start("stored-client", vec![tiny()], &["--worker"], &config);
    official_client("responses_client.py", &site.gateway, 7);
}

#[test]
fn a_response_outlives_the_gateway_and_is_its_tenants_alone() {
    let (folder, config) = database("stored");
    let [alice, bob] = ["alice", "bob"].map(|name| router_access::new_key(name, name).expect("a key"));
    let keys = folder.config("keys.toml", &format!("{}\n{}\n", alice.lines, bob.lines));
    let config = format!("{config}[access]\nkeys_file = {keys:?}\n");
    let mock = || MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    let mut site = Site::start("stored", vec![mock()], &["--worker"], &config);
    let (alice, bob) = (Some(alice.secret.as_str()), Some(bob.secret.as_str()));

    let (status, first) =
        asked(&site.gateway, alice, "/v1/responses", Some(&turn(&json!("Hello"), &json!({}))));
    assert_eq!((status, &first["store"]), (200, &json!(true)), "{first}");
    let id = first["id"].as_str().expect("an id").to_owned();
    let path = format!("/v1/responses/{id}");
    for bad in ["limit=x", "limit=0", "order=up", "after=nobody"] {
        let (status, refused) = asked(&site.gateway, alice, &format!("{path}/input_items?{bad}"), None);
        assert_eq!(status, 400, "{bad}: {refused}");
    }

    site.gateway.stop();
    site.gateway.restart();
    wait_for("the gateway", || site.ready() == 1);
    assert_eq!(asked(&site.gateway, alice, &path, None), (200, first.clone()));
    let on = turn(&json!("Why?"), &json!({ "previous_response_id": id }));
    let whole = turn(
        &json!([{ "role": "user", "content": "Hello" }, { "role": "assistant", "content": text(&first) },
            { "role": "user", "content": "Why?" }]),
        &json!({ "store": false }),
    );
    let (status, second) = asked(&site.gateway, alice, "/v1/responses", Some(&on));
    let (_, expected) = asked(&site.gateway, alice, "/v1/responses", Some(&whole));
    assert_eq!((status, text(&second)), (200, text(&expected)), "{second}");
    assert_eq!(second["usage"]["input_tokens"], expected["usage"]["input_tokens"]);

    // Another tenant can neither see it, nor continue it, nor delete it.
    assert_eq!(asked(&site.gateway, bob, &path, None).0, 404);
    assert_eq!(asked(&site.gateway, bob, &format!("{path}/input_items"), None).0, 404);
    let (status, refused) = asked(&site.gateway, bob, "/v1/responses", Some(&on));
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("previous_response_not_found")));
    assert!(deleted(&site.gateway, bob, &path).starts_with("HTTP/1.1 404"));
    let (_, talk) = asked(&site.gateway, alice, "/v1/conversations", Some(&json!({})));
    let talk = format!("/v1/conversations/{}", talk["id"].as_str().expect("an id"));
    assert_eq!(asked(&site.gateway, bob, &talk, None).0, 404);
    let more = json!({ "items": [{ "role": "user", "content": "x" }] });
    assert_eq!(asked(&site.gateway, bob, &format!("{talk}/items"), Some(&more)).0, 404);
    assert_eq!(asked(&site.gateway, None, &path, None).0, 401);
    assert_eq!(asked(&site.gateway, alice, &path, None).0, 200, "still there");
    assert!(deleted(&site.gateway, alice, &path).starts_with("HTTP/1.1 200"));
    assert_eq!(asked(&site.gateway, alice, &path, None).0, 404);

    // Assembled input is checked like input of a single request, and errors name the client's own fields.
    let link = json!([{ "role": "user", "content": [{ "type": "input_image", "image_url": "http://10.0.0.1/x.png" }] }]);
    for conversation in [json!({}), json!({ "items": [{ "role": "user", "content": "Hello" }] })] {
        let (_, talk) = asked(&site.gateway, alice, "/v1/conversations", Some(&conversation));
        let request = turn(&link, &json!({ "conversation": talk["id"] }));
        let (status, refused) = asked(&site.gateway, alice, "/v1/responses", Some(&request));
        assert_eq!(status, 400, "{refused}");
        assert!(
            refused["error"]["param"].as_str().is_some_and(|param| param.starts_with("input[0]")),
            "{refused}"
        );
        let items = format!("/v1/conversations/{}/items", talk["id"].as_str().expect("an id"));
        let (status, _) = asked(&site.gateway, alice, &items, Some(&json!({ "items": link })));
        assert_eq!(status, 200, "an item is no request");
        let request = turn(&json!("What is it?"), &json!({ "conversation": talk["id"] }));
        let (status, refused) = asked(&site.gateway, alice, "/v1/responses", Some(&request));
        assert_eq!(status, 400, "{refused}");
    }
}

#[test]
fn a_tenant_stores_no_more_than_it_may() {
    let (_folder, config) = database("stored-room");
    let config = format!("{config}tenant_bytes_max = \"1MiB\"\n");
    let mock = MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    let site = Site::start("stored-room", vec![mock], &["--worker"], &config);
    // Not an even part of the space: a little is left, too little for the next one.
    let item = json!({ "items": [{ "role": "user", "content": "word ".repeat(52_000) }] });
    let conversations: Vec<u16> =
        (0..5).map(|_| asked(&site.gateway, None, "/v1/conversations", Some(&item)).0).collect();
    assert_eq!(conversations, [200, 200, 200, 200, 507]);
    let (_, refused) = asked(&site.gateway, None, "/v1/conversations", Some(&item));
    assert_eq!(refused["error"]["code"], "storage_full", "{refused}");
    let mut stored = Vec::new();
    for _ in 0..3 {
        let request = turn(&json!("x ".repeat(4000)), &json!({}));
        let (status, response) = asked(&site.gateway, None, "/v1/responses", Some(&request));
        assert_eq!(status, 200, "{response}");
        // The response states whether it was stored, and a later query of the gateway agrees.
        let id = response["id"].as_str().expect("an id");
        let is_stored = response["store"] == true;
        let (status, _) = asked(&site.gateway, None, &format!("/v1/responses/{id}"), None);
        assert_eq!(status == 200, is_stored);
        stored.push(is_stored);
    }
    assert_eq!(stored.last(), Some(&false), "{stored:?}");
    let refused = stored.iter().filter(|is_stored| !**is_stored).count();
    assert_eq!(site.gateway.metric("kvasir_gateway_not_stored_total"), refused as f64);
    let bytes = site.gateway.metric("kvasir_gateway_stored_bytes");
    assert!((1_000_000.0..=1_048_576.0).contains(&bytes), "{bytes}");
}

/// Each change of a conversation writes the whole conversation.
#[test]
fn a_conversation_is_no_larger_than_its_changes_can_write() {
    let (_folder, config) = database("stored-large");
    let mock = MockConfig {
        eos_one_in: 0,
        context_tokens: 2 << 20,
        blocks: 1 << 18,
        ..MockConfig::tiny().expect("a configuration")
    };
    let site = Site::start("stored-large", vec![mock], &["--worker"], &config);
    let items = |bytes: usize| json!({ "items": [{ "role": "user", "content": "x".repeat(bytes) }] });
    assert_eq!(asked(&site.gateway, None, "/v1/conversations", Some(&items(1 << 20))).0, 413);
    let (status, made) = asked(&site.gateway, None, "/v1/conversations", Some(&items(600_000)));
    assert_eq!(status, 200, "{made}");
    let id = made["id"].as_str().expect("an id");
    let (status, refused) =
        asked(&site.gateway, None, &format!("/v1/conversations/{id}/items"), Some(&items(600_000)));
    assert_eq!((status, &refused["error"]["code"]), (413, &json!("conversation_too_large")));
    // A response that does not fit in the database reports that it is not stored.
    let request = turn(&json!("y".repeat(600_000)), &json!({ "conversation": id, "max_output_tokens": 2 }));
    let (status, response) = asked(&site.gateway, None, "/v1/responses", Some(&request));
    assert_eq!((status, &response["store"]), (200, &json!(false)), "{}", &response.to_string()[..200]);
    let (_, kept) = asked(&site.gateway, None, &format!("/v1/conversations/{id}/items"), None);
    assert_eq!(kept["data"].as_array().map(Vec::len), Some(1));
}

#[test]
fn without_a_database_nothing_is_stored() {
    let site = Site::start("stored-not", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let (_, models) = asked(&site.gateway, None, "/v1/models", None);
    let request = json!({ "model": models["data"][0]["id"], "input": "Hello", "max_output_tokens": 4 });
    let (status, response) = asked(&site.gateway, None, "/v1/responses", Some(&request));
    assert_eq!((status, &response["store"]), (200, &json!(false)), "{response}");
    for field in ["previous_response_id", "conversation"] {
        let mut request = request.clone();
        request[field] = "x_1".into();
        let (status, refused) = asked(&site.gateway, None, "/v1/responses", Some(&request));
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(field)));
    }
    let id = response["id"].as_str().expect("an id");
    assert_eq!(asked(&site.gateway, None, &format!("/v1/responses/{id}"), None).0, 501);
    assert_eq!(asked(&site.gateway, None, "/v1/conversations", Some(&json!({}))).0, 501);
}
