//! Answers whose text the gateway makes: engines that take and give token ids are sent ids, and the outputs
//! of one request (several prompts, several choices) are merged again.

use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Bytes;
use axum::http::{HeaderValue, StatusCode};
use futures_util::StreamExt;
use futures_util::stream::SelectAll;
use router_openai::{
    Answer as AnswerForm, ApiError, ChatRequest, CompletionRequest, Finish, Kind, Prompt, STRUCTURED_OUTPUTS,
    Sampling, TokenLogprobs, ToolChoice, Usage,
};
use router_parsers::ToolFormat;
use serde_json::{Value, json};

use super::buffered::json_answer;
use super::output_parser::{OutputParser, forced_parser};
use super::token_output::{TokenDelta, TokenOutput};
use super::{Answer, AnswerEvents, explain, stream_error_event};
use crate::compute::Work;
use crate::models::{Model, Target};
use crate::request::RequestContext;
use crate::service::{fresh_number, unix_time};
use crate::upstream::{BrokenAnswer, EventStream, Generation};

/// A request whose prompts are known in tokens, in the form that chats and completions share.
pub(crate) struct TokenRequest {
    kind: Kind,
    model: Arc<Model>,
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
    /// Format of the tool call that the model is forced to make.
    forced: Option<ToolFormat>,
}

impl TokenRequest {
    /// Reads a request and tokenizes its prompts.
    pub(crate) async fn read(
        context: &RequestContext,
        model: &Arc<Model>,
        body: Bytes,
        kind: Kind,
    ) -> Result<Self, ApiError> {
        let gateway = &context.gateway;
        let work = gateway.work(body.len(), &context.footprint).await?;
        let mut this = match kind {
            Kind::Chat => Self::of_chat(model, body, &work).await?,
            Kind::Completion => Self::of_completion(model, body, &work).await?,
        };
        // Only the gateway itself sets this field, when it continues on another worker.
        this.sampling.resumed_tokens = 0;
        if let Some(salt) = gateway.access.tenants_salt(&context.grant, this.salt.as_deref()) {
            this.salt = Some(salt);
        }
        this.check_prompts()?;
        Ok(this)
    }

