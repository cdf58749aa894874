//! A request that a proxy sends in the gateway's place.
//!
//! A proxy that speaks Envoy's `ext_proc` asks where a request should go, and sends it there itself. The gateway treats it like
//! any other request up to the moment of sending; then the [`ProxyDispatch`] takes the [`Call`] to the proxy's side, and the
//! engine's answer comes back through it as a [`ReplyBody`].
//!
//! Invariant: one request is handed over once. A second attempt is refused, so nothing is computed twice.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderValue, Response};
use tokio::sync::{mpsc, oneshot};

use crate::upstream::{Call, ReplyBody, Upstream, UpstreamError};

/// Pieces of an answer that may wait to be read. Each is at most the size of one message of the proxy.
const PIECES_MAX: usize = 8;

/// Channel to the proxy that one request came from.
#[derive(Debug, Clone)]
pub struct ProxyDispatch(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    to_proxy: Mutex<Option<oneshot::Sender<ProxyRequest>>>,
    shows_answers: bool,
    allowed_workers: Option<Vec<String>>,
}

/// A request that the proxy is to send.
#[derive(Debug)]
pub struct ProxyRequest {
    /// The request for the engine.
    pub call: Call,
    /// The engine's URL.
    pub base: String,
    /// The engine's own key, if it asks for one.
    pub authorization: Option<HeaderValue>,
    /// Takes the engine's answer.
    pub reply: ReplySender,
}

/// Sends the head of an engine's answer, or the error in its place, to the request.
#[derive(Debug)]
pub struct ReplySender(oneshot::Sender<Result<Response<mpsc::Receiver<BodyPiece>>, ProxyDispatchError>>);

/// Reason for which a proxy returned no engine's answer.
#[derive(Debug)]
pub enum ProxyDispatchError {
    /// The worker could not be reached, or broke the connection off.
    Worker(UpstreamError),
    /// Another reason: the client disconnected, or a limit of the proxy was reached.
    Proxy(UpstreamError),
}

impl std::fmt::Display for ProxyDispatchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Worker(error) | Self::Proxy(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ProxyDispatchError {}

fn upstream_error(worker: &str, reason: &str) -> UpstreamError {
    UpstreamError { worker: worker.to_owned(), reason: reason.to_owned(), is_too_large: false }
}

/// Extension of an answer's head: another endpoint, `HOST:PORT`, served the request, because the proxy could not use the
/// chosen one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedElsewhere(pub String);

/// A part of an answer's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyPiece {
    /// Some bytes.
    Data(Bytes),
    /// The body is complete. A body that ends without this has broken off.
    End,
}

impl ProxyDispatch {
    /// Returns a channel to a proxy, and its other end. `shows_answers`: the proxy passes on the bodies of answers, not only
    /// their heads. `allowed_workers`: the only workers that it can reach, as `HOST:PORT`, or as `HOST` for all ports of it.
    #[must_use]
    pub fn new(
        shows_answers: bool,
        allowed_workers: Option<Vec<String>>,
    ) -> (Self, oneshot::Receiver<ProxyRequest>) {
        let (sender, receiver) = oneshot::channel();
        let inner = Inner { to_proxy: Mutex::new(Some(sender)), shows_answers, allowed_workers };
        (Self(Arc::new(inner)), receiver)
    }

    /// Whether the request was handed over.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.0.to_proxy.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Whether the bodies of answers come back.
    #[must_use]
    pub fn shows_answers(&self) -> bool {
        self.0.shows_answers
    }

    /// The only workers that the proxy can reach, as `HOST:PORT` or `HOST`; `None`: all workers.
    #[must_use]
    pub fn allowed_workers(&self) -> Option<&[String]> {
        self.0.allowed_workers.as_deref()
    }

