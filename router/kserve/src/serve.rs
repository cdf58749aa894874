//! Connections: HTTP/2 on a port of its own, over whatever a listener accepts.
//!
//! hyper is used as it is: tonic's own server answers CANCELLED when a `grpc-timeout` passes, where the protocol says
//! DEADLINE_EXCEEDED, and it would race with the deadline that the methods keep.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::backend::Backend;
use crate::config::Config;
use crate::service::service;

/// A connection that says nothing for so long is asked whether it is there, and has as long again to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Flow control: what may be on its way to the server on one call.
const CALL_WINDOW_BYTES: u32 = 1 << 20;

/// And on one connection.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// Serves until `shutdown` is done; then no call is begun any more, and those under way end as they would. The listener
/// sets its connections up, and waits when there are none to be had. Dropping this future closes all connections at once.
pub async fn serve<B: Backend, L: Listener>(
    mut listener: L,
    backend: Arc<B>,
    config: Config,
    shutdown: impl Future<Output = ()> + Send,
) {
    let places = Arc::new(Semaphore::new(config.connections_max));
    let mut http2 = http2::Builder::new(TokioExecutor::new());
    http2
        .timer(TokioTimer::new())
        .max_concurrent_streams(config.calls_per_connection_max)
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    let router = service(backend, config);
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = connections.join_next() => continue,
            () = &mut shutdown => break,
        };
        let (socket, _) = accepted;
        let answering = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(http2.serve_connection(TokioIo::new(socket), answering));
        connections.spawn(async move {
            // A connection that breaks drops its calls; nobody is left to be told.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
    while connections.join_next().await.is_some() {}
}
