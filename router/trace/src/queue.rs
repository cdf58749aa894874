//! The queue between requests and the exporter: bounded and lock-free, with counters of the spans of finished traces.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::record::Record;

/// Counters of the spans of finished traces. A span in none of the three is still queued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Spans that a collector accepted.
    pub exported: u64,
    /// Spans dropped because the queue was full or closed, or left in it at the end.
    pub dropped: u64,
    /// Spans that a collector did not accept in time, or refused.
    pub failed: u64,
}

/// Shared by the tracer, its traces and the exporter's thread.
#[derive(Debug)]
pub(crate) struct Queue {
    records: ArrayQueue<Record>,
    is_closed: AtomicBool,
    exported: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

impl Queue {
    pub(crate) fn new(queue_max: usize) -> Self {
        Self {
            records: ArrayQueue::new(queue_max),
            is_closed: AtomicBool::new(false),
            exported: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    /// Queues a trace. Never waits: when the queue is full the trace is dropped and counted.
    pub(crate) fn push(&self, record: Record) {
        // Relaxed: a push that does not see the end yet is counted by `drop_rest`, or, just after that, not at all.
        if self.is_closed.load(Ordering::Relaxed) {
            self.count_dropped(record.span_count());
        } else if let Err(record) = self.records.push(record) {
            self.count_dropped(record.span_count());
        }
    }

    pub(crate) fn pop(&self) -> Option<Record> {
        self.records.pop()
    }

    /// Closes the queue: later traces are dropped.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Drops and counts the remaining traces.
    pub(crate) fn drop_rest(&self) {
        while let Some(record) = self.records.pop() {
            self.count_dropped(record.span_count());
        }
    }

    pub(crate) fn count_exported(&self, spans: usize) {
        self.exported.fetch_add(spans as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_failed(&self, spans: usize) {
        self.failed.fetch_add(spans as u64, Ordering::Relaxed);
    }

    fn count_dropped(&self, spans: usize) {
        self.dropped.fetch_add(spans as u64, Ordering::Relaxed);
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            exported: self.exported.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }
}
