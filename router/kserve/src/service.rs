//! The methods of the service.

use std::sync::Arc;

use http::HeaderMap;
use tokio::sync::watch;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::headers::{deadline, passed_on, within};
use crate::health::HealthService;
use crate::intake::Budget;
use crate::proto::health::health_server::HealthServer;
use crate::proto::inference::grpc_inference_service_server::{
    GrpcInferenceService, GrpcInferenceServiceServer,
};
use crate::proto::inference::repository_index_response::ModelIndex;
use crate::proto::inference::{
    ModelConfigRequest, ModelConfigResponse, ModelInferRequest, ModelInferResponse, ModelMetadataRequest,
    ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse, RepositoryIndexRequest,
    RepositoryIndexResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
    ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse,
};
use crate::request::{VERSION, check_version};
use crate::stream::InferStream;
use crate::{infer, models};

/// Supported extensions of the protocol, by Triton's names.
const EXTENSIONS: [&str; 3] = ["parameters", "model_configuration", "model_repository(index)"];

/// Returns a router for HTTP/2 with the services of this crate over a backend. When `stopping` becomes
/// true, watchers of health get the new status and their streams end.
pub(crate) fn service<B: Backend>(
    backend: Arc<B>,
    config: Config,
    budget: Arc<Budget>,
    stopping: watch::Receiver<bool>,
) -> axum::Router {
    let bytes_max = config.request_bytes_max;
    let health = HealthServer::new(HealthService { backend: Arc::clone(&backend), stopping });
    let inference = Inference { backend, config: Arc::new(config), budget };
    // The size of responses was bounded when the backend's answer was read.
    let inference = GrpcInferenceServiceServer::new(inference)
        .max_decoding_message_size(bytes_max)
        .max_encoding_message_size(usize::MAX);
    tonic::service::Routes::new(inference).add_service(health).prepare().into_axum_router()
}

struct Inference<B> {
    backend: Arc<B>,
    config: Arc<Config>,
    budget: Arc<Budget>,
}

impl<B: Backend> Inference<B> {
    async fn names(&self, metadata: &MetadataMap) -> Result<Vec<String>, Error> {
        let names = models::names(&*self.backend, &self.config, passed_on(metadata));
        within(deadline(metadata), names).await?
    }

    /// Checks that the model exists.
    async fn check_model(&self, metadata: &MetadataMap, name: &str, version: &str) -> Result<(), Error> {
        check_version(name, version)?;
        if self.names(metadata).await?.iter().any(|known| known == name) {
            return Ok(());
        }
        Err(Error::NotFound(format!("there is no model `{name}`")))
    }
}

#[tonic::async_trait]
impl<B: Backend> GrpcInferenceService for Inference<B> {
    type ModelStreamInferStream = InferStream<B>;

    async fn server_live(
        &self,
        _request: Request<ServerLiveRequest>,
    ) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: self.backend.is_live() }))
    }

    async fn server_ready(
        &self,
        _request: Request<ServerReadyRequest>,
    ) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: self.backend.is_ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<ModelReadyRequest>,
    ) -> Result<Response<ModelReadyResponse>, Status> {
        let (metadata, _, asked) = request.into_parts();
        let ready = match self.check_model(&metadata, &asked.name, &asked.version).await {
            Ok(()) => self.backend.is_ready(),
            Err(Error::NotFound(_)) => false,
            Err(error) => return Err(error.into()),
        };
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _request: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        Ok(Response::new(ServerMetadataResponse {
            name: self.config.server_name.clone(),
            version: self.config.server_version.clone(),
            extensions: EXTENSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let (metadata, _, asked) = request.into_parts();
        self.check_model(&metadata, &asked.name, &asked.version).await?;
        Ok(Response::new(models::metadata(asked.name)))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Result<Response<ModelConfigResponse>, Status> {
        let (metadata, _, asked) = request.into_parts();
        self.check_model(&metadata, &asked.name, &asked.version).await?;
        Ok(Response::new(ModelConfigResponse { config: Some(models::configuration(asked.name)) }))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        let (metadata, _, asked) = request.into_parts();
        let is_ready = self.backend.is_ready();
        let state = if is_ready { "READY" } else { "UNAVAILABLE" };
        let named = |name| ModelIndex {
            name,
            version: VERSION.to_owned(),
            state: state.to_owned(),
            reason: String::new(),
        };
        let names = if asked.ready && !is_ready { Vec::new() } else { self.names(&metadata).await? };
        Ok(Response::new(RepositoryIndexResponse { models: names.into_iter().map(named).collect() }))
    }

    async fn model_infer(
        &self,
        request: Request<ModelInferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let (metadata, _, asked) = request.into_parts();
        let _charged = self.budget.hold(&asked)?;
        let (headers, deadline) = (passed_on(&metadata), deadline(&metadata));
        let (response, seen): (_, HeaderMap) =
            infer::infer(&*self.backend, &self.config, headers, deadline, asked).await?;
        let mut response = Response::new(response);
        *response.metadata_mut() = MetadataMap::from_headers(seen);
        Ok(response)
    }

    async fn model_stream_infer(
        &self,
        request: Request<tonic::Streaming<ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let (metadata, _, incoming) = request.into_parts();
        let (backend, config) = (Arc::clone(&self.backend), Arc::clone(&self.config));
        let (headers, budget) = (passed_on(&metadata), Arc::clone(&self.budget));
        Ok(Response::new(InferStream::new(backend, config, budget, headers, deadline(&metadata), incoming)))
    }
}
