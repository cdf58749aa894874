//! Answers whose text is made here: engines that take and give token ids are asked for ids, and what one request became
//! (several prompts, several choices) is put together again.
//!
//! Text, stop strings and answers are made from the ids. That is what allows a request to go on elsewhere, exactly as it
//! would have gone on, when its worker dies: what has been generated so far is known to the token.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use router_engines::openai::{
    Answer, ApiError, ChatRequest, CompletionRequest, Finish, Kind, Prompt, Sampling, TokenLogprobs,
    ToolChoice, Usage,
};
use router_fleet::RouteRequest;
use router_parsers::ToolFormat;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::choice::{ChoiceEvent, ChoicePiece, ChoiceRequest, run};
use crate::memory::held_bytes;
use crate::models::{Model, Target};
use crate::requests::Head;
use crate::said::{Said, forced_parser};
use crate::service::{Gateway, fresh_number, json_response, unix_time};
use crate::stay::Stay;

/// Events that may wait between the choices and the connection.
const EVENTS_MAX: usize = 64;

/// A request in the form that both surfaces share.
struct Normal {
    prompts: Vec<Arc<Vec<u32>>>,
    echo: Vec<String>,
    sampling: Sampling,
    salt: Option<String>,
    stream: bool,
    include_usage: bool,
    return_token_ids: bool,
    tokens_as_ids: bool,
    /// The tools that the model may call.
    tools: Option<Value>,
    /// How a call is written that it must make.
    forced: Option<ToolFormat>,
}

/// Serves a request whose text is made here.
pub(crate) async fn generate(
    gateway: &Arc<Gateway>,
    target: Target,
    body: &Bytes,
    head: &Head,
    kind: Kind,
    mut stay: Box<Stay>,
) -> Result<Response, (Box<Stay>, ApiError)> {
    let prepared = match prepare(gateway, &target.model, body, kind, &mut stay).await {
        Ok(normal) => choose(gateway, target.model, normal, head, kind, &mut stay).await,
        Err(error) => Err(error),
    };
    let (mut collector, explained) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Err((stay, error)),
    };
    let mut rates = Response::new(Body::empty());
    stay.tell_rates(&mut rates);
    collector.stay = Some(stay);
    let stream = collector.normal.stream;
    let answered = if stream { collector.streamed().await } else { collector.whole().await };
    let mut response = answered?;
    response.headers_mut().extend(std::mem::take(rates.headers_mut()));
    if let Some(value) = explained.and_then(|text| HeaderValue::from_str(&text).ok()) {
        response.headers_mut().insert("x-kvasir-route", value);
    }
    Ok(response)
}

/// A request as it is served, admitted.
async fn prepare(
    gateway: &Arc<Gateway>,
    model: &Model,
    body: &Bytes,
    kind: Kind,
    stay: &mut Stay,
) -> Result<Normal, ApiError> {
    let mut normal = match kind {
        Kind::Chat => normal_chat(gateway, model, body, stay).await?,
        Kind::Completion => normal_completion(gateway, model, body, stay).await?,
    };
    // Only the gateway itself says so, when it goes on elsewhere.
    normal.sampling.resumed_tokens = 0;
    if let Some(salt) = gateway.access.tenants_salt(&stay.grant, normal.salt.as_deref()) {
        normal.salt = Some(salt);
    }
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    check_prompts(model, param, &normal)?;
    let tokens = normal.prompts.iter().map(|prompt| prompt.len()).sum();
    stay.holds(held_bytes(body.len(), tokens));
    let choices = normal.prompts.len() * normal.sampling.n as usize;
    stay.admit(&model.gate, tokens, normal.sampling.max_tokens, choices).await?;
    Ok(normal)
}

