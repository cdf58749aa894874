//! The standard gRPC health service, for proxies and probes.
//!
//! `liveness` is always serving; the server itself (the empty name), `readiness` and the picker's own names are serving while
//! the gateway can serve requests. Source: the Endpoint Picker Protocol's reference implementation, `cmd/epp`, whose service is
//! `inference-extension` in older releases.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{BoxStream, StreamExt, unfold};
use tonic::{Request, Response, Status};

use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::health::health_server::Health;
use crate::proto::health::{HealthCheckRequest, HealthCheckResponse};

/// Interval at which the state of a watched service is checked.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
const LIVENESS: &str = "liveness";
const SERVICES: [&str; 5] =
    ["", LIVENESS, "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension"];

/// Whether the gateway can serve requests.
pub(crate) type IsReady = Arc<dyn Fn() -> bool + Send + Sync>;

pub(crate) struct HealthService(pub(crate) IsReady);

fn status_of(is_ready: &IsReady, service: &str) -> ServingStatus {
    match service {
        _ if !SERVICES.contains(&service) => ServingStatus::ServiceUnknown,
        LIVENESS => ServingStatus::Serving,
        _ if is_ready() => ServingStatus::Serving,
        _ => ServingStatus::NotServing,
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for HealthService {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        match status_of(&self.0, &service) {
            ServingStatus::ServiceUnknown => {
                Err(Status::not_found(format!("there is no service `{service}`")))
            }
            status => Ok(Response::new(response(status))),
        }
    }

    /// Sends the status now, and again at each change.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let watched = (Arc::clone(&self.0), request.into_inner().service, None);
        let stream = unfold(watched, |(is_ready, service, last)| async move {
            loop {
                let status = status_of(&is_ready, &service);
                if last != Some(status) {
                    return Some((Ok(response(status)), (is_ready, service, Some(status))));
                }
                tokio::time::sleep(WATCH_INTERVAL).await;
            }
        });
        Ok(Response::new(stream.boxed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_gateway_that_is_not_ready_lives() {
        let health = HealthService(Arc::new(|| false));
        let asked = async |service: &str| {
            let answer = health.check(Request::new(HealthCheckRequest { service: service.to_owned() })).await;
            answer.map(|answer| answer.into_inner().status()).map_err(|status| status.code())
        };
        assert_eq!(asked(LIVENESS).await, Ok(ServingStatus::Serving));
        assert_eq!(asked("").await, Ok(ServingStatus::NotServing));
        assert_eq!(asked("inference-extension").await, Ok(ServingStatus::NotServing));
        assert_eq!(asked("other").await, Err(tonic::Code::NotFound));
    }
}
