//! Scanner of an engine's events: relays them unchanged, or leaves them to be parsed for their token ids.
//!
//! Only whole events leave, so that a stream can be continued after any of them, and only JSON. An event is
//! parsed only when it contains the bytes of a usage field: inside JSON strings the quotes would be
//! escaped, so a search of the bytes cannot be misled by what a model writes. Hot path: a frame is not
//! copied as long as frames end where events end.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use router_openai::Usage;
use router_openai::sse::{DONE, EventBuffer, EventTooLarge, data_of, events};
use serde::Deserialize;

/// Largest single event; an engine that sends more is broken.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// Events that a frame completed.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct EventBatch {
    /// Events for the client; empty when none is complete yet.
    pub(crate) out: Bytes,
    /// Number of events with data, without `[DONE]`, and for relayed events without the usage at the end; about as
    /// many as tokens.
    pub(crate) events: usize,
    pub(crate) usage: Option<Usage>,
    /// `usage` came in an event of its own, so it is that of the whole answer; engines report one choice's
    /// usage before the end.
    pub(crate) is_usage_last: bool,
    /// Whether `[DONE]` was among the events.
    pub(crate) is_done: bool,
    /// Error message of an engine that reports a failure; later events are ignored.
    pub(crate) failure: Option<String>,
}

/// Use of the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// The events are relayed to the client. The usage at the end may be requested by the gateway alone.
    PassOn { hides_usage: bool },
    /// The `Output` parses each event; the scanner only looks for `[DONE]`.
    Read,
}

/// Takes the frames of an engine's answer.
#[derive(Debug)]
pub(crate) struct Scanner {
    buffer: EventBuffer,
    purpose: Purpose,
    usage: memmem::Finder<'static>,
}

impl Scanner {
    fn new(purpose: Purpose) -> Self {
        Self { buffer: EventBuffer::new(EVENT_BYTES_MAX), purpose, usage: memmem::Finder::new(b"\"usage\":") }
    }

    /// Creates a scanner whose events are relayed to the client; without the usage if the client has not
    /// asked for it.
    pub(crate) fn passing_on(hides_usage: bool) -> Self {
        Self::new(Purpose::PassOn { hides_usage })
    }

    /// Creates a scanner whose events the `Output` parses: the scanner only looks for the end.
    pub(crate) fn reading() -> Self {
        Self::new(Purpose::Read)
    }

    /// A scanner of the same kind, for another leg.
    pub(super) fn for_next_leg(&self) -> Self {
        Self::new(self.purpose)
    }

    /// Takes a frame.
    pub(super) fn push(&mut self, frame: Bytes) -> Result<EventBatch, EventTooLarge> {
        let whole = self.buffer.push(frame)?;
        Ok(self.scan(whole))
    }

    /// Whether there is a usage that is not null.
    fn has_usage(&self, bytes: &[u8]) -> bool {
        let behind = |at: usize| bytes[at + self.usage.needle().len()..].trim_ascii_start();
        self.usage.find_iter(bytes).any(|at| behind(at).starts_with(b"{"))
    }

    fn scan(&self, whole: Bytes) -> EventBatch {
        let mut batch = EventBatch::default();
        // The events without the hidden ones, if any is hidden.
        let mut kept: Option<BytesMut> = None;
        let mut at = 0;
        for event in events(&whole) {
            let data = data_of(event);
            let before = at;
            at += event.len();
            let hides = if data[..] == *DONE {
                batch.is_done = true;
                false
            } else {
                match self.is_usage_alone(&data, &mut batch) {
                    Ok(is_usage_alone) => {
                        batch.events += usize::from(!data.is_empty() && !is_usage_alone);
                        is_usage_alone && self.purpose == Purpose::PassOn { hides_usage: true }
                    }
                    Err(reason) => {
                        batch.failure = Some(reason);
                        batch.out = kept.map_or_else(|| whole.slice(..before), BytesMut::freeze);
                        return batch;
                    }
                }
            };
            match (&mut kept, hides) {
                (None, true) => kept = Some(BytesMut::from(&whole[..before])),
                (Some(kept), false) => kept.extend_from_slice(event),
                _ => {}
            }
        }
        batch.out = kept.map_or(whole, BytesMut::freeze);
        batch
    }

    /// Returns whether an event holds nothing but the usage; an error is the reason why later events are
    /// ignored.
    fn is_usage_alone(&self, data: &[u8], batch: &mut EventBatch) -> Result<bool, String> {
        if self.purpose == Purpose::Read || data.is_empty() {
            return Ok(false);
        }
        if data.starts_with(b"{\"error\"") {
            return Err(String::from_utf8_lossy(data).into_owned());
        }
        if !data.starts_with(b"{") {
            return Err("an event that is no JSON object".to_owned());
        }
        if gave_up(data) {
            return Err(ENGINE_ABORTED.to_owned());
        }
        let bad = |_| "an event that is no JSON".to_owned();
        if !self.has_usage(data) {
            return serde_json::from_slice::<serde::de::IgnoredAny>(data).map(|_| false).map_err(bad);
        }
        let Event { usage, choices } = serde_json::from_slice(data).map_err(bad)?;
        batch.usage = usage.or(batch.usage);
        // The last event holds nothing but the usage. An event without `choices` is of another kind: it may
        // hold all of the text.
        let is_usage_alone = usage.is_some() && choices.is_some_and(|choices| choices.is_empty());
        batch.is_usage_last |= is_usage_alone;
        Ok(is_usage_alone)
    }
}

