//! Waiting in the queue, as a future.
//!
//! Dropping it at any moment is safe. Still in the queue: it is taken out. Already chosen: the permit lies in the
//! channel and is dropped with it, which passes the place on. Between the two: the channel is closed first, so that
//! whoever chooses it now keeps the place and passes it on.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use super::gate::Gate;
use super::permit::Permit;
use super::queue::Ticket;

/// How waiting ended.
#[derive(Debug)]
#[must_use]
pub enum WaitOutcome {
    /// Inside.
    Admitted(Permit),
    /// The deadline passed.
    Expired,
}

/// A place in the queue.
#[derive(Debug)]
#[must_use = "dropping it gives up the place in the queue"]
pub struct Wait {
    gate: Arc<Gate>,
    ticket: Ticket,
    /// `None` once it has answered.
    receiver: Option<oneshot::Receiver<WaitOutcome>>,
}

impl Wait {
    pub(super) fn new(gate: Arc<Gate>, ticket: Ticket, receiver: oneshot::Receiver<WaitOutcome>) -> Self {
        Self { gate, ticket, receiver: Some(receiver) }
    }

    /// The outcome if there is one already; `None` while it waits.
    pub fn try_take(&mut self) -> Option<WaitOutcome> {
        let outcome = self.receiver.as_mut()?.try_recv().ok()?;
        self.receiver = None;
        Some(outcome)
    }
}

impl Future for Wait {
    type Output = WaitOutcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<WaitOutcome> {
        // Polled again after its end: it has waited in vain. And a sender is never dropped unused.
        let Some(receiver) = &mut self.receiver else { return Poll::Ready(WaitOutcome::Expired) };
        let outcome = std::task::ready!(Pin::new(receiver).poll(context)).unwrap_or(WaitOutcome::Expired);
        self.receiver = None;
        Poll::Ready(outcome)
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(mut receiver) = self.receiver.take() {
            receiver.close();
            self.gate.abandon(&self.ticket);
        }
    }
}
