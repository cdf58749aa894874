//! The caller's place in a trace: W3C Trace Context, version 00, section 3.2.
//!
//! A header that breaks a rule is ignored, and with it `tracestate`. A version that is not known yet is read as version
//! 00, whatever follows the flags, and passed on as version 00.

use std::fmt;

use opentelemetry::trace::{SpanId, TraceFlags, TraceId};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};

use crate::tracestate;

/// Length of a `traceparent` of version 00.
const TRACEPARENT_BYTES: usize = 55;
/// Bit 0: the caller samples. Bit 1 (Trace Context Level 2): the trace id is random. Other bits are not passed on.
const FLAGS_KNOWN: u8 = 0b11;

/// The value of a `traceparent` header, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Traceparent([u8; TRACEPARENT_BYTES]);

impl Traceparent {
    pub(crate) fn new(trace_id: TraceId, span_id: SpanId, flags: TraceFlags) -> Self {
        let mut text = *b"00-00000000000000000000000000000000-0000000000000000-00";
        write_hex(&mut text[3..35], &trace_id.to_bytes());
        write_hex(&mut text[36..52], &span_id.to_bytes());
        write_hex(&mut text[53..55], &[flags.to_u8()]);
        Self(text)
    }

    /// The header's value as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // Always valid UTF-8: only digits, letters and dashes were written.
        str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

impl fmt::Debug for Traceparent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), out)
    }
}

/// A caller's place in a trace. It is valid whether or not the request is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context<'a> {
    trace_id: TraceId,
    span_id: SpanId,
    flags: TraceFlags,
    tracestate: Option<&'a str>,
}

impl<'a> Context<'a> {
    /// The context of a request; `None` without a valid `traceparent`. Several `tracestate` headers are joined by commas;
    /// several `traceparent` headers count as none.
    #[must_use]
    pub fn from_headers(traceparent: Option<&str>, tracestate: Option<&'a str>) -> Option<Self> {
        let (trace_id, span_id, flags) = parse(traceparent?)?;
        Some(Self {
            trace_id,
            span_id,
            flags,
            tracestate: tracestate.filter(|text| tracestate::is_valid(text)),
        })
    }

    /// Context for a request that has none and is not traced. Without it an engine would begin a trace of its own for each
    /// request.
    #[must_use]
    pub fn unsampled() -> Context<'static> {
        Context {
            trace_id: fresh_trace_id(),
            span_id: fresh_span_id(),
            flags: TraceFlags::NOT_SAMPLED,
            tracestate: None,
        }
    }

    /// Whether the caller records this trace.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags.is_sampled()
    }

    /// Id of the trace.
    #[must_use]
    pub fn trace_id(&self) -> TraceId {
        self.trace_id
    }

    /// Id of the caller's span.
    #[must_use]
    pub fn span_id(&self) -> SpanId {
        self.span_id
    }

    /// Flags that are passed on.
    pub(crate) fn flags(&self) -> TraceFlags {
        self.flags
    }

    /// Value of `traceparent` for onward calls when this request has no spans.
    #[must_use]
    pub fn traceparent(&self) -> Traceparent {
        Traceparent::new(self.trace_id, self.span_id, self.flags)
    }

    /// Value of `tracestate` for onward calls.
    #[must_use]
    pub fn tracestate(&self) -> Option<&'a str> {
        self.tracestate
    }
}

pub(crate) fn fresh_trace_id() -> TraceId {
    let ids = RandomIdGenerator::default();
    loop {
        let id = ids.new_trace_id();
        if id != TraceId::INVALID {
            return id;
        }
    }
}

pub(crate) fn fresh_span_id() -> SpanId {
    let ids = RandomIdGenerator::default();
    loop {
        let id = ids.new_span_id();
        if id != SpanId::INVALID {
            return id;
        }
    }
}

fn parse(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let (known, tail) = text.as_bytes().split_first_chunk::<TRACEPARENT_BYTES>()?;
    if known[2] != b'-' || known[35] != b'-' || known[52] != b'-' {
        return None;
    }
    let [version] = read_hex(&known[..2])?;
    let tail_is_fine = match version {
        0x00 => tail.is_empty(),
        0xff => false,
        _ => tail.first().is_none_or(|&byte| byte == b'-'),
    };
    let trace_id = TraceId::from_bytes(read_hex(&known[3..35])?);
    let span_id = SpanId::from_bytes(read_hex(&known[36..52])?);
    let [flags] = read_hex(&known[53..])?;
    let is_valid = tail_is_fine && trace_id != TraceId::INVALID && span_id != SpanId::INVALID;
    is_valid.then(|| (trace_id, span_id, TraceFlags::new(flags & FLAGS_KNOWN)))
}

