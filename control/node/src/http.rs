//! An HTTP/1.1 server: Nagle's algorithm off, bounds on connections and on how long a client may take to say what it wants,
//! and a shutdown that finishes what is in flight, until a deadline.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::ConnectInfo;
use axum::serve::Listener;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use router_tls::PeerAddr;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

/// One metric in Prometheus' text form.
pub(crate) fn metric(out: &mut String, name: &str, help: &str, value: u64) {
    use std::fmt::Write;
    let _infallible = writeln!(out, "# HELP {name} {help}\n{name} {value}");
}

/// Connections that wait to be accepted, per listener; the kernel may allow fewer.
const BACKLOG: u32 = 4096;
/// Connections open at a time, per listener; more wait in the kernel.
const CONNECTIONS_MAX: usize = 65_536;
/// Largest head of a request; a longer one is answered with 431.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// A connection whose next request has not begun, or whose head is not whole, after this time is closed. Longer than the
/// pools of usual clients keep theirs, so that it is they who close.
const HEAD_WITHIN: Duration = Duration::from_secs(120);

/// Binds the address; the error names it.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// Binds an address once for each of several threads: the kernel spreads connections over the listeners. The first binds
/// alone, so that it fails when somebody else has the address.
pub(crate) fn bind_shared(address: SocketAddr, listeners: usize) -> Result<Vec<std::net::TcpListener>> {
    let socket = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        std::io::Result::Ok(socket)
    };
    let bind = || {
        let first = socket()?;
        first.bind(address)?;
        // From here on the others may join.
        first.set_reuseport(true)?;
        // With port 0 the first has decided.
        let address = first.local_addr()?;
        let mut all = vec![first.listen(BACKLOG)?.into_std()?];
        for _ in 1..listeners {
            let next = socket()?;
            next.set_reuseport(true)?;
            next.bind(address)?;
            all.push(next.listen(BACKLOG)?.into_std()?);
        }
        std::io::Result::Ok(all)
    };
    bind().with_context(|| format!("cannot listen on {address}"))
}

/// When a server has to be over: `None` while nobody has told it to stop.
pub(crate) type Stop = watch::Receiver<Option<Instant>>;

/// Listens to SIGTERM and SIGINT from now on: the first gives requests in flight `drain` to end, the second nothing.
pub(crate) fn stop_signals(drain: Duration) -> Result<Stop> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (stop, stopped) = watch::channel(None);
    tokio::spawn(async move {
        for drain in [drain, Duration::ZERO] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            // Nobody listens when everything is over already.
            let _over = stop.send(Some(Instant::now() + drain));
        }
        std::future::pending::<()>().await;
    });
    Ok(stopped)
}

/// Waits until everything has to be over.
pub(crate) async fn deadline(mut stop: Stop) {
    loop {
        let until = *stop.borrow_and_update();
        let sleep = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => return,
            changed = stop.changed() => if changed.is_err() { return },
        }
    }
}

/// The routes, with who asks.
struct Known {
    router: TowerToHyperService<Router>,
    peer: PeerAddr,
}

impl Service<Request<Incoming>> for Known {
    type Response = axum::response::Response;
    type Error = std::convert::Infallible;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(ConnectInfo(self.peer.clone()));
        self.router.call(request)
    }
}

/// Serves until it is told to stop, then finishes what is in flight until it has to be over.
pub(crate) async fn serve<L>(mut listener: L, router: Router, mut stop: Stop)
where
    L: Listener<Addr = PeerAddr>,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_header_size(HEAD_BYTES_MAX);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let is_told = stop.clone();
    let mut told = pin!(async move { drop(stop.wait_for(Option::is_some).await) });
    loop {
        let accepted = async {
            // It is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let ((stream, peer), place) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut told => break,
        };
        let known = Known { router: TowerToHyperService::new(router.clone()), peer };
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), known));
        tokio::spawn(async move {
            // A client that breaks off has nobody to be told.
            let _broken = connection.await;
            drop(place);
        });
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => {}
        () = deadline(is_told) => tracing::warn!("requests were still in flight at the end of the drain time"),
    }
}
