//! Questions with the answers of an engine without faults, which are the reference for every token.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use router_tokens::ModelText;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tools_mocker::{Mock, MockConfig};

use crate::model::MODEL_NAME;

/// Number of conversations of the clients.
pub(crate) const CONVERSATIONS: usize = 16;
/// Turns of each conversation.
pub(crate) const TURNS: usize = 3;
/// Most tokens of an answer, by turn.
const ANSWER_TOKENS: [usize; TURNS] = [12, 24, 40];

/// Folder of the model, within the folder of a run.
pub(crate) const MODEL: &str = "model";

/// One question with its answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Exchange {
    pub(crate) messages: Value,
    pub(crate) tokens_max: usize,
    pub(crate) answer: String,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) finish_reason: String,
    /// Tokens of the prompt and of the answer.
    pub(crate) tokens: Vec<u32>,
}

/// All exchanges, for each kind of engine.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Catalog {
    /// Answers of mock engines: `mocks[conversation][turn]`.
    pub(crate) mocks: Vec<Vec<Exchange>>,
    /// Answers of the reference engine.
    pub(crate) workers: Vec<Vec<Exchange>>,
}

/// Returns the configuration that all mock engines share.
pub(crate) fn engine_config() -> Result<MockConfig> {
    // If an output sometimes ends by itself, its continuations end as well.
    let tokenizer = ModelText::from_folder(Path::new(MODEL)).context("the model's folder")?;
    Ok(MockConfig { eos_one_in: 64, tokenizer, ..MockConfig::tiny()? })
}

fn first_message(conversation: usize) -> String {
    // Two in four share their prefix with another conversation, so that conversations have blocks in common.
    let shared = ["alpha ", "beta ", "gamma ", "delta "][conversation % 4];
    format!(
        "{} Question {conversation}: {}?",
        shared.repeat(8 + conversation % 3),
        "why ".repeat(conversation * 5 % 37)
    )
}

/// Asks engines without faults every question, on the real system, in a process that exits afterwards.
pub(crate) fn build() -> Result<Catalog> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mock = Mock::start(engine_config()?, "127.0.0.1:0".parse()?).await?;
        let mocks = ask_all(mock.address()).await?;
        let address = start_worker().await?;
        Ok(Catalog { mocks, workers: ask_all(address).await? })
    })
}

/// Starts a worker with the reference engine, without peers and tiers.
async fn start_worker() -> Result<SocketAddr> {
    let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    std::fs::write(
        "reference.toml",
        format!(
            "[engine]\nmodel_name = \"{MODEL_NAME}\"\nmodel_folder = \"{MODEL}\"\nthreads = 1\n[worker]\nlisten = \"{address}\"\n\
             events = \"127.0.0.1:0\"\nreplay = \"127.0.0.1:0\"\n[host_tier]\ncapacity = \"0 B\"\n\
             [transfer]\ntransport = \"tcp\"\nhuge_pages = false\n"
        ),
    )?;
    std::thread::spawn(|| {
        control_node::run(["kvasir", "worker", "--role", "both", "--config", "reference.toml"])
    });
    for _ in 0..600 {
        if TcpStream::connect(address).await.is_ok() {
            return Ok(address);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("the reference engine does not start")
}

async fn ask_all(address: SocketAddr) -> Result<Vec<Vec<Exchange>>> {
    let model = ModelText::from_folder(Path::new(MODEL)).context("the model's folder")?;
    let mut all = Vec::new();
    for conversation in 0..CONVERSATIONS {
        let mut messages = json!([{"role": "user", "content": first_message(conversation)}]);
        let mut turns = Vec::new();
        for (turn, tokens_max) in ANSWER_TOKENS.into_iter().enumerate() {
            let exchange = ask(address, &model, &messages, tokens_max).await?;
            if let Some(list) = messages.as_array_mut() {
                list.push(json!({"role": "assistant", "content": exchange.answer}));
                list.push(json!({"role": "user", "content": format!("And then, {turn}? Go on.")}));
            }
            turns.push(exchange);
        }
        all.push(turns);
    }
    Ok(all)
}

async fn ask(
    address: SocketAddr,
    model: &ModelText,
    messages: &Value,
    tokens_max: usize,
) -> Result<Exchange> {
    let body = json!({"model": MODEL_NAME, "messages": messages, "max_tokens": tokens_max, "temperature": 0})
        .to_string();
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: reference\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let text = String::from_utf8(answer)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "the reference refuses: {text}");
    let answer: Value = serde_json::from_str(body)?;
    let choice = &answer["choices"][0];
    let usage = |name: &str| answer["usage"][name].as_u64().context("usage");
    let text = choice["message"]["content"].as_str().context("no text")?;
    let prompt_tokens = usage("prompt_tokens")?;
    let mut tokens = model.encode_conversation(messages.clone(), true, false, &Map::new())?.ids;
    ensure!(
        tokens.len() as u64 == prompt_tokens,
        "{} tokens, of which the reference counts {prompt_tokens}",
        tokens.len()
    );
    tokens.extend(model.tokenizer.encode(text, false)?);
    Ok(Exchange {
        messages: messages.clone(),
        tokens_max,
        answer: text.to_owned(),
        prompt_tokens,
        tokens,
        completion_tokens: usage("completion_tokens")?,
        finish_reason: choice["finish_reason"].as_str().context("no finish_reason")?.to_owned(),
    })
}
