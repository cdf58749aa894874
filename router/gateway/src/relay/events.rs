//! An engine's server-sent events, passed on as they come.
//!
//! Only whole events leave, so that a stream can be continued after any of them, and only JSON. An event is looked into
//! when the letters of a usage are in it: inside JSON's strings their quotes would be escaped, so a search of the bytes
//! cannot be misled by what a model writes. Hot path: each frame is gone over three times, for its ends, for a usage and
//! for its form, and not copied as long as frames end where events end.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memmem;
use serde::Deserialize;

/// Largest single event; an engine that sends more is broken.
const EVENT_BYTES_MAX: usize = 4 << 20;
const DONE: &[u8] = b"[DONE]";

/// The counts at the end of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Usage {
    #[serde(default)]
    pub(crate) prompt_tokens: usize,
    #[serde(default)]
    pub(crate) completion_tokens: usize,
    prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
struct Details {
    cached_tokens: Option<usize>,
}

impl From<router_engines::openai::Usage> for Usage {
    fn from(usage: router_engines::openai::Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            prompt_tokens_details: Some(Details { cached_tokens: Some(usage.cached) }),
        }
    }
}

impl Usage {
    pub(crate) fn of(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, prompt_tokens_details: None }
    }

    /// Tokens of the prompt that needed no computation, if the engine says so.
    pub(crate) fn cached_tokens(&self) -> Option<usize> {
        self.prompt_tokens_details?.cached_tokens
    }
}

/// What a frame was made of.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Batch {
    /// For the client; empty when nothing is whole yet.
    pub(crate) out: Bytes,
    pub(crate) usage: Option<Usage>,
    /// The engine's own end of the stream was among them.
    pub(crate) is_done: bool,
    /// The engine says that it failed, in its words; nothing behind it counts.
    pub(crate) failure: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Scanner {
    partial: BytesMut,
    /// The client has not asked for the usage that the gateway asked for.
    hides_usage: bool,
    usage: memmem::Finder<'static>,
}

impl Scanner {
    pub(crate) fn new(hides_usage: bool) -> Self {
        Self { partial: BytesMut::new(), hides_usage, usage: memmem::Finder::new(b"\"usage\":") }
    }

    /// Takes a frame; `None` when an event is too large.
    pub(crate) fn push(&mut self, frame: Bytes) -> Option<Batch> {
        let whole = if self.partial.is_empty() && frame.ends_with(b"\n\n") {
            frame
        } else {
            self.partial.extend_from_slice(&frame);
            let end = memmem::rfind(&self.partial, b"\n\n").map(|at| at + 2);
            let end = end.max(memmem::rfind(&self.partial, b"\r\n\r\n").map(|at| at + 4));
            let Some(end) = end else {
                return (self.partial.len() <= EVENT_BYTES_MAX).then(Batch::default);
            };
            self.partial.split_to(end).freeze()
        };
        Some(self.look_into(whole))
    }

    /// Whether there is a usage that is not null.
    fn has_usage(&self, bytes: &[u8]) -> bool {
        let behind = |at: usize| bytes[at + self.usage.needle().len()..].trim_ascii_start();
        self.usage.find_iter(bytes).any(|at| behind(at).starts_with(b"{"))
    }

    fn look_into(&self, whole: Bytes) -> Batch {
        let mut batch = Batch::default();
        // Where an event is left out, if one is.
        let mut kept: Option<BytesMut> = None;
        let mut at = 0;
        for event in events(&whole) {
            let data = data_of(event);
            let before = at;
            at += event.len();
            let hides = if data == DONE {
                batch.is_done = true;
                false
            } else {
                match self.judge(data, &mut batch) {
                    Ok(hides) => hides,
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

    /// Whether an event is hidden; an error says why nothing behind it counts.
    fn judge(&self, data: &[u8], batch: &mut Batch) -> Result<bool, String> {
        if data.is_empty() || data.starts_with(b":") {
            return Ok(false);
        }
        if data.starts_with(b"{\"error\"") {
            return Err(String::from_utf8_lossy(data).into_owned());
        }
        if !data.starts_with(b"{") {
            return Err("an event that is no JSON object".to_owned());
        }
        let bad = |_| "an event that is no JSON".to_owned();
        if !self.has_usage(data) {
            return serde_json::from_slice::<serde::de::IgnoredAny>(data).map(|_| false).map_err(bad);
        }
        let Event { usage, choices } = serde_json::from_slice(data).map_err(bad)?;
        batch.usage = usage.or(batch.usage);
        // A last event that has nothing but the usage.
        Ok(self.hides_usage && usage.is_some() && choices.is_empty())
    }
}

#[derive(Deserialize)]
struct Event {
    usage: Option<Usage>,
    #[serde(default)]
    choices: Vec<serde::de::IgnoredAny>,
}

/// Whole events with their ends.
pub(crate) fn events(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let end = memmem::find(bytes, b"\n\n").map_or(bytes.len(), |at| at + 2);
        // Only as far as that, or a long text would be searched to its end for each of its events.
        let end = memmem::find(&bytes[..end], b"\r\n\r\n").map_or(end, |at| at + 4);
        let event = &bytes[..end];
        bytes.advance(end);
        Some(event)
    })
}

/// The JSON of an event of one line.
pub(crate) fn data_of(event: &[u8]) -> &[u8] {
    let data = event.strip_prefix(b"data:").unwrap_or(event);
    data.trim_ascii()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"usage\\\":{ b\"}}],\"usage\":null}\n\n\
        : ping\n\ndata: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"total_tokens\":11,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

    fn run(hides: bool, pieces: &[&[u8]]) -> (Vec<u8>, Option<Usage>, bool, Option<String>) {
        let mut scanner = Scanner::new(hides);
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
                assert_eq!((usage.prompt_tokens, usage.completion_tokens), (9, 2));
                assert_eq!(usage.cached_tokens(), Some(4));
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

    #[test]
    fn an_event_without_end_is_refused() {
        let mut scanner = Scanner::new(true);
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        assert!((0..4).all(|_| scanner.push(piece.clone()).is_some()));
        assert!(scanner.push(piece).is_none());
    }
}
