//! Counts the tokens of a message; nothing is generated.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use router_engines::client::EngineError;
use router_engines::dialect::TokenCount;
use router_openai::{ApiError, RawBody, Surface, anthropic};

use super::stages::{Received, has_media};
use super::{RequestContext, prompt, respond, within_deadline};
use crate::answer::Answer;
use crate::answer::buffered::json_answer;
use crate::answer::translate::parse;
use crate::compute::IsCancelled;
use crate::models::Target;
use crate::service::Gateway;

pub(crate) async fn messages_count(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let mut context = RequestContext::new(&gateway, Surface::CountTokens, &request);
    let answered = match context.begin(request.headers()) {
        Ok(()) => within_deadline(&gateway, context.deadline, answer(&mut context, request)).await,
        Err(error) => Err(error),
    };
    respond(context, answered.map(|answer| (answer, None))).await
}

async fn answer(context: &mut RequestContext, request: Request) -> Result<Answer, ApiError> {
    let loaded = Received(request).identify(context)?.load(context).await?;
    let tokens = count(context, loaded.bytes).await?;
    context.answered(StatusCode::OK, None);
    Ok(Answer::Buffered(json_answer(StatusCode::OK, anthropic::count_answer(tokens).to_string())))
}

async fn count(context: &mut RequestContext, bytes: Bytes) -> Result<usize, ApiError> {
    let gateway = Arc::clone(&context.gateway);
    let work = gateway.work(bytes.len(), &context.footprint).await?;
    let access = Arc::clone(&gateway);
    let counted = move |_: IsCancelled<'_>| {
        let message = RawBody::parse(bytes.clone())?;
        access.access.screen(&message, Surface::CountTokens)?;
        let chat = anthropic::to_chat_for_count(&parse(&bytes)?)?.to_string();
        Ok::<_, ApiError>((RawBody::parse(chat.into())?, message))
    };
    let (mut chat, mut message) = work.run(counted).await??;
    drop(work);
    let asked = chat.text("model")?.map(Cow::into_owned);
    context.allow(asked.as_deref())?;
    let patience = gateway.tuning().worker_wait;
    let target = gateway.target(asked.as_deref(), None, patience).await?;
    context.allow_target(asked.as_deref(), &target)?;
    target.name_in(&mut chat)?;
    target.name_in(&mut message)?;
    let work = gateway.work(chat.len(), &context.footprint).await?;
    let seen = prompt::of_chat(&target.model, &chat, &work).await?;
    drop(work);
    if seen.is_exact {
        return Ok(seen.tokens.len());
    }
    if has_media(&chat) {
        let why = "The request is not only text: only generating tells how many tokens it has.";
        return Err(ApiError::new(StatusCode::NOT_FOUND, why, "not_available"));
    }
    gateway.access.clean(&mut chat, &context.grant);
    gateway.access.clean(&mut message, &context.grant);
    count_at_engine(&target, &chat.to_bytes(), &message.to_bytes()).await
}

/// Asks engines until one returns a count: all engines of one make return the same.
async fn count_at_engine(target: &Target, chat: &Bytes, message: &Bytes) -> Result<usize, ApiError> {
    /// Longest time for an engine's count.
    const WITHIN: Duration = Duration::from_secs(10);
    const ENGINES_ASKED_MAX: usize = 3;
    let roster = Arc::clone(&target.model.pool.roster());
    let adapter = target.adapter.as_deref();
    let able = roster.iter().filter(|rank| rank.is_ready() && rank.serves(adapter));
    let able = able.filter_map(|rank| Some((rank, rank.run.description.engine.dialect().token_count()?)));
    let mut failure = None;
    for (rank, how) in able.take(ENGINES_ASKED_MAX) {
        let body = match how {
            TokenCount::Tokenize => chat,
            TokenCount::Messages => message,
        };
        let asked = rank.worker.client.count_tokens(how, body.clone());
        match tokio::time::timeout(WITHIN, asked).await {
            Ok(Ok(count)) => return Ok(count),
            // This engine's release lacks the path.
            Ok(Err(EngineError::Refused(error))) if error.status == StatusCode::NOT_FOUND => {}
            Ok(Err(EngineError::Refused(error))) if error.status.is_client_error() => return Err(error),
            Ok(Err(error)) => failure = Some(error.to_string()),
            Err(_) => failure = Some(format!("{}: no answer within {WITHIN:?}", rank.run.name)),
        }
    }
    if let Some(failure) = failure {
        tracing::debug!(failure, "no engine counted the tokens of a prompt");
        return Err(ApiError::unavailable("The engines did not count the tokens."));
    }
    let message = "This gateway has no tokenizer of this model, and its engines count no tokens of chats: set \
                   `gateway.model_folder`.";
    Err(ApiError::new(StatusCode::NOT_FOUND, message, "not_available"))
}
