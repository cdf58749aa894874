//! Routes: the handler of each path.

use std::io;
use std::sync::Arc;

use http::{HeaderMap, Method, StatusCode};
use hyper::body::Incoming;
use hyper::{Request, Response};
use router_engines::intake::IntakeError;
use serde_json::{Value, json};

use super::answer::Payload;
use super::generate::{Failure, generate};
use super::parsed_request::{ParsedRequest, Surface, chat_prompt};
use super::refusal::Refusal;
use super::request::Body;
use super::{ServerState, anthropic, description, metrics, recording, reply, responses, sleep};
use crate::fault::{Fault, FaultKind};
use crate::{Dialect, Role};

type Answered = Result<Response<Payload>, Failure>;

/// Answers one request. An error cuts the connection.
pub(super) async fn route(
    served: Arc<ServerState>,
    request: Request<Incoming>,
) -> Result<Response<Payload>, io::Error> {
    let (head, incoming) = request.into_parts();
    let path = head.uri.path();
    if !path.starts_with("/mock/") && served.worker.faults.draw(FaultKind::Refuse).is_some() {
        return Err(io::Error::other("a fault refuses the connection"));
    }
    let is_anthropic = path.starts_with("/v1/messages");
    let answered = match served.intake.receive(incoming).await {
        Ok(body) => answer(&served, &head.method, path, &head.headers, &body.bytes).await,
        Err(IntakeError::TooLarge) => Err(Refusal::too_large(served.intake.body_bytes_max()).into()),
        Err(IntakeError::Full) => Err(Refusal::overloaded().into()),
        Err(IntakeError::Slow) => Err(Refusal::too_slow().into()),
        Err(error @ IntakeError::Broken) => return Err(io::Error::other(error)),
    };
    match answered {
        Ok(response) => Ok(response),
        Err(Failure::Refused(refusal)) => {
            Ok(reply::json(refusal.status, refusal.to_json(served.dialect(), is_anthropic)))
        }
        Err(Failure::Cut) => Err(io::Error::other("a fault cut the connection")),
    }
}

fn parsed<'a, T: serde::Deserialize<'a>>(body: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| Refusal::malformed(&error).into())
}

