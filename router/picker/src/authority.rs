//! Rewrites `:authority` values that RFC 3986 does not allow, before the HTTP/2 library parses them.
//!
//! Envoy calls a gRPC service by the name of its cluster, where no other authority is configured. Names of clusters are
//! arbitrary: Istio's are `outbound|9002||epp.default.svc.cluster.local`, Envoy Gateway's have slashes. RFC 3986, section 3.2,
//! does not allow those characters, and the HTTP/2 library resets the stream, which Envoy turns into a 500 for every request.
//! The picker does not use the authority. So in such a value every octet except letters, digits, `-` and `_` becomes a dot.
//!
//! A value keeps its length. An entry of HPACK's dynamic table counts the octets of the decoded strings (RFC 7541, section
//! 4.1), so the sender's table and the library's stay equal, and no table is needed here: only the structure of a header
//! block is followed, and only a literal value of `:authority` is decoded.
//!
//! Memory of a connection: one header block that is incomplete or changed, of at most [`BLOCK_BYTES_MAX`].

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::serve::Listener;
use bytes::{Buf, BytesMut};
use httlib_huffman::DecoderSpeed;
use http::uri::Authority;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Length of HTTP/2's connection preface (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;
/// Length of a frame's header (section 4.1).
const FRAME_HEAD_BYTES: usize = 9;
/// Largest payload of a frame, unless a peer allows more, which the server does not (section 4.2).
const FRAME_BYTES_MAX: usize = 16_384;
/// Largest header block that is rewritten. Larger ones are passed to the library, which refuses them.
const BLOCK_BYTES_MAX: usize = 64 << 10;

/// Largest number of frames of a rewritten header block, which bounds the cost of many small ones. The library allows fewer.
const BLOCK_FRAMES_MAX: usize = 8;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Static index of `:authority` (RFC 7541, appendix A).
const AUTHORITY_INDEX: usize = 1;

/// A listener whose connections have valid authorities.
pub(crate) struct AuthorityRewriteListener<L>(pub(crate) L);

impl<L: Listener> Listener for AuthorityRewriteListener<L> {
    type Io = RewrittenStream<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, peer) = self.0.accept().await;
        (RewrittenStream { io, frames: Frames::default() }, peer)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

/// An HTTP/2 connection with rewritten header blocks.
pub(crate) struct RewrittenStream<T> {
    io: T,
    frames: Frames,
}

