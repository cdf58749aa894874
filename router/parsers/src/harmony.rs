//! GPT-OSS: harmony messages, `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json`
//! `<|message|>BODY<|end|>`.
//!
//! Source: OpenAI, "OpenAI harmony response format". The prompt ends with `<|start|>assistant`, so the
//! output begins inside a header. Channel `analysis` is reasoning; `final` is content, and so is
//! `commentary` without a recipient (a preamble that is meant for the user); a message to
//! `functions.NAME`, or to any other name of an offered tool, is a call whose arguments are its body,
//! verbatim. The recipient may stand in the role or in the channel part. A message to one of the model's
//! built-in tools that is not offered is reasoning. A message ends with `<|end|>`, `<|call|>` or
//! `<|return|>`, or, if the model forgot it, where the next header begins. Bodies of one kind are joined
//! without a separator. A header that is none comes out as content, as does text without a header.

use crate::json::{JsonScanner, Scan};
use crate::limits::HEADER_BYTES_MAX;
use crate::machine::{Found, Machine, Step, find, leading_space, prefix};
use crate::output::Sink;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];

#[derive(Debug)]
enum Body {
    Reasoning,
    Content,
    Call { scanner: JsonScanner, any: bool, ended: bool, broken: bool },
}

#[derive(Debug)]
enum State {
    /// Inside a header, whose text is held. The first header lacks the part that is in the prompt.
    Header {
        raw: String,
        first: bool,
    },
    Body(Body),
}

/// The parser of harmony messages.
#[derive(Debug)]
pub(crate) struct Harmony {
    state: State,
}

/// Parsed fields of a header.
struct Header<'a> {
    channel: &'a str,
    recipient: Option<&'a str>,
}

impl Harmony {
    pub(crate) fn new() -> Self {
        Self { state: State::Header { raw: String::new(), first: true } }
    }

    fn header(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let State::Header { raw, first } = &mut self.state else { return Step::again(0) };
        // Between messages there is only white space, or a stray end marker.
        if raw.is_empty() {
            let space = leading_space(text);
            if space > 0 && !*first {
                return if space == text.len() { Step::wait(space) } else { Step::again(space) };
            }
        }
        let (end, found) = match find(text, &[MESSAGE, ENDS[0], ENDS[1], ENDS[2]], last) {
            Found::Nothing { safe } => (safe, None),
            Found::At { at, marker } => (at, Some(marker)),
        };
        // A message begins with a header; text that cannot become one need not be held.
        let room = HEADER_BYTES_MAX.saturating_sub(raw.len());
        let part = prefix(&text[..end], room);
        let before = raw.len();
        raw.push_str(part);
        if let Some(bad) = not_a_header(raw) {
            // Consumes up to the first wrong byte, so that the result is the same for every division of the text.
            let used = bad.max(before) - before;
            raw.truncate(bad.max(before));
            sink.content(&std::mem::take(raw));
            self.state = State::Body(Body::Content);
            return Step::again(used);
        }
        if part.len() < end {
            let used = part.len();
            sink.content(&std::mem::take(raw));
            self.state = State::Body(Body::Content);
            return Step::again(used);
        }
        let Some(marker) = found else { return Step::wait(end) };
        let header = std::mem::take(raw);
        *first = false;
        if marker != 0 {
            // An end marker without a body.
            sink.content(&header);
            return Step::again(end + ENDS[marker - 1].len());
        }
        match parse(&header) {
            Some(header) => self.state = State::Body(body(&header, sink)),
            None => {
                sink.content(&header);
                sink.content(MESSAGE);
                self.state = State::Body(Body::Content);
            }
        }
        Step::again(end + MESSAGE.len())
    }
}

/// The first byte at which a text can no longer be a header, which begins with a marker or a recipient.
fn not_a_header(raw: &str) -> Option<usize> {
    let start = leading_space(raw);
    let rest = &raw[start..];
    let mut longest = 0;
    for begin in [START, CHANNEL, "to="] {
        let common = begin.bytes().zip(rest.bytes()).take_while(|(a, b)| a == b).count();
        if common == begin.len() || common == rest.len() {
            return None;
        }
        longest = longest.max(common);
    }
    Some(start + longest)
}

