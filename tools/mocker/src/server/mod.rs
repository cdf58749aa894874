//! The HTTP surface: one listener per worker, one task per connection.
//!
//! A client that disconnects drops its connection's task, and with it the body and the request, without a
//! timer. A listener without clients costs a socket and a sleeping task.

mod answer;
mod anthropic;
mod description;
mod generate;
mod handoff;
mod json;
mod metrics;
mod openai;
mod parsed_request;
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

pub(crate) use parsed_request::tiny_chat;
pub(crate) use request::{Message, Text};

use crate::fault::FaultKind;
use crate::worker::Worker;
use crate::{Dialect, Role};

/// Most connections that the kernel holds before they are accepted.
const BACKLOG: u32 = 1024;
/// Most open connections; further ones wait in the kernel.
const CONNECTIONS_MAX: usize = 16_384;
/// Largest head of a request; a larger one is answered with 431.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Time after which a connection is closed if its next request has not begun or its head is incomplete.
const HEAD_WITHIN: Duration = Duration::from_secs(120);
/// Time within which a body must be complete.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// Most bytes of all bodies that are being received or parsed.
const BODIES_BYTES_MAX: usize = 256 << 20;
/// Pause of the listener after a failed accept (no file descriptors left).
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// Addresses of a worker, which it knows only once its sockets are bound.
#[derive(Debug, Clone)]
pub(crate) struct WorkerAddresses {
    pub(crate) address: SocketAddr,
    pub(crate) events_port: Option<u16>,
    pub(crate) replay_port: Option<u16>,
}

/// A worker as seen by its connections.
pub(crate) struct ServerState {
    pub(crate) worker: Arc<Worker>,
    pub(crate) addresses: WorkerAddresses,
    intake: Intake,
}

impl ServerState {
    pub(crate) fn new(worker: Arc<Worker>, addresses: WorkerAddresses) -> Self {
        let intake = Intake::new(worker.config.body_bytes_max, BODIES_BYTES_MAX, BODY_WITHIN);
        Self { worker, addresses, intake }
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

/// Accepts connections until dropped, which cuts all of them.
pub(crate) async fn serve(listener: TcpListener, served: Arc<ServerState>) {
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
    // Without it the client sees an ordinary end of the connection, which is a refusal too.
    let _best_effort = stream.set_zero_linger();
}

async fn connection(stream: TcpStream, served: Arc<ServerState>) {
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
