//! Separates reasoning from content, before calls are searched for.
//!
//! DeepSeek R1, Qwen3, GLM 4.5 and Kimi K2 Thinking write `<think>…</think>`, Magistral writes `[THINK]…[/THINK]`. If the chat
//! template itself ends with the opening tag, the output begins inside the reasoning. Text is returned as written: like vLLM's
//! parsers, this one keeps the newlines beside the tags. Source: the models' chat templates, Magistral-Small-2507's model card,
//! and vLLM's documentation of reasoning outputs.
//!
//! After the closing tag everything is content: a tag that an answer quotes is no reasoning.

use std::borrow::Cow;

use crate::limits::HEADER_BYTES_MAX;
use crate::machine::{Found, PrefixMatch, begins, find, leading_space};
use crate::section::KIMI_SECTION_BEGIN;

/// The tags of one family.
#[derive(Debug)]
pub(crate) struct Tags {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// Marker that ends the reasoning if the closing tag is missing, and stays part of the content.
    pub(crate) implicit_close: Option<&'static str>,
    /// Whether the output begins inside the reasoning; an opening tag is skipped all the same.
    pub(crate) starts_inside: bool,
    /// Whether the reasoning may follow content; otherwise it must begin the output.
    pub(crate) anywhere: bool,
}

/// `<think>` at the beginning of the output.
pub(crate) const THINK: Tags =
    Tags { open: "<think>", close: "</think>", implicit_close: None, starts_inside: false, anywhere: false };
/// The output begins inside `<think>`.
pub(crate) const INSIDE_THINK: Tags = Tags { starts_inside: true, ..THINK };
/// Kimi K2 may begin its calls without the closing tag.
pub(crate) const KIMI_THINK: Tags = Tags { implicit_close: Some(KIMI_SECTION_BEGIN), ..INSIDE_THINK };
/// `[THINK]`, also after content: Magistral.
pub(crate) const MISTRAL_THINK: Tags =
    Tags { open: "[THINK]", close: "[/THINK]", implicit_close: None, starts_inside: false, anywhere: true };

/// Destination of a piece of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Reasoning,
    Content,
}

/// Result of a step.
pub(crate) struct Routed<'a> {
    /// Number of consumed bytes of the given text.
    pub(crate) used: usize,
    /// The piece, which may begin with white space of earlier steps.
    pub(crate) text: Cow<'a, str>,
    pub(crate) route: Route,
    /// Whether to step again with the rest.
    pub(crate) again: bool,
}

#[derive(Debug)]
enum State {
    /// Only white space so far, which is held.
    Start(String),
    /// In content, after which reasoning may follow.
    Before,
    Inside,
    Done,
}

/// The separator of reasoning and content.
#[derive(Debug)]
pub(crate) struct Reasoning {
    tags: &'static Tags,
    state: State,
}

impl Reasoning {
    pub(crate) fn new(tags: &'static Tags) -> Self {
        let state = if tags.anywhere { State::Before } else { State::Start(String::new()) };
        Self { tags, state }
    }

    pub(crate) fn step<'a>(&mut self, text: &'a str, last: bool) -> Routed<'a> {
        match &mut self.state {
            State::Start(_) => self.start(text, last),
            State::Before => match find(text, &[self.tags.open], last) {
                Found::Nothing { safe } => Routed::wait(safe, &text[..safe], Route::Content),
                Found::At { at, .. } => {
                    self.state = State::Inside;
                    Routed::again(at + self.tags.open.len(), &text[..at], Route::Content)
                }
            },
            State::Inside => {
                let implicit = self.tags.implicit_close.unwrap_or(self.tags.close);
                match find(text, &[self.tags.close, implicit], last) {
                    Found::Nothing { safe } => Routed::wait(safe, &text[..safe], Route::Reasoning),
                    Found::At { at, marker } => {
                        self.state = State::Done;
                        let tag = if marker == 0 { self.tags.close.len() } else { 0 };
                        Routed::again(at + tag, &text[..at], Route::Reasoning)
                    }
                }
            }
            State::Done => Routed::wait(text.len(), text, Route::Content),
        }
    }

    fn start<'a>(&mut self, text: &'a str, last: bool) -> Routed<'a> {
        let State::Start(held) = &mut self.state else { return Routed::again(0, "", Route::Content) };
        let room = HEADER_BYTES_MAX.saturating_sub(held.len());
        let space = leading_space(text).min(room);
        held.push_str(&text[..space]);
        if space == text.len() {
            return Routed::wait(space, "", Route::Content);
        }
        match begins(&text[space..], &[self.tags.open], last) {
            PrefixMatch::Maybe => Routed::wait(space, "", Route::Content),
            PrefixMatch::With(_) => {
                self.state = State::Inside;
                Routed::again(space + self.tags.open.len(), "", Route::Content)
            }
            PrefixMatch::No => {
                let (text, route) = self.unopened();
                Routed { used: space, text: Cow::Owned(text), route, again: true }
            }
        }
    }

    /// Leaves the start without an opening tag; the held white space belongs to the text that follows.
    fn unopened(&mut self) -> (String, Route) {
        let next = if self.tags.starts_inside { State::Inside } else { State::Done };
        let route = if self.tags.starts_inside { Route::Reasoning } else { Route::Content };
        match std::mem::replace(&mut self.state, next) {
            State::Start(held) => (held, route),
            _ => (String::new(), route),
        }
    }

    /// Ends the output; only white space at its start can still be held.
    pub(crate) fn finish(&mut self) -> (String, Route) {
        if matches!(self.state, State::Start(_)) {
            return self.unopened();
        }
        (String::new(), Route::Content)
    }
}

impl<'a> Routed<'a> {
    fn again(used: usize, text: &'a str, route: Route) -> Self {
        Self { used, text: Cow::Borrowed(text), route, again: true }
    }

    fn wait(used: usize, text: &'a str, route: Route) -> Self {
        Self { used, text: Cow::Borrowed(text), route, again: false }
    }
}