/// Routes every choice and starts it; the first route is for the header.
async fn choose(
    gateway: &Arc<Gateway>,
    model: Arc<Model>,
    normal: Normal,
    head: &Head,
    kind: Kind,
    stay: &mut Stay,
) -> Result<(Collector, Option<String>), ApiError> {
    gateway.retries.earn(gateway.requests_inside());
    let explains = gateway.access.explains(&stay.grant);
    let (started, request_id, session) = (head.started, &head.request_id, head.session);
    let (out, events) = mpsc::channel(EVENTS_MAX);
    let mut explained = None;
    let mut index = 0;
    let deadline = Instant::now() + gateway.tuning().worker_wait;
    for prompt in &normal.prompts {
        for _ in 0..normal.sampling.n {
            let wanted = RouteRequest {
                tokens: prompt,
                salt: normal.salt.as_deref(),
                session,
                adapter: None,
                without_prefill: false,
                audited: true,
                avoid: &[],
            };
            // Booked before the next choice is routed, so that a burst does not follow one prefix to one worker.
            let (route, booking) =
                gateway.wait_for_route(&model.pool, &wanted, head.traced.as_deref(), deadline).await?;
            stay.sent();
            if explains {
                explained.get_or_insert_with(|| route.explain());
            }
            let mut sampling = normal.sampling.clone();
            // Every choice has a seed, so that an interrupted one can be continued as it would have gone on.
            let seed = sampling.seed.unwrap_or_else(fresh_number);
            sampling.seed = Some(seed.wrapping_add(u64::from(index % normal.sampling.n)));
            sampling.n = 1;
            let choice = ChoiceRequest {
                model: Arc::clone(&model),
                index,
                request_id: request_id.clone(),
                engine_id: format!("{}-{index}", head.engine_id),
                explains,
                prompt: Arc::clone(prompt),
                sampling,
                salt: normal.salt.clone(),
                session,
                traced: head.traced.clone(),
                headers: head.headers.clone(),
            };
            tokio::spawn(run(Arc::clone(gateway), choice, (route, booking), out.clone()));
            index += 1;
        }
    }
    drop(out);
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let answer = Answer::new(
        kind,
        format!("{prefix}-{request_id}"),
        unix_time(),
        &model.pool.model(),
        normal.tokens_as_ids,
    );
    let said = (0..index).map(|_| parser(&model, &normal, kind)).collect();
    let collector = Collector {
        said,
        gateway: Arc::clone(gateway),
        answer,
        kind,
        choices: index,
        usage: Usage { prompt: normal.prompts.iter().map(|prompt| prompt.len()).sum(), ..Usage::default() },
        normal,
        events,
        started,
        stay: None,
    };
    Ok((collector, explained))
}

/// A parser for one choice, if its model writes anything but text.
fn parser(model: &Model, normal: &Normal, kind: Kind) -> Option<Said> {
    /// Enough for whatever a template opens an answer with.
    const PROMPT_END_TOKENS: usize = 16;
    let prompt = normal.prompts.first().filter(|_| kind == Kind::Chat)?;
    if normal.sampling.structured.is_some() {
        // The output is JSON from its first token on: there are no marks and no reasoning.
        let format = normal.forced.clone()?;
        return Some(Said::new(forced_parser(format, normal.tools.as_ref(), fresh_number())));
    }
    let end = &prompt[prompt.len().saturating_sub(PROMPT_END_TOKENS)..];
    let end = model.text.tokenizer.decode(end, false);
    model.formats.parser(normal.tools.as_ref(), &end, fresh_number()).map(Said::new)
}

async fn normal_chat(
    gateway: &Arc<Gateway>,
    model: &Model,
    body: &Bytes,
    stay: &mut Stay,
) -> Result<Normal, ApiError> {
    let footprint = stay.footprint.clone();
    let work = gateway.work(body.len(), &footprint).await?;
    let bytes = body.clone();
    let mut request = work.run(move |_| ChatRequest::parse(&bytes)).await??;
    let tools = request.template_extras.get("tools").cloned();
    let tools = tools.filter(|_| request.tool_choice != ToolChoice::None);
    let forced = match request.tool_choice {
        ToolChoice::Auto | ToolChoice::None => None,
        ToolChoice::Required => Some(ToolFormat::ForcedArray),
        ToolChoice::Named(name) => Some(ToolFormat::ForcedNamed(name)),
    };
    let formats = &model.formats;
    if (formats.tools.is_some() && tools.is_some()) || formats.reasoning.is_some() {
        // Marks of calls and reasoning are special tokens in most vocabularies.
        request.sampling.skip_special_tokens = false;
    }
    let text = model.text.clone();
    let (messages, extras, generate) =
        (request.messages, request.template_extras, request.add_generation_prompt);
    let ids = work
        .run(move |_| text.encode_conversation(messages, generate, false, &extras))
        .await?
        .map_err(|error| ApiError::invalid("messages", error.to_string()))?
        .ids;
    Ok(Normal {
        prompts: vec![Arc::new(ids)],
        echo: Vec::new(),
        sampling: request.sampling,
        salt: request.cache_salt,
        stream: request.stream,
        include_usage: request.include_usage,
        return_token_ids: request.return_token_ids,
        tokens_as_ids: false,
        tools,
        forced,
    })
}

