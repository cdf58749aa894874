//! A client of etcd's API, version 3.
//!
//! Requests go to one endpoint at a time. If it is unreachable, or reports that its cluster has no leader,
//! the next request goes to the next endpoint. Connections are made on demand; HTTP/2 pings detect a
//! connection whose machine vanished without closing it. A user's token is fetched with the first request,
//! and again after it was refused.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use hyper_util::rt::TokioIo;
use router_tls::{ClientStream, ClientTls};
use tokio::net::TcpStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status, Streaming};

use crate::rpc::etcdserverpb::auth_client::AuthClient;
use crate::rpc::etcdserverpb::kv_client::KvClient;
use crate::rpc::etcdserverpb::lease_client::LeaseClient;
use crate::rpc::etcdserverpb::watch_client::WatchClient;
use crate::rpc::etcdserverpb::{
    AuthenticateRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, PutRequest,
    RangeRequest, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse, watch_request,
};
use crate::rpc::mvccpb::KeyValue;
use crate::worker::BYTES_MAX;

/// Time limit for a connection, and for the answer to one request.
const CONNECT_MAX: Duration = Duration::from_secs(5);
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Interval of pings on a connection; etcd refuses more than one in 5 s (`--grpc-keepalive-min-time`).
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_ANSWER_MAX: Duration = Duration::from_secs(5);
/// Most keys in one answer.
const PAGE: i64 = 1000;
/// Largest answer: etcd's own requests are at most 1.5 MiB, and a page has many values.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Endpoints and credentials of an etcd cluster.
#[derive(Clone, Default)]
pub struct ClientConfig {
    /// `http://HOST:PORT` or `https://HOST:PORT` of the cluster's members.
    pub endpoints: Vec<String>,
    /// Trusted authorities and the client certificate, which `https` endpoints need. Its ALPN must offer
    /// HTTP/2.
    pub tls: Option<Arc<ClientTls>>,
    /// A user and its password, if etcd requires authentication.
    pub user: Option<(String, String)>,
}

impl std::fmt::Debug for ClientConfig {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let user = self.user.as_ref().map(|(name, _)| name);
        out.debug_struct("ClientConfig")
            .field("endpoints", &self.endpoints)
            .field("user", &user)
            .finish_non_exhaustive()
    }
}

/// Error of a request to etcd.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// An endpoint is not of the form `http://HOST:PORT` or `https://HOST:PORT`.
    #[error("{0:?} is not of the form http://HOST:PORT or https://HOST:PORT")]
    Endpoint(String),
    /// No endpoint is given.
    #[error("no endpoint of etcd is named")]
    NoEndpoint,
    /// An https endpoint is given without TLS files.
    #[error("{0}: https needs a certificate authority")]
    NoTls(String),
    /// The user, its password or its token contains characters that cannot be sent.
    #[error("etcd's token cannot be sent")]
    Token,
    /// etcd answered with an error, or did not answer.
    #[error("etcd at {endpoint}: {}", message(status))]
    Refused {
        /// The endpoint of the request.
        endpoint: String,
        /// The answer.
        status: Box<Status>,
    },
    /// The lease has expired or was revoked.
    #[error("the lease is gone")]
    LeaseGone,
    /// Another process has registered this key.
    #[error("another process has registered {0}: names must differ")]
    Taken(String),
    /// The watched revision has been compacted.
    #[error("the watched revision is compacted")]
    Compacted,
}

