//! A small S3 service with real HTTP/1.1: signatures are checked, objects live in memory, faults come from a plan.
//!
//! PUT, GET, HEAD and DELETE of objects with ranges, `If-Match` and `If-None-Match: *`; ListObjectsV2 with
//! delimiter, `start-after` and pages; uploads in parts. Errors have S3's codes. Path style only.

mod connection;
mod objects;
mod serving;
mod uploads;

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use kvstore_object::{Credentials, Location, ObjectConfig, S3Config, Secret};
use tokio::net::TcpListener;

use super::faults::Plan;
use super::sigv4::{Account, sha256};
use super::{FINGERPRINT, quick};
use connection::Connection;
use serving::serve;

pub(crate) const BUCKET: &str = "kv-bucket";

#[derive(Debug, Clone)]
struct Object {
    bytes: Bytes,
    e_tag: String,
    changed_unix_s: i64,
}

#[derive(Debug, Default)]
struct Upload {
    key: String,
    parts: BTreeMap<u32, Bytes>,
}

/// The state of the service.
#[derive(Debug)]
pub(crate) struct State {
    account: Account,
    objects: Mutex<BTreeMap<String, Object>>,
    uploads: Mutex<HashMap<String, Upload>>,
    plan: Mutex<Plan>,
    /// Number of requests by "METHOD operation".
    requests: Mutex<BTreeMap<String, u64>>,
    pub(crate) faults: AtomicU64,
    pub(crate) body_bytes: AtomicU64,
    pub(crate) bad_signatures: AtomicU64,
    /// Whether `If-None-Match` is answered with 501.
    pub(crate) knows_no_conditions: AtomicBool,
    pub(crate) page_objects: AtomicUsize,
    /// Text repeated in every error, as a hostile or careless service would do.
    pub(crate) echo: Mutex<String>,
}

/// The running service.
pub(crate) struct Double {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<State>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Double {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn account() -> Account {
    Account {
        key_id: "AKIDEXAMPLE".into(),
        secret: "canary-secret-6d1f".into(),
        token: Some("canary-token-77aa".into()),
        region: "us-east-1".into(),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test panics with a lock")
}

impl Double {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let state = Arc::new(State {
            account: account(),
            objects: Mutex::default(),
            uploads: Mutex::default(),
            plan: Mutex::new(Plan::none()),
            requests: Mutex::default(),
            faults: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
            bad_signatures: AtomicU64::new(0),
            knows_no_conditions: AtomicBool::new(false),
            page_objects: AtomicUsize::new(1000),
            echo: Mutex::default(),
        });
        let task = tokio::spawn(accept(listener, state.clone()));
        Self { address, state, task }
    }

    /// Returns settings for this service.
    pub(crate) fn config(&self) -> ObjectConfig {
        let account = &self.state.account;
        let credentials = Credentials::Keys {
            access_key_id: Secret::new(&account.key_id),
            secret_access_key: Secret::new(&account.secret),
            session_token: Secret::new(account.token.clone().unwrap_or_default()),
        };
        let mut s3 = S3Config::new(BUCKET, credentials);
        s3.endpoint = Some(format!("http://{}", self.address));
        s3.allow_http = true;
        s3.part_bytes = 5 << 20;
        quick(ObjectConfig::new(Location::S3(s3), FINGERPRINT))
    }

    pub(crate) fn plan(&self, plan: Plan) {
        *locked(&self.state.plan) = plan;
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        locked(&self.state.objects).keys().cloned().collect()
    }

    pub(crate) fn uploads(&self) -> usize {
        locked(&self.state.uploads).len()
    }

    pub(crate) fn insert(&self, key: &str, bytes: Bytes) {
        let object = Object { e_tag: e_tag(&bytes), bytes, changed_unix_s: now_unix_s() };
        locked(&self.state.objects).insert(key.to_owned(), object);
    }

    /// Returns the number of requests whose name starts with `name`, for example `GET`.
    pub(crate) fn requests(&self, name: &str) -> u64 {
        let requests = locked(&self.state.requests);
        requests.iter().filter(|(key, _)| key.starts_with(name)).map(|(_, count)| count).sum()
    }
}

pub(crate) fn now_unix_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

fn e_tag(bytes: &[u8]) -> String {
    format!("\"{}\"", &sha256(bytes)[..32])
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (state, reset) = (state.clone(), Arc::new(AtomicBool::new(false)));
        let connection = Connection { stream, reset: reset.clone() };
        tokio::spawn(async move {
            let service = hyper::service::service_fn(|request| {
                let (state, reset) = (state.clone(), reset.clone());
                async move { Ok::<_, Infallible>(serve(&state, &reset, request).await) }
            });
            // Fails when a fault cuts the body off.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(connection), service)
                .await;
        });
    }
}
