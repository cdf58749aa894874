//! Turns generations into an answer, whole or streamed.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use router_openai::{Answer, ApiError, Finish, TokenLogprob, TokenLogprobs, Usage};
use router_tokens::Tokenizer;
use tokio::sync::mpsc;

use super::routes::{error_response, json_response};
use crate::{Choice, Output, OutputStream};

/// A request that the engine has taken.
pub(super) struct Job {
    pub(super) answer: Answer,
    pub(super) generations: Vec<OutputStream>,
    /// The prompts' texts, when they are part of the output.
    pub(super) echo: Option<Vec<String>>,
    pub(super) prompt_tokens: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// Whether the cached tokens are told with the first token already.
    pub(super) early_usage: bool,
    pub(super) return_token_ids: bool,
    pub(super) wants_logprobs: bool,
    pub(super) tokenizer: Tokenizer,
    pub(super) is_chat: bool,
}

/// Pieces that may wait between the generations and the connection.
const PIECES_MAX: usize = 64;

/// The body of a streamed answer.
pub(super) struct Stream(mpsc::Receiver<Bytes>);

impl futures_util::Stream for Stream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|piece| piece.map(Ok))
    }
}

pub(super) async fn respond(started: Result<Job, ApiError>) -> Response {
    match started {
        Ok(job) if job.stream => streamed(job).into_response(),
        Ok(job) => whole(job).await,
        Err(error) => error_response(&error),
    }
}

impl Job {
    fn echo_of(&self, index: usize) -> &str {
        let echo = self.echo.as_ref().filter(|echo| !echo.is_empty());
        echo.map_or("", |echo| &echo[index / (self.generations.len() / echo.len()).max(1)])
    }

    fn logprobs(&self, output: &Output) -> Vec<TokenLogprobs> {
        let describe = |id: u32, logprob: f32| TokenLogprob {
            id,
            text: self.tokenizer.decode(&[id], false),
            bytes: self.tokenizer.bytes_of(id),
            logprob,
        };
        let entry = |choice: &Choice| TokenLogprobs {
            chosen: describe(choice.token, choice.logprob),
            top: choice.top.iter().map(|&(id, logprob)| describe(id, logprob)).collect(),
        };
        output.choice.iter().map(entry).collect()
    }
}

async fn whole(mut job: Job) -> Response {
    let mut choices = Vec::new();
    let mut usage = Usage { prompt: job.prompt_tokens, ..Usage::default() };
    let mut generations = std::mem::take(&mut job.generations);
    for (index, generation) in generations.iter_mut().enumerate() {
        let mut text = job.echo_of(index).to_owned();
        let (mut tokens, mut logprobs, mut finish) = (Vec::new(), Vec::new(), None);
        while let Some(output) = generation.next().await {
            logprobs.extend(job.logprobs(&output));
            text.push_str(&output.text);
            tokens.extend_from_slice(&output.tokens);
            finish = output.finish;
            usage.cached = usage.cached.max(Some(output.cached_tokens));
        }
        let Some(finish) = finish.filter(|finish| *finish != Finish::Abort) else {
            return error_response(&ApiError::unavailable("The engine gave the request up."));
        };
        usage.completion += tokens.len();
        let logprobs = job.wants_logprobs.then_some(logprobs.as_slice());
        let token_ids = job.return_token_ids.then_some(tokens.as_slice());
        choices.push(job.answer.choice(index as u32, &text, logprobs, token_ids, finish));
    }
    json_response(StatusCode::OK, job.answer.whole(choices, usage).to_string())
}

/// One task per choice feeds the body; when the body is dropped, their sends fail and the generations go.
fn streamed(mut job: Job) -> Stream {
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    let echoes: Vec<String> = (0..job.generations.len()).map(|index| job.echo_of(index).to_owned()).collect();
    let generations = std::mem::take(&mut job.generations);
    let job = std::sync::Arc::new(job);
    let mut choices = Vec::new();
    for ((index, generation), echo) in generations.into_iter().enumerate().zip(echoes) {
        let (job, sender) = (std::sync::Arc::clone(&job), sender.clone());
        choices.push(tokio::spawn(stream_choice(job, generation, index as u32, echo, sender)));
    }
    tokio::spawn(async move {
        let mut usage = Usage { prompt: job.prompt_tokens, ..Usage::default() };
        for choice in choices {
            // An output without an end is no answer: the stream ends without its end marker, too.
            let Ok(Some((completion, cached))) = choice.await else { return };
            usage.completion += completion;
            usage.cached = usage.cached.max(Some(cached));
        }
        if job.include_usage {
            let _gone = sender.send(job.answer.usage_piece(usage).into()).await;
        }
        let _gone = sender.send(Bytes::from_static(b"data: [DONE]\n\n")).await;
    });
    Stream(receiver)
}

/// Returns the number of tokens and of cached prompt tokens; `None` when the output has no end.
async fn stream_choice(
    job: std::sync::Arc<Job>,
    mut generation: OutputStream,
    index: u32,
    echo: String,
    sender: mpsc::Sender<Bytes>,
) -> Option<(usize, usize)> {
    let (mut tokens, mut offset) = (0, 0);
    if job.is_chat && sender.send(job.answer.role_piece(index).into()).await.is_err() {
        return None;
    }
    if !echo.is_empty() {
        let piece = job.answer.piece(index, &echo, &[], 0, None, None);
        offset = echo.chars().count();
        if sender.send(piece.into()).await.is_err() {
            return None;
        }
    }
    loop {
        // A request that waits for its first token sends nothing: watch the client meanwhile.
        let output = tokio::select! {
            output = generation.next() => output,
            () = sender.closed() => return None,
        };
        let output = output?;
        if tokens == 0 && job.early_usage {
            let cached = Some(output.cached_tokens);
            let usage = Usage { prompt: job.prompt_tokens, cached, ..Usage::default() };
            sender.send(job.answer.usage_piece(usage).into()).await.ok()?;
        }
        tokens += output.tokens.len();
        let logprobs = job.logprobs(&output);
        let ids = job.return_token_ids.then_some(output.tokens.as_slice());
        let piece = job.answer.piece(index, &output.text, &logprobs, offset, ids, output.finish);
        offset += output.text.chars().count();
        sender.send(piece.into()).await.ok()?;
        if output.finish.is_some() {
            return Some((tokens, output.cached_tokens));
        }
    }
}
