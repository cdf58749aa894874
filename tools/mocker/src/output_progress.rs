//! Progress of an output, passed from the scheduler to the connection that waits for it.
//!
//! The output is known from the start, so its progress has counts only and needs no queue: tokens that a slow
//! client has not read yet are sent in one piece, as in vLLM.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Progress of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Number of output tokens that have been sent.
    pub(crate) tokens: usize,
    /// Prompt tokens found in a cache; final once the first token is there.
    pub(crate) cached: usize,
    /// Whether the output is complete.
    pub(crate) is_over: bool,
    /// Whether the engine gave the request up.
    pub(crate) is_failed: bool,
}

/// The progress of one request.
#[derive(Debug, Default)]
pub(crate) struct OutputProgress(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    waker: Option<Waker>,
}

impl OutputProgress {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the progress of a request that has ended.
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

    /// Ready once there are more than `seen` tokens, or the output is complete.
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
