//! One of the gateway's threads: a listener of its own, a reactor of its own, and every connection that it accepts.
//!
//! A request is read, routed, sent to its engine and answered without leaving its thread, over connections to engines that
//! belong to the thread: nobody else is woken for it, and nothing is stolen. The kernel spreads clients over the listeners.

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

/// Steps between two looks at the sockets of a thread that never sleeps.
const BUSY_STEPS: u32 = 8;

/// How often a thread's timer fires for nothing. Tokio wakes its reactor, with a system call and a turn of the loop for
/// nothing, whenever a timer is set that is due before all others, as each request's is on a thread that has no other.
const TIMER_EVERY: Duration = Duration::from_millis(500);

/// Threads of its own for what blocks: names to be looked up, snapshots. Requests are worked on by a pool that all shards
/// share.
const BLOCKING_MAX: usize = 4;

/// A thread that serves.
pub(crate) struct Shard(oneshot::Receiver<Result<()>>);

impl Shard {
    /// Waits for its end: all its requests are over, or their time to drain is.
    pub(crate) async fn ended(self) -> Result<()> {
        self.0.await.context("a thread of the gateway is gone")?
    }
}

/// Starts a thread that serves until it is told to stop. Each thread makes routes of its own: their counts of references would
/// otherwise be written by all threads with each request.
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
        // Whatever else is ready, sockets are looked at after so many steps.
        runtime.event_interval(BUSY_STEPS);
    }
    let runtime = runtime.max_blocking_threads(BLOCKING_MAX).enable_all().build()?;
    let (over, ended) = oneshot::channel();
    let bounds = ServeConfig { unread_max: write_timeout, ..ServeConfig::default() };
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
        router_engines::upstream::own_connections();
        if busy_poll {
            // A task that is always ready keeps the thread from sleeping: it asks for events without waiting for them.
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
        // What was cut off is written down before the end is told.
        runtime.shutdown_background();
        // Nobody waits any more when the process is on its way out.
        let _nobody = over.send(served);
    };
    thread::Builder::new().name("kvasir-serve".to_owned()).spawn(work).context("a thread to serve with")?;
    Ok(Shard(ended))
}
