//! Answers that are not streamed. They are sent in pieces, and the request and its memory stay charged
//! until the last piece was sent: answers for slow clients cannot accumulate unaccounted.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{Response as HttpResponse, StatusCode, header};
use axum::response::Response;
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::request::RequestContext;

/// Bytes that are handed to the connection at a time; it buffers a few times as many.
const PIECE_BYTES: usize = 64 << 10;

/// A complete answer.
pub(crate) type Buffered = HttpResponse<Bytes>;

/// Returns a JSON answer.
pub(crate) fn json_answer(status: StatusCode, json: String) -> Buffered {
    let mut answer = HttpResponse::new(Bytes::from(json));
    *answer.status_mut() = status;
    let json = header::HeaderValue::from_static("application/json");
    answer.headers_mut().insert(header::CONTENT_TYPE, json);
    answer
}

/// Returns the response. The request's resources are held until the client has read it.
pub(crate) fn respond(answer: Buffered, context: Box<RequestContext>) -> Response {
    context.resize_memory_charge(answer.body().len());
    let (head, rest) = answer.into_parts();
    let mut response = Response::from_parts(head, Body::empty());
    context.add_rate_limit_headers(&mut response);
    *response.body_mut() = Body::new(BufferedBody { rest, _context: context });
    response
}

/// Returns a response that holds a value until the client has read it.
pub(crate) fn holding(answer: Buffered, held: impl Send + Unpin + 'static) -> Response {
    answer.map(|rest| Body::new(BufferedBody { rest, _context: held }))
}

struct BufferedBody<C = Box<RequestContext>> {
    rest: Bytes,
    /// Dropped with the body.
    _context: C,
}

impl<C: Unpin> HttpBody for BufferedBody<C> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let len = self.rest.len().min(PIECE_BYTES);
        let piece = self.rest.split_to(len);
        Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use super::*;

    #[test]
    fn an_answer_leaves_in_pieces_and_its_request_ends_with_the_last() {
        let request = Arc::new(());
        let bytes: Bytes = (0..2 * PIECE_BYTES + 1).map(|at| at as u8).collect();
        let mut body = Some(Box::pin(BufferedBody { rest: bytes.clone(), _context: Arc::clone(&request) }));
        let (mut got, mut pieces) = (Vec::new(), 0);
        let mut task = Context::from_waker(Waker::noop());
        while let Some(inner) = &mut body {
            assert_eq!(inner.size_hint().exact(), Some((bytes.len() - got.len()) as u64));
            assert_eq!(Arc::strong_count(&request), 2, "still inside");
            let Poll::Ready(Some(Ok(frame))) = inner.as_mut().poll_frame(&mut task) else {
                panic!("a piece")
            };
            got.extend_from_slice(&frame.into_data().expect("bytes"));
            pieces += 1;
            // Polls the body as a connection would.
            if inner.is_end_stream() {
                body = None;
            }
        }
        assert_eq!((pieces, got), (3, bytes.to_vec()));
        assert_eq!(Arc::strong_count(&request), 1);
    }
}
