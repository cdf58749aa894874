//! The bidirectional stream: requests in, their responses out, until both sides are done.
//!
//! Requests start in the order of arrival and at most [`Config::pipelined_max`] are in flight; a further one stays on
//! the wire, and the client's flow control holds it there. Responses of several requests interleave, as Triton's do
//! for models that stream, and carry their request's id. A request without an id could not be told from others, so it
//! starts when those before it are done, and those after it wait for it.
//!
//! Everything is polled by the call's own task: when the client goes or the deadline passes, all of it is dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::stream::{BoxStream, SelectAll, StreamExt};
use futures_util::{FutureExt, Stream};
use http::HeaderMap;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::{Status, Streaming};

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::infer::responses;
use crate::proto::inference::{ModelInferRequest, ModelStreamInferResponse};

/// One call of ModelStreamInfer.
pub(crate) struct Conversation<B> {
    backend: Arc<B>,
    config: Arc<Config>,
    headers: HeaderMap,
    incoming: Option<Streaming<ModelInferRequest>>,
    /// A request without an id that waits for those before it.
    held: Option<ModelInferRequest>,
    /// Whether one without an id is in flight.
    is_alone: bool,
    active: SelectAll<BoxStream<'static, ModelStreamInferResponse>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<B: Backend> Conversation<B> {
    pub(crate) fn new(
        backend: Arc<B>,
        config: Arc<Config>,
        headers: HeaderMap,
        deadline: Option<Instant>,
        incoming: Streaming<ModelInferRequest>,
    ) -> Self {
        Self {
            backend,
            config,
            headers,
            incoming: Some(incoming),
            held: None,
            is_alone: false,
            active: SelectAll::new(),
            deadline: deadline.map(|deadline| Box::pin(sleep_until(deadline))),
        }
    }

    /// Drops all that is under way.
    fn end(&mut self) {
        self.incoming = None;
        self.held = None;
        self.active.clear();
        self.deadline = None;
    }

    fn start(&mut self, request: ModelInferRequest) {
        self.is_alone = request.id.is_empty();
        let (backend, config) = (Arc::clone(&self.backend), Arc::clone(&self.config));
        self.active.push(responses(backend, config, self.headers.clone(), request).boxed());
    }

    /// Starts what may start now. An error is one of the incoming stream.
    fn admit(&mut self, context: &mut Context<'_>) -> Result<(), Status> {
        loop {
            if self.active.is_empty() {
                self.is_alone = false;
                if let Some(request) = self.held.take() {
                    self.start(request);
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
                Poll::Ready(Some(Ok(request))) if request.id.is_empty() => self.held = Some(request),
                Poll::Ready(Some(Ok(request))) => self.start(request),
            }
        }
    }
}

impl<B: Backend> Stream for Conversation<B> {
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
            // Requests that ended without a further response made room for others.
            if this.active.len() == active_before {
                return Poll::Pending;
            }
        }
    }
}
