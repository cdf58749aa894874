//! Listening, taking connections, and stopping.
//!
//! [`Server::bind`] opens the listening sockets, so that a caller learns of a port in use before anything else
//! starts; [`Server::run`] serves until it is told to stop, lets connections finish their commands, and ends
//! those that take too long. A client beyond `clients_max` gets an error, as in Redis, and is closed.

use std::fs;
use std::hash::RandomState;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::commands::Names;
use crate::config::{Listen, RespConfig};
use crate::connection::{ConnectionEnd, serve};
use crate::error::RespError;
use crate::metrics::RespCounters;
use crate::values::Values;

/// Bytes of one permit of the budget for long arguments.
pub(crate) const CHARGE_BYTES: usize = 1024;
/// Pause after a failed `accept`, which mostly means that file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Minimum time between two warnings of clients that speak HTTP: a page in a browser can connect any number of
/// times.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// State shared by all connections.
#[derive(Debug)]
pub(crate) struct Shared<V> {
    pub(crate) values: V,
    pub(crate) config: RespConfig,
    pub(crate) names: Names,
    pub(crate) counters: Arc<RespCounters>,
    pub(crate) started: Instant,
    /// Budget for long arguments, in units of [`CHARGE_BYTES`].
    pub(crate) received: Semaphore,
    /// Permit of the one command that may exceed that budget.
    pub(crate) over_budget: Semaphore,
    pub(crate) hasher: RandomState,
    next_id: AtomicU64,
    /// Time of the last warning about a client that spoke HTTP.
    warned: Mutex<Option<Instant>>,
}

/// An address that the server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bound {
    /// A TCP address with its actual port.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl std::fmt::Display for Bound {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(formatter, "{address}"),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// Removes the socket's file on drop.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "the socket's file was not removed");
        }
    }
}

enum Stream {
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream),
}

/// A server whose listening sockets are open.
#[derive(Debug)]
pub struct Server<V> {
    shared: Arc<Shared<V>>,
    listeners: Vec<Listener>,
}

impl<V: Values> Server<V> {
    /// Opens the listening sockets. The file of a unix socket without a listener is replaced.
    ///
    /// # Errors
    /// The configuration is out of range, or an address cannot be listened on.
    pub async fn bind(values: V, config: RespConfig) -> Result<Self, RespError> {
        config.check()?;
        let mut listeners = Vec::new();
        for place in &config.listen {
            let (listener, name) = match place {
                Listen::Tcp(address) => {
                    (TcpListener::bind(address).await.map(Listener::Tcp), address.to_string())
                }
                Listen::Unix(path) => (bind_unix(path).await, path.display().to_string()),
            };
            listeners.push(listener.map_err(|source| RespError::Listen { place: name, source })?);
        }
        let received = Semaphore::new(config.received_bytes_max.div_ceil(CHARGE_BYTES));
        let names = Names::new(&config.renamed).map_err(RespError::Configuration)?;
        let shared = Shared {
            values,
            config,
            names,
            counters: Arc::default(),
            started: Instant::now(),
            received,
            over_budget: Semaphore::new(1),
            hasher: RandomState::new(),
            next_id: AtomicU64::new(1),
            warned: Mutex::new(None),
        };
        Ok(Self { shared: Arc::new(shared), listeners })
    }

    /// Addresses that the server listens on.
    #[must_use]
    pub fn bound(&self) -> Vec<Bound> {
        let place = |listener: &Listener| match listener {
            Listener::Tcp(listener) => listener.local_addr().ok().map(Bound::Tcp),
            Listener::Unix(_, file) => Some(Bound::Unix(file.0.clone())),
        };
        self.listeners.iter().filter_map(place).collect()
    }

    /// Counters of the server.
    #[must_use]
    pub fn counters(&self) -> Arc<RespCounters> {
        Arc::clone(&self.shared.counters)
    }