/// Failure reason for an engine that ended an answer early, as vLLM and SGLang do when they are paused or
/// go to sleep.
pub(super) const ENGINE_ABORTED: &str = "it gave the request up";

/// Whether an answer or an event says that the engine gave the request up: its finish reason is `abort`. In JSON's strings the
/// quotes would be escaped, so a search of the bytes cannot be misled by what a model writes.
pub(super) fn gave_up(json: &[u8]) -> bool {
    static FINISH: LazyLock<memmem::Finder<'static>> =
        LazyLock::new(|| memmem::Finder::new(b"\"finish_reason\":"));
    let behind = |at: usize| json[at + FINISH.needle().len()..].trim_ascii_start();
    FINISH.find_iter(json).any(|at| behind(at).starts_with(b"\"abort\""))
}

#[derive(Deserialize)]
struct Event {
    usage: Option<Usage>,
    choices: Option<Vec<serde::de::IgnoredAny>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_gives_a_request_up_has_not_answered_it() {
        assert!(gave_up(b"{\"choices\":[{\"text\":\"a\",\"finish_reason\": \"abort\"}]}"));
        for other in [
            &b"{\"choices\":[{\"text\":\"a\",\"finish_reason\":\"stop\"}]}"[..],
            b"{\"choices\":[{\"text\":\"\\\"finish_reason\\\":\\\"abort\\\"\",\"finish_reason\":null}]}",
            b"{}",
        ] {
            assert!(!gave_up(other), "{}", String::from_utf8_lossy(other));
        }
        let aborted = b"data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n\
                        data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n";
        let mut scanner = Scanner::passing_on(false);
        let batch = scanner.push(Bytes::from_static(aborted)).expect("small events");
        assert_eq!((batch.failure.as_deref(), batch.events, batch.is_done), (Some(ENGINE_ABORTED), 1, false));
        assert!(!batch.out.windows(5).any(|word| word == b"abort"), "the client does not get it");
    }

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"usage\\\":{ b\"}}],\"usage\":null}\n\n\
        : ping\n\ndata: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"total_tokens\":11,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

    #[test]
    fn only_an_event_of_usage_alone_is_hidden() {
        let done = "data: {\"type\":\"transcript.text.done\",\"text\":\"all of it\",\"usage\":{\"total_tokens\":3}}\n\n";
        let (out, usage, is_done, error) = run(true, &[done.as_bytes()]);
        assert_eq!((out.as_slice(), is_done, error), (done.as_bytes(), false, None));
        assert!(usage.is_some());
    }

    fn run(hides: bool, pieces: &[&[u8]]) -> (Vec<u8>, Option<Usage>, bool, Option<String>) {
        let mut scanner = Scanner::passing_on(hides);
        let mut all = (Vec::new(), None, false, None);
        for piece in pieces {
            let batch = scanner.push(Bytes::copy_from_slice(piece)).expect("not too large");
            assert!(batch.out.is_empty() || batch.out.ends_with(b"\n\n"), "only whole events leave");
            all.0.extend_from_slice(&batch.out);
            all.1 = all.1.or(batch.usage);
            all.2 |= batch.is_done;
            all.3 = all.3.or(batch.failure);
        }
        all
    }

    #[test]
    fn a_usage_alone_and_the_end_are_no_tokens() {
        for hides in [false, true] {
            let mut scanner = Scanner::passing_on(hides);
            let batch = scanner.push(Bytes::from_static(STREAM.as_bytes())).expect("not too large");
            assert_eq!(batch.events, 2, "hides: {hides}");
        }
    }

    #[test]
    fn cuts_do_not_matter() {
        let bytes = STREAM.as_bytes();
        let hidden: String = {
            let start = STREAM.find("data: {\"choices\":[],").expect("the usage");
            let end = STREAM.find("data: [DONE]").expect("the end");
            format!("{}{}", &STREAM[..start], &STREAM[end..])
        };
        for cut in 0..=bytes.len() {
            for (hides, expected) in [(false, STREAM), (true, hidden.as_str())] {
                let (out, usage, is_done, failure) = run(hides, &[&bytes[..cut], &bytes[cut..]]);
                assert_eq!(String::from_utf8(out).expect("UTF-8"), expected, "cut at {cut}");
                let usage = usage.expect("a usage");
                assert_eq!((usage.prompt, usage.completion, usage.cached), (9, 2, Some(4)));
                assert!(is_done && failure.is_none());
            }
        }
    }

    #[test]
    fn an_engines_error_ends_it() {
        let stream =
            "data: {\"choices\":[{}]}\n\ndata: {\"error\":{\"message\":\"boom\"}}\n\ndata: [DONE]\n\n";
        let (out, _, is_done, failure) = run(true, &[stream.as_bytes()]);
        assert_eq!(out, b"data: {\"choices\":[{}]}\n\n");
        assert!(failure.is_some_and(|words| words.contains("boom")) && !is_done);
        let garbage = "data: {\"choices\":[{}]}\n\ndata: {\"cho\n\n";
        let (out, _, _, failure) = run(false, &[garbage.as_bytes()]);
        assert_eq!((out.len(), failure.is_some()), (garbage.find("\n\n").map_or(0, |at| at + 2), true));
        let quoted = "data: {\"choices\":[{\"delta\":{\"content\":\"data: {\\\"error\\\"\"}}]}\n\n";
        assert_eq!(run(true, &[quoted.as_bytes()]).3, None);
    }
}
