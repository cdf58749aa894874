//! The events of an answer, from whichever worker goes on with it.

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

/// What becomes of an engine's events, and how the answer goes on with another worker.
pub(crate) trait Output: Unpin + Send + 'static {
    /// What comes of events, for the client.
    type Item: Send + Unpin;

    /// How the events of a leg are read.
    fn scanner(&self) -> Scanner;

    /// A leg has begun, over this route.
    fn began(&mut self, _route: &Route) {}

    /// The prefill worker had so many tokens of the prompt.
    fn prefill_cached(&mut self, _tokens: usize) {}

    /// Takes whole events.
    fn take(&mut self, batch: EventBatch) -> OutputStep<Self::Item>;

    /// The engine has ended its answer as it should; an error says why that is not so.
    fn finish(&mut self) -> Result<Option<Self::Item>, String>;

    /// What to request the next worker for, after a failure.
    fn continuation(&mut self) -> Continuation<Self::Item>;
}

/// What came of events.
pub(crate) struct OutputStep<T> {
    pub(crate) item: Option<T>,
    /// What the engine says that it did.
    pub(crate) usage: Option<Usage>,
    /// Nothing more is wanted of the engine.
    pub(crate) is_complete: bool,
    /// The attempt has failed, in these words.
    pub(crate) failure: Option<String>,
}

/// How an answer goes on after a failure.
pub(crate) enum Continuation<T> {
    /// With another worker.
    Request(Arc<EngineRequest>),
    /// Everything was delivered but the end of the stream.
    Complete(Option<T>),
    /// The answer cannot be continued, for this reason.
    Impossible(&'static str),
}

/// The end of an answer that failed.
#[derive(Debug)]
pub(crate) struct BrokenAnswer {
    pub(crate) failure: Failure,
    /// Why no other worker could go on with it.
    pub(crate) not_resumable: Option<String>,
}

type Begun = (Leg, EventBatch, Attempts);

enum State {
    /// Workers are being asked, for the first time or for the rest.
    Starting(BoxFuture<'static, Result<Begun, Failure>>),
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
    /// What is ready to go.
    ready: VecDeque<Result<O::Item, BrokenAnswer>>,
    /// Something has come of it.
    has_begun: bool,
    last_piece: Option<Instant>,
    /// Of the first worker that answered.
    route: Option<Route>,
}

/// Asks for an answer, or for the rest of one whose worker has failed.
async fn start(
    generation: Arc<Generation>,
    request: Arc<EngineRequest>,
    scanner: impl Fn() -> Scanner + Send + Sync,
    mut attempts: Attempts,
    after: Option<(Route, Failure)>,
) -> Result<Begun, Failure> {
    if let Some((route, failure)) = after {
        attempts.failed(&generation, &route, failure).await?;
    }
    let attempt =
        |route, booking| begin(Arc::clone(&generation), Arc::clone(&request), scanner(), route, booking);
    let (leg, first) = attempts.run(&generation, &request, attempt).await?;
    Ok((leg, first, attempts))
}

impl<O: Output> EventStream<O> {
    /// The answer to this; it is asked for when the stream is first polled.
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

    /// Takes events of the present worker.
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
            let now = leg.last_came();
            if let Some(last) = self.last_piece.replace(now) {
                metrics.inter_token.observe(now.duration_since(last));
            }
        }
        let mut broken = None;
        if let Some(usage) = &taken.usage {
            broken = leg.promised.as_ref().and_then(|promised| promised.check(usage).err());
            if let Some(cached) = usage.cached {
                leg.booking.cached_tokens(cached);
            }
        }
        if let Some(reason) = broken {
            // The client has tokens already; what can be done is to say that they are not to be trusted.
            let failure = Failure::protocol(&leg.route.decode, &reason);
            let failure = failure.of_elsewhere(leg.booking.is_served_elsewhere());
            leg.failed();
            failure.blame(&leg.route);
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
            // What the engine would still say is not wanted: its connection is closed.
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

    /// The present worker failed: another one goes on, if it can.
    fn fail_over(&mut self, failure: Failure) {
        let State::Live(mut leg) = std::mem::replace(&mut self.state, State::Over) else { return };
        leg.failed();
        let failure = failure.of_elsewhere(leg.booking.is_served_elsewhere());
        let route = leg.route.clone();
        drop(leg);
        match self.output.continuation() {
            Continuation::Request(request) => self.start(request, Some((route, failure))),
            Continuation::Complete(last) => self.ready.extend(last.map(Ok)),
            Continuation::Impossible(why) => {
                failure.blame(&route);
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
