//! Parameters of a request for KvasirConnector and the reference engine: `kv_transfer_params`, beside its part in a hand-off.

use serde_json::{Map, Value};

/// For how many seconds the blocks of a request are to be retained.
pub const RETAIN_SECONDS: &str = "kvasir_retain_seconds";
/// Blocks of the prompt that the gateway knows to be in stores which engines share.
pub const SHARED_BLOCKS: &str = "kvasir_shared_blocks";

/// The parameters of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectorParams {
    /// Blocks of the prompt in stores that the engine shares with others: it asks them for these and for nothing else.
    pub shared_blocks: Option<u32>,
    /// For how many seconds the request's blocks are to be retained.
    pub retain_seconds: Option<u32>,
}

impl ConnectorParams {
    /// `kv_transfer_params` with these beside what is there already, if that is an object; `None`: it stays as it is. How long blocks are
    /// retained is not for clients to say.
    #[must_use]
    pub fn beside(self, own: Option<&str>) -> Option<String> {
        // Names may be spelled with escapes.
        let is_claimed = own.is_some_and(|own| own.contains(RETAIN_SECONDS) || own.contains('\\'));
        if self == Self::default() && !is_claimed {
            return None;
        }
        let own = own.and_then(|own| serde_json::from_str::<Map<String, Value>>(own).ok());
        let mut params = own.unwrap_or_default();
        params.remove(RETAIN_SECONDS);
        let named = [(SHARED_BLOCKS, self.shared_blocks), (RETAIN_SECONDS, self.retain_seconds)];
        params.extend(named.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into()))));
        Some(Value::Object(params).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_own_parameters_stay_but_for_the_time() {
        let of = |shared_blocks, retain_seconds| ConnectorParams { shared_blocks, retain_seconds };
        let beside = |params: ConnectorParams, own: &str| -> Option<Value> {
            params.beside(Some(own)).map(|text| serde_json::from_str(&text).expect("JSON"))
        };
        let own = "{\"kvasir_shared_blocks\":99,\"other\":[1]}";
        assert_eq!(
            beside(of(Some(3), None), own),
            Some(serde_json::json!({ SHARED_BLOCKS: 3, "other": [1] }))
        );
        let both = serde_json::json!({ SHARED_BLOCKS: 99, "other": [1], RETAIN_SECONDS: 60 });
        assert_eq!(beside(of(None, Some(60)), own), Some(both));
        assert_eq!(beside(of(None, None), own), None, "nothing to say");
        let claimed = "{\"kvasir_retain_seconds\":9999,\"other\":1}";
        assert_eq!(beside(of(None, None), claimed), Some(serde_json::json!({ "other": 1 })));
        let escaped = "{\"kvasir_retain_\\u0073econds\":9999,\"other\":1}";
        assert_eq!(beside(of(None, None), escaped), Some(serde_json::json!({ "other": 1 })));
        assert_eq!(of(None, None).beside(None), None);
        for nothing in [None, Some("null"), Some("[1]"), Some("\"text\"")] {
            let expected = "{\"kvasir_shared_blocks\":0}";
            assert_eq!(of(Some(0), None).beside(nothing).as_deref(), Some(expected), "{nothing:?}");
        }
    }
}
