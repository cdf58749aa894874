//! The contract of [`IoEngine`], clause by clause.

use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::Slab;
use kvstore_io::{Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Request, Waker};

use super::engine::{NAME, SpdkEngine, dead, into_io};
use super::flow::completed;
use super::library::NAMESPACE_CAN_FLUSH;
use super::registration::{self, Refused};
use crate::NvmeError;
use crate::request_queue::describe;
use crate::volatile_cache::LOST;
use crate::wake::Backoff;

impl IoEngine for SpdkEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn geometry(&self) -> &Geometry {
        &self.queue.geometry
    }

    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        if self.queue.registrations.contains(slab) {
            return Ok(());
        }
        let bytes = slab.mapped_bytes();
        let operation = format!("register a slab of {bytes} bytes");
        if self.queue.registrations.is_full() {
            let limit = "16 slabs are registered";
            return Err(into_io(NvmeError::NoRoom { device: self.device.clone(), bytes, limit }, operation));
        }
        let start = slab.base().as_ptr();
        // SAFETY: `registrations` holds the slab until it is unregistered, and slabs are only accessed as
        // memory that may change concurrently.
        if let Err(refused) = unsafe { registration::register(&self.library, start, bytes) } {
            let Refused { reason, is_mapped } = refused;
            if is_mapped {
                // The device can still reach the memory: it must never be reused.
                std::mem::forget(Arc::clone(slab));
            }
            return Err(IoError { engine: NAME, operation, kind: IoErrorKind::Unmapped, reason });
        }
        self.queue.registrations.push(Arc::clone(slab), start.expose_provenance() as u64);
        Ok(())
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        self.queue.submit(request, |request| Some(dead(self.dead.as_ref()?, describe(request))))
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.queue.flush();
        self.issue();
        Ok(())
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.turn();
        self.queue.hand_back(budget, completions)
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.flush()?;
        let mut pause = Backoff::new();
        loop {
            self.turn();
            if !self.queue.finished.is_empty() || self.alarm.take() {
                return Ok(());
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
                return Ok(());
            }
            let left = until.map(|until| until.duration_since(now));
            if self.commands.count() == 0 {
                self.alarm.sleep(left);
            } else if let Some(length) = pause.next(now) {
                self.watch(now);
                self.alarm.sleep(Some(left.map_or(length, |left| left.min(length))));
            }
        }
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.alarm.clone()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        let operation = self.queue.check_sync(file)?;
        if self.cache.take_loss() {
            return Err(self.queue.error(IoErrorKind::Device, operation, LOST));
        }
        if self.flags & NAMESPACE_CAN_FLUSH == 0 && self.dead.is_none() {
            return Ok(());
        }
        self.cache.begin_flush();
        let flushed = self.run_blocking(&operation, |library, namespace, pair, word| {
            // SAFETY: namespace and queue pair are alive, and the word lives as long as the engine.
            unsafe { (library.flush)(namespace, pair, completed, word) }
        });
        if self.cache.end_flush(flushed.is_ok()) {
            return Err(self.queue.error(IoErrorKind::Device, operation, LOST));
        }
        flushed
    }
}
