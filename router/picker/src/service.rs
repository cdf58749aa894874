//! The gRPC services and their listeners.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use futures_util::Stream;
use router_serve::ServeConfig;
use tokio::sync::{Semaphore, mpsc};
use tonic::{Request, Response, Status, Streaming};

use crate::authority::AuthorityRewriteListener;
use crate::exchange::exchange;
use crate::health::{HealthService, IsReady};
use crate::proto::ext_proc::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use crate::proto::ext_proc::{ProcessingRequest, ProcessingResponse};
use crate::proto::health::health_server::HealthServer;

/// Messages that may wait to be written to a proxy.
const MESSAGES_MAX: usize = 8;
/// Largest message of a proxy, equal to its buffer size.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Flow control: bytes that a proxy may send ahead on one stream. A connection's window is the sum over all its streams, so that
/// waiting requests do not block others.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// Largest window of HTTP/2 (RFC 9113, section 6.9.1).
const WINDOW_BYTES_MAX: u32 = (1 << 31) - 1;
/// Largest number of connections: proxies use few.
const CONNECTIONS_MAX: usize = 1024;

/// Limits of a picker.
#[derive(Debug, Clone)]
pub struct PickerConfig {
    /// Largest number of requests in flight; further ones are refused.
    pub requests_max: usize,
    /// Longest wait of a message for the proxy to read on.
    pub stalled_read_timeout: Duration,
}

struct Picker {
    routes: Router,
    places: Arc<Semaphore>,
}

/// Serves the picker and the health service until `shutdown` completes. Requests go through `routes`; those in flight are
/// finished.
pub async fn serve<L: Listener>(
    listener: L,
    routes: Router,
    is_ready: impl Fn() -> bool + Send + Sync + 'static,
    config: PickerConfig,
    shutdown: impl Future<Output = ()> + Send,
) where
    L::Addr: Clone + Send + Sync + 'static,
{
    let streams_max = u32::try_from(config.requests_max).unwrap_or(u32::MAX);
    let bounds = ServeConfig {
        http2_only: true,
        connections_max: CONNECTIONS_MAX,
        streams_max,
        stream_window_bytes: STREAM_WINDOW_BYTES,
        connection_window_bytes: STREAM_WINDOW_BYTES.saturating_mul(streams_max).min(WINDOW_BYTES_MAX),
        stalled_read_timeout: config.stalled_read_timeout,
        ..ServeConfig::default()
    };
    let picker = Picker { routes, places: Arc::new(Semaphore::new(config.requests_max)) };
    let picker = ExternalProcessorServer::new(picker).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let health = HealthServer::new(HealthService(Arc::new(is_ready)));
    let router = tonic::service::Routes::new(picker).add_service(health).prepare().into_axum_router();
    router_serve::serve(AuthorityRewriteListener(listener), router, bounds, shutdown).await;
}

/// Serves the health service alone.
pub async fn serve_health<L: Listener>(
    listener: L,
    is_ready: impl Fn() -> bool + Send + Sync + 'static,
    shutdown: impl Future<Output = ()> + Send,
) where
    L::Addr: Clone + Send + Sync + 'static,
{
    let is_ready: IsReady = Arc::new(is_ready);
    let health = HealthServer::new(HealthService(is_ready));
    let router = tonic::service::Routes::new(health).prepare().into_axum_router();
    let bounds = ServeConfig { http2_only: true, connections_max: 64, ..ServeConfig::default() };
    router_serve::serve(AuthorityRewriteListener(listener), router, bounds, shutdown).await;
}

#[tonic::async_trait]
impl ExternalProcessor for Picker {
    type ProcessStream = Messages;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Messages>, Status> {
        let (out, messages) = mpsc::channel(MESSAGES_MAX);
        let exchange = exchange(request.into_inner(), out, self.routes.clone(), Arc::clone(&self.places));
        Ok(Response::new(Messages { exchange: Some(Box::pin(exchange)), messages, failed: None }))
    }
}

type Exchange = Pin<Box<dyn Future<Output = Result<(), Status>> + Send>>;

/// Stream of the messages of one exchange, which is polled by the stream's reader.
pub(crate) struct Messages {
    exchange: Option<Exchange>,
    messages: mpsc::Receiver<ProcessingResponse>,
    /// Error of the exchange, sent after its last message.
    failed: Option<Status>,
}

impl Stream for Messages {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Poll::Ready(Some(message)) = this.messages.poll_recv(context) {
            return Poll::Ready(Some(Ok(message)));
        }
        if let Some(exchange) = &mut this.exchange
            && let Poll::Ready(ended) = exchange.as_mut().poll(context)
        {
            this.exchange = None;
            this.failed = ended.err();
            if let Some(status) = &this.failed {
                tracing::debug!("an exchange with a proxy ended: {status}");
            }
        }
        match this.messages.poll_recv(context) {
            Poll::Ready(Some(message)) => Poll::Ready(Some(Ok(message))),
            Poll::Ready(None) => Poll::Ready(this.failed.take().map(Err)),
            Poll::Pending => Poll::Pending,
        }
    }
}