    /// Serves until `stop` is ready, then for at most [`RespConfig::drain`] longer.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (told, telling) = watch::channel(false);
        let mut accepting = JoinSet::new();
        for listener in self.listeners {
            accepting.spawn(accept(Arc::clone(&self.shared), listener, telling.clone()));
        }
        stop.await;
        // Fails only if every task that listens has ended.
        let _ = told.send(true);
        let ended = async { while accepting.join_next().await.is_some() {} };
        if tokio::time::timeout(self.shared.config.drain, ended).await.is_err() {
            tracing::info!("connections were ended in the middle of a command");
        }
        // Dropping the set ends the tasks that still run.
    }
}

/// Accepts connections of one listener until told to stop, and waits for them to end.
async fn accept<V: Values>(shared: Arc<Shared<V>>, listener: Listener, mut stop: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let telling = stop.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let counters = &shared.counters;
        if counters.connections_open.fetch_add(1, Relaxed) >= shared.config.clients_max as u64 {
            counters.connections_open.fetch_sub(1, Relaxed);
            RespCounters::add(&counters.connections_refused, 1);
            refuse(stream);
            continue;
        }
        RespCounters::add(&counters.connections, 1);
        let id = shared.next_id.fetch_add(1, Relaxed);
        connections.spawn(connection(Arc::clone(&shared), stream, telling.clone(), id));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Decrements the count of open connections on drop, however the task ends.
struct Open<'a>(&'a RespCounters);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.connections_open.fetch_sub(1, Relaxed);
    }
}

async fn connection<V: Values>(shared: Arc<Shared<V>>, stream: Stream, stop: watch::Receiver<bool>, id: u64) {
    let _open = Open(&shared.counters);
    let client = match &stream {
        Stream::Tcp(_, client) => Some(*client),
        Stream::Unix(_) => None,
    };
    let ended = match stream {
        Stream::Tcp(stream, _) => {
            // Answers are small and awaited: Nagle's algorithm would add 40 ms to each.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(id, %error, "TCP_NODELAY was refused");
            }
            let (reader, writer) = stream.into_split();
            serve(&shared, reader, writer, stop, id).await
        }
        Stream::Unix(stream) => {
            let (reader, writer) = stream.into_split();
            serve(&shared, reader, writer, stop, id).await
        }
    };
    match ended {
        Ok(ConnectionEnd::Closed) => {}
        Ok(ConnectionEnd::CrossProtocol) => warn_of_http(&shared, client),
        Err(error) => tracing::debug!(id, %error, "a connection broke"),
    }
}

/// Logs that a client spoke HTTP to this port, at most once in [`WARN_EVERY`].
fn warn_of_http<V>(shared: &Shared<V>, client: Option<SocketAddr>) {
    let now = Instant::now();
    let mut warned = shared.warned.lock().unwrap_or_else(PoisonError::into_inner);
    if warned.is_some_and(|warned| now.duration_since(warned) < WARN_EVERY) {
        return;
    }
    *warned = Some(now);
    tracing::warn!(
        ?client,
        "somebody sends POST or Host: to the Redis port, likely a web page that attacks this store through a browser; the \
         connection was closed"
    );
}

/// Tells a client that there are too many, if the socket takes the text at once.
fn refuse(stream: Stream) {
    const TEXT: &[u8] = b"-ERR max number of clients reached\r\n";
    tokio::spawn(async move {
        let told = async {
            match stream {
                Stream::Tcp(mut stream, _) => stream.write_all(TEXT).await,
                Stream::Unix(mut stream) => stream.write_all(TEXT).await,
            }
        };
        // The client may be gone; the write is limited to this time.
        let _ = tokio::time::timeout(ACCEPT_PAUSE, told).await;
    });
}

impl Listener {
    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                listener.accept().await.map(|(stream, client)| Stream::Tcp(stream, client))
            }
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

async fn bind_unix(path: &Path) -> io::Result<Listener> {
    let left_over = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if left_over
        && UnixStream::connect(path)
            .await
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    let file = SocketFile(path.to_owned());
    // Until here the umask decides; no connection is accepted before this function returns.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(Listener::Unix(listener, file))
}
