//! What of a client's request an engine may see.
//!
//! Engines and their sidecars act on headers and body fields that are meant for a router that everybody trusts:
//! which rank computes, from which host key-value blocks are fetched, under which name. A client that sets them
//! could bypass routing, make a worker connect to a host of its choice, or read what another tenant left. So the
//! rule for headers is: only what is known to be harmless passes; the families that steer are also named, so that
//! allowing "everything unknown" does not open them.
//!
//! Pure functions over names, compared without case; no allocation.

/// What to do with a header or field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decision {
    /// It goes to the engine as it is.
    Pass,
    /// It is left out.
    Strip,
    /// The gateway's own value takes its place, whether the client sent one or not.
    Replace,
    /// The request is refused: without it the answer would be another than the client asked for.
    Refuse,
}

/// Harmless, and of use to an engine or to whoever follows a request.
const PASSED: [&str; 12] = [
    "accept",
    "content-type",
    "user-agent",
    // W3C trace context.
    "traceparent",
    "tracestate",
    "baggage",
    // A conversation; engines only use it as a hint, as this gateway does.
    "x-session-id",
    "x-correlation-id",
    // Their values are checked by `HeaderPolicy::request_id`.
    "x-request-id",
    "anthropic-version",
    "anthropic-beta",
    "openai-beta",
];

/// Of one connection, or made anew by whoever sends the request on (RFC 9110, section 7.6.1). Never passed.
const HOP_BY_HOP: [&str; 14] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "expect",
    // The gateway reads the answer, so it says which encodings it understands.
    "accept-encoding",
    "content-encoding",
];

/// For the gateway, not for engines: an engine that logs them would hold clients' keys. Never passed.
const CREDENTIALS: [&str; 6] =
    ["authorization", "x-api-key", "api-key", "cookie", "openai-organization", "openai-project"];

/// Who a client is according to himself; the gateway knows it better.
const FORWARDED: [&str; 3] = ["forwarded", "via", "x-real-ip"];

/// Beginnings of headers that steer.
const STEERING: [&str; 21] = [
    // vLLM: X-data-parallel-rank picks the rank.
    "x-data-parallel-",
    "x-dp-",
    // llm-d: where the sidecar fetches blocks and encodings from.
    "x-prefill",
    "x-decode",
    "x-encode",
    // Inference gateways: the endpoint to send to, the objective and the fairness id.
    "x-gateway-",
    "x-inference-",
    "x-slo-",
    "x-llm-d-",
    // Routers and engines.
    "x-vllm-",
    "x-sglang-",
    "x-smg-",
    "x-trtllm-",
    "x-dynamo-",
    "x-kvasir-",
    "x-worker-",
    "x-kv-",
    // Transfer libraries.
    "x-nixl-",
    "x-mooncake-",
    "x-lmcache-",
    // Where a proxy says that the request came from.
    "x-forwarded-",
];

/// Parts of a request id out of which engines read addresses to connect to: vLLM's P2P-NCCL and MoRI-IO connectors
/// take `___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_…` apart.
const ADDRESSES_IN_IDS: [&str; 3] = ["prefill_addr", "decode_addr", "___"];
/// Longest request id that is passed.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Which request headers pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeaderPolicy {
    /// Names that pass although they are unknown or steer; lower case. Hop-by-hop headers and credentials never do.
    pub allowed: Vec<String>,
    /// Whether headers of which nothing is known pass. Off by default: the next release of an engine may act on one.
    pub are_unknown_passed: bool,
}

fn is_one_of(list: &[&str], name: &str) -> bool {
    list.iter().any(|listed| listed.eq_ignore_ascii_case(name))
}

fn starts_with(name: &str, prefix: &str) -> bool {
    // Compared as bytes: a prefix may end inside a letter of a name that is no header.
    name.as_bytes().get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
}

