//! An HTTP server with Nagle's algorithm off, graceful shutdown and a deadline for it.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use router_tls::PeerAddr;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};

/// Connections that wait to be accepted, per listener; the kernel may allow fewer.
const BACKLOG: u32 = 4096;

/// Binds the address; the error names it.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// Binds an address once for each of several threads: the kernel spreads connections over the listeners. Nobody else may
/// have it, not even somebody who would share it.
pub(crate) async fn bind_shared(address: SocketAddr, listeners: usize) -> Result<Vec<std::net::TcpListener>> {
    let alone = bind(address).await?;
    // With port 0 the first decides.
    let address = alone.local_addr()?;
    drop(alone);
    let bind = || {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)?.into_std()
    };
    let bound: std::io::Result<Vec<_>> = (0..listeners).map(|_| bind()).collect();
    bound.with_context(|| format!("cannot listen on {address}"))
}

/// SIGTERM or SIGINT, from now on.
pub(crate) fn told_to_stop() -> Result<impl Future<Output = ()> + Send> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Serves until SIGTERM or SIGINT, then finishes what is in flight, for at most `drain`.
pub(crate) async fn serve<L>(listener: L, router: Router, drain: Duration) -> Result<()>
where
    L: Listener,
    L::Addr: std::fmt::Debug,
    PeerAddr: for<'a> Connected<IncomingStream<'a, L>>,
{
    let told = told_to_stop()?;
    let (stopping, mut stopped) = tokio::sync::watch::channel(false);
    let shutdown = async move {
        told.await;
        // The receiver lives in this function.
        let _alive = stopping.send(true);
    };
    let service = router.into_make_service_with_connect_info::<PeerAddr>();
    let server = axum::serve(listener, service).with_graceful_shutdown(shutdown);
    let deadline = async move {
        drop(stopped.wait_for(|&stopping| stopping).await);
        tokio::time::sleep(drain).await;
    };
    tokio::select! {
        served = server.into_future() => served.context("HTTP server"),
        () = deadline => {
            tracing::warn!("requests were still in flight at the end of the drain time");
            Ok(())
        }
    }
}
