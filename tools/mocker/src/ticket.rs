//! Between the scheduler and the connection that waits for a request: how far its output has come.
//!
//! The output itself is known from the start, so a ticket carries counts only and nothing can pile up: tokens
//! that a slow client has not taken yet leave in one piece, as they do with vLLM.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// How far a request has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Tokens of the output that have left.
    pub(crate) tokens: usize,
    /// Prompt tokens found in a cache; certain once the first token is there.
    pub(crate) cached: usize,
    /// Whether no more will come.
    pub(crate) is_over: bool,
    /// Whether the engine gave the request up.
    pub(crate) is_failed: bool,
}

/// One request's.
#[derive(Debug, Default)]
pub(crate) struct Ticket(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    waker: Option<Waker>,
}

impl Ticket {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket of a request that is over already.
    pub(crate) fn finished(progress: Progress) -> Self {
        Self(Mutex::new(State { progress, waker: None }))
    }

    pub(crate) fn advance(&self, change: impl FnOnce(&mut Progress)) {
        let waker = {
            let mut state = self.lock();
            change(&mut state.progress);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        self.lock().progress
    }

    /// Ready once there are more tokens than `seen`, or the end.
    pub(crate) fn poll_past(&self, seen: usize, context: &mut Context<'_>) -> Poll<Progress> {
        let mut state = self.lock();
        if state.progress.is_over || state.progress.tokens > seen {
            return Poll::Ready(state.progress);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}