fn message(status: &Status) -> String {
    let mut text = match status.code() {
        Code::DeadlineExceeded => format!("no answer within {ANSWER_MAX:?}"),
        _ => status.message().to_owned(),
    };
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

struct Member {
    endpoint: String,
    channel: Channel,
}

struct Shared {
    members: Vec<Member>,
    current: AtomicUsize,
    user: Option<(String, String)>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
}

/// A client of one cluster. Clones share connections.
#[derive(Clone)]
pub struct Client(Arc<Shared>);

/// All keys of a range at one revision.
pub(crate) struct Listed {
    pub(crate) revision: i64,
    pub(crate) keys: Vec<KeyValue>,
}

impl Client {
    /// Creates a client. No connection is made before the first request. Must be called within a Tokio
    /// runtime.
    ///
    /// # Errors
    ///
    /// Malformed endpoints, no endpoint, or https without TLS files.
    pub fn new(config: ClientConfig) -> Result<Self, EtcdError> {
        let member = |text: &String| -> Result<Member, EtcdError> {
            let error = || EtcdError::Endpoint(text.clone());
            let uri: Uri = text.trim_end_matches('/').parse().map_err(|_| error())?;
            let is_whole = uri.host().is_some_and(|host| !host.is_empty())
                && uri.port_u16().is_some_and(|port| port > 0);
            if !matches!(uri.scheme_str(), Some("http" | "https"))
                || !is_whole
                || !matches!(uri.path(), "" | "/")
            {
                return Err(error());
            }
            let tls = match uri.scheme_str() {
                Some("https") => Some(config.tls.clone().ok_or_else(|| EtcdError::NoTls(text.clone()))?),
                _ => None,
            };
            let endpoint = Endpoint::from(uri)
                .connect_timeout(CONNECT_MAX)
                .http2_keep_alive_interval(PING_EVERY)
                .keep_alive_timeout(PING_ANSWER_MAX)
                .keep_alive_while_idle(true);
            Ok(Member {
                endpoint: text.clone(),
                channel: endpoint.connect_with_connector_lazy(Connector(tls)),
            })
        };
        let members: Vec<Member> = config.endpoints.iter().map(member).collect::<Result<_, _>>()?;
        if members.is_empty() {
            return Err(EtcdError::NoEndpoint);
        }
        Ok(Self(Arc::new(Shared {
            members,
            current: AtomicUsize::new(0),
            user: config.user,
            token: Mutex::default(),
        })))
    }

    /// Returns the endpoints, for messages.
    pub(crate) fn endpoints(&self) -> String {
        self.0.members.iter().map(|member| member.endpoint.as_str()).collect::<Vec<_>>().join(",")
    }

    fn member(&self) -> (usize, &Member) {
        let at = self.0.current.load(Ordering::Relaxed) % self.0.members.len();
        (at, &self.0.members[at])
    }

    /// Converts the error of a request to this member. If another member may not have the error, the next
    /// request goes to the next one.
    fn refused(&self, at: usize, status: Status) -> EtcdError {
        match status.code() {
            Code::Unauthenticated => *self.token() = None,
            // The token is older than a change of users or roles: etcd's ErrGRPCAuthOldRevision, in two
            // wordings.
            _ if status.message().contains("revision of auth store is old")
                || status.message().contains("revision in header is old") =>
            {
                *self.token() = None;
            }
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal => {
                // Of several requests that fail at once, only one advances the index.
                let next = (at + 1) % self.0.members.len();
                let _moved = self.0.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
            }
            _ => {}
        }
        EtcdError::Refused { endpoint: self.0.members[at].endpoint.clone(), status: Box::new(status) }
    }

    fn token(&self) -> std::sync::MutexGuard<'_, Option<MetadataValue<Ascii>>> {
        // The token is always replaced as a whole, so a poisoned lock leaves no broken state.
        self.0.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a request with the user's token.
    async fn request<T>(&self, message: T) -> Result<Request<T>, EtcdError> {
        let mut request = Request::new(message);
        // A member that is cut off from its cluster then refuses the request instead of not answering.
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        let Some((name, password)) = &self.0.user else { return Ok(request) };
        let known = self.token().clone();
        let token = match known {
            Some(token) => token,
            None => {
                let (at, member) = self.member();
                let asked = AuthenticateRequest { name: name.clone(), password: password.clone() };
                let mut auth = AuthClient::new(member.channel.clone());
                let answer =
                    within(auth.authenticate(asked)).await.map_err(|status| self.refused(at, status))?;
                let token = answer.token.parse::<MetadataValue<Ascii>>().map_err(|_| EtcdError::Token)?;
                *self.token() = Some(token.clone());
                token
            }
        };
        request.metadata_mut().insert("token", token);
        Ok(request)
    }

    /// Returns all keys that begin with `prefix`, at one revision.
    pub(crate) async fn list(&self, prefix: &str) -> Result<Listed, EtcdError> {
        let range_end = range_end(prefix.as_bytes());
        let mut listed = Listed { revision: 0, keys: Vec::new() };
        let mut key = prefix.as_bytes().to_vec();
        let mut limit = PAGE;
        loop {
            let range = RangeRequest {
                key: key.clone(),
                range_end: range_end.clone(),
                limit,
                revision: listed.revision,
            };
            let request = self.request(range).await?;
            let (at, member) = self.member();
            let mut kv = KvClient::new(member.channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
            let answer = match within(kv.range(request)).await {
                // tonic's error for a page beyond ANSWER_BYTES_MAX; etcd has the same code for a compacted
                // revision.
                Err(status)
                    if status.code() == Code::OutOfRange
                        && status.message().contains("too large")
                        && limit > 1 =>
                {
                    limit /= 10;
                    continue;
                }
                answer => answer.map_err(|status| self.refused(at, status))?,
            };
            if listed.revision == 0 {
                listed.revision = answer.header.map_or(0, |header| header.revision);
            }
            let last = answer.kvs.last().map(|last| last.key.clone());
            // Larger values are no workers and are truncated: one byte above the limit marks them.
            listed.keys.extend(answer.kvs.into_iter().map(|mut found| {
                found.value.truncate(BYTES_MAX + 1);
                found.value.shrink_to_fit();
                found
            }));
            match last {
                Some(mut last) if answer.more => {
                    last.push(0);
                    key = last;
                }
                _ => return Ok(listed),
            }
        }
    }

    /// Returns a key, if it exists.
    pub(crate) async fn get(&self, key: &str) -> Result<Option<KeyValue>, EtcdError> {
        let range = RangeRequest { key: key.into(), ..RangeRequest::default() };
        let request = self.request(range).await?;
        let (at, member) = self.member();
        let answer = within(KvClient::new(member.channel.clone()).range(request)).await;
        Ok(answer.map_err(|status| self.refused(at, status))?.kvs.into_iter().next())
    }

    /// Watches all keys that begin with `prefix`, from `start_revision` on.
    pub(crate) async fn watch(&self, prefix: &str, start_revision: i64) -> Result<Watch, EtcdError> {
        let create = WatchCreateRequest {
            key: prefix.as_bytes().to_vec(),
            range_end: range_end(prefix.as_bytes()),
            start_revision,
        };
        let create = WatchRequest { request_union: Some(watch_request::RequestUnion::CreateRequest(create)) };
        let request = self.request(one_and_open(create)).await?;
        let (at, member) = self.member();
        let mut client = WatchClient::new(member.channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let answers = within(client.watch(request)).await.map_err(|status| self.refused(at, status))?;
        Ok(Watch { client: self.clone(), at, answers })
    }

    /// Writes a key that is deleted with its lease.
    pub(crate) async fn put(&self, key: &str, value: &str, lease: i64) -> Result<(), EtcdError> {
        let put = PutRequest { key: key.into(), value: value.into(), lease };
        let request = self.request(put).await?;
        let (at, member) = self.member();
        match within(KvClient::new(member.channel.clone()).put(request)).await {
            Ok(_) => Ok(()),
            // etcd's ErrGRPCLeaseNotFound.
            Err(status) if status.code() == Code::NotFound => Err(EtcdError::LeaseGone),
            Err(status) => Err(self.refused(at, status)),
        }
    }

    pub(crate) async fn transaction(&self, transaction: TxnRequest) -> Result<TxnResponse, EtcdError> {
        let request = self.request(transaction).await?;
        let (at, member) = self.member();
        let answer = within(KvClient::new(member.channel.clone()).txn(request)).await;
        answer.map_err(|status| self.refused(at, status))
    }

    /// Creates a lease of this many seconds.
    pub(crate) async fn grant(&self, seconds: i64) -> Result<i64, EtcdError> {
        let request = self.request(LeaseGrantRequest { ttl: seconds, id: 0 }).await?;
        let (at, member) = self.member();
        let answer = within(LeaseClient::new(member.channel.clone()).lease_grant(request)).await;
        Ok(answer.map_err(|status| self.refused(at, status))?.id)
    }

    /// Renews a lease.
    pub(crate) async fn keep_alive(&self, lease: i64) -> Result<(), EtcdError> {
        let request = self.request(one_and_open(LeaseKeepAliveRequest { id: lease })).await?;
        let (at, member) = self.member();
        let mut client = LeaseClient::new(member.channel.clone());
        let answered = async {
            let mut answers = client.lease_keep_alive(request).await?;
            Ok(tonic::Response::new(answers.get_mut().message().await?))
        };
        let answer = within(answered).await.map_err(|status| self.refused(at, status))?;
        match answer {
            Some(answer) if answer.ttl > 0 => Ok(()),
            Some(_) => Err(EtcdError::LeaseGone),
            None => Err(self.refused(at, Status::unavailable("the answer ended"))),
        }
    }

    /// Revokes a lease, which deletes its keys.
    pub(crate) async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        let request = self.request(LeaseRevokeRequest { id: lease }).await?;
        let (at, member) = self.member();
        match within(LeaseClient::new(member.channel.clone()).lease_revoke(request)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(self.refused(at, status)),
        }
    }
}

/// Waits for an answer within the time limit.
async fn within<T>(asked: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(ANSWER_MAX, asked).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("")),
    }
}

