//! One of the gateway's threads: a listener of its own, a reactor of its own, and every connection that it accepts.
//!
//! A request is read, routed, sent to its engine and answered without leaving its thread, over connections to engines that
//! belong to the thread: nobody else is woken for it, and nothing is stolen. The kernel spreads clients over the listeners.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use router_gateway::{Gateway, router};
use router_tls::{PlainListener, ServerTls, TlsListener};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::http;

/// A thread that serves.
pub(crate) struct Shard(oneshot::Receiver<Result<()>>);

impl Shard {
    /// Waits for its end: all its requests are over, or their time to drain is.
    pub(crate) async fn ended(self) -> Result<()> {
        self.0.await.context("a thread of the gateway is gone")?
    }
}

/// Starts a thread that serves until SIGTERM or SIGINT.
pub(crate) fn start(
    listener: std::net::TcpListener,
    tls: Option<Arc<ServerTls>>,
    gateway: Arc<Gateway>,
    drain: Duration,
) -> Result<Shard> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (over, ended) = oneshot::channel();
    let serve = async move {
        let listener = TcpListener::from_std(listener)?;
        match tls {
            None => http::serve(PlainListener::new(listener), router(gateway), drain).await,
            Some(tls) => http::serve(TlsListener::new(listener, tls), router(gateway), drain).await,
        }
    };
    let work = move || {
        router_engines::upstream::own_connections();
        let served = runtime.block_on(serve);
        // Nobody waits any more when the process is on its way out.
        let _nobody = over.send(served);
        runtime.shutdown_background();
    };
    thread::Builder::new().name("kvasir-serve".to_owned()).spawn(work).context("a thread to serve with")?;
    Ok(Shard(ended))
}
