//! The backend: a bucket or a directory. Also the layer between the S3 client and the HTTP library, which
//! records the status of each answer for the request that runs, and makes the end of an upload in parts
//! conditional: the client offers the condition only for uploads in one piece.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use http::header::{HeaderValue, IF_NONE_MATCH};
use http::{HeaderName, Method};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::local::LocalFileSystem;
use object_store::{Certificate, ClientOptions, ObjectStore, RetryConfig};

use crate::config::{Location, ObjectConfig, S3Config};
use crate::credentials::read_small;
use crate::error::ConfigError;

/// The store and its properties.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// Client for uploads in parts; `None` for a directory.
    pub(crate) s3: Option<AmazonS3>,
    pub(crate) part_bytes: u64,
    /// Name of the bucket or directory, for errors.
    pub(crate) name: String,
    /// Whether the server supports `If-None-Match`.
    pub(crate) conditional: Arc<AtomicBool>,
}

tokio::task_local! {
    /// Status seen by the HTTP layer for the request of this task.
    pub(crate) static SEEN: LastStatus;
}

/// Status of the last answer; 0 if there was none. `TIMED_OUT` stands for a timeout of the HTTP library.
#[derive(Debug, Default)]
pub(crate) struct LastStatus(AtomicU16);

const TIMED_OUT: u16 = 1;

impl LastStatus {
    pub(crate) fn status(&self) -> Option<u16> {
        Some(self.0.load(Ordering::Relaxed)).filter(|status| *status >= 100)
    }

    pub(crate) fn timed_out(&self) -> bool {
        self.0.load(Ordering::Relaxed) == TIMED_OUT
    }
}

impl Backend {
    pub(crate) fn open(config: &ObjectConfig) -> Result<Self, ConfigError> {
        match &config.location {
            Location::Directory(path) => {
                let name = path.display().to_string();
                let store =
                    LocalFileSystem::new_with_prefix(path).map_err(|_| ConfigError::Backend(name.clone()))?;
                let conditional = Arc::new(AtomicBool::new(true));
                Ok(Self { store: Arc::new(store), s3: None, part_bytes: u64::MAX, name, conditional })
            }
            Location::S3(s3) => Self::open_s3(config, s3),
        }
    }

    fn open_s3(config: &ObjectConfig, s3: &S3Config) -> Result<Self, ConfigError> {
        let conditional = Arc::new(AtomicBool::new(s3.conditional_put));
        let mut options = ClientOptions::new()
            .with_allow_http(s3.allow_http)
            .with_connect_timeout(config.connect_timeout)
            .with_timeout(config.request_timeout)
            .with_pool_max_idle_per_host(config.requests_max);
        if let Some(path) = &s3.ca_bundle {
            let pem = read_small("CA bundle", path)?;
            let certificates = Certificate::from_pem_bundle(&pem)
                .ok()
                .filter(|certificates| !certificates.is_empty())
                .ok_or_else(|| ConfigError::Certificate(path.clone()))?;
            for certificate in certificates {
                options = options.with_root_certificate(certificate);
            }
        }
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&s3.bucket)
            .with_region(&s3.region)
            .with_virtual_hosted_style_request(!s3.path_style)
            .with_client_options(options)
            .with_retry(retry)
            .with_disable_bulk_delete(true)
            .with_http_connector(Connector { conditional: conditional.clone() });
        if let Some(endpoint) = &s3.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        builder = match s3.credentials.provider()? {
            Some(provider) => builder.with_credentials(provider),
            None => builder.with_skip_signature(true),
        };
        let store = builder.build().map_err(|_| ConfigError::Backend(s3.bucket.clone()))?;
        Ok(Self {
            store: Arc::new(store.clone()),
            s3: Some(store),
            part_bytes: s3.part_bytes,
            name: s3.bucket.clone(),
            conditional,
        })
    }
}

#[derive(Debug)]
struct Connector {
    conditional: Arc<AtomicBool>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Observer { client, conditional: self.conditional.clone() }))
    }
}

#[derive(Debug)]
struct Observer {
    client: HttpClient,
    conditional: Arc<AtomicBool>,
}

impl Observer {
    async fn observe(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let query = request.uri().query().unwrap_or_default();
        let completes = request.method() == Method::POST
            && query.split('&').any(|parameter| parameter.starts_with("uploadId="));
        if completes && self.conditional.load(Ordering::Relaxed) {
            // The header is not signed: the signature covers at least the host and x-amz-* headers.
            request.headers_mut().insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
        }
        for name in ["authorization", "x-amz-security-token"] {
            if let Some(value) = request.headers_mut().get_mut(HeaderName::from_static(name)) {
                value.set_sensitive(true);
            }
        }
        let result = self.client.execute(request).await;
        let seen = match &result {
            Ok(answer) => answer.status().as_u16(),
            Err(error) if error.kind() == HttpErrorKind::Timeout => TIMED_OUT,
            Err(_) => 0,
        };
        // Fails outside of a request of this tier, where no status is recorded.
        let _ = SEEN.try_with(|slot| slot.0.store(seen, Ordering::Relaxed));
        result
    }
}

impl HttpService for Observer {
    fn call<'life, 'future>(
        &'life self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(self.observe(request))
    }
}
