//! The events of an answer, also when it continues on another worker.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, Stream};
use router_fleet::Route;
use router_openai::Usage;

use super::failure::Failure;
use super::leg::{Leg, begin};
use super::scanner::{EventBatch, Scanner};
use super::{Attempts, EngineRequest, Generation};

/// Processing of an engine's events, and the continuation of the answer on another worker.
pub(crate) trait Output: Unpin + Send + 'static {
    /// Item made of events, for the client.
    type Item: Send + Unpin;

    /// Returns the scanner for the events of a leg.
    fn scanner(&self) -> Scanner;

    /// Called when a leg has begun, over this route.
    fn began(&mut self, _route: &Route) {}

    /// Reports the number of prompt tokens that the prefill worker had cached.
    fn prefill_cached(&mut self, _tokens: usize) {}

    /// Takes a batch of whole events.
    fn take(&mut self, batch: EventBatch) -> OutputStep<Self::Item>;

    /// Called when the engine has ended its answer; an error says why the answer is not complete.
    fn finish(&mut self) -> Result<Option<Self::Item>, String>;

    /// Returns the request for the next worker after a failure.
    fn continuation(&mut self) -> Continuation<Self::Item>;
}

/// Result of a batch of events.
pub(crate) struct OutputStep<T> {
    pub(crate) item: Option<T>,
    /// Token usage that the engine reported.
    pub(crate) usage: Option<Usage>,
    /// Nothing more is needed from the engine.
    pub(crate) is_complete: bool,
    /// Reason why the attempt has failed.
    pub(crate) failure: Option<String>,
}

/// Continuation of an answer after a failure.
pub(crate) enum Continuation<T> {
    /// With another worker.
    Request(Arc<EngineRequest>),
    /// Everything but the end of the stream was delivered.
    Complete(Option<T>),
    /// The answer cannot be continued, for this reason.
    Impossible(&'static str),
}

/// The end of an answer that failed.
#[derive(Debug)]
pub(crate) struct BrokenAnswer {
    pub(crate) failure: Failure,
    /// Reason why no other worker could continue the answer.
    pub(crate) not_resumable: Option<String>,
}

type StartedLeg = (Leg, EventBatch, Attempts);

enum State {
    /// Workers are being asked, for the first time or for the rest.
    Starting(BoxFuture<'static, Result<StartedLeg, Failure>>),
    Live(Box<Leg>),
    /// `[DONE]` has come: only the end of the body can follow.
    Ending(Box<Leg>),
    Over,
}

/// The events of an answer.
pub(crate) struct EventStream<O: Output> {
    generation: Arc<Generation>,
    output: O,
    state: State,
    attempts: Attempts,
    /// Items that are ready to be sent.
    ready: VecDeque<Result<O::Item, BrokenAnswer>>,
    /// Whether an item was produced.
    has_begun: bool,
    last_piece: Option<Instant>,
    /// Route of the first worker that answered.
    route: Option<Route>,
}

/// Asks for an answer, or for the rest of one whose worker has failed.
async fn start(
    generation: Arc<Generation>,
    request: Arc<EngineRequest>,
    scanner: impl Fn() -> Scanner + Send + Sync,
    mut attempts: Attempts,
    after: Option<(Route, Failure)>,
) -> Result<StartedLeg, Failure> {
    if let Some((route, failure)) = after {
        attempts.failed(&generation, &route, failure).await?;
    }
    let attempt =
        |route, booking| begin(Arc::clone(&generation), Arc::clone(&request), scanner(), route, booking);
    let (leg, first) = attempts.run(&generation, &request, attempt).await?;
    Ok((leg, first, attempts))
}

impl<O: Output> EventStream<O> {
    /// Creates the stream of the answer to `request`, which is sent when the stream is first polled.
    pub(crate) fn new(generation: &Arc<Generation>, request: Arc<EngineRequest>, output: O) -> Self {
        let mut this = Self {
            generation: Arc::clone(generation),
            output,
            state: State::Over,
            attempts: Attempts::default(),
            ready: VecDeque::new(),
            has_begun: false,
            last_piece: None,
            route: None,
        };
        this.start(request, None);
        this
    }

    pub(crate) fn generation(&self) -> &Arc<Generation> {
        &self.generation
    }

    /// The route of the first worker that answered, once one has.
    pub(crate) fn route(&self) -> Option<&Route> {
        self.route.as_ref()
    }

    fn start(&mut self, request: Arc<EngineRequest>, after: Option<(Route, Failure)>) {
        let attempts = std::mem::take(&mut self.attempts);
        let scanner = self.output.scanner();
        let started =
            start(Arc::clone(&self.generation), request, move || scanner.for_next_leg(), attempts, after);
        self.state = State::Starting(started.boxed());
    }