/// Returns a stream of one request that does not end: etcd ends its answers when the requests end.
fn one_and_open<T: Send + 'static>(request: T) -> impl Stream<Item = T> + Send + 'static {
    stream::iter([request]).chain(stream::pending())
}

/// Returns the first key after all those that begin with `prefix`; `\0`, which means no bound, if there is
/// none.
fn range_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.last_mut() {
        if *last < 0xff {
            *last += 1;
            return end;
        }
        end.pop();
    }
    vec![0]
}

/// Changes of keys, in the order of their revisions.
pub(crate) struct Watch {
    client: Client,
    at: usize,
    answers: Streaming<WatchResponse>,
}

impl Watch {
    /// Waits for the next changes.
    pub(crate) async fn next(&mut self) -> Result<WatchResponse, EtcdError> {
        let answer = self.answers.message().await.map_err(|status| self.client.refused(self.at, status))?;
        match answer {
            Some(answer) if answer.compact_revision > 0 => Err(EtcdError::Compacted),
            Some(answer) if answer.canceled => {
                let status = match answer.cancel_reason.contains("auth token") {
                    true => Status::unauthenticated(answer.cancel_reason),
                    false => Status::failed_precondition(answer.cancel_reason),
                };
                Err(self.client.refused(self.at, status))
            }
            Some(answer) => Ok(answer),
            None => Err(self.client.refused(self.at, Status::unavailable("the watch ended"))),
        }
    }
}

