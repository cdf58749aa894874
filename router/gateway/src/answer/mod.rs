//! Answers to clients, made of an engine's own events (`relayed`, with `resume`) or of token ids
//! (`token_output`, `generated`, `output_parser`), in the format of the API that was called (`translate`),
//! until the request's deadline (`deadline`), or as a whole (`buffered`).

pub(crate) mod buffered;
pub(crate) mod deadline;
pub(crate) mod generated;
pub(crate) mod output_parser;
pub(crate) mod relayed;
mod resume;
mod token_output;
pub(crate) mod translate;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use http_body::{Body as HttpBody, Frame};
use router_openai::ApiError;

use self::buffered::Buffered;
use self::deadline::with_deadline;
use self::generated::GeneratedEvents;
use self::relayed::RelayedEvents;
use self::translate::ResponseAdapter;
use crate::guardrail::Guardrail;
use crate::request::{RequestContext, within_deadline};
use crate::upstream::{BrokenAnswer, Generation};

/// Response header that tells which workers served a request.
static ROUTE: HeaderName = HeaderName::from_static("x-kvasir-route");
static BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// An answer, before its headers.
pub(crate) enum Answer {
    Buffered(Buffered),
    /// A stream whose first event has arrived; with the header that explains its route.
    Relayed(Box<RelayedEvents>, Option<HeaderValue>),
    Generated(Box<GeneratedEvents>, Option<HeaderValue>),
}

impl Answer {
    /// Returns the response, converted by an adapter if there is one. The context moves into it: its
    /// request ends with the last byte.
    pub(crate) async fn into_response(
        self,
        mut context: Box<RequestContext>,
        adapter: Option<ResponseAdapter>,
    ) -> Result<Response, ApiError> {
        let (gateway, deadline) = (Arc::clone(&context.gateway), context.deadline);
        let response = match self {
            Self::Buffered(answer) => {
                // The engine has finished.
                context.leave_gate();
                let adapted = adapted(&context, answer, adapter);
                return match within_deadline(&gateway, deadline, adapted).await {
                    Ok(answer) => Ok(buffered::respond(answer, context)),
                    Err(error) => {
                        context.refused(&error);
                        Err(error)
                    }
                };
            }
            Self::Relayed(events, explained) => streamed(*events, explained, context),
            Self::Generated(events, explained) => streamed(*events, explained, context),
        };
        let response = with_deadline(&gateway, deadline, response);
        Ok(match adapter {
            None => response,
            Some(adapter) => adapter.stream(response),
        })
    }
}

/// Returns a whole answer, checked by the guardrail, in the format of its API, and stored if requested.
async fn adapted(
    context: &RequestContext,
    mut answer: Buffered,
    adapter: Option<ResponseAdapter>,
) -> Result<Buffered, ApiError> {
    let gateway = &context.gateway;
    if let Some(guardrail) = &gateway.guardrail {
        answer = guardrail.answer(context, answer).await?;
    }
    let Some(adapter) = adapter else { return Ok(answer) };
    let work = gateway.answer_work(answer.body(), &context.footprint).await?;
    Ok(work.run(move |_| adapter.buffered(answer)).await??.stored().await)
}

fn streamed(
    events: impl AnswerEvents,
    explained: Option<HeaderValue>,
    mut context: Box<RequestContext>,
) -> Response {
    context.answered(StatusCode::OK, None);
    context.first_token();
    let mut response = Response::new(Body::empty());
    context.add_rate_limit_headers(&mut response);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies in front that buffer would hold tokens back.
    headers.insert(BUFFERING.clone(), HeaderValue::from_static("no"));
    explain(&mut response, explained);
    let gateway = Arc::clone(&context.gateway);
    let subject = gateway.guardrail.as_ref().and_then(|guardrail| guardrail.subject_of_stream(&context));
    let body = Body::new(AnswerBody { events, context });
    *response.body_mut() = match subject {
        None => body,
        Some(subject) => Guardrail::stream(gateway, subject, body),
    };
    response
}

/// Adds the header that tells which workers served a request.
pub(crate) fn explain<B>(response: &mut axum::http::Response<B>, explained: Option<HeaderValue>) {
    if let Some(explained) = explained {
        response.headers_mut().insert(ROUTE.clone(), explained);
    }
}

/// The events of a streamed answer.
pub(crate) trait AnswerEvents: Unpin + Send + 'static {
    /// Returns the next events, and updates the request's usage in its context.
    fn poll_events(&mut self, context: &mut RequestContext, task: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

/// The body of a streamed answer.
struct AnswerBody<E> {
    events: E,
    context: Box<RequestContext>,
}

impl<E: AnswerEvents> HttpBody for AnswerBody<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        this.events.poll_events(&mut this.context, task).map(|events| Some(Ok(Frame::data(events?))))
    }
}

/// Returns the last event of a stream that failed. Names of workers are only for clients that may know the
/// fleet.
fn stream_error_event(context: &mut RequestContext, generation: &Generation, failed: BrokenAnswer) -> Bytes {
    context.record_broken_stream();
    let reason = failed.failure.reason;
    let why = failed.not_resumable.unwrap_or_else(|| "no other worker could go on with it".to_owned());
    let message = if generation.explains {
        format!("The stream broke: {reason}; {why}")
    } else {
        tracing::warn!(request = generation.request_id, reason, "a stream broke");
        format!("The stream broke: {why}")
    };
    ApiError::unavailable(message).to_event()
}
