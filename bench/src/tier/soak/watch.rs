//! Samples of the resources used by the process and its folder.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// A sample, taken every few seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sample {
    /// Time since the start of the work.
    pub(super) at: Duration,
    /// Blocks copied in and out so far.
    pub(super) operations: u64,
    /// Anonymous memory: heap and stacks.
    pub(super) anonymous_bytes: u64,
    /// Shared memory: the slabs.
    pub(super) shared_bytes: u64,
    pub(super) descriptors: u64,
    /// Threads, without those that the kernel runs for io_uring in this process, whose number varies.
    pub(super) threads: u64,
    /// Sum of the lengths of all files in the folder.
    pub(super) file_bytes: u64,
    /// Bytes that the file system has allocated for these files.
    pub(super) allocated_bytes: u64,
}

impl Sample {
    pub(super) fn take(at: Duration, operations: u64, folder: &Path) -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
        let (file_bytes, allocated_bytes) = bytes_in(folder)?;
        Ok(Self {
            at,
            operations,
            anonymous_bytes: field(&status, "RssAnon:")?,
            shared_bytes: field(&status, "RssShmem:")?,
            descriptors: std::fs::read_dir("/proc/self/fd")?.count() as u64,
            threads: threads()?,
            file_bytes,
            allocated_bytes,
        })
    }
}

/// `RssAnon:     1234 kB`, proc_pid_status(5).
fn field(status: &str, name: &str) -> Result<u64> {
    let value = |line: &str| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok();
    status.lines().find_map(value).map(|kib| kib << 10).with_context(|| format!("no {name} in the status"))
}

fn threads() -> Result<u64> {
    let tasks = std::fs::read_dir("/proc/self/task")?.flatten();
    // A thread that has ended meanwhile has no name, and does not count.
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    Ok(names.filter(|name| !name.starts_with("iou-")).count() as u64)
}

fn bytes_in(folder: &Path) -> Result<(u64, u64)> {
    let (mut length, mut allocated) = (0, 0);
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let found = entry?.metadata()?;
        length += found.len();
        // st_blocks counts 512 bytes, whatever the file system's blocks are: inode(7).
        allocated += found.blocks() * 512;
    }
    Ok((length, allocated))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_and_a_folder_are_seen() {
        let sample = Sample::take(Duration::ZERO, 0, Path::new("/proc/self/fdinfo")).expect("a sample");
        assert!(sample.anonymous_bytes > 0 && sample.threads > 0 && sample.descriptors > 2, "{sample:?}");
        assert!(field("VmRSS: 1 kB\nRssAnon:\t  12 kB\n", "RssAnon:").is_ok_and(|bytes| bytes == 12_288));
        assert!(field("VmRSS: 1 kB\n", "RssAnon:").is_err());
    }
}
