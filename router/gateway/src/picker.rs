//! The endpoint picker: requests that arrive through a proxy's `ext_proc`, and that the proxy sends to
//! their workers.
//!
//! Such requests use the routes of clients, so they are identified by key or token, limited, routed and
//! accounted for as usual. Routes of peers and administrators cannot be reached through the picker.

use std::sync::Arc;

use axum::serve::Listener;
use router_picker::PickerConfig;

use crate::service::{Gateway, client_router};

/// Serves proxies until `shutdown` is done; requests in progress end normally.
pub async fn serve_picker<L: Listener>(
    listener: L,
    gateway: Arc<Gateway>,
    requests_max: usize,
    shutdown: impl Future<Output = ()> + Send,
) where
    L::Addr: Clone + Send + Sync + 'static,
{
    let config = PickerConfig { requests_max, stalled_read_timeout: gateway.config.write_timeout };
    let routes = client_router(Arc::clone(&gateway));
    router_picker::serve(listener, routes, move || gateway.takes_requests(), config, shutdown).await;
}

/// Serves the standard gRPC health service alone, for probes.
pub async fn serve_picker_health<L: Listener>(
    listener: L,
    gateway: Arc<Gateway>,
    shutdown: impl Future<Output = ()> + Send,
) where
    L::Addr: Clone + Send + Sync + 'static,
{
    router_picker::serve_health(listener, move || gateway.takes_requests(), shutdown).await;
}