/// Makes the connections of a channel.
struct Connector(Option<Arc<ClientTls>>);

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<ClientStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let port = uri.port_u16().unwrap_or_default();
            let tcp = TcpStream::connect((host.trim_matches(['[', ']']), port)).await?;
            tcp.set_nodelay(true)?;
            let stream = match tls {
                Some(tls) => tls.connect(host, tcp).await.map_err(io::Error::other)?,
                None => ClientStream::Plain(tcp),
            };
            Ok(TokioIo::new(stream))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn endpoints_in_another_form_are_refused() {
        for text in ["127.0.0.1:2379", "http://a", "http://a:0", "unix:///tmp/x", "http://a:1/path", ""] {
            let made =
                Client::new(ClientConfig { endpoints: vec![text.to_owned()], ..ClientConfig::default() });
            assert!(matches!(made.err(), Some(EtcdError::Endpoint(said)) if said == text), "{text}");
        }
        assert!(matches!(Client::new(ClientConfig::default()).err(), Some(EtcdError::NoEndpoint)));
        let https =
            ClientConfig { endpoints: vec!["https://[::1]:2379".to_owned()], ..ClientConfig::default() };
        assert!(matches!(Client::new(https).err(), Some(EtcdError::NoTls(_))));
    }

    #[tokio::test]
    async fn who_cannot_be_reached_is_named_and_another_one_is_asked_next() {
        // Ports without a listener: they were free a moment ago.
        let free =
            || std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
        let endpoints = vec![format!("http://{}", free()), format!("http://{}", free())];
        let config = ClientConfig { endpoints: endpoints.clone(), ..ClientConfig::default() };
        let client = Client::new(config).expect("endpoints");
        for endpoint in endpoints.iter().cycle().take(3) {
            let error = client.list("a").await.err().expect("nobody is there").to_string();
            assert!(error.contains(endpoint) && error.contains("refused"), "{error}");
        }
    }

    #[test]
    fn ranges_end_behind_the_prefix() {
        assert_eq!(range_end(b"/kvasir/"), b"/kvasir0");
        assert_eq!(range_end(b"a\xff"), b"b");
        assert_eq!(range_end(b"\xff"), b"\0");
        assert_eq!(range_end(b""), b"\0");
    }
}
