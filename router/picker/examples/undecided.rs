//! A picker that decides nothing: every request goes to one address, whatever it is. What Kvasir's picker costs is measured
//! beside it.
//!
//!     cargo run --release -p router-picker --example undecided -- 127.0.0.1:9102 http://127.0.0.1:9400

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::serve::ListenerExt;
use http_body_util::BodyExt;
use router_engines::proxy_dispatch::ProxyDispatch;
use router_engines::upstream::{Call, Upstream};
use router_picker::{PickerConfig, serve};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, listen, engine] = &arguments[..] else {
        return Err("usage: undecided IP:PORT http://ENGINE".into());
    };
    let upstream = Upstream::new(engine, None);
    let relay = async move |request: Request| -> Response {
        let Some(proxy_dispatch) = request.extensions().get::<ProxyDispatch>().cloned() else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let (head, body) = request.into_parts();
        let Ok(body) = body.collect().await else { return StatusCode::BAD_REQUEST.into_response() };
        let call = Call {
            method: head.method,
            path: head.uri,
            headers: head.headers,
            body: body.to_bytes(),
            once: true,
        };
        match proxy_dispatch.send(&upstream, call).await {
            Ok(reply) => reply.map(Body::new),
            Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
        }
    };
    let listener = tokio::net::TcpListener::bind(listen).await?;
    // A connection that is gone already will say so soon.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let config = PickerConfig { requests_max: 16_384, stalled_read_timeout: Duration::from_secs(60) };
    serve(listener, Router::new().fallback(relay), || true, config, std::future::pending()).await;
    Ok(())
}
