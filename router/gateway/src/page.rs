//! The built-in page at `/kvasir/`: workers, pools, hit rate, histograms and decisions, as the status tells them.
//!
//! The page itself is public; it fetches its contents with an administrator's key, if the gateway has keys.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Redirect, Response};

/// Scripts, styles and data come from this gateway alone.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// The page's own addresses are relative, so it needs the slash.
pub(crate) async fn to_page() -> Redirect {
    Redirect::permanent("kvasir/")
}

pub(crate) async fn page() -> Response {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

pub(crate) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/page.js"))
}

pub(crate) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page/page.css"))
}
