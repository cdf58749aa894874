//! HTTP/1.1 as a client (RFC 9112): one request at a time over a connection that is driven by the task that polls it.
//!
//! No task, no channel and no copy of a body: a request leaves in one write, and received bytes are returned as slices of the
//! read buffer. Heads are parsed by `httparse`; the size of everything that an engine sends is limited.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::LazyLock;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version};
use memchr::memmem::Finder;
use router_tls::ClientStream;
use tokio::io::{AsyncReadExt, AsyncWrite};

/// Largest head of an answer, informational ones each.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;
/// Largest number of informational answers before the final one.
const INFORMATIONAL_MAX: usize = 8;
/// Longest chunk-size line, and largest trailers.
const CHUNK_LINE_MAX: usize = 4 << 10;
const TRAILER_BYTES_MAX: usize = 16 << 10;
/// Buffer space reserved for a read.
const READ_BYTES: usize = 16 << 10;
/// Bodies up to this size are copied behind their head, so that both leave as one piece of memory.
const COPIED_BYTES_MAX: usize = 4 << 10;

/// Built once: building the searcher takes longer than a search.
static END_OF_HEAD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\r\n\r\n"));

/// A request to an engine.
pub(crate) struct Request<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    pub(crate) host: &'a HeaderValue,
    pub(crate) authorization: Option<&'a HeaderValue>,
    /// Headers in addition to `host`, the length, and `authorization` where that is given.
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a Bytes,
}

/// Rest of a body that is still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Number of bytes.
    Length(u64),
    Chunked(Chunk),
    /// All bytes until the connection ends.
    UntilClose,
    Ended,
}

/// Position of the next byte in a chunked body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chunk {
    Size,
    Data(u64),
    /// The end of line behind a chunk.
    End,
    /// Trailers after the last chunk, with the number of their bytes so far.
    Trailers(usize),
}

/// The head of an answer, and the framing of its body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) head: Parts,
    pub(crate) framing: Framing,
    /// Whether the connection may be used again when the body has ended.
    pub(crate) is_reusable: bool,
}

/// The next part of a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Data(Bytes),
    /// More input must be read.
    Starved,
    Ended,
}

