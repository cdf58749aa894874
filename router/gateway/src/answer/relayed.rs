//! Answers that engines format themselves: the client's body goes to the worker that the router chose, and
//! the engine's bytes are returned.
//!
//! Templates, tools, guided decoding and new features are the engine's; fields that the gateway does not
//! know pass through. A copy of a stream is kept for as long as it may have to be continued on another
//! worker, up to a bound.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::StreamExt;
use router_fleet::Route;
use router_openai::{Kind, RawBody, Usage};

use super::resume::{DeliveredOutput, not_resumable_reason};
use super::{AnswerEvents, stream_error_event};
use crate::request::RequestContext;
use crate::upstream::{Continuation, EngineRequest, EventBatch, EventStream, Output, OutputStep, Scanner};

/// A stream of more bytes than this is not continued on another worker: the bytes that the client got are
/// no longer kept.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// Events for the client.
pub(crate) struct RelayedChunk {
    pub(crate) events: Bytes,
    /// Number of events; about as many as tokens.
    pub(crate) pieces: usize,
    pub(crate) usage: Option<Usage>,
    /// Whether `usage` counts the whole answer, not one choice of it.
    pub(crate) is_usage_last: bool,
}

/// Number of tokens of a prompt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptTokens {
    /// The gateway's count, if its tokens equal the engine's.
    pub(crate) exact: Option<usize>,
    /// The gateway's count, or its estimate from the length of the body.
    pub(crate) counted: usize,
}

/// A stream whose events are relayed unchanged.
pub(crate) struct Relayed {
    kind: Option<Kind>,
    request: Arc<EngineRequest>,
    prompt_tokens: PromptTokens,
    hides_usage: bool,
    /// Usage that engines have reported so far.
    told: Option<Usage>,
    /// Whether the client got the usage of the whole answer.
    has_usage: bool,
    /// Bytes that the client got, while the stream may have to continue on another worker; an error is the
    /// reason why it cannot.
    kept: Result<Vec<u8>, &'static str>,
    /// The output delivered before a failure; set once the stream continues on another worker.
    sent: Option<DeliveredOutput>,
}

impl Relayed {
    /// Creates a stream. The usage at the end may be requested by the gateway, not by the client.
    pub(crate) fn new(
        kind: Option<Kind>,
        request: &Arc<EngineRequest>,
        prompt_tokens: PromptTokens,
        hides_usage: bool,
    ) -> Self {
        let kept = match not_resumable_reason(kind, &request.body) {
            None => Ok(Vec::new()),
            Some(not_resumable_reason) => Err(not_resumable_reason),
        };
        let request = Arc::clone(request);
        Self { kind, request, prompt_tokens, hides_usage, told: None, has_usage: false, kept, sent: None }
    }

    /// Completes a stream whose engine failed after the finish reason: the usage, unless it was sent already, then `[DONE]`.
    fn end(&self, sent: &DeliveredOutput) -> RelayedChunk {
        let done = Bytes::from_static(b"data: [DONE]\n\n");
        if self.has_usage {
            return RelayedChunk { events: done, pieces: 0, usage: None, is_usage_last: false };
        }
        let told = self.told.unwrap_or_default();
        let prompt = self.prompt_tokens.exact.or(self.told.map(|told| told.prompt));
        let usage = Usage {
            prompt: prompt.unwrap_or(self.prompt_tokens.counted),
            completion: told.completion.max(sent.pieces + usize::from(sent.ends_by_token)),
            ..told
        };
        // An estimate is not sent to the client.
        let events = if self.hides_usage || prompt.is_none() {
            done
        } else {
            Bytes::from(format!("{}data: [DONE]\n\n", sent.usage_event(self.kind, &usage)))
        };
        RelayedChunk { events, pieces: 0, usage: Some(usage), is_usage_last: true }
    }

    fn keep(&mut self, events: &[u8]) {
        let Ok(kept) = &mut self.kept else { return };
        kept.extend_from_slice(events);
        if kept.len() > KEPT_BYTES_MAX {
            self.kept = Err("more was sent than can be remembered");
        }
    }

