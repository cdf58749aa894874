//! The contract of [`IoEngine`], clause by clause.

use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::Slab;
use kvstore_io::{Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Request, Waker};

use super::NvmeEngine;
use crate::bus::Bus;
use crate::command::Command;
use crate::recovery::Health;
use crate::request_queue::describe;
use crate::volatile_cache::LOST;
use crate::wake::Backoff;
use crate::{ENGINE_NAME, NvmeError};

impl<B: Bus> IoEngine for NvmeEngine<B> {
    fn name(&self) -> &'static str {
        ENGINE_NAME
    }

    fn geometry(&self) -> &Geometry {
        &self.queue.geometry
    }

    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        if self.queue.registrations.contains(slab) {
            return Ok(());
        }
        let bytes = slab.mapped_bytes();
        let operation = || format!("register a slab of {bytes} bytes");
        if self.queue.registrations.is_full() {
            let device = self.controller.bus.device().to_owned();
            let error = NvmeError::NoRoom { device, bytes, limit: "16 slabs are registered" };
            return Err(error.into_io(operation()));
        }
        // SAFETY: `registrations` holds the slab until this engine has unmapped it, and slabs are only accessed
        // as memory that may change concurrently.
        let mapped = unsafe { self.controller.bus.map(slab.base(), bytes) };
        let address =
            mapped.map_err(|error| IoError { kind: IoErrorKind::Unmapped, ..error.into_io(operation()) })?;
        self.queue.registrations.push(Arc::clone(slab), address);
        Ok(())
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        self.queue.submit(request, |request| match &self.health {
            Health::Failed(error) => Some(error.clone().into_io(describe(request))),
            _ => None,
        })
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.queue.flush();
        self.issue();
        Ok(())
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.turn(budget);
        self.queue.hand_back(budget, completions)
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.flush()?;
        let mut pause = Backoff::new();
        loop {
            if self.has_completions() || self.alarm.take() {
                return Ok(());
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
                return Ok(());
            }
            let left = until.map(|until| until.duration_since(now));
            if self.commands_in_flight() == 0 && self.health.is_stable() {
                self.alarm.sleep(left);
                continue;
            }
            self.watch(now);
            if let Some(length) = pause.next(now) {
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
        if !self.identity.has_volatile_cache {
            return match &self.health {
                Health::Failed(error) => Err(error.clone().into_io(operation)),
                _ => Ok(()),
            };
        }
        self.cache.begin_flush();
        let flushed = self.run_blocking(&operation, Command::flush(self.namespace.id));
        if self.cache.end_flush(flushed.is_ok()) {
            return Err(self.queue.error(IoErrorKind::Device, operation, LOST));
        }
        flushed
    }
}
