//! The HTTP surface: one listener per worker, one task per connection.
//!
//! A client that goes away drops its connection's task, and with it the body and the request: no timer is
//! involved. A listener without clients costs a socket and a sleeping task.

mod about;
mod answer;
mod anthropic;
mod ask;
mod generate;
mod handoff;
mod json;
mod metrics;
mod openai;
mod recording;
mod refusal;
mod reply;
mod request;
mod responses;
mod routes;
mod schema;
mod sleep;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use router_engines::intake::Intake;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

pub(crate) use ask::tiny_chat;
pub(crate) use request::{Message, Text};

use crate::fault::FaultKind;
use crate::worker::Worker;
use crate::{Dialect, Role};

/// Connections that the system may hold before they are accepted.
const BACKLOG: u32 = 1024;
/// Connections open at a time; more wait in the kernel.
const CONNECTIONS_MAX: usize = 16_384;
/// Largest head of a request; a longer one is answered with 431.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// A connection whose next request has not begun, or whose head is not whole, after this time is closed.
const HEAD_WITHIN: Duration = Duration::from_secs(120);
/// A body must be whole after this time.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// Bytes of all bodies that are received or being parsed.
const BODIES_BYTES_MAX: usize = 256 << 20;
/// After a failed accept (no file descriptors left) the listener rests.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// What a worker tells about itself that it cannot know without its sockets.
#[derive(Debug, Clone)]
pub(crate) struct Site {
    pub(crate) address: SocketAddr,
    pub(crate) events_port: Option<u16>,
    pub(crate) replay_port: Option<u16>,
}

/// A worker as its connections see it.
pub(crate) struct Served {
    pub(crate) worker: Arc<Worker>,
    pub(crate) site: Site,
    intake: Intake,
}

impl Served {
    pub(crate) fn new(worker: Arc<Worker>, site: Site) -> Self {
        let intake = Intake::new(worker.config.body_bytes_max, BODIES_BYTES_MAX, BODY_WITHIN);
        Self { worker, site, intake }
    }

    fn dialect(&self) -> Dialect {
        self.worker.config.dialect
    }

    fn role_name(&self) -> &'static str {
        match self.worker.config.role {
            Role::Both => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// Opens a listener. Must be called within the runtime.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections until it is dropped, which cuts them all.
pub(crate) async fn serve(listener: TcpListener, served: Arc<Served>) {
    let mut connections = JoinSet::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepting = async {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepting => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) => {
                if served.worker.faults.draw(FaultKind::Refuse).is_some() {
                    reset(stream);
                } else {
                    let connection = connection(stream, Arc::clone(&served));
                    connections.spawn(async move {
                        connection.await;
                        drop(place);
                    });
                }
            }
            Err(error) => {
                tracing::warn!(%error, "mock engine: a connection was not accepted");
                tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
            }
        }
    }
}

/// Closes a connection with a reset, so that the client sees an error at once.
fn reset(stream: TcpStream) {
    // Without it the client sees a plain end of the connection, which is a refusal, too.
    let _best_effort = stream.set_zero_linger();
}

async fn connection(stream: TcpStream, served: Arc<Served>) {
    // Without it small pieces of a stream wait for acknowledgements.
    let _best_effort = stream.set_nodelay(true);
    let service = service_fn(|request| routes::route(Arc::clone(&served), request));
    let mut http = http1::Builder::new();
    http.half_close(false)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_header_size(HEAD_BYTES_MAX);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "mock engine: a connection ended early");
    }
}