    fn request_of(&self, body: RawBody) -> Arc<EngineRequest> {
        // Only the client's prompt is known in tokens: an engine's cached tokens are no longer comparable.
        Arc::new(EngineRequest { body, tokens: Arc::clone(&self.request.tokens), tokens_are_exact: false })
    }
}

impl Output for Relayed {
    type Item = RelayedChunk;

    fn scanner(&self) -> Scanner {
        Scanner::passing_on(self.hides_usage)
    }

    fn began(&mut self, route: &Route) {
        if !route.decode.run.description.engine.dialect().takes_extensions() {
            self.kept = Err("this service cannot take up an answer in the middle");
        }
    }

    fn take(&mut self, batch: EventBatch) -> OutputStep<RelayedChunk> {
        let EventBatch { out: bytes, events: pieces, usage, is_usage_last, .. } = batch;
        let mut told = usage;
        let events = match &self.sent {
            None => bytes,
            // Another worker has taken over: its events are rewritten to fit.
            Some(sent) => {
                told = usage.map(|usage| sent.whole_usage(usage, self.prompt_tokens.exact));
                sent.splice(&bytes, self.prompt_tokens.exact)
            }
        };
        self.told = told.or(self.told);
        self.has_usage |= is_usage_last;
        self.keep(&events);
        let item = RelayedChunk { events, pieces, usage: told, is_usage_last };
        let is_empty = item.events.is_empty() && item.usage.is_none();
        OutputStep { item: (!is_empty).then_some(item), usage, is_complete: false, failure: None }
    }

    fn finish(&mut self) -> Result<Option<RelayedChunk>, String> {
        Ok(None)
    }

    fn continuation(&mut self) -> Continuation<RelayedChunk> {
        let sent = match &self.kept {
            Ok(kept) => DeliveredOutput::read(self.kind, kept),
            Err(why) => Err(*why),
        };
        let sent = match sent {
            Ok(sent) => sent,
            Err(why) => return Continuation::Impossible(why),
        };
        if sent.is_finished {
            return Continuation::Complete(Some(self.end(&sent)));
        }
        let Some(rest) = sent.continuation_body(self.kind, &self.request.body) else {
            return Continuation::Impossible("the output already ended with a stop token");
        };
        self.sent = Some(sent);
        Continuation::Request(self.request_of(rest))
    }
}

/// The body of a relayed stream.
pub(crate) struct RelayedEvents {
    stream: EventStream<Relayed>,
    /// The first events, which arrived before the answer began.
    first: Option<RelayedChunk>,
    /// Usage that the engine reported so far, perhaps of one choice alone. It counts when the stream ends
    /// normally: a client that disconnects earlier is charged for the events it got.
    usage: Option<Usage>,
    is_over: bool,
}

impl RelayedEvents {
    pub(crate) fn new(stream: EventStream<Relayed>, first: RelayedChunk) -> Self {
        Self { stream, first: Some(first), usage: None, is_over: false }
    }
}

impl AnswerEvents for RelayedEvents {
    fn poll_events(&mut self, context: &mut RequestContext, task: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while !self.is_over {
            let next = match self.first.take() {
                Some(first) => Some(Ok(first)),
                None => std::task::ready!(self.stream.poll_next_unpin(task)),
            };
            match next {
                None => {
                    self.is_over = true;
                    if let Some(usage) = self.usage.take() {
                        context.record_usage(&usage);
                    }
                }
                Some(Ok(passed)) => {
                    context.count_events(passed.pieces);
                    match passed.usage {
                        Some(usage) if passed.is_usage_last => {
                            self.usage = None;
                            context.record_usage(&usage);
                        }
                        told => self.usage = told.or(self.usage),
                    }
                    if !passed.events.is_empty() {
                        return Poll::Ready(Some(passed.events));
                    }
                }
                Some(Err(failed)) => {
                    self.is_over = true;
                    return Poll::Ready(Some(stream_error_event(context, self.stream.generation(), failed)));
                }
            }
        }
        Poll::Ready(None)
    }
}