    /// Has the proxy send a request, and returns the head of the engine's answer. Cancelling this drops the answer.
    pub async fn send(
        &self,
        upstream: &Arc<Upstream>,
        call: Call,
    ) -> Result<Response<ReplyBody>, ProxyDispatchError> {
        let error = |reason: &str| ProxyDispatchError::Proxy(upstream_error(upstream.base(), reason));
        let to_proxy = self.0.to_proxy.lock().unwrap_or_else(PoisonError::into_inner).take();
        let to_proxy = to_proxy.ok_or_else(|| error("the proxy has sent this request already"))?;
        let (sender, head) = oneshot::channel();
        let handed_over = ProxyRequest {
            call,
            base: upstream.base().to_owned(),
            authorization: upstream.authorization(),
            reply: ReplySender(sender),
        };
        to_proxy.send(handed_over).map_err(|_| error("the proxy has gone"))?;
        let head = head.await.map_err(|_| error("the proxy got no answer from it"))??;
        let (head, pieces) = head.into_parts();
        Ok(Response::from_parts(head, ReplyBody::handed_back(pieces, upstream)))
    }
}

impl ReplySender {
    /// Passes the head of the answer on; the pieces of its body are sent through the returned channel. Returns an error when
    /// the request was given up.
    pub fn answered(self, head: Response<()>) -> Result<mpsc::Sender<BodyPiece>, mpsc::Sender<BodyPiece>> {
        let (sender, receiver) = mpsc::channel(PIECES_MAX);
        match self.0.send(Ok(head.map(|()| receiver))) {
            Ok(()) => Ok(sender),
            Err(_) => Err(sender),
        }
    }

    /// Reports that the proxy answered in the engine's place, for this reason.
    pub fn failed(self, worker: &str, reason: &str, is_worker_failure: bool) {
        let error = upstream_error(worker, reason);
        let error = if is_worker_failure {
            ProxyDispatchError::Worker(error)
        } else {
            ProxyDispatchError::Proxy(error)
        };
        // The request may have been given up.
        let _given_up = self.0.send(Err(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_handed_over_once_and_its_answer_comes_back() {
        let upstream = Upstream::new("http://engine:8000", None);
        let (proxy_dispatch, proxy) = ProxyDispatch::new(true, None);
        let call = || Call::json("/v1/completions", Bytes::from_static(b"{}"));
        let asked = tokio::spawn({
            let (proxy_dispatch, upstream) = (proxy_dispatch.clone(), Arc::clone(&upstream));
            async move {
                let reply = proxy_dispatch.send(&upstream, call()).await.expect("an answer");
                reply.into_body().whole(1 << 10).await
            }
        });
        let ProxyRequest { call: sent, base, reply, .. } = proxy.await.expect("a request");
        assert_eq!((sent.path.path(), base.as_str()), ("/v1/completions", "http://engine:8000"));
        let pieces = reply.answered(Response::new(())).expect("it waits");
        for piece in [
            BodyPiece::Data(Bytes::from_static(b"ab")),
            BodyPiece::Data(Bytes::from_static(b"c")),
            BodyPiece::End,
        ] {
            pieces.send(piece).await.expect("it is read");
        }
        assert_eq!(asked.await.expect("no panic").expect("an answer"), "abc");
        let again = proxy_dispatch.send(&upstream, call()).await.expect_err("once only");
        assert!(again.to_string().contains("already"), "{again}");
    }

    #[tokio::test]
    async fn a_body_without_an_end_has_broken_off() {
        let upstream = Upstream::new("http://engine:8000", None);
        let (proxy_dispatch, proxy) = ProxyDispatch::new(true, None);
        let whole = async {
            let reply =
                proxy_dispatch.send(&upstream, Call::json("/", Bytes::new())).await.expect("an answer");
            reply.into_body().whole(99).await
        };
        let cut = async {
            let pieces = proxy.await.expect("a request").reply.answered(Response::new(())).expect("it waits");
            pieces.send(BodyPiece::Data(Bytes::from_static(b"half"))).await.expect("it is read");
        };
        let (whole, ()) = tokio::join!(whole, cut);
        assert!(whole.expect_err("it broke off").reason.contains("broke off"));
    }
}