/// A connection to an engine.
pub(crate) struct Connection {
    stream: ClientStream,
    /// Bytes that were read and not yet returned.
    input: BytesMut,
    /// Buffer for request heads, reused.
    output: Vec<u8>,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Connection {
    pub(crate) fn new(stream: ClientStream) -> Self {
        Self { stream, input: BytesMut::new(), output: Vec::new() }
    }

    /// Whether nothing has arrived on an idle connection, not even its end.
    pub(crate) fn is_quiet(&mut self, context: &mut Context<'_>) -> bool {
        self.input.is_empty() && self.poll_read(context).is_pending()
    }

    /// Whether every byte that arrived belonged to the answer.
    pub(crate) fn is_drained(&self) -> bool {
        self.input.is_empty()
    }

    /// Reads available bytes; 0 at the end of the stream.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.input.capacity() - self.input.len() < READ_BYTES / 2 {
            self.input.reserve(READ_BYTES);
        }
        // Dropping such a future loses no data.
        pin!(self.stream.read_buf(&mut self.input)).poll(context)
    }

    fn write_head(&mut self, request: &Request<'_>) {
        let out = &mut self.output;
        out.clear();
        let mut put = |parts: &[&[u8]]| parts.iter().for_each(|part| out.extend_from_slice(part));
        put(&[request.method.as_str().as_bytes(), b" ", request.path.as_bytes(), b" HTTP/1.1\r\nhost: "]);
        put(&[request.host.as_bytes(), b"\r\n"]);
        for (name, value) in request.headers {
            let is_own = *name == CONTENT_LENGTH
                || *name == TRANSFER_ENCODING
                || *name == http::header::HOST
                || (*name == http::header::AUTHORIZATION && request.authorization.is_some());
            if !is_own {
                put(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
            }
        }
        if let Some(authorization) = request.authorization {
            put(&[b"authorization: ", authorization.as_bytes(), b"\r\n"]);
        }
        if !request.body.is_empty() || *request.method == Method::POST {
            let mut digits = itoa::Buffer::new();
            put(&[b"content-length: ", digits.format(request.body.len()).as_bytes(), b"\r\n"]);
        }
        put(&[b"\r\n"]);
    }

    /// Sends a request and reads the head of its answer. An answer that arrives before all is sent ends the sending.
    pub(crate) async fn exchange(&mut self, request: &Request<'_>) -> io::Result<Answer> {
        self.write_head(request);
        let mut body: &[u8] = request.body;
        if body.len() <= COPIED_BYTES_MAX {
            self.output.extend_from_slice(body);
            body = &[];
        }
        let (mut sent, mut is_flushed, mut searched, mut informational) = (0, false, 0, 0);
        let mut send_failure: Option<io::Error> = None;
        poll_fn(|context| {
            loop {
                if !is_flushed && send_failure.is_none() {
                    match self.poll_send(body, &mut sent, context) {
                        Poll::Ready(Ok(())) => is_flushed = true,
                        // The answer may say why sending failed.
                        Poll::Ready(Err(error)) => send_failure = Some(error),
                        Poll::Pending => {}
                    }
                }
                while let Some(answer) = self.head(request.method, &mut searched)? {
                    searched = 0;
                    if answer.head.status.is_informational() {
                        informational += 1;
                        if informational > INFORMATIONAL_MAX
                            || answer.head.status == StatusCode::SWITCHING_PROTOCOLS
                        {
                            return Poll::Ready(Err(broken("it answers with informational heads alone")));
                        }
                        continue;
                    }
                    let is_reusable = answer.is_reusable && is_flushed;
                    return Poll::Ready(Ok(Answer { is_reusable, ..answer }));
                }
                if self.input.len() > HEAD_BYTES_MAX {
                    return Poll::Ready(Err(broken("a head without end")));
                }
                if ready!(self.poll_read(context))? == 0 {
                    // An engine that began to answer has received the request: it must not be sent again.
                    if informational > 0 || !self.input.is_empty() {
                        return Poll::Ready(Err(broken("closed in the middle of a head")));
                    }
                    let closed = || io::Error::new(io::ErrorKind::UnexpectedEof, "closed before an answer");
                    return Poll::Ready(Err(send_failure.take().unwrap_or_else(closed)));
                }
            }
        })
        .await
    }

    /// Sends the head and the body, of which `sent` bytes were sent before.
    fn poll_send(
        &mut self,
        body: &[u8],
        sent: &mut usize,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = &mut self.stream;
        while *sent < self.output.len() + body.len() {
            let head = self.output.get(*sent..).unwrap_or_default();
            let rest = &body[sent.saturating_sub(self.output.len())..];
            let written = match head.is_empty() {
                true => Pin::new(&mut *stream).poll_write(context, rest),
                false => {
                    let parts = [IoSlice::new(head), IoSlice::new(rest)];
                    Pin::new(&mut *stream).poll_write_vectored(context, &parts)
                }
            };
            match ready!(written)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                bytes => *sent += bytes,
            }
        }
        Pin::new(stream).poll_flush(context)
    }

    /// Returns the head if it has arrived whole; the first `searched` bytes of the input contain no end of a head.
    fn head(&mut self, method: &Method, searched: &mut usize) -> io::Result<Option<Answer>> {
        // The end may begin up to three bytes before the new input.
        let from = searched.saturating_sub(3);
        let Some(end) = END_OF_HEAD.find(&self.input[from..]) else {
            *searched = self.input.len();
            return Ok(None);
        };
        let head = self.input.split_to(from + end + 4).freeze();
        if head.len() > HEAD_BYTES_MAX {
            return Err(broken("a head without end"));
        }
        parse(&head, method).map(Some)
    }

    /// Returns the next part of a body from the input.
    pub(crate) fn next(&mut self, framing: &mut Framing) -> io::Result<Next> {
        next(&mut self.input, framing)
    }

    /// Reads more of a body and returns its next part.
    pub(crate) fn poll_next(
        &mut self,
        framing: &mut Framing,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Next>> {
        loop {
            match self.next(framing)? {
                Next::Starved => {}
                next => return Poll::Ready(Ok(next)),
            }
            if ready!(self.poll_read(context))? == 0 {
                return Poll::Ready(match framing {
                    Framing::UntilClose => {
                        *framing = Framing::Ended;
                        Ok(Next::Ended)
                    }
                    _ => Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "closed in the middle of its answer",
                    )),
                });
            }
        }
    }
}

fn parse(bytes: &Bytes, method: &Method) -> io::Result<Answer> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    match config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut headers) {
        Ok(httparse::Status::Complete(end)) if end == bytes.len() => {}
        // `httparse` also accepts a bare line feed as end of line, which the search above did not look for.
        Ok(httparse::Status::Complete(_)) => return Err(broken("a head whose lines do not end in CRLF")),
        Ok(httparse::Status::Partial) => return Err(broken("a head that ends too early")),
        Err(error) => return Err(broken(&format!("its head: {error}"))),
    }
    let (mut head, ()) = Response::new(()).into_parts();
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    head.status = status.ok_or_else(|| broken("a head without a status"))?;
    head.version = if parsed.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    head.headers.reserve(parsed.headers.len());
    for header in parsed.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(|_| broken("a header's name"))?;
        let value = HeaderValue::from_maybe_shared(bytes.slice_ref(header.value));
        head.headers.append(name, value.map_err(|_| broken("a header's value"))?);
    }
    let (framing, is_framed_once) = framing(&head, method)?;
    let is_reusable = keeps_alive(&head) && is_framed_once && framing != Framing::UntilClose;
    Ok(Answer { head, framing, is_reusable })
}

/// Whether a header's list contains this word.
fn has_word(headers: &HeaderMap, name: &HeaderName, word: &[u8]) -> bool {
    let words =
        headers.get_all(name).into_iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    words.into_iter().any(|found| found.trim_ascii().eq_ignore_ascii_case(word))
}

