//! The thread that writes the audit log.
//!
//! Lines are made by the thread of the request and written by one thread here; when the channel is full
//! they are dropped and counted. The file is opened for appending and each flush is one `write` of whole
//! lines, so that a rotated or shared file has no torn lines. Rotation: rename the file, then call
//! [`AuditLog::reopen`], for example from a handler of SIGHUP. When writing fails, the lines are counted as
//! lost and the file is opened again with the next ones.
//!
//! Per request: about 1.2 µs and two allocations for the line, and one push into the channel; no lock, no system call.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::AuditRecord;
use crate::error::Error;

/// Lines that may be queued for the disk: at 500 bytes a line, 8 MiB.
pub const AUDIT_QUEUE_MAX: usize = 16_384;
/// Bytes that are written at once.
const BATCH_BYTES: usize = 64 << 10;
/// Interval at which an idle thread checks for a reopen request.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// File mode: the owner writes, its group reads, all other users have no access.
const MODE: u32 = 0o640;

/// Counters of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AuditCounters {
    /// Lines written.
    pub written: u64,
    /// Lines dropped because the channel was full.
    pub dropped: u64,
    /// Lines lost because writing failed.
    pub lost: u64,
}

#[derive(Debug, Default)]
struct Shared {
    is_reopening: AtomicBool,
    written: AtomicU64,
    dropped: AtomicU64,
    lost: AtomicU64,
}

/// An open audit log. Dropping it writes the queued lines and closes the file.
#[derive(Debug)]
pub struct AuditLog {
    /// `None` only while the log is dropped.
    lines: Option<Sender<String>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl AuditLog {
    /// Opens a log, at the end of the file if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::Audit`] when the file cannot be opened or the thread not be started.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        Self::with_queue(path.into(), AUDIT_QUEUE_MAX)
    }

    fn with_queue(path: PathBuf, queue_max: usize) -> Result<Self, Error> {
        let failed = |source| Error::Audit { path: path.clone(), source };
        let file = open(&path).map_err(failed)?;
        let (lines, received) = bounded(queue_max);
        let shared = Arc::new(Shared::default());
        let writer = Writer {
            path: path.clone(),
            file: Some(file),
            lines: received,
            shared: Arc::clone(&shared),
            batch: Vec::with_capacity(BATCH_BYTES),
            batch_lines: 0,
        };
        let thread = std::thread::Builder::new().name("audit-log".to_owned()).spawn(move || writer.run());
        Ok(Self { lines: Some(lines), shared, thread: Some(thread.map_err(failed)?) })
    }

    /// Logs a request; true when its line was queued, false when it was dropped.
    pub fn log(&self, record: &AuditRecord<'_>) -> bool {
        let is_queued = self.lines.as_ref().is_some_and(|lines| {
            // A line is not serialized only to be dropped.
            !lines.is_full() && lines.try_send(record.to_line()).is_ok()
        });
        if !is_queued {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
        is_queued
    }

    /// Has the writer reopen the file shortly: call it after a rotation. Never blocks.
    pub fn reopen(&self) {
        // Release: pairs with the acquire of the writer, so that the writer sees the rename.
        self.shared.is_reopening.store(true, Ordering::Release);
    }

    /// Returns the counters of lines.
    #[must_use]
    pub fn counters(&self) -> AuditCounters {
        AuditCounters {
            written: self.shared.written.load(Ordering::Relaxed),
            dropped: self.shared.dropped.load(Ordering::Relaxed),
            lost: self.shared.lost.load(Ordering::Relaxed),
        }
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        drop(self.lines.take());
        if let Some(thread) = self.thread.take() {
            // A writer that panicked has no more lines to write.
            let _ = thread.join();
        }
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(MODE).open(path)
}

struct Writer {
    path: PathBuf,
    /// `None` after a failure, and until the file is reopened.
    file: Option<File>,
    lines: Receiver<String>,
    shared: Arc<Shared>,
    batch: Vec<u8>,
    batch_lines: u64,
}

impl Writer {
    fn run(mut self) {
        loop {
            let first = self.lines.recv_timeout(CHECK_INTERVAL);
            // Acquire: pairs with the release of `reopen`.
            if self.shared.is_reopening.swap(false, Ordering::Acquire) {
                self.file = None;
            }
            match first {
                Ok(line) => self.add(&line),
                Err(RecvTimeoutError::Timeout) => {
                    // The new file is created now, and not only with the next request.
                    self.file();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
            while self.batch.len() < BATCH_BYTES {
                let Ok(line) = self.lines.try_recv() else { break };
                self.add(&line);
            }
            self.write();
        }
    }

    fn add(&mut self, line: &str) {
        self.batch.extend_from_slice(line.as_bytes());
        self.batch_lines += 1;
    }

    fn file(&mut self) -> Option<&mut File> {
        if self.file.is_none() {
            self.file = open(&self.path).ok();
        }
        self.file.as_mut()
    }

    fn write(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        let is_written = self.file().is_some_and(|file| file.write_all(&batch).is_ok());
        if !is_written {
            self.file = None;
        }
        let counter = if is_written { &self.shared.written } else { &self.shared.lost };
        counter.fetch_add(self.batch_lines, Ordering::Relaxed);
        self.batch = batch;
        self.batch.clear();
        self.batch_lines = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A directory that is removed after the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvasir-audit-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn record(request_id: &str) -> AuditRecord<'_> {
        AuditRecord { request_id, surface: "chat", status: 200, ..AuditRecord::default() }
    }

    fn until(condition: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < end, "it did not happen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn lines_are_written_in_order_and_appended() {
        let folder = Folder::new("order");
        let path = folder.0.join("audit.jsonl");
        for half in 0..2 {
            let log = AuditLog::open(&path).expect("open");
            for number in 0..500 {
                assert!(log.log(&record(&format!("{}", half * 500 + number))));
            }
        }
        let text = std::fs::read_to_string(&path).expect("written when dropped");
        let ids: Vec<String> = text
            .lines()
            .map(|line| {
                serde_json::from_str::<serde_json::Value>(line).expect("JSON")["request_id"].to_string()
            })
            .collect();
        assert_eq!(ids, (0..1000).map(|number| format!("\"{number}\"")).collect::<Vec<_>>());
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o007, 0);
    }

    #[test]
    fn a_rotated_file_is_left_and_a_new_one_begun() {
        let folder = Folder::new("rotate");
        let (path, old) = (folder.0.join("audit.jsonl"), folder.0.join("audit.jsonl.1"));
        let log = AuditLog::open(&path).expect("open");
        log.log(&record("before"));
        until(|| log.counters().written == 1);
        std::fs::rename(&path, &old).expect("rename");
        log.reopen();
        until(|| path.exists());
        log.log(&record("after"));
        drop(log);
        let read = |path| std::fs::read_to_string(path).expect("there");
        assert!(read(&old).contains("before") && !read(&old).contains("after"));
        assert!(read(&path).contains("after") && !read(&path).contains("before"));
    }

    #[test]
    fn a_full_queue_drops_and_a_failing_disk_loses_and_both_are_counted() {
        let log = AuditLog::with_queue("/dev/full".into(), 4).expect("open");
        let queued = (0..2000).filter(|_| log.log(&record("x"))).count() as u64;
        until(|| log.counters().lost == queued);
        assert_eq!(log.counters(), AuditCounters { written: 0, dropped: 2000 - queued, lost: queued });
        assert!(queued >= 4);
        assert!(AuditLog::open("/nowhere/audit.jsonl").is_err());
    }
}
