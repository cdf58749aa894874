//! The standard health service: `SERVING` means live and ready.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{BoxStream, StreamExt, unfold};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::backend::Backend;
use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_server::Health;
use crate::proto::health::{HealthCheckRequest, HealthCheckResponse};

/// Interval at which a watched backend is checked.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// Services whose status can be requested; the empty name is the server.
const SERVICES: [&str; 2] = ["", "inference.GRPCInferenceService"];

pub(crate) struct HealthService<B> {
    pub(crate) backend: Arc<B>,
    pub(crate) stopping: watch::Receiver<bool>,
}

fn status_of<B: Backend>(backend: &B) -> ServingStatus {
    if backend.is_live() && backend.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl<B: Backend> Health for HealthService<B> {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !SERVICES.contains(&service.as_str()) {
            return Err(Status::not_found(format!("there is no service `{service}`")));
        }
        Ok(Response::new(response(status_of(&*self.backend))))
    }

    /// Returns the current status, and the status again after each change.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let is_known = SERVICES.contains(&request.into_inner().service.as_str());
        let watched = (Arc::clone(&self.backend), self.stopping.clone(), None);
        let stream = unfold(watched, move |(backend, mut stopping, last)| async move {
            loop {
                let is_stopping = *stopping.borrow();
                let status = match is_known {
                    false => ServingStatus::ServiceUnknown,
                    true if is_stopping => ServingStatus::NotServing,
                    true => status_of(&*backend),
                };
                if last != Some(status) {
                    return Some((Ok(response(status)), (backend, stopping, Some(status))));
                }
                if is_stopping {
                    return None;
                }
                // Ends when the server stops; a server without a shutdown never sends this.
                let told = stopping.wait_for(|stopping| *stopping);
                let _looks_again = tokio::time::timeout(WATCH_INTERVAL, told).await;
            }
        });
        Ok(Response::new(stream.boxed()))
    }
}
