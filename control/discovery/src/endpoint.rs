//! A worker as a source describes it.

/// Work that a worker does for the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Prefills for decode workers.
    Prefill,
    /// Decodes from prompts that prefill workers computed.
    Decode,
    /// Prefills and decodes.
    Both,
}

impl Role {
    /// Returns the role with this name: `prefill`, `decode`, `both` or llm-d's `prefill-decode`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "prefill" => Some(Self::Prefill),
            "decode" => Some(Self::Decode),
            "both" | "prefill-decode" => Some(Self::Both),
            _ => None,
        }
    }
}

/// State of a worker according to its source. If two endpoints have one address, the smaller state is
/// preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointState {
    /// The source reports that the worker takes requests.
    Ready,
    /// The worker is starting, or fails its readiness probe: no new requests. The fleet may already query its
    /// engine.
    NotReady,
    /// The worker is about to stop: no new requests; requests in flight continue.
    Draining,
}

/// One address at which a worker answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub url: String,
    /// Identity of the process behind the address (a pod's UID). A different value means a different worker.
    pub uid: Option<String>,
    /// Role that the source assigns; `None` leaves it to the engine.
    pub role: Option<Role>,
    /// Name of its pool, if the source gives one.
    pub pool: Option<String>,
    /// Name of the model that the worker serves according to its source. The pool of that name gets the
    /// worker, if it exists.
    pub model: Option<String>,
    /// Version of the deployment: prefill and decode workers of different generations are not paired. `None`
    /// pairs with all.
    pub generation: Option<String>,
    /// Whether it takes requests.
    pub state: EndpointState,
}

impl Endpoint {
    /// Returns a ready endpoint with only an address.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            uid: None,
            role: None,
            pool: None,
            model: None,
            generation: None,
            state: EndpointState::Ready,
        }
    }

    /// Returns a ready endpoint at `http://HOST:PORT`; the host may be an IPv6 address.
    #[must_use]
    pub fn at(host: &str, port: u16) -> Self {
        Self::new(url_of("http", host, port))
    }

    /// Returns the normalised address: lower case, without a trailing slash and without the scheme's default
    /// port.
    pub(crate) fn address(&self) -> String {
        let url = self.url.trim_end_matches('/').to_ascii_lowercase();
        let usual = if url.starts_with("https:") { ":443" } else { ":80" };
        url.strip_suffix(usual).map_or_else(|| url.clone(), str::to_owned)
    }
}

/// Returns `SCHEME://HOST:PORT`, with brackets around an IPv6 address.
pub(crate) fn url_of(scheme: &str, host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("{scheme}://[{host}]:{port}"),
        false => format!("{scheme}://{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_one_spelling_and_ipv6_has_brackets() {
        assert_eq!(Endpoint::new("http://NODE:8000/").address(), "http://node:8000");
        assert_eq!(Endpoint::new("http://node:80").address(), Endpoint::new("http://node/").address());
        assert_eq!(url_of("http", "fd00::1", 8000), "http://[fd00::1]:8000");
        assert_eq!(url_of("https", "10.0.0.1", 8000), "https://10.0.0.1:8000");
    }

    #[test]
    fn roles_have_the_names_of_the_field() {
        assert_eq!(Role::from_name("prefill"), Some(Role::Prefill));
        assert_eq!(Role::from_name("prefill-decode"), Some(Role::Both));
        assert_eq!(Role::from_name("encode"), None);
    }
}
