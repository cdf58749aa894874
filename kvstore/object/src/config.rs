//! Configuration of the object tier: every limit has its name, unit, default and range here.

use std::path::PathBuf;
use std::time::Duration;

use crate::credentials::Credentials;
use crate::error::ConfigError;
use crate::format::{ALIGNMENT_MAX, RUN_BLOCKS_MAX};

/// Location of the objects.
#[derive(Debug, Clone)]
pub enum Location {
    /// A directory, for example on a shared file system. It must exist.
    Directory(PathBuf),
    /// A bucket of an S3-compatible store.
    S3(S3Config),
}

/// Settings of a bucket. `Debug` prints each credential as `set` or `unset`.
#[derive(Debug, Clone)]
pub struct S3Config {
    /// The bucket.
    pub bucket: String,
    /// Region of the signature. Default `us-east-1`, which most compatible stores expect.
    pub region: String,
    /// URL of the service, without the bucket; `None`: AWS. A URL with user names is refused.
    pub endpoint: Option<String>,
    /// Whether the bucket is the first part of the path rather than of the host name. Default on.
    pub path_style: bool,
    /// Whether `http://` is allowed, which sends the KV unencrypted. Default off.
    pub allow_http: bool,
    /// PEM file with certificate authorities to trust besides the system's.
    pub ca_bundle: Option<PathBuf>,
    /// Credentials for signing requests.
    pub credentials: Credentials,
    /// Objects larger than this are uploaded in parts of this size. Default 64 MiB, 5 MiB to 5 GiB.
    pub part_bytes: u64,
    /// Whether the server is asked to refuse an object that exists already. Default on; switched off
    /// automatically, and counted, when the server answers 501.
    pub conditional_put: bool,
}

impl S3Config {
    /// The defaults for a bucket.
    #[must_use]
    pub fn new(bucket: impl Into<String>, credentials: Credentials) -> Self {
        Self {
            bucket: bucket.into(),
            region: "us-east-1".into(),
            endpoint: None,
            path_style: true,
            allow_http: false,
            ca_bundle: None,
            credentials,
            part_bytes: 64 << 20,
            conditional_put: true,
        }
    }
}

/// Settings of the tier.
#[derive(Debug, Clone)]
pub struct ObjectConfig {
    /// Location of the objects.
    pub location: Location,
    /// First part of every key; clusters with the same prefix share their KV. Default `kvasir`.
    pub prefix: String,
    /// Fingerprint of model and block layout: part of every key and object.
    pub layout_fingerprint: u64,
    /// Blocks of a run. Clusters that share a prefix must agree. Default 16, a power of two from 1 to 1024.
    pub run_blocks: usize,
    /// Whether chain ends that fill no run are also stored, as runs whose length is a power of two. Costs a
    /// look-up that finds the end up to log2(`run_blocks`) more requests, and the store up to as many bytes
    /// again. Default off.
    pub store_partial: bool,
    /// Payloads start at multiples of this in an object. Default 4096, a power of two from 1 to 1 MiB.
    pub payload_alignment: u32,
    /// Age from which on an object is a miss and may be swept; `None`: no limit. Default 7 days.
    pub ttl: Option<Duration>,
    /// Bytes that the first read of an object requests; larger indexes cost a second read. Default
    /// 16 KiB, 64 B to 16 MiB.
    pub index_read_bytes: u64,
    /// Maximum number of requests in flight. Default 32, 1 to 1024.
    pub requests_max: usize,
    /// Maximum number of puts in flight; more are [`Throttled`](crate::Outcome::Throttled). Default 4, 1 to
    /// 256.
    pub puts_max: usize,
    /// Maximum number of runs that a look-up or a get requests concurrently. Default 8, 1 to 256.
    pub run_concurrency: usize,
    /// Maximum time of one attempt of a request. Default 10 s, 10 ms to 10 min. The caller's deadline also
    /// applies.
    pub request_timeout: Duration,
    /// Maximum time to connect. Default 1 s, 1 ms to 1 min.
    pub connect_timeout: Duration,
    /// Maximum number of attempts of one request, the first included. Default 3, 1 to 10.
    pub attempts_max: u32,
    /// Retries as a share of requests, in percent. Default 10, 0 to 100.
    pub retry_percent: u32,
    /// Maximum number of retries that accumulate in the budget. Default 10, 0 to 1000.
    pub retry_burst: u32,
    /// Maximum of the first pause before a retry; doubles with each retry. Default 50 ms, 1 ms to 10 s.
    pub backoff: Duration,
    /// Maximum of any pause. Default 2 s, at least `backoff`.
    pub backoff_max: Duration,
    /// Failures in a row after which every request is a miss at once. Default 5, 1 to 1000.
    pub breaker_failures: u32,
    /// Minimum time after which an attempt that the caller's deadline ended counts as a failure: a shorter one
    /// says nothing about the service. Default 100 ms, at most `request_timeout`.
    pub breaker_wait_max: Duration,
    /// Pause of an open breaker until one request is admitted. Default 5 s, 10 ms to 10 min.
    pub breaker_pause: Duration,
    /// Memory of the cache of keys and indexes, in bytes. Default 32 MiB, 64 KiB to 4 GiB.
    pub cache_bytes: u64,
    /// Time for which a key is cached as present. Default 60 s.
    pub present_ttl: Duration,
    /// Time for which a key is cached as absent. Default 2 s.
    pub absent_ttl: Duration,
    /// Time for which a damaged object is not requested. Default 5 min.
    pub avoid_ttl: Duration,
    /// Whether an object that two reads found damaged is deleted. Default on.
    pub delete_damaged: bool,
    /// Deletions per second of a sweep. Default 100, 1 to 100,000.
    pub sweep_deletes_per_s: u32,
    /// Seed of the jitter.
    pub seed: u64,
}