/// Parses a header. Unknown words make it invalid, except after `<|constrain|>`, where models invent types and the type has no
/// effect.
fn parse(raw: &str) -> Option<Header<'_>> {
    let (role, rest) = raw.split_once(CHANNEL)?;
    let role = role.trim();
    let role = role.strip_prefix(START).unwrap_or(role);
    let rest = rest.split_once(CONSTRAIN).map_or(rest, |(before, _)| before);
    let mut words = rest.split_whitespace();
    let channel = words.next().filter(|name| matches!(*name, "analysis" | "commentary" | "final"))?;
    let mut recipient = None;
    for word in role.split_whitespace().chain(words) {
        match word.strip_prefix("to=") {
            Some(name) if recipient.is_none() && !name.contains("<|") => recipient = Some(name),
            None if matches!(word, "assistant" | "json" | "code" | "text") => {}
            _ => return None,
        }
    }
    Some(Header { channel, recipient })
}

fn body(header: &Header<'_>, sink: &mut Sink<'_>) -> Body {
    if let Some(recipient) = header.recipient {
        let function = recipient.strip_prefix("functions.").filter(|name| !name.is_empty());
        let offered = sink.tool(recipient).is_some().then_some(recipient);
        if let Some(name) = function.or(offered) {
            sink.start(name, None);
            return Body::Call { scanner: JsonScanner::new(), any: false, ended: false, broken: false };
        }
        return Body::Reasoning;
    }
    if header.channel == "analysis" { Body::Reasoning } else { Body::Content }
}

impl Body {
    fn push(&mut self, text: &str, sink: &mut Sink<'_>) {
        match self {
            Self::Reasoning => sink.reasoning(text),
            Self::Content => sink.content(text),
            Self::Call { scanner, any, ended, broken } => {
                let text = if *any { text } else { &text[leading_space(text)..] };
                if text.is_empty() {
                    return;
                }
                *any = true;
                let mut rest = text;
                if !*ended && !*broken {
                    let object = text.starts_with(['{', '[', '"']) || scanner.begun();
                    let (used, scan) = if object { scanner.feed(text) } else { (0, Scan::Broken) };
                    *ended = scan == Scan::Ended;
                    *broken = scan == Scan::Broken;
                    sink.arguments(&text[..used]);
                    rest = &text[used..];
                }
                if *ended && !*broken {
                    // White space after the arguments is not part of them; other text makes them invalid.
                    let space = leading_space(rest);
                    *broken |= space < rest.len();
                    rest = &rest[space..];
                }
                sink.arguments(rest);
            }
        }
    }

    fn end(&mut self, whole: bool, sink: &mut Sink<'_>) {
        if let Self::Call { scanner, any, ended, broken } = self {
            if !*any && whole {
                sink.arguments("{}");
            }
            let valid = *ended && !*broken && scanner.valid();
            sink.end(valid || (!*any && whole));
        }
    }
}

impl Machine for Harmony {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink<'_>) -> Step {
        let State::Body(body) = &mut self.state else { return self.header(text, last, sink) };
        match find(text, &ENDS, last) {
            Found::Nothing { safe } => {
                body.push(&text[..safe], sink);
                Step::wait(safe)
            }
            Found::At { at, marker } => {
                body.push(&text[..at], sink);
                body.end(true, sink);
                self.state = State::Header { raw: String::new(), first: false };
                // The next message's header is read from its marker on.
                Step::again(if marker < 3 { at + ENDS[marker].len() } else { at })
            }
        }
    }

    fn finish(&mut self, sink: &mut Sink<'_>) {
        match &mut self.state {
            State::Header { raw, .. } => sink.content(&std::mem::take(raw)),
            State::Body(body) => body.end(false, sink),
        }
    }
}
