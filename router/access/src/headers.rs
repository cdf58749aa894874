//! Policy for the headers of clients that are passed on to engines.
//!
//! Engines and their sidecars act on headers and body fields that are meant for a trusted router: the rank
//! that computes, the host from which key-value blocks are fetched, the request's name. A client that sets
//! them could bypass routing, make a worker connect to a host of its choice, or read another tenant's
//! blocks. So only headers that are known to be harmless pass ([`PASSED_HEADERS`]).

use http::{HeaderName, header};

/// Decision on a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decision {
    /// The field is passed to the engine unchanged.
    Pass,
    /// The field is removed.
    Strip,
    /// The gateway's own value replaces the field, also where the client sent none.
    Replace,
    /// The request is refused: without the field the answer would differ from the client's request.
    Refuse,
}

/// Headers of clients that are passed to engines: W3C trace context, the session hint, and the language.
pub static PASSED_HEADERS: [HeaderName; 4] = [
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("x-session-id"),
    header::ACCEPT_LANGUAGE,
];

/// Parts of a request id from which engines read addresses to connect to: vLLM's P2P-NCCL and MoRI-IO
/// connectors parse `___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_…`.
const ADDRESSES_IN_IDS: [&str; 3] = ["prefill_addr", "decode_addr", "___"];
/// Longest accepted request id, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Whether a client's request id may be used: it is short, made of letters, digits and `-_.:`, and contains
/// no address. Otherwise the gateway makes one.
#[must_use]
pub fn is_plain_request_id(id: &str) -> bool {
    let is_plain = !id.is_empty()
        && id.len() <= REQUEST_ID_BYTES_MAX
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte));
    let has_address = ADDRESSES_IN_IDS.iter().any(|part| {
        id.as_bytes().windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
    });
    is_plain && !has_address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_with_addresses_are_not_used() {
        let long = "x".repeat(REQUEST_ID_BYTES_MAX + 1);
        let cases = [
            ("chatcmpl-0191e7", true),
            ("a:b.c_d-e", true),
            ("___prefill_addr_10.0.0.1:5000___decode_addr_10.0.0.2:5000_x", false),
            ("x_PREFILL_ADDR_h:1", false),
            ("a___b", false),
            ("a b", false),
            ("a\nb", false),
            ("", false),
            (long.as_str(), false),
        ];
        for (id, expected) in cases {
            assert_eq!(is_plain_request_id(id), expected, "{id}");
        }
    }
}
