//! The bidirectional stream: receives requests and sends their responses, until both sides are done.
//!
//! Requests start in the order of arrival and at most [`Config::pipelined_max`] are in flight; a further
//! one stays unread, and flow control holds it at the client. Responses of several requests interleave, as
//! Triton's do for models that stream, and carry their request's id. A request without an id could not be
//! told from others, so it starts when all earlier ones are done, and later ones wait for it.
//!
//! Each request is charged to the budget of all calls until its last response; a request that exceeds the
//! budget is answered with an error, and the stream continues.
//!
//! Everything is polled by the call's own task: when the client disconnects or the deadline passes, all of
//! it is dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::stream::{BoxStream, SelectAll, StreamExt, once};
use futures_util::{FutureExt, Stream};
use http::HeaderMap;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::{Status, Streaming};

use crate::answer::failed;
use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::infer::responses;
use crate::intake::Budget;
use crate::proto::inference::{ModelInferRequest, ModelStreamInferResponse};

/// A received request.
struct ReceivedRequest {
    has_id: bool,
    /// The request with its charge, or the error response when the budget was used up.
    work: Result<(ModelInferRequest, OwnedSemaphorePermit), Box<ModelStreamInferResponse>>,
}

impl ReceivedRequest {
    fn new(budget: &Budget, request: ModelInferRequest) -> Self {
        let has_id = !request.id.is_empty();
        let work = match budget.hold(&request) {
            Ok(charge) => Ok((request, charge)),
            Err(error) => Err(Box::new(failed(&request.id, &request.model_name, &error))),
        };
        Self { has_id, work }
    }
}

/// One call of ModelStreamInfer.
pub(crate) struct InferStream<B> {
    backend: Arc<B>,
    config: Arc<Config>,
    budget: Arc<Budget>,
    headers: HeaderMap,
    incoming: Option<Streaming<ModelInferRequest>>,
    /// A request without an id that waits for the earlier ones.
    held: Option<ReceivedRequest>,
    /// Whether a request without an id is in flight.
    is_alone: bool,
    active: SelectAll<BoxStream<'static, ModelStreamInferResponse>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<B: Backend> InferStream<B> {
    pub(crate) fn new(
        backend: Arc<B>,
        config: Arc<Config>,
        budget: Arc<Budget>,
        headers: HeaderMap,
        deadline: Option<Instant>,
        incoming: Streaming<ModelInferRequest>,
    ) -> Self {
        Self {
            backend,
            config,
            budget,
            headers,
            incoming: Some(incoming),
            held: None,
            is_alone: false,
            active: SelectAll::new(),
            deadline: deadline.map(|deadline| Box::pin(sleep_until(deadline))),
        }
    }

    /// Drops all requests in progress.
    fn end(&mut self) {
        self.incoming = None;
        self.held = None;
        self.active.clear();
        self.deadline = None;
    }

    fn start(&mut self, asked: ReceivedRequest) {
        self.is_alone = !asked.has_id;
        let (backend, config) = (Arc::clone(&self.backend), Arc::clone(&self.config));
        self.active.push(match asked.work {
            Ok((request, charge)) => {
                let responses = responses(backend, config, self.headers.clone(), request);
                let charged = responses.map(move |response| {
                    let _until_the_last = &charge;
                    response
                });
                charged.boxed()
            }
            Err(refusal) => once(std::future::ready(*refusal)).boxed(),
        });
    }

    /// Starts the requests that may start now. An error is one of the incoming stream.
    fn admit(&mut self, context: &mut Context<'_>) -> Result<(), Status> {
        loop {
            if self.active.is_empty() {
                self.is_alone = false;
                if let Some(asked) = self.held.take() {
                    self.start(asked);
                }
            }
            if self.is_alone || self.held.is_some() || self.active.len() >= self.config.pipelined_max {
                return Ok(());
            }
            let Some(incoming) = &mut self.incoming else { return Ok(()) };
            match incoming.poll_next_unpin(context) {
                Poll::Pending => return Ok(()),
                Poll::Ready(None) => self.incoming = None,
                Poll::Ready(Some(Err(status))) => return Err(status),
                Poll::Ready(Some(Ok(request))) => {
                    let asked = ReceivedRequest::new(&self.budget, request);
                    match asked.has_id {
                        true => self.start(asked),
                        false => self.held = Some(asked),
                    }
                }
            }
        }
    }
}

impl<B: Backend> Stream for InferStream<B> {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.deadline.as_mut().is_some_and(|deadline| deadline.poll_unpin(context).is_ready()) {
            this.end();
            return Poll::Ready(Some(Err(Error::Deadline.into())));
        }
        loop {
            if let Err(status) = this.admit(context) {
                this.end();
                return Poll::Ready(Some(Err(status)));
            }
            let active_before = this.active.len();
            if let Poll::Ready(Some(response)) = this.active.poll_next_unpin(context) {
                return Poll::Ready(Some(Ok(response)));
            }
            if this.active.is_empty() && this.incoming.is_none() && this.held.is_none() {
                return Poll::Ready(None);
            }
            // Requests that ended without a further response freed places for new ones.
            if this.active.len() == active_before {
                return Poll::Pending;
            }
        }
    }
}