    /// Takes events of the current worker.
    fn take(&mut self, mut batch: EventBatch) {
        let State::Live(leg) = &mut self.state else { return };
        let metrics = &self.generation.gateway.metrics;
        if !batch.out.is_empty()
            && let (Some(since), Some(traced)) = (leg.mark_first_output(), &self.generation.traced)
        {
            traced.transferred(since, &leg.route);
        }
        if let Some(cached) = leg.prefill_cached.take() {
            self.output.prefill_cached(cached);
        }
        let (events, told, is_done) = (batch.events, batch.failure.take(), batch.is_done);
        let taken = self.output.take(batch);
        if taken.item.is_some() && events > 0 {
            let now = leg.last_frame_at();
            if let Some(last) = self.last_piece.replace(now) {
                metrics.inter_token.observe(now.duration_since(last));
            }
        }
        let mut broken = None;
        if let Some(usage) = &taken.usage {
            broken = leg.prefill_usage.as_ref().and_then(|prefill_usage| prefill_usage.check(usage).err());
            if let Some(cached) = usage.cached {
                leg.booking.cached_tokens(cached);
            }
        }
        if let Some(reason) = broken {
            // The client already has tokens; the only remedy is to report that they cannot be trusted.
            let failure = Failure::protocol(&leg.route.decode, &reason);
            let failure = failure.unattributed_if(leg.booking.is_served_elsewhere());
            leg.failed();
            failure.record_on_breaker(&leg.route);
            self.state = State::Over;
            return self.fail(failure, Some(format!("the tokens may be of another prompt: {reason}")));
        }
        self.has_begun |= taken.item.is_some();
        self.ready.extend(taken.item.map(Ok));
        if let Some(words) = told.or(taken.failure) {
            let failure = leg.engine_error(&words);
            return self.fail_over(failure);
        }
        if taken.is_complete {
            // The rest of the engine's output is not needed: its connection is closed.
            leg.succeeded();
            self.state = State::Over;
        } else if is_done {
            match self.output.finish() {
                Err(reason) => {
                    let failure = leg.engine_error(&reason);
                    self.fail_over(failure);
                }
                Ok(last) => {
                    self.ready.extend(last.map(Ok));
                    leg.succeeded();
                    if let State::Live(leg) = std::mem::replace(&mut self.state, State::Over) {
                        self.state = State::Ending(leg);
                    }
                }
            }
        }
    }

    fn fail(&mut self, failure: Failure, not_resumable: Option<String>) {
        self.ready.push_back(Err(BrokenAnswer { failure, not_resumable }));
    }

    /// Handles a failure of the current worker: continues on another one, if possible.
    fn fail_over(&mut self, failure: Failure) {
        let State::Live(mut leg) = std::mem::replace(&mut self.state, State::Over) else { return };
        leg.failed();
        let failure = failure.unattributed_if(leg.booking.is_served_elsewhere());
        let route = leg.route.clone();
        drop(leg);
        match self.output.continuation() {
            Continuation::Request(request) => self.start(request, Some((route, failure))),
            Continuation::Complete(last) => self.ready.extend(last.map(Ok)),
            Continuation::Impossible(why) => {
                failure.record_on_breaker(&route);
                self.fail(failure, Some(why.to_owned()));
            }
        }
    }
}

impl<O: Output> Stream for EventStream<O> {
    type Item = Result<O::Item, BrokenAnswer>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(ready) = this.ready.pop_front() {
                return Poll::Ready(Some(ready));
            }
            match &mut this.state {
                State::Over => return Poll::Ready(None),
                State::Ending(_) => {
                    if let State::Ending(leg) = std::mem::replace(&mut this.state, State::Over) {
                        leg.end(context);
                    }
                }
                State::Live(leg) => match leg.poll_batch(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Some(Ok(batch))) => this.take(batch),
                    Poll::Ready(Some(Err(failure))) => this.fail_over(failure),
                    Poll::Ready(None) => {
                        let failure = Failure::protocol(&leg.route.decode, "the stream ended too early");
                        this.fail_over(failure);
                    }
                },
                State::Starting(starting) => match starting.as_mut().poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok((leg, first, attempts))) => {
                        this.attempts = attempts;
                        this.output.began(&leg.route);
                        this.route.get_or_insert_with(|| leg.route.clone());
                        this.state = State::Live(Box::new(leg));
                        this.take(first);
                    }
                    Poll::Ready(Err(failure)) => {
                        this.state = State::Over;
                        let why = this.has_begun.then(|| "no other worker could go on with it".to_owned());
                        this.fail(failure, why);
                    }
                },
            }
        }
    }
}
