//! The service on a port of its own.
//!
//! tonic's own server answers CANCELLED when a `grpc-timeout` passes, where the protocol requires
//! DEADLINE_EXCEEDED, and it would race with the methods' own deadline: so only its router is used.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::serve::Listener;
use router_serve::ServeConfig;
use tokio::sync::watch;

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::intake::{Budget, Intake, IntakeLimits};
use crate::service::service;

/// Time after which a connection without a call is closed.
const FIRST_CALL_WITHIN: Duration = Duration::from_secs(30);

/// Flow control: bytes that a client may send on one call before they are read, which are held in the
/// server.
const CALL_WINDOW_BYTES: u32 = 256 << 10;

/// Flow control window of one connection; times [`Config::connections_max`] it bounds the unread bytes, 1
/// GiB by default.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// Largest message of methods that carry no prompt.
const SMALL_MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Serves until `shutdown` is done; then no new call begins, and calls in progress end normally. The
/// listener sets its connections up, and waits when none is available. Dropping this future closes all
/// connections immediately.
pub async fn serve<B: Backend, L: Listener>(
    listener: L,
    backend: Arc<B>,
    config: Config,
    shutdown: impl Future<Output = ()> + Send,
) where
    L::Addr: Clone + Send + Sync + 'static,
{
    let bounds = ServeConfig {
        http2_only: true,
        connections_max: config.connections_max,
        first_call_within: FIRST_CALL_WITHIN,
        streams_max: config.calls_per_connection_max,
        stream_window_bytes: CALL_WINDOW_BYTES,
        connection_window_bytes: CONNECTION_WINDOW_BYTES,
        stalled_read_timeout: config.stalled_read_timeout,
        ..ServeConfig::default()
    };
    let budget = Arc::new(Budget::new(config.received_bytes_max.max(config.request_bytes_max)));
    let guard = Arc::new(CallAuthenticator {
        backend: Arc::clone(&backend),
        budget: Arc::clone(&budget),
        request_bytes_max: config.request_bytes_max,
        within: config.message_within,
    });
    let (stop, stopping) = watch::channel(false);
    let router = service(backend, config, budget, stopping).layer(from_fn_with_state(guard, admit::<B>));
    let shutdown = async move {
        shutdown.await;
        // All watchers of health may have disconnected.
        let _nobody = stop.send(true);
    };
    router_serve::serve(listener, router, bounds, shutdown).await;
}

/// Authenticates a call before its message is read.
struct CallAuthenticator<B> {
    backend: Arc<B>,
    budget: Arc<Budget>,
    request_bytes_max: usize,
    within: Duration,
}

impl<B> CallAuthenticator<B> {
    /// Returns the limits for the messages of a call.
    fn rules(&self, path: &str) -> IntakeLimits {
        let is_stream = path.ends_with("/ModelStreamInfer");
        let message_bytes_max = match is_stream || path.ends_with("/ModelInfer") {
            true => self.request_bytes_max,
            false => SMALL_MESSAGE_BYTES_MAX.min(self.request_bytes_max),
        };
        IntakeLimits { budget: Arc::clone(&self.budget), message_bytes_max, within: self.within, is_stream }
    }
}

async fn admit<B: Backend>(
    State(guard): State<Arc<CallAuthenticator<B>>>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    // Every client may ask whether the server is live and ready.
    let is_open = !path.contains("/Model") && !path.contains("/Repository");
    if !is_open && let Err((status, message)) = guard.backend.admits(request.headers()) {
        let status: tonic::Status = Error::of(status, message).into();
        return status.into_http();
    }
    let rules = guard.rules(path);
    next.run(request.map(|body| Body::new(Intake::new(body, rules)))).await
}
