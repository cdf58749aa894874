//! The KServe v2 gRPC service: its completions go through the gateway, with the same keys, limits and
//! metrics.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use axum::serve::Listener;
use router_kserve::{Answer, Backend, Call, Config};
use router_openai::Surface;

use crate::caller::Caller;
use crate::request::serve;
use crate::service::{Gateway, model_list};

struct KServeBackend(Arc<Gateway>);

impl Backend for KServeBackend {
    fn is_live(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.0.models.can_serve()
    }

    fn admits(&self, headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
        // Calls do not carry their connection: a client is identified by its key alone.
        let identified = self.0.access.identify(&Caller::at_api(headers, None));
        identified.map(drop).map_err(|error| (error.status, error.message))
    }

    async fn models(&self, headers: HeaderMap) -> Answer {
        model_list(&self.0, &Caller::at_api(&headers, None))
    }

    async fn completions(&self, call: Call) -> Answer {
        serve(Arc::clone(&self.0), call.into_request(), Surface::KServe).await
    }
}

/// Serves gRPC until `shutdown` is done; calls in progress end normally.
pub async fn serve_grpc<L: Listener>(
    listener: L,
    gateway: Arc<Gateway>,
    shutdown: impl Future<Output = ()> + Send,
) where
    L::Addr: Clone + Send + Sync + 'static,
{
    // Messages are charged here until they are decoded; the decoded request is then charged to the same
    // memory as bodies.
    let defaults = Config::default();
    let received_bytes_max = defaults.received_bytes_max.min(gateway.config.request_memory_max / 4);
    let config = Config {
        received_bytes_max,
        request_bytes_max: gateway.config.body_bytes_max,
        stalled_read_timeout: gateway.config.write_timeout,
        ..defaults
    };
    router_kserve::serve(listener, Arc::new(KServeBackend(gateway)), config, shutdown).await;
}
