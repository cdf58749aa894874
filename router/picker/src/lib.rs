//! An endpoint picker: a gRPC service that Envoy, and gateways of the Gateway API's Inference Extension, ask where to send a
//! request.
//!
//! The picker is another way into a gateway, not another gateway. A request becomes an HTTP request for the gateway's own
//! routes, with a [`ProxyDispatch`](router_engines::proxy_dispatch::ProxyDispatch) among its extensions. Keys, limits, tokens, routing and errors
//! are those of any request. Where the gateway would send it to an engine, the proxy sends it; where the gateway would read the
//! engine's answer, the proxy shows it. A prefill leg is sent by the gateway itself, so prefill and decode workers need no
//! sidecar.
//!
//! ```text
//!  Envoy                         picker                              gateway
//!  request headers, body  ──▶  Request + ProxyHandover     ──▶  identify … choose a worker
//!  ◀── destination, body       ProxyRequest                ◀──  instead of sending
//!  response headers, body ──▶  ReplyBody                   ──▶  count, translate, detokenise
//!  ◀── headers, body           Response                    ◀──  answer
//! ```
//!
//! A request that is answered without an engine (an error, `/v1/models`) is answered at once (`ImmediateResponse`).
//!
//! Sources: Envoy's `external_processor.proto`; the Endpoint Picker Protocol, `kubernetes-sigs/gateway-api-inference-extension`
//! `docs/proposals/004-endpoint-picker-protocol/README.md`.
//!
//! Reading order: `message` (between Envoy's messages and HTTP's; no I/O), `exchange` (one request from its first message to
//! its last), `service` (the gRPC services and their listener), `authority` (bytes that the HTTP/2 library would refuse), `health`.
//!
//! Threads: an exchange is polled by the task of its gRPC stream, so a message wakes one task. Memory of a request: its body,
//! which the gateway charges and bounds, and a few messages of up to 4 MiB on their way, which it does not charge.

#![forbid(unsafe_code)]

mod authority;
mod exchange;
mod health;
mod message;
mod service;

pub use service::{PickerConfig, serve, serve_health};

#[allow(missing_docs, unreachable_pub, clippy::all)]
mod proto {
    pub mod ext_proc {
        tonic::include_proto!("envoy.service.ext_proc.v3");
    }
    pub mod health {
        tonic::include_proto!("grpc.health.v1");
    }
}
