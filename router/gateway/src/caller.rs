//! The caller of a request, from its headers and its connection. Keys, tokens and certificates are checked
//! in `access`.

use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, HeaderName, header};
use router_engines::dialect::host_of;
use router_tls::{ClientIdentity, PeerAddr};

/// The sender of a request, as far as the request itself says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller<'a> {
    pub(crate) headers: &'a HeaderMap,
    /// Address of the peer; `None` where the listener does not provide it (gRPC).
    pub(crate) peer: Option<&'a PeerAddr>,
    /// Whether the request arrived on the administrators' listener.
    pub(crate) is_at_admin: bool,
}

/// Marks the requests of the listener for administrators.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtAdminListener;

/// Headers by which a proxy marks a forwarded request.
const FORWARDED: [&str; 4] = ["forwarded", "via", "x-forwarded-for", "x-real-ip"];

/// Returns the peer of a request's connection.
pub(crate) fn peer_of(request: &Request) -> Option<&PeerAddr> {
    request.extensions().get::<ConnectInfo<PeerAddr>>().map(|peer| &peer.0)
}

impl<'a> Caller<'a> {
    pub(crate) fn of(request: &'a Request) -> Self {
        let is_at_admin = request.extensions().get::<AtAdminListener>().is_some();
        Self { headers: request.headers(), peer: peer_of(request), is_at_admin }
    }

    /// Creates the caller of a request to the API's own port.
    pub(crate) fn at_api(headers: &'a HeaderMap, peer: Option<&'a PeerAddr>) -> Self {
        Self { headers, peer, is_at_admin: false }
    }

    /// Returns the client's certificate, if it showed one. The handshake has verified it.
    pub(crate) fn certificate(&self) -> Option<&'a ClientIdentity> {
        self.peer?.certificate.as_deref()
    }

    /// Whether the caller is a process of this machine on its own behalf: over loopback, not through a
    /// proxy, and not a browser page whose host name was pointed at this machine (DNS rebinding: such a
    /// page cannot name an address).
    pub(crate) fn is_local(&self) -> bool {
        let is_forwarded = FORWARDED.iter().any(|name| self.headers.contains_key(*name));
        self.is_loopback() && !is_forwarded && self.is_same_site()
    }

    /// Whether the request arrived on a Unix socket, which browsers cannot reach.
    pub(crate) fn is_at_socket(&self) -> bool {
        // TCP has no port 0: the listener of a Unix socket sets it.
        self.is_at_admin && self.peer.is_some_and(|peer| peer.addr.port() == 0)
    }

    /// Whether a browser reports that a page of another site sends the request.
    pub(crate) fn is_foreign_page(&self) -> bool {
        let site = self.headers.get("sec-fetch-site");
        site.is_some_and(|site| site != "same-origin" && site != "none")
    }

    fn is_loopback(&self) -> bool {
        self.peer.is_some_and(|peer| peer.addr.ip().to_canonical().is_loopback())
    }

    /// Whether the request arrived on the administrators' listener and is not from a page in a browser of
    /// this machine. Over the network a scraper may name that listener by any host name, and browsers
    /// cannot reach a Unix socket.
    pub(crate) fn is_administrators(&self) -> bool {
        self.is_at_admin && (self.is_at_socket() || !self.is_loopback() || self.is_same_site())
    }

    /// Whether the request is not from another site's page: its `Host` is an address, which a page whose
    /// host name was pointed at this machine cannot set (DNS rebinding), and a browser that reports the
    /// request's origin names no other site.
    fn is_same_site(&self) -> bool {
        let told = |name: HeaderName| self.headers.get(name).map(|value| value.to_str());
        let is_by_address = told(header::HOST).is_none_or(|host| host.is_ok_and(is_address));
        let is_from_here = told(header::ORIGIN).is_none_or(|origin| {
            origin.is_ok_and(|origin| origin.split_once("://").is_some_and(|(_, host)| is_address(host)))
        });
        let site = told(HeaderName::from_static("sec-fetch-site"));
        let is_own = site.is_none_or(|site| matches!(site, Ok("same-origin" | "none")));
        is_by_address && is_from_here && is_own
    }
}

/// Whether a `Host` is an address or `localhost`, with a port or without.
fn is_address(host: &str) -> bool {
    let host = host_of(host);
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_a_process_of_this_machine_that_asks_for_itself_is_local() {
        let is_local = |peer: &str, headers: &[(&'static str, &'static str)]| {
            let peer = PeerAddr { addr: peer.parse().expect("an address"), certificate: None };
            let headers: HeaderMap = headers
                .iter()
                .map(|&(name, value)| (name.parse().expect("a name"), HeaderValue::from_static(value)))
                .collect();
            Caller::at_api(&headers, Some(&peer)).is_local()
        };
        for host in ["127.0.0.1:8000", "localhost", "LocalHost:8000", "[::1]:8000", "10.0.0.1", "0.0.0.0:1"] {
            assert!(is_local("127.0.0.1:5", &[("host", host)]), "{host}");
        }
        assert!(
            is_local("127.0.0.1:5", &[]) && is_local("[::1]:5", &[]) && is_local("[::ffff:127.0.0.1]:5", &[])
        );
        assert!(!is_local("10.0.0.1:5", &[("host", "127.0.0.1:8000")]));
        let page = |name, value| is_local("127.0.0.1:5", &[("host", "127.0.0.1:8000"), (name, value)]);
        assert!(page("origin", "http://127.0.0.1:8000") && page("sec-fetch-site", "same-origin"));
        assert!(!page("origin", "https://evil.example") && !page("origin", "null"));
        assert!(!page("sec-fetch-site", "cross-site"));
        for host in ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""] {
            assert!(!is_local("127.0.0.1:5", &[("host", host)]), "{host}");
        }
        for name in FORWARDED {
            assert!(!is_local("127.0.0.1:5", &[("host", "127.0.0.1"), (name, "10.0.0.1")]), "{name}");
        }
        assert!(!Caller::at_api(&HeaderMap::new(), None).is_local());
    }
}