fn keeps_alive(head: &Parts) -> bool {
    match head.version {
        Version::HTTP_10 => has_word(&head.headers, &CONNECTION, b"keep-alive"),
        _ => !has_word(&head.headers, &CONNECTION, b"close"),
    }
}

/// Framing of the body (RFC 9112, section 6.3), and whether only one header determines it.
fn framing(head: &Parts, method: &Method) -> io::Result<(Framing, bool)> {
    let is_without = head.status.is_informational()
        || head.status == StatusCode::NO_CONTENT
        || head.status == StatusCode::NOT_MODIFIED
        || *method == Method::HEAD;
    if is_without {
        return Ok((Framing::Ended, true));
    }
    let mut lengths = head.headers.get_all(CONTENT_LENGTH).into_iter();
    if let Some(coding) = head.headers.get_all(TRANSFER_ENCODING).into_iter().next_back() {
        let last = coding.as_bytes().rsplit(|byte| *byte == b',').next().unwrap_or_default();
        if !last.trim_ascii().eq_ignore_ascii_case(b"chunked") {
            return Err(broken("a transfer coding that is not chunked"));
        }
        return Ok((Framing::Chunked(Chunk::Size), lengths.next().is_none()));
    }
    let Some(first) = lengths.next() else { return Ok((Framing::UntilClose, true)) };
    if lengths.any(|other| other != first) {
        return Err(broken("two lengths"));
    }
    let digits = first.as_bytes();
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let length = first.to_str().ok().filter(|_| is_number).and_then(|digits| digits.parse().ok());
    match length.ok_or_else(|| broken("a length that is no number"))? {
        0 => Ok((Framing::Ended, true)),
        length => Ok((Framing::Length(length), true)),
    }
}

/// Removes up to `most` bytes from the input.
fn taken(input: &mut BytesMut, most: u64) -> Bytes {
    let bytes = usize::try_from(most).unwrap_or(usize::MAX).min(input.len());
    input.split_to(bytes).freeze()
}

/// Returns a line without its end, if it has arrived whole.
fn line(input: &mut BytesMut, bytes_max: usize) -> io::Result<Option<BytesMut>> {
    match memchr::memchr(b'\n', input) {
        Some(end) if end <= bytes_max => {
            let mut line = input.split_to(end + 1);
            let is_whole = line.ends_with(b"\r\n");
            line.truncate(end.saturating_sub(usize::from(is_whole)));
            Ok(Some(line))
        }
        None if input.len() <= bytes_max => Ok(None),
        _ => Err(broken("a line of a chunked body without end")),
    }
}

fn next(input: &mut BytesMut, framing: &mut Framing) -> io::Result<Next> {
    loop {
        match *framing {
            Framing::Ended => return Ok(Next::Ended),
            _ if input.is_empty() => return Ok(Next::Starved),
            Framing::UntilClose => return Ok(Next::Data(taken(input, u64::MAX))),
            Framing::Length(left) => {
                let data = taken(input, left);
                *framing = match left - data.len() as u64 {
                    0 => Framing::Ended,
                    left => Framing::Length(left),
                };
                return Ok(Next::Data(data));
            }
            Framing::Chunked(Chunk::Data(left)) => {
                let data = taken(input, left);
                *framing = Framing::Chunked(match left - data.len() as u64 {
                    0 => Chunk::End,
                    left => Chunk::Data(left),
                });
                return Ok(Next::Data(data));
            }
            Framing::Chunked(Chunk::Size) => {
                let Some(line) = line(input, CHUNK_LINE_MAX)? else { return Ok(Next::Starved) };
                *framing = Framing::Chunked(match chunk_size(&line)? {
                    0 => Chunk::Trailers(0),
                    size => Chunk::Data(size),
                });
            }
            Framing::Chunked(Chunk::End) => {
                match input.as_ref() {
                    [b'\r', b'\n', ..] => input.advance(2),
                    [b'\n', ..] => input.advance(1),
                    [b'\r'] => return Ok(Next::Starved),
                    _ => return Err(broken("a chunk that is longer than it says")),
                }
                *framing = Framing::Chunked(Chunk::Size);
            }
            Framing::Chunked(Chunk::Trailers(before)) => {
                let Some(line) = line(input, TRAILER_BYTES_MAX)? else { return Ok(Next::Starved) };
                let bytes = before + line.len() + 2;
                if bytes > TRAILER_BYTES_MAX {
                    return Err(broken("trailers without end"));
                }
                *framing = match line.is_empty() {
                    true => Framing::Ended,
                    false => Framing::Chunked(Chunk::Trailers(bytes)),
                };
            }
        }
    }
}

/// Parses the size in a chunk line; extensions are ignored.
fn chunk_size(line: &[u8]) -> io::Result<u64> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let is_number = (1..=16).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let text = std::str::from_utf8(digits).ok().filter(|_| is_number);
    text.and_then(|digits| u64::from_str_radix(digits, 16).ok()).ok_or_else(|| broken("the size of a chunk"))
}

#[cfg(test)]
#[path = "http1_tests.rs"]
mod tests;
