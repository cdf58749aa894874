//! The `kv_transfer_params` of the native hand-off.
//!
//! Both legs are dispatched at once and meet by `transfer_id`; each is told where the other's data plane
//! listens. Engines of other makes have their own shapes, which pass through the gateway unread.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where a worker's data plane can be reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPlaneAddress {
    /// Same on all processes that share memory.
    pub host: String,
    /// Path of the shared-memory socket, if that transport is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm: Option<String>,
    /// `ip:port` of the TCP transport, if it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<String>,
    /// `ip:port` at which each RDMA rail is connected to, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rdma: Vec<String>,
}

/// One leg of a hand-off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kvasir", rename_all = "snake_case")]
pub enum Handoff {
    /// To the prefill worker: compute the prompt's blocks and send them to whoever asks for this transfer.
    Prefill {
        /// The transfer.
        transfer_id: u64,
    },
    /// To the decode worker: fetch the prompt's blocks from there.
    Decode {
        /// The transfer.
        transfer_id: u64,
        /// The prefill worker.
        from: DataPlaneAddress,
    },
}

impl Handoff {
    /// As the value of `kv_transfer_params`, with the two flags that every dialect has.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        let prefill = matches!(self, Self::Prefill { .. });
        value["do_remote_decode"] = prefill.into();
        value["do_remote_prefill"] = (!prefill).into();
        value
    }

    /// From `kv_transfer_params`; `None` when it is another dialect's.
    #[must_use]
    pub fn from_json(value: &Value) -> Option<Self> {
        serde_json::from_value(value.clone()).ok()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn legs_survive_json_and_other_dialects_are_not_ours() {
        let from = DataPlaneAddress {
            host: "h".into(),
            shm: Some("/x".into()),
            tcp: None,
            rdma: vec!["1.2.3.4:5".into()],
        };
        for leg in [Handoff::Prefill { transfer_id: u64::MAX }, Handoff::Decode { transfer_id: 1, from }] {
            assert_eq!(Handoff::from_json(&leg.to_json()), Some(leg.clone()));
        }
        let nixl = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null});
        assert_eq!(Handoff::from_json(&nixl), None);
    }
}