async fn normal_completion(
    gateway: &Arc<Gateway>,
    model: &Model,
    body: &Bytes,
    stay: &mut Stay,
) -> Result<Normal, ApiError> {
    let footprint = stay.footprint.clone();
    let work = gateway.work(body.len(), &footprint).await?;
    let bytes = body.clone();
    let request = work.run(move |_| CompletionRequest::parse(&bytes)).await??;
    let mut prompts = Vec::with_capacity(request.prompts.len());
    let mut echo = Vec::new();
    for prompt in request.prompts {
        let ids = match prompt {
            Prompt::Tokens(ids) => {
                if request.echo {
                    let tokenizer = model.text.tokenizer.clone();
                    let (text, ids) = work.run(move |_| (tokenizer.decode(&ids, false), ids)).await?;
                    echo.push(text);
                    ids
                } else {
                    ids
                }
            }
            Prompt::Text(text) => {
                if request.echo {
                    echo.push(text.clone());
                }
                let tokenizer = model.text.tokenizer.clone();
                work.run(move |_| tokenizer.encode(&text, true))
                    .await?
                    .map_err(|error| ApiError::invalid("prompt", error.to_string()))?
            }
        };
        prompts.push(Arc::new(ids));
    }
    Ok(Normal {
        prompts,
        echo,
        sampling: request.sampling,
        salt: request.cache_salt,
        stream: request.stream,
        include_usage: request.include_usage,
        return_token_ids: request.return_token_ids,
        tokens_as_ids: request.tokens_as_ids,
        tools: None,
        forced: None,
    })
}

fn check_prompts(model: &Model, param: &str, normal: &Normal) -> Result<(), ApiError> {
    let context = model.pool.context_tokens();
    for prompt in &normal.prompts {
        if prompt.is_empty() {
            return Err(ApiError::invalid(param, format!("`{param}` has no tokens.")));
        }
        if context > 0 && prompt.len() >= context {
            return Err(ApiError::context_length(param, prompt.len(), context));
        }
    }
    Ok(())
}

/// Makes an answer of the choices' events.
struct Collector {
    gateway: Arc<Gateway>,
    /// By choice.
    said: Vec<Option<Said>>,
    answer: Answer,
    kind: Kind,
    choices: u32,
    usage: Usage,
    normal: Normal,
    events: mpsc::Receiver<ChoiceEvent>,
    started: Instant,
    stay: Option<Box<Stay>>,
}

impl Collector {
    fn count(&mut self, piece: &ChoicePiece) {
        if self.usage.completion == 0 && !piece.tokens.is_empty() {
            self.gateway.metrics.time_to_first_token.observe(self.started.elapsed());
            if let Some(stay) = &mut self.stay {
                stay.first_token();
            }
        }
        self.usage.completion += piece.tokens.len();
        if let Some(stay) = &mut self.stay {
            stay.progress(piece.tokens.len());
        }
        self.usage.cached = self.usage.cached.max(piece.cached_tokens);
    }

    fn account(&mut self) {
        self.gateway.metrics.prompt_tokens.inc_by(self.usage.prompt as u64);
        self.gateway.metrics.cached_tokens.inc_by(self.usage.cached as u64);
        if let Some(stay) = &mut self.stay {
            stay.used(&self.usage.into());
        }
    }

    fn echo_of(&self, index: u32) -> &str {
        self.normal.echo.get((index / self.normal.sampling.n) as usize).map_or("", String::as_str)
    }

    async fn whole(mut self) -> Result<Response, (Box<Stay>, ApiError)> {
        match self.put_together().await {
            Ok(response) => {
                self.answered(None);
                Ok(response)
            }
            Err(error) => Err(self.give_up(error)),
        }
    }

    /// The client gets an answer, whole or as far as it came.
    fn answered(&mut self, reason: Option<&'static str>) {
        if let Some(stay) = &mut self.stay {
            stay.answered(StatusCode::OK, reason);
        }
    }

    /// Nothing has been sent: the error is the answer.
    fn give_up(mut self, error: ApiError) -> (Box<Stay>, ApiError) {
        let stay = self.stay.take();
        (stay.unwrap_or_else(|| Stay::nobodys(&self.gateway)), error)
    }

    async fn put_together(&mut self) -> Result<Response, ApiError> {
        #[derive(Default, Clone)]
        struct Output {
            text: String,
            tokens: Vec<u32>,
            logprobs: Vec<TokenLogprobs>,
            finish: Option<Finish>,
        }
        let mut outputs = vec![Output::default(); self.choices as usize];
        for index in 0..self.choices {
            outputs[index as usize].text = self.echo_of(index).to_owned();
        }
        while let Some(event) = self.events.recv().await {
            let piece = match event {
                ChoiceEvent::Failed(error) => return Err(error),
                ChoiceEvent::Piece(piece) => piece,
            };
            self.count(&piece);
            let output = &mut outputs[piece.index as usize];
            output.text.push_str(&piece.text);
            output.tokens.extend(piece.tokens);
            output.logprobs.extend(piece.logprobs);
            output.finish = output.finish.or(piece.finish);
        }
        self.account();
        let wants_logprobs = self.normal.sampling.logprobs.is_some();
        let mut said = std::mem::take(&mut self.said);
        let choices = outputs.iter().zip(0..).map(|(output, index)| {
            let finish =
                output.finish.ok_or_else(|| ApiError::internal("An output ended without a reason."))?;
            let logprobs = wants_logprobs.then_some(output.logprobs.as_slice());
            let tokens = self.normal.return_token_ids.then_some(output.tokens.as_slice());
            let said = said.get_mut(index as usize).and_then(Option::as_mut);
            let Some(said) = said else {
                return Ok(self.answer.choice(index, &output.text, logprobs, tokens, finish));
            };
            said.push(&output.text, true);
            let mut choice = self.answer.choice(index, "", logprobs, tokens, said.finish(finish));
            choice["message"] = said.message();
            Ok(choice)
        });
        let choices = choices.collect::<Result<Vec<_>, ApiError>>()?;
        Ok(json_response(StatusCode::OK, self.answer.whole(choices, self.usage).to_string()))
    }