impl ObjectConfig {
    /// Returns the default settings.
    #[must_use]
    pub fn new(location: Location, layout_fingerprint: u64) -> Self {
        Self {
            location,
            prefix: "kvasir".into(),
            layout_fingerprint,
            run_blocks: 16,
            store_partial: false,
            payload_alignment: 4096,
            ttl: Some(Duration::from_secs(7 * 24 * 3600)),
            index_read_bytes: 16 << 10,
            requests_max: 32,
            puts_max: 4,
            run_concurrency: 8,
            request_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(1),
            attempts_max: 3,
            retry_percent: 10,
            retry_burst: 10,
            backoff: Duration::from_millis(50),
            backoff_max: Duration::from_secs(2),
            breaker_failures: 5,
            breaker_wait_max: Duration::from_millis(100),
            breaker_pause: Duration::from_secs(5),
            cache_bytes: 32 << 20,
            present_ttl: Duration::from_secs(60),
            absent_ttl: Duration::from_secs(2),
            avoid_ttl: Duration::from_secs(300),
            delete_damaged: true,
            sweep_deletes_per_s: 100,
            seed: 1,
        }
    }

    /// Checks every setting. The error lists all problems, one per line.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut require = |holds: bool, text: &str| {
            if !holds {
                problems.push(text.to_owned());
            }
        };
        let within = |value: Duration, low_ms: u64, high_ms: u64| {
            value >= Duration::from_millis(low_ms) && value <= Duration::from_millis(high_ms)
        };
        require(
            self.run_blocks.is_power_of_two() && self.run_blocks <= RUN_BLOCKS_MAX,
            "run_blocks: a power of two from 1 to 1024",
        );
        require(
            self.payload_alignment.is_power_of_two() && self.payload_alignment <= ALIGNMENT_MAX,
            "payload_alignment: a power of two from 1 to 1 MiB",
        );
        require((64..=16 << 20).contains(&self.index_read_bytes), "index_read_bytes: 64 B to 16 MiB");
        require((1..=1024).contains(&self.requests_max), "requests_max: 1 to 1024");
        require((1..=256).contains(&self.puts_max), "puts_max: 1 to 256");
        require((1..=256).contains(&self.run_concurrency), "run_concurrency: 1 to 256");
        require(within(self.request_timeout, 10, 600_000), "request_timeout: 10 ms to 10 min");
        require(within(self.connect_timeout, 1, 60_000), "connect_timeout: 1 ms to 1 min");
        require((1..=10).contains(&self.attempts_max), "attempts_max: 1 to 10");
        require(self.retry_percent <= 100, "retry_percent: 0 to 100");
        require(self.retry_burst <= 1000, "retry_burst: 0 to 1000");
        require(within(self.backoff, 1, 10_000), "backoff: 1 ms to 10 s");
        require(self.backoff_max >= self.backoff, "backoff_max: at least backoff");
        require((1..=1000).contains(&self.breaker_failures), "breaker_failures: 1 to 1000");
        require(self.breaker_wait_max <= self.request_timeout, "breaker_wait_max: at most request_timeout");
        require(within(self.breaker_pause, 10, 600_000), "breaker_pause: 10 ms to 10 min");
        require((64 << 10..=4 << 30).contains(&self.cache_bytes), "cache_bytes: 64 KiB to 4 GiB");
        require((1..=100_000).contains(&self.sweep_deletes_per_s), "sweep_deletes_per_s: 1 to 100,000");
        let plain = |part: &str| {
            !part.is_empty()
                && part != "."
                && part != ".."
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        require(
            self.prefix.len() <= 512 && self.prefix.split('/').all(plain),
            "prefix: parts of letters, digits and -_. with / between them, at most 512 bytes",
        );
        if let Location::S3(s3) = &self.location {
            require(plain(&s3.bucket) && s3.bucket.len() <= 63, "bucket: 1 to 63 letters, digits and -_.");
            require(plain(&s3.region), "region: letters, digits and -_.");
            require((5 << 20..=5 << 30).contains(&s3.part_bytes), "part_bytes: 5 MiB to 5 GiB");
            if let Some(endpoint) = &s3.endpoint {
                let scheme =
                    endpoint.starts_with("https://") || (s3.allow_http && endpoint.starts_with("http://"));
                require(scheme, "endpoint: an https:// URL, or http:// with allow_http");
                let more = endpoint.contains(['@', '?', '#']);
                require(!more, "endpoint: without user name, password and query");
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Values(problems.join("\n"))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_hold_and_every_problem_is_listed() {
        let mut config = ObjectConfig::new(Location::Directory("/tmp".into()), 1);
        config.validate().expect("the defaults are valid");
        config.run_blocks = 12;
        config.prefix = "a/../b".into();
        let mut s3 = S3Config::new("bucket", Credentials::Anonymous);
        s3.endpoint = Some("https://user:canary@host".into());
        config.location = Location::S3(s3);
        let text = config.validate().expect_err("three problems").to_string();
        for name in ["run_blocks", "prefix", "endpoint"] {
            assert!(text.contains(name), "{name} in {text}");
        }
        assert!(!text.contains("canary"));
    }
}
