//! `/v1/audio/transcriptions` and `/v1/audio/translations`: the transcript describes the request, so that
//! clients can check it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::iter;

use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use hyper::Response;
use serde_json::{Value, json};

use super::answer::Payload;
use super::refusal::Refusal;
use super::reply;
use crate::worker::Worker;

/// Bytes per second of audio: 16-bit samples at 16 kHz.
const BYTES_PER_SECOND: usize = 32_000;

struct Form {
    fields: BTreeMap<String, String>,
    filename: String,
    content_type: String,
    bytes: usize,
    sum: u64,
}

async fn read(headers: &HeaderMap, body: &[u8]) -> Result<Form, Refusal> {
    let bad = |error: multer::Error| Refusal::bad("body", error.to_string());
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind).map_err(bad)?;
    let whole = stream::iter(iter::once(Ok::<_, Infallible>(Bytes::copy_from_slice(body))));
    let mut parts = multer::Multipart::new(whole, boundary);
    let (mut fields, mut file) = (BTreeMap::<String, String>::new(), None);
    while let Some(part) = parts.next_field().await.map_err(bad)? {
        let name = part.name().unwrap_or_default().to_owned();
        let filename = part.file_name().map(str::to_owned);
        let content_type = part.content_type().map(ToString::to_string).unwrap_or_default();
        let bytes = part.bytes().await.map_err(bad)?;
        match filename {
            Some(filename) if name == "file" => {
                let sum = bytes.iter().map(|&byte| u64::from(byte)).sum();
                file = Some((filename, content_type, bytes.len(), sum));
            }
            _ => {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let value = fields.entry(name).or_default();
                *value = if value.is_empty() { text } else { format!("{value}+{text}") };
            }
        }
    }
    let (filename, content_type, bytes, sum) = file.ok_or_else(|| Refusal::missing("file"))?;
    Ok(Form { fields, filename, content_type, bytes, sum })
}

pub(super) async fn transcribe(
    worker: &Worker,
    path: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response<Payload>, Refusal> {
    let Form { mut fields, filename, content_type, bytes, sum } = read(headers, body).await?;
    let model = fields.remove("model").unwrap_or_default();
    if !model.is_empty() && model != worker.config.model {
        return Err(Refusal::no_such_model(&model, &worker.config.model));
    }
    let streams = fields.remove("stream").is_some_and(|stream| stream == "true");
    let includes_usage = fields.remove("stream_include_usage").is_some_and(|tells| tells == "true");
    let format = fields.remove("response_format").unwrap_or_default();
    let described: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let task = path.rsplit('/').next().unwrap_or_default();
    let text =
        format!("{task} of {bytes} bytes, sum {sum}, of {filename} {content_type}: {}", described.join(" "));
    if streams {
        return Ok(streamed(worker, &text, bytes, includes_usage));
    }
    let seconds = bytes.div_ceil(BYTES_PER_SECOND);
    Ok(match format.as_str() {
        "text" | "srt" | "vtt" => reply::bytes("text/plain; charset=utf-8", text.into_bytes()),
        "verbose_json" => reply::json(
            StatusCode::OK,
            json!({ "text": text, "language": "en", "duration": seconds, "segments": [], "words": null }),
        ),
        _ => reply::json(
            StatusCode::OK,
            json!({ "text": text, "usage": { "type": "duration", "seconds": seconds } }),
        ),
    })
}

/// vLLM's chunks, a word each.
fn streamed(worker: &Worker, text: &str, bytes: usize, includes_usage: bool) -> Response<Payload> {
    let event = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": "trsc-1", "object": "transcription.chunk", "created": worker.started,
            "model": worker.config.model, "choices": choices, "usage": usage,
        });
        format!("data: {chunk}\n\n")
    };
    let words: Vec<&str> = text.split_inclusive(' ').collect();
    let mut events = String::new();
    for (at, word) in words.iter().enumerate() {
        let finish = (at + 1 == words.len()).then_some("stop");
        let choice = json!([{ "delta": { "content": word }, "finish_reason": finish }]);
        events.push_str(&event(choice, Value::Null));
    }
    if includes_usage {
        let (prompt, completion) = (bytes / 1024, words.len());
        let usage = json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        });
        events.push_str(&event(json!([]), usage));
    }
    events.push_str("data: [DONE]\n\n");
    reply::with(StatusCode::OK, reply::EVENT_STREAM, Payload::from_text(events))
}
