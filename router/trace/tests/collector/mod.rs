//! A collector in this process that stores received batches, or misbehaves.

#![allow(dead_code, reason = "each test uses a part")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// The collector's reaction to a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CollectorReply {
    /// Accepts the batch.
    Takes,
    /// Refuses the batch.
    Refuses,
    /// Never answers.
    Hangs,
}

#[derive(Debug, Default)]
pub(crate) struct Received {
    pub(crate) requests: Vec<(MetadataMap, ExportTraceServiceRequest)>,
    pub(crate) metrics: Vec<(MetadataMap, ExportMetricsServiceRequest)>,
}

impl Received {
    pub(crate) fn spans(&self) -> Vec<Span> {
        let of_request = |(_, request): &(MetadataMap, ExportTraceServiceRequest)| {
            request
                .resource_spans
                .iter()
                .flat_map(|of| &of.scope_spans)
                .flat_map(|of| of.spans.clone())
                .collect()
        };
        self.requests.iter().flat_map(|request| -> Vec<Span> { of_request(request) }).collect()
    }
}

#[derive(Clone)]
struct Service {
    reply: Arc<Mutex<CollectorReply>>,
    received: Arc<Mutex<Received>>,
}

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.behave().await?;
        let (metadata, _, message) = request.into_parts();
        self.received.lock().expect("lock").requests.push((metadata, message));
        Ok(Response::new(ExportTraceServiceResponse { partial_success: None }))
    }
}

#[tonic::async_trait]
impl MetricsService for Service {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.behave().await?;
        let (metadata, _, message) = request.into_parts();
        self.received.lock().expect("lock").metrics.push((metadata, message));
        Ok(Response::new(ExportMetricsServiceResponse { partial_success: None }))
    }
}

impl Service {
    async fn behave(&self) -> Result<(), Status> {
        let reply = *self.reply.lock().expect("lock");
        match reply {
            CollectorReply::Takes => Ok(()),
            CollectorReply::Refuses => Err(Status::unauthenticated("no")),
            CollectorReply::Hangs => std::future::pending().await,
        }
    }
}

pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    pub(crate) received: Arc<Mutex<Received>>,
    pub(crate) reply: Arc<Mutex<CollectorReply>>,
}

impl Collector {
    /// Serves on the test's runtime until that ends.
    pub(crate) async fn start(address: &str, reply: CollectorReply) -> Self {
        let listener = tokio::net::TcpListener::bind(address).await.expect("bind");
        let address = listener.local_addr().expect("address");
        let collector = Self { address, received: Arc::default(), reply: Arc::new(Mutex::new(reply)) };
        let service =
            Service { reply: Arc::clone(&collector.reply), received: Arc::clone(&collector.received) };
        let server = Server::builder()
            .add_service(MetricsServiceServer::new(service.clone()))
            .add_service(TraceServiceServer::new(service));
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        collector
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.received.lock().expect("lock").spans()
    }
}

/// Waits until `holds` returns true.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not come");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) fn find<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref()?.value.as_ref()
}

pub(crate) fn text(text: &str) -> Value {
    Value::StringValue(text.to_owned())
}

pub(crate) fn texts(texts: &[&str]) -> Value {
    let values = texts.iter().map(|one| AnyValue { value: Some(text(one)) }).collect();
    Value::ArrayValue(opentelemetry_proto::tonic::common::v1::ArrayValue { values })
}
