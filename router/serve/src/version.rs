//! The version of HTTP that a connection speaks, by its first bytes.
//!
//! hyper-util's `auto` does the same, but limits neither the time until the first byte nor the size of a head of HTTP/1.1.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// First bytes of an HTTP/2 connection (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Size of the first read: most heads fit.
const FIRST_BYTES: usize = 4096;

/// A connection with its first bytes, which were read already.
pub(crate) struct PrefixedStream<S> {
    first: Bytes,
    stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for PrefixedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let count = self.first.len().min(buffer.remaining());
        buffer.put_slice(&self.first.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PrefixedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Reads until the HTTP version is known; the bytes are kept.
pub(crate) async fn begin<S: AsyncRead + Unpin>(mut stream: S) -> std::io::Result<(PrefixedStream<S>, bool)> {
    let mut first = BytesMut::with_capacity(FIRST_BYTES);
    loop {
        let known = first.len().min(PREFACE.len());
        if first[..known] != PREFACE[..known] {
            return Ok((PrefixedStream { first: first.freeze(), stream }, false));
        }
        if known == PREFACE.len() {
            return Ok((PrefixedStream { first: first.freeze(), stream }, true));
        }
        if stream.read_buf(&mut first).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn the_version_is_known_by_the_first_bytes_and_none_is_lost() {
        for (sent, is_http2) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nrest", true),
            (b"PUT / HTTP/1.1\r\n\r\n", false),
            (b"PRI * HTTP/1.1\r\n\r\n", false),
        ] {
            for step in [1, 3, 100] {
                let (mut client, server) = tokio::io::duplex(256);
                let send = async {
                    for piece in sent.chunks(step) {
                        client.write_all(piece).await.expect("room");
                        tokio::task::yield_now().await;
                    }
                    drop(client);
                };
                let (_, (mut begun, found)) =
                    tokio::join!(send, async { begin(server).await.expect("begun") });
                let mut all = Vec::new();
                begun.read_to_end(&mut all).await.expect("the rest");
                assert_eq!((found, &all[..]), (is_http2, sent), "{step}");
            }
        }
        let (client, server) = tokio::io::duplex(16);
        drop(client);
        assert!(begin(server).await.is_err(), "nothing came");
    }
}
