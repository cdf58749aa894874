//! A serving thread of the gateway: its own listener, its own reactor, and every connection that it accepts.
//!
//! A request is read, routed, sent to its engine and answered on one thread, over engine connections that
//! belong to the thread: no other thread is woken for it, and no work stealing takes place. The kernel
//! spreads clients over the listeners.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use router_gateway::Gateway;
use router_serve::ServeConfig;
use router_tls::{PlainListener, ServerTls, TlsListener};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::http::{self, Stop};

/// Scheduler steps between two polls of the sockets on a thread that never sleeps.
const BUSY_STEPS: u32 = 8;

/// Period of a timer that does nothing. Tokio wakes its reactor, with a system call and an idle turn of the
/// loop, whenever a timer is set that is due before all others; without this timer, each request's timer
/// would be such a timer.
const TIMER_EVERY: Duration = Duration::from_millis(500);

/// Most threads for blocking work of a shard: name look-ups, snapshots. Parsing and tokenising run in a pool
/// that all shards share.
const BLOCKING_MAX: usize = 4;

/// A serving thread.
pub(crate) struct Shard(oneshot::Receiver<Result<()>>);

impl Shard {
    /// Waits until the thread ends: all its requests have ended, or the drain time is over.
    pub(crate) async fn ended(self) -> Result<()> {
        self.0.await.context("a thread of the gateway is gone")?
    }
}

/// Starts a thread that serves until `stop`. Each thread builds its own routes: all threads would otherwise
/// write the routes' reference counts with each request.
pub(crate) fn start(
    listener: std::net::TcpListener,
    tls: Option<Arc<ServerTls>>,
    gateway: Arc<Gateway>,
    routes: fn(Arc<Gateway>) -> Router,
    stop: Stop,
    busy_poll: bool,
    write_timeout: Duration,
) -> Result<Shard> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    if busy_poll {
        // Sockets are polled after this many steps, whatever else is ready.
        runtime.event_interval(BUSY_STEPS);
    }
    let runtime = runtime.max_blocking_threads(BLOCKING_MAX).enable_all().build()?;
    let (over, ended) = oneshot::channel();
    let bounds = ServeConfig { stalled_read_timeout: write_timeout, ..ServeConfig::default() };
    let serve = async move {
        let listener = TcpListener::from_std(listener)?;
        match tls {
            None => {
                let listener = PlainListener::new(listener).with_write_timeout(write_timeout);
                http::serve_with(listener, routes(gateway), stop, bounds).await;
            }
            Some(tls) => {
                let listener = TlsListener::new(listener, tls).with_write_timeout(write_timeout);
                http::serve_with(listener, routes(gateway), stop, bounds).await;
            }
        }
        Ok(())
    };
    let work = move || {
        router_engines::upstream::use_thread_connections();
        if busy_poll {
            // A task that is always ready keeps the thread from sleeping: the runtime polls for events
            // without waiting.
            runtime.spawn(async {
                loop {
                    tokio::task::yield_now().await;
                }
            });
        }
        runtime.spawn(async {
            loop {
                tokio::time::sleep(TIMER_EVERY).await;
            }
        });
        let served = runtime.block_on(serve);
        // Requests that were cut off are logged before the end is reported.
        runtime.shutdown_background();
        // The receiver is dropped if the process is exiting.
        let _nobody = over.send(served);
    };
    thread::Builder::new().name("kvasir-serve".to_owned()).spawn(work).context("a thread to serve with")?;
    Ok(Shard(ended))
}
