//! Connections: HTTP/2 on a port of its own, over whatever a listener accepts.
//!
//! hyper is used as it is: tonic's own server answers CANCELLED when a `grpc-timeout` passes, where the protocol says
//! DEADLINE_EXCEEDED, and it would race with the deadline that the methods keep.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::serve::Listener;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::intake::{Budget, Intake, Rules};
use crate::service::service;
use crate::unread::Unread;

/// A connection that says nothing for so long is asked whether it is there, and has as long again to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// A connection that has made no call after this time is closed.
const FIRST_CALL_WITHIN: Duration = Duration::from_secs(30);

/// Flow control: what may be on its way to the server on one call, and is held there while the call is not read.
const CALL_WINDOW_BYTES: u32 = 256 << 10;

/// And on one connection; times [`Config::connections_max`] it bounds what is held unread, 1 GiB by default.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// Largest message of methods that carry no prompt.
const SMALL_MESSAGE_BYTES_MAX: usize = 64 << 10;

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
    let unread_max = config.unread_max;
    let (stop, stopping) = watch::channel(false);
    let budget = Arc::new(Budget::new(config.received_bytes_max.max(config.request_bytes_max)));
    let (request_bytes_max, within) = (config.request_bytes_max, config.message_within);
    let router = service(Arc::clone(&backend), config, Arc::clone(&budget), stopping.clone());
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
        let has_called = Arc::new(AtomicBool::new(false));
        let answering = Guarded {
            router: TowerToHyperService::new(router.clone()),
            backend: Arc::clone(&backend),
            has_called: Arc::clone(&has_called),
            unread_max,
            budget: Arc::clone(&budget),
            request_bytes_max,
            within,
        };
        let connection = graceful.watch(http2.serve_connection(TokioIo::new(socket), answering));
        let silent = silent(has_called, stopping.clone());
        connections.spawn(async move {
            // A connection that breaks drops its calls; nobody is left to be told.
            tokio::select! {
                _broken = connection => {}
                () = silent => {}
            }
            drop(place);
        });
    }
    drop(listener);
    // Watchers of health may be gone already.
    let _nobody = stop.send(true);
    graceful.shutdown().await;
    while connections.join_next().await.is_some() {}
}

/// Returns when a connection has made no call in its time, or when the server stops and it has made none.
async fn silent(has_called: Arc<AtomicBool>, mut stopping: watch::Receiver<bool>) {
    // hyper waits for the beginning of HTTP/2 for as long as it takes.
    tokio::select! {
        () = tokio::time::sleep(FIRST_CALL_WITHIN) => {}
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
    if has_called.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// The router, behind a look at who calls: nobody's message is read who may not send one.
struct Guarded<B> {
    router: TowerToHyperService<axum::Router>,
    backend: Arc<B>,
    has_called: Arc<AtomicBool>,
    unread_max: Duration,
    budget: Arc<Budget>,
    request_bytes_max: usize,
    within: Duration,
}

impl<B> Guarded<B> {
    /// What the messages of a call are held to.
    fn rules(&self, path: &str) -> Rules {
        let is_stream = path.ends_with("/ModelStreamInfer");
        let message_bytes_max = match is_stream || path.ends_with("/ModelInfer") {
            true => self.request_bytes_max,
            false => SMALL_MESSAGE_BYTES_MAX.min(self.request_bytes_max),
        };
        Rules { budget: Arc::clone(&self.budget), message_bytes_max, within: self.within, is_stream }
    }
}

impl<B: Backend> Service<Request<Incoming>> for Guarded<B> {
    type Response = axum::response::Response;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.has_called.store(true, Ordering::Relaxed);
        // Whether the server lives and is ready is for everybody.
        let is_open =
            !request.uri().path().contains("/Model") && !request.uri().path().contains("/Repository");
        if !is_open && let Err((status, message)) = self.backend.admits(request.headers()) {
            let status: tonic::Status = Error::of(status, message).into();
            return Box::pin(std::future::ready(Ok(status.into_http())));
        }
        let rules = self.rules(request.uri().path());
        let answered = self.router.call(request.map(|body| Intake::new(body, rules)));
        let unread_max = self.unread_max;
        Box::pin(async move {
            let answer = answered.await?;
            if http_body::Body::is_end_stream(answer.body()) {
                return Ok(answer);
            }
            Ok(answer.map(|body| Body::new(Unread::new(body, unread_max))))
        })
    }
}
