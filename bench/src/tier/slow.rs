//! An I/O engine that delays another engine's completions to a given latency and bandwidth.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::Slab;
use kvstore_io::{Completion, Full, Geometry, IoEngine, IoError, Request, Waker};

pub(super) struct SlowEngine<E> {
    inner: E,
    latency: Duration,
    bytes_per_s: f64,
    /// Time at which the device has finished all requests submitted so far.
    busy_until: Instant,
    /// Completions not reported yet, in order of their times.
    completed: std::collections::VecDeque<(Instant, Completion)>,
    /// Completion time of each request in flight.
    due: std::collections::HashMap<u64, Instant>,
}

impl<E: IoEngine> SlowEngine<E> {
    pub(super) fn new(inner: E, latency: Duration, bytes_per_s: f64) -> Self {
        Self {
            inner,
            latency,
            bytes_per_s,
            busy_until: Instant::now(),
            completed: std::collections::VecDeque::new(),
            due: std::collections::HashMap::new(),
        }
    }

    fn collect(&mut self) {
        let mut completions = Vec::new();
        self.inner.poll(usize::MAX, &mut completions);
        for completion in completions {
            let due = self.due.remove(&completion.id).unwrap_or_else(Instant::now);
            self.completed.push_back((due, completion));
        }
    }
}

impl<E: IoEngine> IoEngine for SlowEngine<E> {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        self.inner.register(slab)
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        let (id, bytes) = (request.id, request.buffer.len());
        self.inner.submit(request)?;
        let now = Instant::now();
        // Transfers share the bandwidth; latencies overlap.
        let transfer = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        self.busy_until = self.busy_until.max(now) + transfer;
        self.due.insert(id, self.busy_until + self.latency);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.inner.flush()
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.collect();
        let now = Instant::now();
        let mut given = 0;
        while given < budget && self.completed.front().is_some_and(|(due, _)| *due <= now) {
            completions.extend(self.completed.pop_front().map(|(_, completion)| completion));
            given += 1;
        }
        given
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.collect();
        let next = self.completed.front().map(|(due, _)| *due);
        let until = [until, next].into_iter().flatten().min();
        if until.is_some_and(|until| until <= Instant::now()) {
            return Ok(());
        }
        self.inner.wait(until)
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.inner.waker()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.completed.len()
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        self.inner.sync(file)
    }
}