/// Reads hexadecimal digits, lower case only, as the recommendation requires.
fn read_hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

fn write_hex(into: &mut [u8], bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (pair, byte) in into.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn valid_headers() {
        let tail = "x".repeat(5000);
        // Columns: the header, whether it is sampled, and the flags that are passed on.
        let table = [
            (format!("00-{TRACE}-{SPAN}-00"), false, "00"),
            (format!("00-{TRACE}-{SPAN}-01"), true, "01"),
            (format!("00-{TRACE}-{SPAN}-02"), false, "02"),
            (format!("00-{TRACE}-{SPAN}-03"), true, "03"),
            (format!("00-{TRACE}-{SPAN}-ff"), true, "03"),
            (format!("00-{TRACE}-{SPAN}-fe"), false, "02"),
            (format!("01-{TRACE}-{SPAN}-01"), true, "01"),
            (format!("cc-{TRACE}-{SPAN}-00-what-the-future-will-be-like"), false, "00"),
            (format!("fe-{TRACE}-{SPAN}-01-"), true, "01"),
            (format!("cc-{TRACE}-{SPAN}-01-{tail}"), true, "01"),
        ];
        for (header, sampled, flags) in &table {
            let context = Context::from_headers(Some(header), None).expect(header);
            assert_eq!(context.is_sampled(), *sampled, "{header}");
            assert_eq!(context.trace_id().to_string(), TRACE);
            assert_eq!(context.span_id().to_string(), SPAN);
            assert_eq!(context.traceparent().as_str(), format!("00-{TRACE}-{SPAN}-{flags}"));
        }
    }

    #[test]
    fn malformed_headers() {
        let zero_trace = "0".repeat(32);
        let zero_span = "0".repeat(16);
        let table = [
            String::new(),
            "-".to_owned(),
            "00".to_owned(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-"),
            format!("00-{TRACE}-{SPAN}-0"),
            format!("00-{TRACE}-{SPAN}-001"),
            format!("00-{TRACE}-{SPAN}-01-"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}-0G"),
            format!("00-{TRACE}-{SPAN}-.0"),
            format!("00-{TRACE}-{SPAN}-0A"),
            format!(" 00-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-01 "),
            format!("00-{TRACE}-{SPAN}-01,00-{TRACE}-{SPAN}-01"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("FE-{TRACE}-{SPAN}-01"),
            format!("0x-{TRACE}-{SPAN}-01"),
            format!("0-{TRACE}-{SPAN}-01x"),
            format!("000-{TRACE}-{SPAN}-1"),
            format!("01-{TRACE}-{SPAN}-01x"),
            format!("cc-{TRACE}-{SPAN}-01.what-the-future-will-not-be-like"),
            format!("cc-{TRACE}-{SPAN}-0"),
            format!("00-{zero_trace}-{SPAN}-01"),
            format!("00-{TRACE}-{zero_span}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{}-01", SPAN.to_uppercase()),
            format!("00-{}-{SPAN}-01", TRACE.replacen('4', ".", 1)),
            format!("00-{TRACE}-{}-01", SPAN.replacen("f0", "é", 1)),
            format!("00_{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}_{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}_01"),
            format!("00-{}-{SPAN}-011", &TRACE[1..]),
            format!("00-{TRACE}ab-{SPAN}-01"),
        ];
        for header in &table {
            assert_eq!(Context::from_headers(Some(header), Some("a=1")), None, "{header:?}");
        }
        assert_eq!(Context::from_headers(None, Some("a=1")), None);
    }

    #[test]
    fn a_bad_tracestate_does_not_spoil_the_rest() {
        let header = format!("00-{TRACE}-{SPAN}-01");
        for (given, kept) in [(Some("a=1,b=2"), Some("a=1,b=2")), (Some("a=1,a=2"), None), (None, None)] {
            let context = Context::from_headers(Some(&header), given).expect("valid");
            assert_eq!(context.tracestate(), kept);
        }
    }

    #[test]
    fn an_unsampled_context_is_valid_and_fresh() {
        let one = Context::unsampled();
        assert!(!one.is_sampled());
        assert_eq!(Context::from_headers(Some(one.traceparent().as_str()), None), Some(one));
        assert_ne!(one.trace_id(), Context::unsampled().trace_id());
    }
}
