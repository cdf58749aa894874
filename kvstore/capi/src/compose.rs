//! A store from a configuration. The one place that knows which stores there are.

use std::sync::Arc;

use serde::Deserialize;

use crate::backend::Backend;
use crate::memory::MemoryBackend;
use crate::status::{Failure, Status};

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) store: StoreSettings,
    pub(crate) queue: QueueSettings,
}

/// Section `[store]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct StoreSettings {
    /// Bytes of blocks that are kept in memory. 4 KiB to 1 PiB.
    pub(crate) memory_bytes: usize,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self { memory_bytes: 1 << 30 }
    }
}

/// Section `[queue]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct QueueSettings {
    /// Threads that carry submitted requests out. 1 to 64.
    pub(crate) threads: usize,
    /// Requests that were submitted and whose completions were not polled yet. 1 to 65,536.
    pub(crate) depth: usize,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self { threads: 2, depth: 256 }
    }
}

/// Reads a configuration and opens what it says.
pub(crate) fn open(text: &str) -> Result<(Arc<dyn Backend>, QueueSettings), Failure> {
    let refuse = |reason: String| Failure::new(Status::Configuration, reason);
    let settings: Settings = toml::from_str(text).map_err(|error| refuse(error.to_string()))?;
    let ranges = [
        ("store.memory_bytes", settings.store.memory_bytes, 4096, 1 << 50),
        ("queue.threads", settings.queue.threads, 1, 64),
        ("queue.depth", settings.queue.depth, 1, 65_536),
    ];
    let problems: Vec<String> = ranges
        .iter()
        .filter(|(_, value, least, most)| !(least..=most).contains(&value))
        .map(|(name, value, least, most)| format!("{name} = {value} is not in {least} to {most}"))
        .collect();
    if !problems.is_empty() {
        return Err(refuse(problems.join("; ")));
    }
    Ok((Arc::new(MemoryBackend::new(settings.store.memory_bytes)), settings.queue))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_or_out_of_range_is_refused() {
        assert_eq!(open("").expect("the defaults").1, QueueSettings::default());
        assert_eq!(open("[queue]\nthreads = 3\n").expect("valid").1.threads, 3);
        for (text, part) in [
            ("[store]\nmemory = 1\n", "memory"),
            ("[queue]\nthreads = 0\ndepth = 0\n", "threads = 0 is not in 1 to 64; queue.depth"),
            ("[store", "store"),
        ] {
            let Err(failure) = open(text) else { panic!("{text} was taken") };
            assert!(
                failure.status == Status::Configuration && failure.text.contains(part),
                "{}",
                failure.text
            );
        }
    }
}
