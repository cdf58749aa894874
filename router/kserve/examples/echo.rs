//! A service whose only model, `echo`, repeats the words of the prompt until `max_tokens`.
//!
//!     cargo run -p router-kserve --example echo -- 127.0.0.1:8001

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::{HeaderMap, Response};
use router_kserve::{Answer, Backend, Call, Config, serve};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// Time per token.
const TOKEN_TIME: Duration = Duration::from_millis(2);

struct Echo;

fn answer(status: u16, kind: &str, body: Body) -> Answer {
    let response = Response::builder().status(status).header("content-type", kind).body(body);
    response.unwrap_or_else(|_| Response::new(Body::empty()))
}

/// Returns the texts of the tokens, each a word.
fn words(prompt: &str, count: usize) -> Vec<String> {
    prompt.split_whitespace().cycle().take(count).map(|word| format!("{word} ")).collect()
}

fn whole(body: &Value, count: usize) -> Answer {
    let prompts = body["prompt"].as_array().cloned().unwrap_or_else(|| vec![body["prompt"].clone()]);
    let texts = prompts.iter().map(|prompt| words(prompt.as_str().unwrap_or_default(), count).concat());
    let choices: Vec<Value> = texts
        .enumerate()
        .map(|(index, text)| json!({ "index": index, "text": text, "finish_reason": "length", "logprobs": null }))
        .collect();
    let usage = json!({ "prompt_tokens": 1, "completion_tokens": count * prompts.len() });
    answer(200, "application/json", Body::from(json!({ "choices": choices, "usage": usage }).to_string()))
}

fn pieces(body: &Value, count: usize) -> Answer {
    let words = words(body["prompt"].as_str().unwrap_or_default(), count);
    let last = words.len().saturating_sub(1);
    let chunks = words.into_iter().enumerate().map(move |(index, text)| {
        let finish_reason = if index == last { json!("length") } else { Value::Null };
        let chunk = json!({ "choices": [{ "index": 0, "text": text, "finish_reason": finish_reason }] });
        format!("data: {chunk}\n\n")
    });
    let chunks = stream::iter(chunks.chain(["data: [DONE]\n\n".to_owned()])).then(|chunk| async {
        tokio::time::sleep(TOKEN_TIME).await;
        Ok::<_, Infallible>(Bytes::from(chunk))
    });
    answer(200, "text/event-stream", Body::from_stream(chunks))
}

impl Backend for Echo {
    fn admits(&self, _headers: &HeaderMap) -> Result<(), (http::StatusCode, String)> {
        Ok(())
    }

    fn is_live(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        true
    }

    async fn models(&self, _headers: HeaderMap) -> Answer {
        answer(200, "application/json", Body::from(json!({ "data": [{ "id": "echo" }] }).to_string()))
    }

    async fn completions(&self, call: Call) -> Answer {
        let body: Value = serde_json::from_slice(&call.body).unwrap_or_default();
        let count = body["max_tokens"].as_u64().unwrap_or(16);
        if body["model"] != "echo" {
            let error = json!({ "error": { "message": "there is no such model", "code": 404 } });
            return answer(404, "application/json", Body::from(error.to_string()));
        }
        let count = usize::try_from(count).unwrap_or(16);
        if body["stream"] == true {
            return pieces(&body, count);
        }
        tokio::time::sleep(TOKEN_TIME.saturating_mul(u32::try_from(count).unwrap_or(16))).await;
        whole(&body, count)
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8001".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    serve(listener, Arc::new(Echo), Config::default(), async {
        let _ = tokio::signal::ctrl_c().await;
    })
    .await;
    Ok(())
}
