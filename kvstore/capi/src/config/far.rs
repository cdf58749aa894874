//! The tiers outside this node: pools of other nodes, and object storage.

use std::time::Duration;

use kvstore_store::far::remote::RemoteTierConfig;
use serde::Deserialize;

use super::value::{Size, Time};

/// Values of `object_tier.run`.
const RUNS: [&str; 11] = ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"];

/// Section `[remote_tier]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RemoteTierSettings {
    /// Nodes whose pools are used, each as `name=address`. Empty turns the tier off.
    pub(crate) nodes: Vec<String>,
    /// Most time for a look-up and the reads that follow. 1 ms to 60 s.
    pub(crate) deadline: Time,
    /// Most bytes read and written per second; 0 is no limit.
    pub(crate) bandwidth: Size,
    /// Consecutive blocks of a chain that are kept on the same node. 1 to 64.
    pub(crate) group: u64,
    /// Nodes that keep a frequently requested group of blocks. 1 or 2.
    pub(crate) replicas: u64,
    /// File with the secret that the nodes share. Empty: the secret of `[transfer]`, else that of the environment.
    pub(crate) secret_file: String,
}

/// Section `[object_tier]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ObjectTierSettings {
    /// `s3://bucket/prefix` or `file:///folder`; empty turns the tier off.
    pub(crate) url: String,
    /// Endpoint of the S3 service, if it is not Amazon's.
    pub(crate) endpoint: String,
    pub(crate) region: String,
    /// File in the format of AWS's `credentials`. Empty: the environment.
    pub(crate) credentials_file: String,
    /// Whether plain HTTP is allowed.
    pub(crate) allow_http: bool,
    /// Blocks of a chain in one object: a power of two up to 1024.
    pub(crate) run: String,
    /// Age from which on objects are misses and are deleted. 1 min to 10 years.
    pub(crate) ttl: Time,
    /// Memory for objects in transit. 1 MiB to 1 TiB.
    pub(crate) buffers: Size,
    /// Most bytes read and written per second; 0 is no limit.
    pub(crate) bandwidth: Size,
    /// Most time for a look-up and a read. 1 ms to 10 min.
    pub(crate) deadline: Time,
}

impl Default for RemoteTierSettings {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            deadline: Time(Duration::from_millis(200)),
            bandwidth: Size(0),
            group: 32,
            replicas: 2,
            secret_file: String::new(),
        }
    }
}

impl Default for ObjectTierSettings {
    fn default() -> Self {
        Self {
            url: String::new(),
            endpoint: String::new(),
            region: "us-east-1".to_owned(),
            credentials_file: String::new(),
            allow_http: false,
            run: "16".to_owned(),
            ttl: Time(Duration::from_secs(604_800)),
            buffers: Size(1 << 30),
            bandwidth: Size(0),
            deadline: Time(Duration::from_secs(2)),
        }
    }
}

impl RemoteTierSettings {
    /// Whether the tier is configured.
    pub(crate) fn is_on(&self) -> bool {
        !self.nodes.is_empty()
    }

    pub(super) fn contradictions(&self) -> Option<String> {
        RemoteTierConfig::parse_nodes(&self.nodes).err().map(|error| error.to_string())
    }
}

impl ObjectTierSettings {
    /// Whether the tier is configured.
    pub(crate) fn is_on(&self) -> bool {
        !self.url.is_empty()
    }

    /// The value of `run`.
    pub(crate) fn run_blocks(&self) -> u32 {
        self.run.parse().unwrap_or(1)
    }

    pub(super) fn contradictions(&self) -> Vec<String> {
        let mut contradictions = Vec::new();
        if self.is_on() && !["s3://", "file://"].iter().any(|kind| self.url.starts_with(kind)) {
            contradictions
                .push(format!("object_tier.url = {:?} starts neither with s3:// nor with file://", self.url));
        }
        if !RUNS.contains(&self.run.as_str()) {
            contradictions.push(format!("object_tier.run = {:?} is none of {}", self.run, RUNS.join(", ")));
        }
        contradictions
    }
}
