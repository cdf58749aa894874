//! From an HTTP request to its answer.
//!
//! `stages` takes a request from one stage to the next; `context` holds what all stages share and writes
//! the records at the end. `body` reads and bounds what clients send, `form` parses forms, `prompt` turns a
//! prompt into tokens for the index, `count` only counts tokens.

mod body;
mod context;
mod count;
mod form;
pub(crate) mod prompt;
mod stages;

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use router_openai::{ApiError, Surface};

pub(crate) use self::body::{BodyKind, read as read_body};
pub(crate) use self::context::RequestContext;
pub(crate) use self::count::messages_count;
pub(crate) use self::form::boundary_of;
use self::stages::Received;
use crate::answer::Answer;
use crate::answer::deadline::deadline_error;
use crate::answer::translate::ResponseAdapter;
use crate::service::{Gateway, fresh_id};

/// The route of a surface whose requests go to engines.
pub(crate) fn at(surface: Surface) -> MethodRouter<Arc<Gateway>> {
    post(move |State(gateway): State<Arc<Gateway>>, request: Request| serve(gateway, request, surface))
}

/// Serves a request of a surface whose requests go to engines.
pub(crate) async fn serve(gateway: Arc<Gateway>, request: Request, surface: Surface) -> Response {
    let mut context = RequestContext::new(&gateway, surface, &request);
    let answered = match context.begin(request.headers()) {
        Ok(()) => {
            let deadline = context.deadline;
            // Pinned here because the future is too large to be moved.
            within_deadline(&gateway, deadline, pin!(run_stages(&mut context, request))).await
        }
        Err(error) => Err(error),
    };
    respond(context, answered).await
}

/// Takes the request through all stages.
async fn run_stages(
    context: &mut RequestContext,
    request: Request,
) -> Result<(Answer, Option<ResponseAdapter>), ApiError> {
    let identified = Received(request).identify(context)?;
    let loaded = identified.load(context).await?;
    let resolved = loaded.resolve(context).await?;
    let checked = resolved.check(context).await?;
    let tokenized = checked.tokenize(context).await?;
    let admitted = tokenized.admit(context).await?;
    admitted.answer(context).await
}

/// Returns the result, or the deadline error once the request's time is over; the work is dropped then.
pub(crate) async fn within_deadline<T>(
    gateway: &Gateway,
    deadline: Option<Instant>,
    answered: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let Some(deadline) = deadline else { return answered.await };
    match tokio::time::timeout_at(deadline.into(), answered).await {
        Ok(answered) => answered,
        Err(_) => {
            gateway.metrics.late.inc();
            Err(deadline_error())
        }
    }
}

/// Returns the response to a request, in the format of its API and with its id. The context ends with its
/// last byte.
async fn respond(
    mut context: Box<RequestContext>,
    answered: Result<(Answer, Option<ResponseAdapter>), ApiError>,
) -> Response {
    let (gateway, surface) = (Arc::clone(&context.gateway), context.surface);
    let request_id = context.request_id.clone();
    let mut response = match answered {
        Ok((answer, adapter)) => match answer.into_response(context, adapter).await {
            Ok(response) => response,
            Err(error) => error.respond_at(surface),
        },
        Err(error) => {
            context.refused(&error);
            drop(context);
            error.respond_at(surface)
        }
    };
    gateway.metrics.requests.count(surface, response.status());
    name(&mut response, &request_id, surface.is_anthropic());
    response
}

/// Adds a request id to the response of a request that was refused before a context existed.
pub(crate) fn named(headers: &HeaderMap, mut response: Response) -> Response {
    name(&mut response, &context::own_id(headers).map_or_else(fresh_id, str::to_owned), false);
    response
}

fn name(response: &mut Response, request_id: &str, is_anthropic: bool) {
    let Ok(value) = HeaderValue::from_str(request_id) else { return };
    if is_anthropic {
        response.headers_mut().insert("request-id", value.clone());
    }
    response.headers_mut().insert(context::REQUEST_ID.clone(), value);
}
