//! Waiting in the queue, as a future.
//!
//! Dropping it at any moment is safe. While queued, it is removed from the queue. Once chosen, the permit
//! lies in the channel and is dropped with it, which passes the place on. Between the two, the channel is
//! closed first, so that a call that chooses this waiter now keeps the place and passes it on.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use super::gate::Gate;
use super::permit::Permit;
use super::queue::Ticket;

/// Outcome of a wait.
#[derive(Debug)]
#[must_use]
pub enum WaitOutcome {
    /// The request was admitted.
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
    /// `None` once the outcome was returned.
    receiver: Option<oneshot::Receiver<WaitOutcome>>,
}

impl Wait {
    pub(super) fn new(gate: Arc<Gate>, ticket: Ticket, receiver: oneshot::Receiver<WaitOutcome>) -> Self {
        Self { gate, ticket, receiver: Some(receiver) }
    }

    /// Returns the outcome if there is one already; `None` while the request waits.
    pub fn try_take(&mut self) -> Option<WaitOutcome> {
        let outcome = self.receiver.as_mut()?.try_recv().ok()?;
        self.receiver = None;
        Some(outcome)
    }
}

impl Future for Wait {
    type Output = WaitOutcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<WaitOutcome> {
        // Polled again after the outcome was returned: reports expiry. A sender is never dropped unused.
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
