//! An answer in progress: its outputs, how much of them has been written, and the work at its end.
//!
//! The body of a streamed answer polls the progress of its outputs and writes all due tokens into one buffer. An
//! output that was due from the start, as all are if simulated work takes no time, is sent in one piece with
//! one event per token. A whole answer waits for the ends and is written once.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::parsed_request::{ParsedRequest, Surface};
use super::{anthropic, openai, responses};
use crate::output_generator::{Ending, Output};
use crate::worker::{Running, Worker};

/// One output of an answer.
pub(super) struct Choice {
    pub(super) running: Running,
    pub(super) output: Arc<Output>,
    /// Index of the output's prompt.
    pub(super) prompt: usize,
    /// Tokens that have been written.
    pub(super) sent: usize,
    pub(super) is_done: bool,
}

/// Effect of a fault on a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamFault {
    Stall,
    Die,
}

/// An answer in progress.
pub(super) struct Answer {
    pub(super) worker: Arc<Worker>,
    pub(super) ask: ParsedRequest,
    pub(super) choices: Vec<Choice>,
    pub(super) id: String,
    pub(super) created: u64,
    /// Common start of each piece of a stream.
    pub(super) head: String,
    /// Number of tokens after which the stream breaks, and how.
    pub(super) breaks: Option<(usize, StreamFault)>,
    pub(super) reports_wrong_cached: bool,
    /// `kv_transfer_params` of the answer.
    pub(super) transfer: Option<serde_json::Value>,
    /// Events of a stream so far, for surfaces that number them.
    pub(super) event: u64,
    is_opened: bool,
    is_closed: bool,
}

/// Token counts of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) completion: usize,
    pub(super) cached: usize,
}

impl Answer {
    pub(super) fn new(
        worker: Arc<Worker>,
        ask: ParsedRequest,
        choices: Vec<Choice>,
        id: String,
        created: u64,
    ) -> Self {
        let mut answer = Self {
            worker,
            ask,
            choices,
            id,
            created,
            head: String::new(),
            breaks: None,
            reports_wrong_cached: false,
            transfer: None,
            event: 0,
            is_opened: false,
            is_closed: false,
        };
        if answer.ask.stream {
            answer.head = openai::head(&answer);
        }
        answer
    }

    /// Name of the model, or of the adapter that the request names.
    pub(super) fn model(&self) -> &str {
        self.ask.adapter.as_deref().unwrap_or(&self.worker.config.model)
    }

    pub(super) fn usage(&self) -> Usage {
        let prompt = self.ask.prompts.iter().map(Vec::len).sum();
        let cached = self.choices.iter().map(|choice| choice.running.progress().cached).max().unwrap_or(0);
        let cached = match (self.reports_wrong_cached, cached) {
            (false, cached) => cached,
            (true, 0) => prompt,
            (true, _) => 0,
        };
        let completion = self.choices.iter().map(|choice| choice.sent).sum();
        Usage { prompt, completion, cached }
    }