    async fn of_chat(model: &Arc<Model>, body: Bytes, work: &Work) -> Result<Self, ApiError> {
        let mut request = work.run(move |_| ChatRequest::parse(&body)).await??;
        let tools = request.template_extras.get("tools").cloned();
        let tools = tools.filter(|_| request.tool_choice != ToolChoice::None);
        let forced = match request.tool_choice {
            ToolChoice::Auto | ToolChoice::None => None,
            ToolChoice::Required => Some(ToolFormat::ForcedArray),
            ToolChoice::Named(name) => Some(ToolFormat::ForcedNamed(name)),
        };
        let formats = &model.formats;
        if (formats.tools.is_some() && tools.is_some()) || formats.reasoning.is_some() {
            // Markers of calls and reasoning are special tokens in most vocabularies.
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
        Ok(Self {
            kind: Kind::Chat,
            model: Arc::clone(model),
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

    async fn of_completion(model: &Arc<Model>, body: Bytes, work: &Work) -> Result<Self, ApiError> {
        let request = work.run(move |_| CompletionRequest::parse(&body)).await??;
        let mut prompts = Vec::with_capacity(request.prompts.len());
        let mut echo = Vec::new();
        for prompt in request.prompts {
            let tokenizer = model.text.tokenizer.clone();
            let ids = match prompt {
                Prompt::Tokens(ids) if request.echo => {
                    let (text, ids) = work.run(move |_| (tokenizer.decode(&ids, false), ids)).await?;
                    echo.push(text);
                    ids
                }
                Prompt::Tokens(ids) => ids,
                Prompt::Text(text) => {
                    if request.echo {
                        echo.push(text.clone());
                    }
                    work.run(move |_| tokenizer.encode(&text, true))
                        .await?
                        .map_err(|error| ApiError::invalid("prompt", error.to_string()))?
                }
            };
            prompts.push(Arc::new(ids));
        }
        Ok(Self {
            kind: Kind::Completion,
            model: Arc::clone(model),
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

    fn check_prompts(&self) -> Result<(), ApiError> {
        let param = if self.kind == Kind::Chat { "messages" } else { "prompt" };
        let context = self.model.pool.context_tokens();
        for prompt in &self.prompts {
            if prompt.is_empty() {
                return Err(ApiError::invalid(param, format!("`{param}` has no tokens.")));
            }
            if context > 0 && prompt.len() >= context {
                return Err(ApiError::context_length(param, prompt.len(), context));
            }
        }
        Ok(())
    }

    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Tokens of all prompts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.len()).sum()
    }

    /// Returns the largest number of tokens of one choice, if the client limits it.
    pub(crate) fn answer_max(&self) -> Option<usize> {
        self.sampling.max_tokens
    }

    pub(crate) fn choices(&self) -> usize {
        self.prompts.len() * self.sampling.n as usize
    }

    fn echo_of(&self, index: u32) -> &str {
        self.echo.get((index / self.sampling.n) as usize).map_or("", String::as_str)
    }

    /// Returns a parser for one choice, if its model writes tool calls or reasoning.
    fn parser(&self) -> Option<OutputParser> {
        /// Enough for the text with which a template opens an answer.
        const PROMPT_END_TOKENS: usize = 16;
        let prompt = self.prompts.first().filter(|_| self.kind == Kind::Chat)?;
        if self.sampling.structured.is_some() {
            // The output is JSON from its first token on: there are no markers and no reasoning.
            let format = self.forced.clone()?;
            return Some(OutputParser::new(forced_parser(format, self.tools.as_ref(), fresh_number())));
        }
        let end = &prompt[prompt.len().saturating_sub(PROMPT_END_TOKENS)..];
        let end = self.model.text.tokenizer.decode(end, false);
        self.model.formats.parser(self.tools.as_ref(), &end, fresh_number()).map(OutputParser::new)
    }

    /// Starts a stream for every choice, in order: each is booked before the next is routed, so that a
    /// burst does not follow one prefix to one worker.
    fn ask(&self, context: &RequestContext) -> (Arc<Generation>, SelectAll<EventStream<TokenOutput>>) {
        let mut first = None;
        let mut streams = SelectAll::new();
        for index in 0..self.choices() as u32 {
            let prompt = &self.prompts[(index / self.sampling.n) as usize];
            let mut sampling = self.sampling.clone();
            // Every choice has a seed, so that an interrupted choice continues with the same draws.
            let seed = sampling.seed.unwrap_or_else(fresh_number);
            sampling.seed = Some(seed.wrapping_add(u64::from(index % sampling.n)));
            sampling.n = 1;
            let target = Target { model: Arc::clone(&self.model), adapter: None };
            let mut generation = context.generation(target, Kind::Completion.path());
            generation.engine_id = format!("{}-{index}", context.engine_id);
            generation.salt.clone_from(&self.salt);
            generation.can_split = true;
            let generation = Arc::new(generation);
            let output = TokenOutput::new(&self.model, index, prompt, sampling, self.salt.clone());
            streams.push(EventStream::new(&generation, output.request(), output));
            first.get_or_insert(generation);
        }
        // A request has at least one prompt and one choice.
        let first = first.unwrap_or_else(|| {
            let target = Target { model: Arc::clone(&self.model), adapter: None };
            Arc::new(context.generation(target, Kind::Completion.path()))
        });
        (first, streams)
    }

    /// Answers the request, once it has its place at the gate.
    pub(crate) async fn answer(self, context: &mut RequestContext) -> Result<Answer, ApiError> {
        let (generation, streams) = self.ask(context);
        let prefix = if self.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let form = AnswerForm::new(
            self.kind,
            format!("{prefix}-{}", context.request_id),
            unix_time(),
            &self.model.pool.model(),
            self.tokens_as_ids,
        );
        let collector = Collector {
            parsers: (0..self.choices()).map(|_| self.parser()).collect(),
            usage: Usage { prompt: self.prompt_tokens(), cached: Some(0), ..Usage::default() },
            form,
            generation,
            streams,
            request: self,
        };
        match collector.request.stream {
            true => collector.streamed().await,
            false => collector.whole(context).await,
        }
    }
}

/// Merges the choices of an answer.
struct Collector {
    request: TokenRequest,
    form: AnswerForm,
    /// Parsers by choice, where the model writes tool calls or reasoning.
    parsers: Vec<Option<OutputParser>>,
    usage: Usage,
    generation: Arc<Generation>,
    streams: SelectAll<EventStream<TokenOutput>>,
}

impl Collector {
    fn count(&mut self, piece: &TokenDelta, context: &mut RequestContext) {
        if !piece.tokens.is_empty() {
            context.first_token();
        }
        self.usage.completion += piece.tokens.len();
        context.count_events(piece.tokens.len());
        self.usage.cached = self.usage.cached.max(Some(piece.cached_tokens));
    }

    fn explained(&self) -> Option<HeaderValue> {
        let route = self.streams.iter().find_map(EventStream::route)?;
        self.generation.explained(route)
    }

    /// Returns the error of a choice, in terms of the client's request.
    fn error(&self, failed: BrokenAnswer) -> ApiError {
        let mut error = failed.failure.into_error(&self.generation);
        // The engine knows only the name of its own field.
        if let Some(output) = &self.request.sampling.structured
            && error.param.as_deref() == Some(STRUCTURED_OUTPUTS)
        {
            error.param = Some(output.param.to_owned());
        }
        error
    }

    async fn whole(mut self, context: &mut RequestContext) -> Result<Answer, ApiError> {
        #[derive(Default, Clone)]
        struct Output {
            text: String,
            tokens: Vec<u32>,
            logprobs: Vec<TokenLogprobs>,
            finish: Option<Finish>,
        }
        let mut outputs = vec![Output::default(); self.parsers.len()];
        for (output, index) in outputs.iter_mut().zip(0..) {
            self.request.echo_of(index).clone_into(&mut output.text);
        }
        let mut explained = None;
        while let Some(pieces) = self.streams.next().await {
            explained = explained.or_else(|| self.explained());
            for piece in pieces.map_err(|failed| self.error(failed))? {
                self.count(&piece, context);
                let output = &mut outputs[piece.index as usize];
                output.text.push_str(&piece.text);
                output.tokens.extend(piece.tokens);
                output.logprobs.extend(piece.logprobs);
                output.finish = output.finish.or(piece.finish);
            }
        }
        context.record_usage(&self.usage);
        let wants_logprobs = self.request.sampling.logprobs.is_some();
        let mut parsers = std::mem::take(&mut self.parsers);
        let choices = outputs.iter().zip(0..).map(|(output, index)| {
            let finish =
                output.finish.ok_or_else(|| ApiError::internal("An output ended without a reason."))?;
            let logprobs = wants_logprobs.then_some(output.logprobs.as_slice());
            let tokens = self.request.return_token_ids.then_some(output.tokens.as_slice());
            let Some(parser) = parsers.get_mut(index as usize).and_then(Option::as_mut) else {
                return Ok(self.form.choice(index, &output.text, logprobs, tokens, finish));
            };
            parser.push(&output.text, true);
            let mut choice = self.form.choice(index, "", logprobs, tokens, parser.finish(finish));
            choice["message"] = parser.message();
            Ok(choice)
        });
        let choices = choices.collect::<Result<Vec<_>, ApiError>>()?;
        context.answered(StatusCode::OK, None);
        let mut response = json_answer(StatusCode::OK, self.form.whole(choices, self.usage).to_string());
        explain(&mut response, explained);
        Ok(Answer::Buffered(response))
    }

    /// Waits for the first event, so that a failure before any token becomes an error status.
    async fn streamed(mut self) -> Result<Answer, ApiError> {
        let first = match self.streams.next().await {
            Some(Err(failed)) => return Err(self.error(failed)),
            Some(Ok(first)) => first,
            None => Vec::new(),
        };
        let explained = self.explained();
        let mut head = String::new();
        let choices = self.parsers.len() as u32;
        for index in 0..choices {
            let echo = self.request.echo_of(index);
            if self.request.kind == Kind::Chat {
                head.push_str(&self.form.role_piece(index));
            } else if !echo.is_empty() {
                head.push_str(&self.form.piece(index, echo, &[], 0, None, None));
            }
        }
        let offsets = (0..choices).map(|index| self.request.echo_of(index).chars().count()).collect();
        let events = GeneratedEvents { collector: self, offsets, first, next: head, is_over: false };
        Ok(Answer::Generated(Box::new(events), explained))
    }
}

/// The events of a streamed answer. Pieces that are ready together are sent together.
pub(crate) struct GeneratedEvents {
    collector: Collector,
    /// Characters of each choice that were sent.
    offsets: Vec<usize>,
    /// Events that arrived before the answer began.
    first: Vec<TokenDelta>,
    next: String,
    is_over: bool,
}

impl GeneratedEvents {
    fn piece(&mut self, piece: &TokenDelta) {
        let tokens = self.collector.request.return_token_ids.then_some(piece.tokens.as_slice());
        let form = &self.collector.form;
        if let Some(parser) = &mut self.collector.parsers[piece.index as usize] {
            parser.push(&piece.text, piece.finish.is_some());
            let finish = piece.finish.map(|finish| parser.finish(finish));
            let mut deltas = parser.deltas();
            let owes = finish.is_some() || tokens.is_some() || !piece.logprobs.is_empty();
            if deltas.is_empty() && owes {
                deltas.push(json!({}));
            }
            let last = deltas.len().saturating_sub(1);
            for (at, delta) in deltas.iter().enumerate() {
                // Log-probabilities and token ids go with the first part of the text, the finish reason
                // with the last.
                let (logprobs, tokens) =
                    if at == 0 { (piece.logprobs.as_slice(), tokens) } else { (&[][..], None) };
                let finish = finish.filter(|_| at == last);
                self.next.push_str(&form.delta(piece.index, delta, logprobs, tokens, finish));
            }
            return;
        }
        let offset = &mut self.offsets[piece.index as usize];
        let event = form.piece(piece.index, &piece.text, &piece.logprobs, *offset, tokens, piece.finish);
        *offset += piece.text.chars().count();
        // A token whose text is held back makes no event, unless ids or log-probabilities are requested.
        if !piece.text.is_empty() || piece.finish.is_some() || tokens.is_some() || !piece.logprobs.is_empty()
        {
            self.next.push_str(&event);
        }
    }

    fn take(&mut self, pieces: &[TokenDelta], context: &mut RequestContext) {
        for piece in pieces {
            self.collector.count(piece, context);
            self.piece(piece);
        }
    }

    fn end(&mut self, context: &mut RequestContext) {
        self.is_over = true;
        context.record_usage(&self.collector.usage);
        if self.collector.request.include_usage {
            self.next.push_str(&self.collector.form.usage_piece(self.collector.usage));
        }
        self.next.push_str("data: [DONE]\n\n");
    }
}

impl AnswerEvents for GeneratedEvents {
    fn poll_events(&mut self, context: &mut RequestContext, task: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let first = std::mem::take(&mut self.first);
        self.take(&first, context);
        while !self.is_over {
            match self.collector.streams.poll_next_unpin(task) {
                Poll::Pending => break,
                Poll::Ready(Some(Ok(pieces))) => self.take(&pieces, context),
                Poll::Ready(Some(Err(failed))) => {
                    self.is_over = true;
                    if failed.not_resumable.is_none() {
                        // This choice has not begun: the error is the one that a request for this choice
                        // alone would get.
                        context.record_broken_stream();
                        let error = self.collector.error(failed).to_json();
                        self.next.push_str(&format!("data: {error}\n\n"));
                    } else {
                        let event = stream_error_event(context, &self.collector.generation, failed);
                        self.next.push_str(&String::from_utf8_lossy(&event));
                    }
                }
                Poll::Ready(None) => self.end(context),
            }
        }
        if !self.next.is_empty() {
            return Poll::Ready(Some(std::mem::take(&mut self.next).into()));
        }
        if self.is_over { Poll::Ready(None) } else { Poll::Pending }
    }
}