impl HeaderPolicy {
    /// What to do with a header of this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Decision {
        if is_one_of(&HOP_BY_HOP, name) || is_one_of(&CREDENTIALS, name) {
            return Decision::Strip;
        }
        if is_one_of(&PASSED, name) || self.allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name)) {
            return Decision::Pass;
        }
        let is_known = is_one_of(&FORWARDED, name) || STEERING.iter().any(|prefix| starts_with(name, prefix));
        if self.are_unknown_passed && !is_known { Decision::Pass } else { Decision::Strip }
    }

    /// What to do with a client's request id: it passes when it is short, made of letters, digits and `-_.:`, and
    /// has no address in it. Otherwise the gateway makes one.
    #[must_use]
    pub fn request_id(&self, value: &str) -> Decision {
        let is_plain = !value.is_empty()
            && value.len() <= REQUEST_ID_BYTES_MAX
            && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte));
        let has_address = ADDRESSES_IN_IDS.iter().any(|part| {
            value.as_bytes().windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
        });
        if is_plain && !has_address { Decision::Pass } else { Decision::Replace }
    }
}

/// Whether the value of a `connection` header names this header, which then belongs to that connection alone
/// (RFC 9110, section 7.6.1).
#[must_use]
pub fn is_named_by_connection(connection: &str, name: &str) -> bool {
    connection.split(',').any(|named| named.trim().eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_by_default() {
        let policy = HeaderPolicy::default();
        let cases = [
            ("Content-Type", Decision::Pass),
            ("traceparent", Decision::Pass),
            ("X-Session-ID", Decision::Pass),
            ("x-request-id", Decision::Pass),
            ("Authorization", Decision::Strip),
            ("X-API-Key", Decision::Strip),
            ("cookie", Decision::Strip),
            ("Transfer-Encoding", Decision::Strip),
            ("Host", Decision::Strip),
            ("accept-encoding", Decision::Strip),
            ("X-data-parallel-rank", Decision::Strip),
            ("x-prefiller-host-port", Decision::Strip),
            ("x-vllm-anything", Decision::Strip),
            ("X-KVASIR-route", Decision::Strip),
            ("x-gateway-destination-endpoint", Decision::Strip),
            ("X-Forwarded-For", Decision::Strip),
            ("x-new-in-the-next-release", Decision::Strip),
            ("", Decision::Strip),
            ("x-\u{fc}", Decision::Strip),
        ];
        for (name, expected) in cases {
            assert_eq!(policy.header(name), expected, "{name}");
        }
    }

    #[test]
    fn allowing_opens_what_is_named_and_never_credentials() {
        let allowed = ["x-data-parallel-rank", "authorization", "connection"].map(str::to_owned).to_vec();
        let policy = HeaderPolicy { allowed, are_unknown_passed: true };
        let cases = [
            ("X-Data-Parallel-Rank", Decision::Pass),
            ("x-data-parallel-size", Decision::Strip),
            ("x-anything", Decision::Pass),
            ("x-prefiller-host-port", Decision::Strip),
            ("authorization", Decision::Strip),
            ("connection", Decision::Strip),
            ("via", Decision::Strip),
        ];
        for (name, expected) in cases {
            assert_eq!(policy.header(name), expected, "{name}");
        }
    }

    #[test]
    fn request_ids_with_addresses_are_replaced() {
        let policy = HeaderPolicy::default();
        let long = "x".repeat(REQUEST_ID_BYTES_MAX + 1);
        let cases = [
            ("chatcmpl-0191e7", Decision::Pass),
            ("a:b.c_d-e", Decision::Pass),
            ("___prefill_addr_10.0.0.1:5000___decode_addr_10.0.0.2:5000_x", Decision::Replace),
            ("x_PREFILL_ADDR_h:1", Decision::Replace),
            ("a___b", Decision::Replace),
            ("a b", Decision::Replace),
            ("a\nb", Decision::Replace),
            ("", Decision::Replace),
            (long.as_str(), Decision::Replace),
        ];
        for (value, expected) in cases {
            assert_eq!(policy.request_id(value), expected, "{value}");
        }
    }

    #[test]
    fn connection_names_headers() {
        assert!(is_named_by_connection("close, X-Secret ,te", "x-secret"));
        assert!(!is_named_by_connection("close, x-secret-2", "x-secret"));
        assert!(!is_named_by_connection("", "x-secret"));
    }
}