    /// Name of the reason for which an output ended.
    pub(super) fn finish_reason(&self, choice: &Choice) -> &'static str {
        let is_tool = self.ask.forced.as_ref().is_some_and(|forced| forced.tool.is_some());
        match choice.output.ending {
            Ending::Length => "length",
            _ if is_tool && self.ask.surface == Surface::Chat => "tool_calls",
            _ => "stop",
        }
    }

    /// Waits for all outputs. `false`: the engine gave one up.
    pub(super) async fn finished(&mut self) -> bool {
        for choice in &mut self.choices {
            let progress = choice.running.finished().await;
            if progress.is_failed {
                return false;
            }
            (choice.sent, choice.is_done) = (choice.output.tokens.len(), true);
        }
        true
    }

    /// Returns the body of a whole answer.
    pub(super) fn whole(&self) -> String {
        match self.ask.surface {
            Surface::Completion | Surface::Chat => openai::whole(self),
            Surface::Messages => anthropic::whole(self),
            Surface::Responses => responses::whole(self).to_string(),
        }
    }

    fn write_opening(&mut self, out: &mut String) {
        match self.ask.surface {
            Surface::Completion | Surface::Chat => openai::opening(self, out),
            Surface::Messages => anthropic::opening(self, out),
            Surface::Responses => responses::opening(self, out),
        }
    }

    fn write_piece(&mut self, index: usize, to: usize, out: &mut String) {
        match self.ask.surface {
            Surface::Completion | Surface::Chat => openai::piece(self, index, to, out),
            Surface::Messages => anthropic::piece(self, index, to, out),
            Surface::Responses => responses::piece(self, index, to, out),
        }
    }

    fn write_closing(&mut self, out: &mut String) {
        match self.ask.surface {
            Surface::Completion | Surface::Chat => openai::closing(self, out),
            Surface::Messages => anthropic::closing(self, out),
            Surface::Responses => responses::closing(self, out),
        }
    }

    /// Writes due tokens. `true`: nothing follows but a break.
    fn write_due(&mut self, context: &mut Context<'_>, out: &mut String) -> io::Result<bool> {
        if !std::mem::replace(&mut self.is_opened, true) {
            self.write_opening(out);
        }
        let is_instant = self.worker.config.is_instant();
        let mut is_broken = false;
        for index in 0..self.choices.len() {
            let choice = &self.choices[index];
            if choice.is_done {
                continue;
            }
            let Poll::Ready(progress) = choice.running.poll_past(choice.sent, context) else { continue };
            if progress.is_failed {
                return Err(io::Error::other("the worker stopped"));
            }
            let mut due = progress.tokens.min(choice.output.tokens.len());
            if let Some((tokens, _)) = self.breaks.filter(|(tokens, _)| due >= *tokens) {
                (due, is_broken) = (tokens, true);
            }
            // Tokens that became due one by one have one event each; tokens that a slow client has left unread
            // are one piece.
            while self.choices[index].sent < due {
                let to = if is_instant { self.choices[index].sent + 1 } else { due };
                self.write_piece(index, to, out);
                self.choices[index].sent = to;
            }
            self.choices[index].is_done = !is_broken && due == self.choices[index].output.tokens.len();
            if !is_broken && !self.choices[index].is_done {
                // Poll again only to register the waker.
                let _pending = self.choices[index].running.poll_past(due, context);
            }
        }
        if !is_broken && self.choices.iter().all(|choice| choice.is_done) {
            self.write_closing(out);
            self.is_closed = true;
        }
        Ok(is_broken)
    }
}

/// The body of an answer.
pub(super) enum Payload {
    /// The whole body.
    Whole(Option<Bytes>),
    /// A body sent in pieces.
    Stream(Box<Answer>),
    /// A broken stream. Pending once before it dies, so that the written bytes are sent first.
    Broken { how: StreamFault, is_flushed: bool },
}

impl Payload {
    pub(super) fn from_text(text: impl Into<Bytes>) -> Self {
        let text = text.into();
        Self::Whole(Some(text).filter(|text| !text.is_empty()))
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        match this {
            Self::Whole(body) => Poll::Ready(body.take().map(|body| Ok(Frame::data(body)))),
            Self::Broken { how: StreamFault::Stall, .. } => Poll::Pending,
            Self::Broken { how: StreamFault::Die, is_flushed } => {
                if std::mem::replace(is_flushed, true) {
                    return Poll::Ready(Some(Err(io::Error::other("a fault cut the stream"))));
                }
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Self::Stream(answer) if answer.is_closed => Poll::Ready(None),
            Self::Stream(answer) => {
                let mut out = String::new();
                let is_broken = match answer.write_due(context, &mut out) {
                    Ok(is_broken) => is_broken,
                    Err(error) => return Poll::Ready(Some(Err(error))),
                };
                if is_broken && let Some((_, how)) = answer.breaks {
                    context.waker().wake_by_ref();
                    *this = Self::Broken { how, is_flushed: false };
                }
                if out.is_empty() { Poll::Pending } else { Poll::Ready(Some(Ok(Frame::data(out.into())))) }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_none(),
            Self::Stream(answer) => answer.is_closed,
            Self::Broken { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, |body| body.len() as u64)),
            _ => SizeHint::default(),
        }
    }
}