    /// Waits for the first event, so that a failure before any token is a proper error.
    async fn streamed(mut self) -> Result<Response, (Box<Stay>, ApiError)> {
        let first = match self.events.recv().await {
            Some(ChoiceEvent::Failed(error)) => return Err(self.give_up(error)),
            first => first,
        };
        self.answered(None);
        let mut head = String::new();
        for index in 0..self.choices {
            if self.kind == Kind::Chat {
                head.push_str(&self.answer.role_piece(index));
            } else if !self.echo_of(index).is_empty() {
                head.push_str(&self.answer.piece(index, self.echo_of(index), &[], 0, None, None));
            }
        }
        let offsets = (0..self.choices).map(|index| self.echo_of(index).chars().count()).collect();
        let mut stream = Stream { collector: self, offsets, next: Some(head), is_over: false };
        if let Some(ChoiceEvent::Piece(piece)) = first {
            stream.piece(&piece);
        }
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
        Ok((headers, Body::from_stream(stream)).into_response())
    }
}

/// The body of a streamed answer. Pieces that are ready together leave together.
struct Stream {
    collector: Collector,
    offsets: Vec<usize>,
    next: Option<String>,
    is_over: bool,
}

impl Stream {
    fn piece(&mut self, piece: &ChoicePiece) {
        self.collector.count(piece);
        let offset = &mut self.offsets[piece.index as usize];
        let tokens = self.collector.normal.return_token_ids.then_some(piece.tokens.as_slice());
        if let Some(said) = &mut self.collector.said[piece.index as usize] {
            said.push(&piece.text, piece.finish.is_some());
            let finish = piece.finish.map(|finish| said.finish(finish));
            let mut deltas = said.deltas();
            let owes = finish.is_some() || tokens.is_some() || !piece.logprobs.is_empty();
            if deltas.is_empty() && owes {
                deltas.push(json!({}));
            }
            let last = deltas.len().saturating_sub(1);
            for (at, delta) in deltas.iter().enumerate() {
                // What belongs to the tokens goes with the first part of their text, the end with the last.
                let (logprobs, tokens) =
                    if at == 0 { (piece.logprobs.as_slice(), tokens) } else { (&[][..], None) };
                let finish = finish.filter(|_| at == last);
                let event = self.collector.answer.delta(piece.index, delta, logprobs, tokens, finish);
                self.next.get_or_insert_default().push_str(&event);
            }
            return;
        }
        let event = self.collector.answer.piece(
            piece.index,
            &piece.text,
            &piece.logprobs,
            *offset,
            tokens,
            piece.finish,
        );
        *offset += piece.text.chars().count();
        // A token whose text is held back has nothing to say, unless ids or log-probabilities are wanted.
        if !piece.text.is_empty() || piece.finish.is_some() || tokens.is_some() || !piece.logprobs.is_empty()
        {
            self.next.get_or_insert_default().push_str(&event);
        }
    }

    fn end(&mut self) {
        self.is_over = true;
        self.collector.account();
        let next = self.next.get_or_insert_default();
        if self.collector.normal.include_usage {
            next.push_str(&self.collector.answer.usage_piece(self.collector.usage));
        }
        next.push_str("data: [DONE]\n\n");
    }
}

impl futures_util::Stream for Stream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while !self.is_over {
            match self.collector.events.poll_recv(context) {
                Poll::Pending => break,
                Poll::Ready(Some(ChoiceEvent::Piece(piece))) => self.piece(&piece),
                Poll::Ready(Some(ChoiceEvent::Failed(error))) => {
                    self.is_over = true;
                    self.collector.answered(Some("broken_stream"));
                    self.collector.gateway.metrics.broken_streams.inc();
                    let event = format!("data: {}\n\n", error.to_json());
                    self.next.get_or_insert_default().push_str(&event);
                }
                Poll::Ready(None) => self.end(),
            }
        }
        match (self.next.take(), self.is_over) {
            (Some(text), _) => Poll::Ready(Some(Ok(text.into()))),
            (None, true) => Poll::Ready(None),
            (None, false) => Poll::Pending,
        }
    }
}
