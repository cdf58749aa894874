//! The `kv_transfer_params` of Kvasir's own hand-off, used by the reference engine and vLLM with KvasirConnector.
//!
//! Both legs are dispatched at once and meet by `transfer_id`; the decode leg contains the address of the prefill worker's
//! data plane. Other engines have their own formats, which pass through the gateway unread.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Addresses of a worker's data plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPlaneAddress {
    /// Same on all processes that share memory: the machine's boot, `/`, and the folder that they share. A boot that is not
    /// known begins with `unknown`.
    pub host: String,
    /// Path of the socket of shared device memory, if that transport is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_ipc: Option<String>,
    /// Path of the shared-memory socket, if that transport is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm: Option<String>,
    /// `ip:port` of the TCP transport, if it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<String>,
    /// `ip:port` at which each RDMA rail is connected to, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rdma: Vec<String>,
    /// Processes of the worker that hold a share of each block, for each data-parallel rank. Process `n`, counted over all
    /// ranks, listens on these ports plus `n`.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub processes: u16,
}

fn one() -> u16 {
    1
}

fn is_one(count: &u16) -> bool {
    *count == 1
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl DataPlaneAddress {
    /// Drops loopback addresses when `here` is another host.
    #[must_use]
    pub fn reachable_from(&self, here: &Self) -> Self {
        if !self.is_elsewhere(here) {
            return self.clone();
        }
        let is_reachable = |address: &&String| !is_loopback(address);
        Self {
            host: self.host.clone(),
            cuda_ipc: self.cuda_ipc.clone(),
            shm: self.shm.clone(),
            tcp: self.tcp.as_ref().filter(is_reachable).cloned(),
            rdma: self.rdma.iter().filter(is_reachable).cloned().collect(),
            processes: self.processes,
        }
    }

    /// Whether both boots are known and differ.
    fn is_elsewhere(&self, here: &Self) -> bool {
        boot_of(&self.host).zip(boot_of(&here.host)).is_some_and(|(one, other)| one != other)
    }
}

/// The boot in a [`DataPlaneAddress::host`], when it is known.
fn boot_of(host: &str) -> Option<&str> {
    let (boot, _folder) = host.split_once('/')?;
    (!boot.starts_with("unknown")).then_some(boot)
}

/// Whether `ip:port` is of the loopback interface, which no other host reaches.
fn is_loopback(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok_and(|address| address.ip().to_canonical().is_loopback())
}

/// One leg of a hand-off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kvasir", rename_all = "snake_case")]
pub enum Handoff {
    /// Prefill leg: compute the prompt's blocks and send them to the worker that requests this transfer.
    Prefill {
        /// Number of the transfer.
        transfer_id: u64,
        /// Processes of the decode worker's rank that take a share of each block.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        receivers: u16,
    },
    /// Decode leg: fetch the prompt's blocks from the prefill worker.
    Decode {
        /// Number of the transfer.
        transfer_id: u64,
        /// Data plane of the prefill worker.
        from: DataPlaneAddress,
        /// First process of the data-parallel rank that holds the prompt's blocks.
        #[serde(default, skip_serializing_if = "is_zero")]
        first_process: u32,
    },
}

impl Handoff {
    /// Returns the value of `kv_transfer_params`, with the two flags that every dialect has.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        let prefill = matches!(self, Self::Prefill { .. });
        value["do_remote_decode"] = prefill.into();
        value["do_remote_prefill"] = (!prefill).into();
        value
    }

    /// Parses `kv_transfer_params`; `None` when it is of another dialect.
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
    fn loopback_addresses_are_of_no_use_to_another_host() {
        let address = |host: &str| DataPlaneAddress {
            host: host.to_owned(),
            cuda_ipc: None,
            shm: Some("/x".to_owned()),
            tcp: Some("127.0.0.1:7400".to_owned()),
            rdma: vec!["[::1]:1".to_owned(), "10.0.0.2:2".to_owned(), "127.0.0.1:3".to_owned()],
            processes: 1,
        };
        let here = address("boot-a/1");
        for near in ["boot-a/1", "boot-a/2", "unknown-7/1", "h"] {
            assert_eq!(address(near).reachable_from(&here), address(near), "{near}");
        }
        let far = address("boot-b/1").reachable_from(&here);
        assert_eq!((far.tcp, far.rdma), (None, vec!["10.0.0.2:2".to_owned()]));
        let known = DataPlaneAddress { tcp: Some("10.0.0.2:7400".to_owned()), ..address("boot-b/1") };
        assert_eq!(known.reachable_from(&here).tcp, known.tcp);
    }

    #[test]
    fn legs_survive_json_and_other_dialects_are_not_ours() {
        let from = DataPlaneAddress {
            host: "h".into(),
            cuda_ipc: Some("/y".into()),
            shm: Some("/x".into()),
            tcp: None,
            rdma: vec!["1.2.3.4:5".into()],
            processes: 1,
        };
        let of_two = DataPlaneAddress { processes: 2, ..from.clone() };
        for leg in [
            Handoff::Prefill { transfer_id: u64::MAX, receivers: 1 },
            Handoff::Prefill { transfer_id: 5, receivers: 4 },
            Handoff::Decode { transfer_id: 1, from: from.clone(), first_process: 0 },
            Handoff::Decode { transfer_id: 1, from: of_two, first_process: 6 },
        ] {
            assert_eq!(Handoff::from_json(&leg.to_json()), Some(leg.clone()));
        }
        // Workers of the previous release know neither field.
        let plain = Handoff::Decode { transfer_id: 1, from, first_process: 0 }.to_json();
        assert!(plain.get("first_process").is_none() && plain["from"].get("processes").is_none(), "{plain}");
        let nixl = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null});
        assert_eq!(Handoff::from_json(&nixl), None);
    }
}