impl<T: AsyncRead + Unpin> AsyncRead for RewrittenStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let length = this.frames.ready.len().min(buf.remaining());
            if length > 0 || buf.remaining() == 0 {
                buf.put_slice(&this.frames.ready.split_to(length));
                return Poll::Ready(Ok(()));
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.io).poll_read(context, buf))?;
            let read = buf.filled().get(before..).unwrap_or_default();
            if read.is_empty() {
                // End of the stream: incomplete input is passed on unchanged.
                this.frames.ready = this.frames.held.split();
                if this.frames.ready.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            if this.frames.held.is_empty() && this.frames.are_unchanged(read) {
                return Poll::Ready(Ok(()));
            }
            this.frames.held.extend_from_slice(read);
            buf.set_filled(before);
            this.frames.advance();
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for RewrittenStream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// Position in a connection's sequence of frames, and its buffers.
struct Frames {
    /// Number of bytes up to the next frame's header.
    passing: usize,
    /// Received bytes that are not examined yet.
    held: BytesMut,
    /// Bytes for the next read.
    ready: BytesMut,
}

impl Default for Frames {
    fn default() -> Self {
        Self { passing: PREFACE_BYTES, held: BytesMut::new(), ready: BytesMut::new() }
    }
}

/// Result of examining the bytes at the start of a frame.
enum Next {
    /// Number of bytes that stay unchanged; some may not have arrived yet.
    Unchanged(usize),
    /// Length of a header block, frame headers included, and its new frames.
    Changed(usize, BytesMut),
    /// More bytes are needed.
    Incomplete,
}

impl Frames {
    /// Whether bytes that follow immediately can be read unchanged.
    fn are_unchanged(&mut self, mut bytes: &[u8]) -> bool {
        let mut passing = self.passing;
        loop {
            let skipped = passing.min(bytes.len());
            bytes = bytes.get(skipped..).unwrap_or_default();
            passing -= skipped;
            if bytes.is_empty() {
                self.passing = passing;
                return true;
            }
            match next(bytes) {
                Next::Unchanged(length) => passing = length,
                Next::Changed(..) | Next::Incomplete => return false,
            }
        }
    }

    /// Examines frames and moves them from `held` to `ready`.
    fn advance(&mut self) {
        loop {
            let passed = self.passing.min(self.held.len());
            self.ready.unsplit(self.held.split_to(passed));
            self.passing -= passed;
            if self.held.is_empty() {
                return;
            }
            match next(&self.held) {
                Next::Unchanged(length) => self.passing = length,
                Next::Changed(length, frames) => {
                    self.held.advance(length);
                    self.ready.extend_from_slice(&frames);
                }
                Next::Incomplete => return,
            }
        }
    }
}

struct FrameHead {
    length: usize,
    kind: u8,
    flags: u8,
    stream: [u8; 4],
}

fn frame_head(bytes: &[u8]) -> Option<FrameHead> {
    let &[a, b, c, kind, flags, s0, s1, s2, s3] = bytes.first_chunk::<FRAME_HEAD_BYTES>()?;
    Some(FrameHead {
        length: u32::from_be_bytes([0, a, b, c]) as usize,
        kind,
        flags,
        stream: [s0, s1, s2, s3],
    })
}

fn next(bytes: &[u8]) -> Next {
    let Some(first) = frame_head(bytes) else { return Next::Incomplete };
    if first.kind != HEADERS {
        return Next::Unchanged(FRAME_HEAD_BYTES + first.length);
    }
    let mut block = Vec::new();
    let mut at = 0;
    for frame in 0.. {
        let rest = bytes.get(at..).unwrap_or_default();
        let Some(head) = frame_head(rest) else { return Next::Incomplete };
        let end = at + FRAME_HEAD_BYTES + head.length;
        let follows = at == 0 || (head.kind == CONTINUATION && head.stream == first.stream);
        let is_large = head.length > FRAME_BYTES_MAX || end > BLOCK_BYTES_MAX || frame >= BLOCK_FRAMES_MAX;
        if !follows || is_large {
            // A protocol error or too large: the library reports it.
            return Next::Unchanged(end);
        }
        let Some(payload) = rest.get(FRAME_HEAD_BYTES..FRAME_HEAD_BYTES + head.length) else {
            return Next::Incomplete;
        };
        let fragment = if at == 0 { fragment(payload, head.flags) } else { Some(payload) };
        let Some(fragment) = fragment else { return Next::Unchanged(end) };
        at = end;
        let is_last = head.flags & END_HEADERS != 0;
        // Nearly all blocks are one frame, and are not copied.
        let whole = match (is_last, block.is_empty()) {
            (true, true) => fragment,
            (_, _) => {
                block.extend_from_slice(fragment);
                block.as_slice()
            }
        };
        if is_last {
            return match with_readable_authority(whole) {
                Some(block) => Next::Changed(end, frames_of(&block, &first)),
                None => Next::Unchanged(end),
            };
        }
    }
    Next::Incomplete
}

/// Returns a HEADERS frame's part of the header block, without padding and priority (RFC 9113, section 6.2).
fn fragment(payload: &[u8], flags: u8) -> Option<&[u8]> {
    let (mut start, mut padding) = (0, 0);
    if flags & PADDED != 0 {
        padding = usize::from(*payload.first()?);
        start += 1;
    }
    if flags & PRIORITY != 0 {
        start += 5;
    }
    payload.get(start..payload.len().checked_sub(padding)?)
}

/// Splits a header block into frames, without padding and priority.
fn frames_of(block: &[u8], first: &FrameHead) -> BytesMut {
    let mut frames = BytesMut::with_capacity(block.len() + FRAME_HEAD_BYTES);
    let last = block.len().div_ceil(FRAME_BYTES_MAX).saturating_sub(1);
    for (number, piece) in block.chunks(FRAME_BYTES_MAX).enumerate() {
        let kind = if number == 0 { HEADERS } else { CONTINUATION };
        let kept = if number == 0 { first.flags & !(PADDED | PRIORITY | END_HEADERS) } else { 0 };
        let [_, length @ ..] = (piece.len() as u32).to_be_bytes();
        frames.extend_from_slice(&length);
        frames.extend_from_slice(&[kind, kept | if number == last { END_HEADERS } else { 0 }]);
        frames.extend_from_slice(&first.stream);
        frames.extend_from_slice(piece);
    }
    frames
}

/// A parser of a header block (RFC 7541, section 6).
struct Block<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Block<'a> {
    /// Reads an integer with a prefix of `prefix` bits in the first octet (section 5.1).
    fn integer(&mut self, prefix: u32) -> Option<usize> {
        let mask = (1_usize << prefix) - 1;
        let mut value = usize::from(*self.bytes.get(self.at)?) & mask;
        self.at += 1;
        if value < mask {
            return Some(value);
        }
        // Integers of a block within the limit have no more octets.
        for shift in [0, 7, 14, 21] {
            let octet = usize::from(*self.bytes.get(self.at)?);
            self.at += 1;
            value += (octet & 0x7f) << shift;
            if octet & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// Reads a string, and whether it is Huffman-coded (section 5.2).
    fn string(&mut self) -> Option<(bool, &'a [u8])> {
        let is_coded = self.bytes.get(self.at)? & 0x80 != 0;
        let length = self.integer(7)?;
        let string = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some((is_coded, string))
    }
}

fn decoded(is_coded: bool, string: &[u8]) -> Option<Vec<u8>> {
    if !is_coded {
        return Some(string.to_vec());
    }
    let mut decoded = Vec::new();
    httlib_huffman::decode(string, &mut decoded, DecoderSpeed::FourBits).ok()?;
    Some(decoded)
}

/// Returns the header block with a valid authority; `None` if no change is needed.
fn with_readable_authority(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut block = Block { bytes, at: 0 };
    while let Some(&first) = bytes.get(block.at) {
        if first & 0x80 != 0 {
            // Both strings are in a table.
            block.integer(7)?;
        } else if first & 0xe0 == 0x20 {
            // Update of the table's size.
            block.integer(5)?;
        } else {
            let index = block.integer(if first & 0x40 != 0 { 6 } else { 4 })?;
            let is_authority = match index {
                0 => {
                    let (is_coded, name) = block.string()?;
                    // Longest code of `:authority`'s characters: 9 octets. Longer names are not decoded.
                    name.len() <= 10 && decoded(is_coded, name)?.as_slice() == b":authority"
                }
                index => index == AUTHORITY_INDEX,
            };
            let start = block.at;
            let (is_coded, value) = block.string()?;
            if is_authority {
                let value = readable(decoded(is_coded, value)?)?;
                let mut changed = bytes.get(..start)?.to_vec();
                put_string(&mut changed, &value);
                changed.extend_from_slice(bytes.get(block.at..)?);
                return Some(changed);
            }
        }
    }
    None
}

/// Returns a valid authority of the same length; `None` if it is valid already.
fn readable(mut authority: Vec<u8>) -> Option<Vec<u8>> {
    if authority.is_empty() || Authority::try_from(authority.as_slice()).is_ok() {
        return None;
    }
    for octet in &mut authority {
        if !octet.is_ascii_alphanumeric() && *octet != b'-' && *octet != b'_' {
            *octet = b'.';
        }
    }
    Some(authority)
}

/// Appends a string without Huffman coding (section 5.2).
fn put_string(block: &mut Vec<u8>, string: &[u8]) {
    const MASK: usize = 0x7f;
    let mut length = string.len();
    if length < MASK {
        block.push(length as u8);
    } else {
        block.push(MASK as u8);
        length -= MASK;
        while length > MASK {
            block.push((length & MASK) as u8 | 0x80);
            length >>= 7;
        }
        block.push(length as u8);
    }
    block.extend_from_slice(string);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const ISTIO: &str = "outbound|9002||epp.default.svc.cluster.local";

    /// A literal with a static name; `how`: the bits that select its indexing.
    fn literal(how: u8, index: u8, value: &str, is_coded: bool) -> Vec<u8> {
        let mut bytes = vec![how | index];
        let mut coded = Vec::new();
        if is_coded {
            httlib_huffman::encode(value.as_bytes(), &mut coded).expect("a code");
            let start = bytes.len();
            put_string(&mut bytes, &coded);
            bytes[start] |= 0x80;
        } else {
            put_string(&mut bytes, value.as_bytes());
        }
        bytes
    }

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
        [&length[..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    }

    /// Returns the bytes read from a connection whose bytes arrive in two parts.
    fn read(bytes: &[u8], cut: usize) -> Vec<u8> {
        let mut frames = Frames { passing: 0, ..Frames::default() };
        let mut read = Vec::new();
        for part in [&bytes[..cut], &bytes[cut..]] {
            if frames.held.is_empty() && frames.are_unchanged(part) {
                read.extend_from_slice(part);
                continue;
            }
            frames.held.extend_from_slice(part);
            frames.advance();
            read.extend_from_slice(&frames.ready.split());
        }
        read.extend_from_slice(&frames.held);
        read
    }

    #[test]
    fn authorities_are_made_readable_wherever_the_bytes_are_cut() {
        let wanted = "outbound.9002..epp.default.svc.cluster.local";
        for is_coded in [false, true] {
            for how in [0x40, 0x00, 0x10] {
                let before = [&[0x83, 0x86, 0x3f, 0xe1, 0x1f][..], &literal(0x40, 4, "/a|b", true)].concat();
                let after = literal(0x00, 1 << 3, "0|1", false);
                let block = [&before[..], &literal(how, 1, ISTIO, is_coded), &after].concat();
                let expected = [&before[..], &literal(how, 1, wanted, false), &after].concat();
                let padded = [&[3_u8, 0, 0, 0, 0, 9][..], &block, &[0, 0, 0]].concat();
                let (head, tail) = block.split_at(11);
                let data = frame(0, 0, 1, &[7; 40]);
                for (sent, flags) in [
                    (frame(HEADERS, END_HEADERS | 1, 1, &block), 1),
                    (frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &padded), 0),
                    ([frame(HEADERS, 0, 1, head), frame(CONTINUATION, END_HEADERS, 1, tail)].concat(), 0),
                ] {
                    let sent = [&data[..], &sent, &data].concat();
                    let expected =
                        [&data[..], &frame(HEADERS, END_HEADERS | flags, 1, &expected), &data].concat();
                    for cut in 0..=sent.len() {
                        assert_eq!(read(&sent, cut), expected, "{is_coded} {how:#x} {flags} {cut}");
                    }
                }
            }
        }
        let named = [&[0x40][..], &[10], b":authority", &[3], b"a|b"].concat();
        assert_eq!(with_readable_authority(&named).expect("changed"), [&named[..13], b"a.b"].concat());
        let long = "x|".repeat(200);
        let changed = with_readable_authority(&literal(0x40, 1, &long, true)).expect("changed");
        assert_eq!(changed, literal(0x40, 1, &"x.".repeat(200), false));
    }

    #[test]
    fn nothing_else_is_changed() {
        for value in ["10.0.0.1:9002", "epp.default.svc:9002", "[::1]:9002", "user@host", ""] {
            for is_coded in [false, true] {
                assert_eq!(with_readable_authority(&literal(0x40, 1, value, is_coded)), None, "{value}");
            }
        }
        // Other headers, and bytes that are no header block.
        assert_eq!(with_readable_authority(&literal(0x40, 4, "a|b", false)), None);
        let mut seed = 1_u32;
        let mut random = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        for _ in 0..2_000 {
            let payload: Vec<u8> = (0..random()).map(|_| random()).collect();
            let (kind, flags) = (random() % 11, random() | END_HEADERS);
            let sent = [frame(kind, flags, 1, &payload), frame(0, 0, 1, &payload)].concat();
            let is_changed = kind == HEADERS
                && fragment(&payload, flags).is_some_and(|block| with_readable_authority(block).is_some());
            if !is_changed {
                let cut = usize::from(random()) % sent.len();
                assert_eq!(read(&sent, cut), sent);
            }
        }
        // The buffer for a block without an end is bounded.
        let endless =
            (0..5).map(|_| frame(CONTINUATION, 0, 1, &[0; FRAME_BYTES_MAX])).collect::<Vec<_>>().concat();
        let endless = [frame(HEADERS, 0, 1, &[0x83]), endless].concat();
        assert_eq!(read(&endless, endless.len()), endless);
        let mut frames = Frames { passing: 0, ..Frames::default() };
        frames.held.extend_from_slice(&endless);
        frames.advance();
        assert!(frames.held.is_empty());
    }

    /// Returns the kinds of the frames that answer a call with Istio's authority.
    async fn answered<L: Listener>(listener: L, address: std::net::SocketAddr) -> Vec<u8>
    where
        L::Addr: Clone + Send + Sync + 'static,
    {
        let health = crate::proto::health::health_server::HealthServer::new(crate::health::HealthService(
            Arc::new(|| true),
        ));
        let router = tonic::service::Routes::new(health).prepare().into_axum_router();
        let config = router_serve::ServeConfig { http2_only: true, ..Default::default() };
        let serving = tokio::spawn(router_serve::serve(listener, router, config, std::future::pending()));
        let mut connection = TcpStream::connect(address).await.expect("it listens");
        let block = [
            &[0x83, 0x86][..],
            &literal(0x40, 4, "/grpc.health.v1.Health/Check", true),
            &literal(0x40, 1, ISTIO, true),
            &literal(0x40, 31, "application/grpc", true),
            &[0x40, 2],
            b"te",
            &[8],
            b"trailers",
        ]
        .concat();
        let call = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            &frame(4, 0, 0, &[])[..],
            &frame(HEADERS, END_HEADERS, 1, &block),
            &frame(0, 1, 1, &[0; 5]),
            // The same headers from the table: path, authority, type and `te` have the indices 65 to 62.
            &frame(HEADERS, END_HEADERS, 3, &[0x83, 0x86, 0xc1, 0xc0, 0xbf, 0xbe]),
            &frame(0, 1, 3, &[0; 5]),
        ]
        .concat();
        connection.write_all(&call).await.expect("sent");
        let mut kinds = Vec::new();
        while kinds.iter().filter(|kind| [HEADERS, 3].contains(kind)).count() < 4 {
            let mut head = [0; FRAME_HEAD_BYTES];
            let read = tokio::time::timeout(Duration::from_secs(2), connection.read_exact(&mut head)).await;
            let Ok(Ok(_)) = read else { break };
            let head = frame_head(&head).expect("a head");
            let mut payload = vec![0; head.length];
            connection.read_exact(&mut payload).await.expect("a payload");
            kinds.push(head.kind);
        }
        serving.abort();
        kinds
    }

    #[tokio::test]
    async fn istios_calls_are_answered_and_the_library_alone_resets_them() {
        async fn bound() -> (TcpListener, std::net::SocketAddr) {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            (listener, address)
        }
        let (listener, address) = bound().await;
        let kinds = answered(AuthorityRewriteListener(listener), address).await;
        // Two answers, each with a head and trailers.
        assert_eq!(kinds.iter().filter(|kind| **kind == HEADERS).count(), 4, "{kinds:?}");
        // If the library accepts these authorities one day, this module can be removed.
        let (listener, address) = bound().await;
        let kinds = answered(listener, address).await;
        assert!(kinds.contains(&3) && !kinds.contains(&HEADERS), "{kinds:?}");
    }
}
