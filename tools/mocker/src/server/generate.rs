//! Turns a checked request into an answer: faults, hand-off, outputs, and the worker.
//!
//! If simulated work takes no time and no fault is armed, a request completes without waiting.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use http::StatusCode;
use hyper::Response;

use super::answer::{Answer, Choice, Payload, StreamFault};
use super::handoff;
use super::parsed_request::{ParsedRequest, Surface};
use super::refusal::Refusal;
use super::reply::{self, EVENT_STREAM, JSON};
use crate::fault::{FaultKind, mix};
use crate::output_generator::Output;
use crate::worker::{SequenceRequest, Worker};

/// Reason for which a request has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The client receives an error.
    Refused(Refusal),
    /// The connection is cut.
    Cut,
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The faults drawn for one request.
#[derive(Debug, Default)]
struct DrawnFaults {
    breaks: Option<(usize, StreamFault)>,
    is_corrupt: bool,
    reports_wrong_cached: bool,
}

async fn draw(worker: &Worker) -> Result<DrawnFaults, Failure> {
    let faults = &worker.faults;
    if !faults.any() {
        return Ok(DrawnFaults::default());
    }
    if faults.draw(FaultKind::Overloaded).is_some() {
        return Err(Refusal::overloaded().into());
    }
    if faults.draw(FaultKind::Error).is_some() {
        return Err(Refusal::internal("A fault was injected.").into());
    }
    if faults.draw(FaultKind::Hang).is_some() {
        // Ends when the client goes away and its connection is dropped.
        std::future::pending::<()>().await;
    }
    let stall = faults.draw(FaultKind::Stall).map(|fault| (fault.tokens, StreamFault::Stall));
    let die = || faults.draw(FaultKind::DieMidStream).map(|fault| (fault.tokens, StreamFault::Die));
    Ok(DrawnFaults {
        breaks: stall.or_else(die),
        is_corrupt: faults.draw(FaultKind::Corrupt).is_some(),
        reports_wrong_cached: faults.draw(FaultKind::WrongCached).is_some(),
    })
}

/// Returns `chatcmpl-` and the client's own id, or a generated one.
fn answer_id(worker: &Worker, ask: &ParsedRequest, header: Option<&str>) -> String {
    let prefix = match ask.surface {
        Surface::Completion => "cmpl-",
        Surface::Chat | Surface::Messages => "chatcmpl-",
        Surface::Responses => "resp_",
    };
    match header.or(ask.request_id.as_deref()) {
        Some(id) => format!("{prefix}{id}"),
        None => {
            let count = worker.counters.requests.load(std::sync::atomic::Ordering::Relaxed);
            let prompt = ask.prompts.first().map_or(0, Vec::len) as u64;
            format!("{prefix}{:016x}", mix(mix(worker.config.seed ^ count) ^ worker.started ^ prompt << 32))
        }
    }
}

fn outputs(worker: &Worker, ask: &ParsedRequest) -> Vec<Arc<Output>> {
    let model = &worker.model;
    let output = |prompt: &Vec<u32>| match &ask.forced {
        Some(forced) => model.generator.forced_output(&model.text, &forced.text, &ask.limits),
        None => model.generator.generate_output(&model.text, prompt, &ask.limits),
    };
    ask.prompts.iter().map(|prompt| Arc::new(output(prompt))).collect()
}

/// Answers a request.
pub(super) async fn generate(
    worker: Arc<Worker>,
    mut ask: ParsedRequest,
    request_id: Option<&str>,
) -> Result<Response<Payload>, Failure> {
    let drawn = draw(&worker).await?;
    let id = answer_id(&worker, &ask, request_id);
    let mut leg = handoff::before(&worker, &ask, &id).await?;
    if leg.is_prompt_alone {
        (ask.limits.max_tokens, ask.limits.ignore_eos) = (1, true);
        ask.limits.stop.clear();
        ask.limits.stop_token_ids.clear();
    }
    let outputs = outputs(&worker, &ask);
    let lease = leg.lease.take();
    let mut choices = Vec::with_capacity(outputs.len() * ask.choices);
    for (prompt, output) in outputs.into_iter().enumerate() {
        for _ in 0..ask.choices {
            let order = SequenceRequest {
                prompt: ask.prompts[prompt].clone(),
                adapter: ask.adapter.clone(),
                extras: ask.extras.clone(),
                is_external: leg.is_external,
                report_cached: leg.report_cached,
                lease: lease.clone(),
            };
            let running = worker.submit(order, &output).map_err(|_full| Refusal::overloaded())?;
            choices.push(Choice { running, output: Arc::clone(&output), prompt, sent: 0, is_done: false });
        }
    }
    if lease.is_some() {
        // A prefill leg has one whole answer.
        ask.stream = false;
    }
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let stream = ask.stream;
    let mut answer = Answer::new(Arc::clone(&worker), ask, choices, id, created);
    answer.reports_wrong_cached = drawn.reports_wrong_cached;
    if drawn.is_corrupt {
        return Ok(corrupt(stream));
    }
    if stream {
        answer.breaks = drawn.breaks;
        return Ok(reply::with(StatusCode::OK, EVENT_STREAM, Payload::Stream(Box::new(answer))));
    }
    match drawn.breaks {
        Some((_, StreamFault::Die)) => return Err(Failure::Cut),
        Some((_, StreamFault::Stall)) => std::future::pending().await,
        None => {}
    }
    if !answer.finished().await {
        return Err(Refusal::internal("The engine stopped.").into());
    }
    let prompt = answer.ask.prompts.first().map_or(0, Vec::len);
    if lease.is_some() {
        answer.transfer = leg.after(&worker, prompt, lease.as_deref()).await?;
    }
    Ok(reply::with(StatusCode::OK, JSON, Payload::from_text(answer.whole())))
}

/// Returns an answer as a broken proxy or engine may send it.
fn corrupt(stream: bool) -> Response<Payload> {
    match stream {
        true => {
            let garbage =
                "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"del\u{0}\n\ndata: }{\n\nnonsense\n\n";
            reply::with(StatusCode::OK, EVENT_STREAM, Payload::from_text(garbage))
        }
        false => reply::with(StatusCode::OK, JSON, Payload::from_text("{\"id\":\"x\",\"choices\":[{\"ind")),
    }
}