async fn answer(
    served: &Arc<ServerState>,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Answered {
    match (method, path) {
        (&Method::POST, "/v1/chat/completions") => {
            start(served, Surface::Chat, headers, parsed::<Body<'_>>(body)?).await
        }
        (&Method::POST, "/v1/completions") => {
            start(served, Surface::Completion, headers, parsed::<Body<'_>>(body)?).await
        }
        (&Method::POST, "/v1/messages") => {
            let object: Value = parsed(body)?;
            start(served, Surface::Messages, headers, anthropic::to_chat(&object)?).await
        }
        (&Method::POST, "/v1/responses") => {
            let object: Value = parsed(body)?;
            start(served, Surface::Responses, headers, responses::to_chat(&object)?).await
        }
        (&Method::POST, "/v1/audio/transcriptions" | "/v1/audio/translations") => {
            Ok(recording::transcribe(&served.worker, path, headers, body).await?)
        }
        (&Method::POST, _) => post(served, path, body).await,
        (&Method::GET, _) => get(served, path).await,
        (&Method::DELETE, "/mock/faults") => {
            served.worker.faults.heal();
            Ok(reply::empty())
        }
        _ => Ok(reply::json(StatusCode::METHOD_NOT_ALLOWED, "{\"detail\":\"Method Not Allowed\"}")),
    }
}

async fn start(served: &Arc<ServerState>, surface: Surface, headers: &HeaderMap, body: Body<'_>) -> Answered {
    let ask = ParsedRequest::new(&served.worker, surface, body)?;
    let request_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    generate(Arc::clone(&served.worker), ask, request_id).await
}

fn not_found() -> Answered {
    Ok(reply::json(StatusCode::NOT_FOUND, "{\"detail\":\"Not Found\"}"))
}

fn found(value: &Value) -> Answered {
    Ok(reply::json(StatusCode::OK, value))
}

async fn post(served: &Arc<ServerState>, path: &str, body: &[u8]) -> Answered {
    let worker = &served.worker;
    let is_vllm = served.dialect() == Dialect::Vllm;
    match path {
        "/v1/messages/count_tokens" => {
            let object: Value = parsed(body)?;
            found(&anthropic::counted(chat_prompt(worker, &anthropic::to_chat(&object)?)?.len()))
        }
        "/v1/embeddings" => found(&description::embeddings(worker, &parsed(body)?)?),
        "/v1/rerank" | "/rerank" => found(&description::reranked(worker, &parsed(body)?)?),
        "/v1/score" | "/score" => found(&description::scored(worker, &parsed(body)?)?),
        "/v1/audio/speech" => Ok(reply::bytes("audio/wav", description::spoken(&parsed(body)?)?)),
        "/tokenize" => found(&description::tokenized(worker, parsed(body)?)?),
        "/detokenize" => found(&description::detokenized(worker, &parsed(body)?)?),
        "/ping" => Ok(reply::empty()),
        "/reset_prefix_cache" | "/flush_cache" => {
            let is_cleared = worker.lock().pool.clear();
            let status = if is_cleared { StatusCode::OK } else { StatusCode::BAD_REQUEST };
            Ok(reply::json(status, json!({ "success": is_cleared })))
        }
        "/sleep" | "/wake_up" if is_vllm && worker.config.wake.is_some() => sleep::vllm(worker, path).await,
        "/pause_generation" | "/continue_generation" if !is_vllm => Ok(sleep::pause(worker, path).await),
        "/release_memory_occupation" | "/resume_memory_occupation" if !is_vllm => {
            sleep::sglang(worker, path).await
        }
        "/mock/faults" => {
            let fault: Fault = parsed(body)?;
            worker.faults.arm(fault).map_err(|error| Refusal::bad("probability", error.to_string()))?;
            found(&json!({ "armed": true }))
        }
        _ => not_found(),
    }
}

/// Returns the fault that delays a request for the engine's state.
fn slow(path: &str) -> Option<FaultKind> {
    match path {
        "/health" => Some(FaultKind::SlowHealth),
        "/metrics" | "/server_info" | "/get_server_info" => Some(FaultKind::SlowMetrics),
        _ => None,
    }
}

async fn get(served: &Arc<ServerState>, path: &str) -> Answered {
    let worker = &served.worker;
    if let Some(fault) = slow(path).and_then(|kind| worker.faults.draw(kind)) {
        tokio::time::sleep(fault.delay()).await;
    }
    let is_vllm = served.dialect() == Dialect::Vllm;
    match path {
        "/health" if !is_vllm && worker.lock().is_paused => sleep::silent().await,
        "/health" => Ok(reply::empty()),
        "/is_sleeping" if is_vllm && worker.config.wake.is_some() => {
            found(&json!({ "is_sleeping": worker.lock().is_asleep }))
        }
        "/ping" if is_vllm => Ok(reply::empty()),
        "/health_generate" if !is_vllm => Ok(reply::empty()),
        "/v1/models" => found(&description::models(worker)),
        "/metrics" => {
            let text = metrics::render(worker);
            Ok(reply::with(StatusCode::OK, reply::METRICS, Payload::from_text(text)))
        }
        "/version" if is_vllm => found(&json!({ "version": description::VLLM_VERSION })),
        "/load" if is_vllm => found(&json!({ "server_load": worker.stats().running })),
        "/kv_event_sources" if is_vllm => found(&description::event_sources(served)),
        "/query" if is_vllm && worker.config.role != Role::Decode => found(&description::bootstrap(served)),
        "/server_info" | "/get_server_info" if !is_vllm => found(&description::server_info(served)),
        "/model_info" | "/get_model_info" if !is_vllm => found(&description::model_info(worker)),
        "/v1/loads" if !is_vllm => found(&description::loads(worker)),
        "/mock/stats" => found(&json!(worker.stats())),
        "/v1/chat/completions" | "/v1/completions" | "/v1/messages" | "/v1/responses" | "/v1/embeddings" => {
            Ok(reply::json(StatusCode::METHOD_NOT_ALLOWED, "{\"detail\":\"Method Not Allowed\"}"))
        }
        _ => not_found(),
    }
}
