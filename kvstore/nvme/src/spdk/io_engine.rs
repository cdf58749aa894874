//! The contract of [`IoEngine`], clause by clause.

use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::Slab;
use kvstore_io::{Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Request, Waker};

use super::engine::{NAME, SpdkEngine, into_io};
use super::flow::completed;
use super::library::{DEALLOCATE, NAMESPACE_CAN_DEALLOCATE, NAMESPACE_CAN_FLUSH, Range};
use crate::NvmeError;
use crate::engine::describe;
use crate::wake::Pause;

impl IoEngine for SpdkEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        if self.registrations.contains(slab) {
            return Ok(());
        }
        let bytes = slab.mapped_bytes();
        let operation = format!("register a slab of {bytes} bytes");
        if self.registrations.is_full() {
            let limit = "16 slabs are registered";
            return Err(into_io(NvmeError::NoRoom { device: self.device.clone(), bytes, limit }, operation));
        }
        let start = slab.base().as_ptr();
        // SAFETY: `registrations` holds the slab until it is unregistered, and slabs are only accessed as memory that
        // others change.
        let errno = unsafe { (self.library.mem_register)(start.cast(), bytes) };
        if errno != 0 {
            let reason = format!(
                "spdk_mem_register: {}; many versions take whole 2 MiB pages only (reserve hugepages)",
                std::io::Error::from_raw_os_error(errno.saturating_abs())
            );
            return Err(IoError { engine: NAME, operation, kind: IoErrorKind::Unmapped, reason });
        }
        self.registrations.push(Arc::clone(slab), start.expose_provenance() as u64);
        Ok(())
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        if self.accepted == self.geometry.depth_max {
            return Err(Full(request));
        }
        let target = match (self.target(&request), &self.dead) {
            (Ok(_), Some(error)) => {
                Err(IoError { kind: IoErrorKind::Device, ..into_io(error.clone(), describe(&request)) })
            }
            (target, _) => target,
        };
        match target {
            Ok(target) => {
                let index = self.requests.insert(request, target).map_err(Full)?;
                self.pending.push_back(index);
                self.unflushed += 1;
            }
            Err(error) => {
                let Request { id, buffer, .. } = request;
                self.finished.push_back(Completion { id, buffer, result: Err(error) });
            }
        }
        self.accepted += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.unflushed = 0;
        self.issue();
        Ok(())
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.turn();
        let moved = self.finished.len().min(budget);
        completions.extend(self.finished.drain(..moved));
        self.accepted -= moved;
        moved
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.flush()?;
        let mut pause = Pause::new();
        loop {
            self.turn();
            if !self.finished.is_empty() || self.alarm.take() {
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
        self.accepted
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        let operation = format!("sync file {file}");
        if file as usize >= self.geometry.files.len() {
            let (kind, reason) = (IoErrorKind::Invalid, "there is no such file".to_owned());
            return Err(IoError { engine: NAME, operation, kind, reason });
        }
        let lost = |operation| {
            let (kind, reason) = (IoErrorKind::Device, crate::CACHE_LOST.to_owned());
            Err(IoError { engine: NAME, operation, kind, reason })
        };
        if std::mem::take(&mut self.cache_lost) {
            return lost(operation);
        }
        if self.flags & NAMESPACE_CAN_FLUSH == 0 && self.dead.is_none() {
            return Ok(());
        }
        let (was_dirty, resets) = (std::mem::take(&mut self.cache_dirty), self.resets);
        let flushed = self.run_blocking(&operation, |library, namespace, pair, word| {
            // SAFETY: namespace and queue pair are alive, and the word lives as long as the engine.
            unsafe { (library.flush)(namespace, pair, completed, word) }
        });
        if self.resets == resets {
            self.cache_dirty |= was_dirty && flushed.is_err();
            return flushed;
        }
        // The cache went with the reset; a flush that succeeded came after it and says nothing about those writes.
        self.cache_lost |= was_dirty;
        if flushed.is_ok() && std::mem::take(&mut self.cache_lost) {
            return lost(operation);
        }
        flushed
    }

    fn discard(&mut self, file: u32, offset: u64, bytes: u64) -> Result<bool, IoError> {
        let operation = format!("discard {bytes} bytes at {offset:#x} of file {file}");
        if let Err(reason) = self.geometry.check_range(file, offset, bytes) {
            let (kind, reason) = (IoErrorKind::Invalid, reason.to_owned());
            return Err(IoError { engine: NAME, operation, kind, reason });
        }
        if self.flags & NAMESPACE_CAN_DEALLOCATE == 0 {
            return Ok(false);
        }
        let block_bytes = self.block_bytes as u64;
        let (mut first, mut blocks) = (offset / block_bytes, bytes / block_bytes);
        while blocks > 0 {
            let count = blocks.min(u32::MAX.into());
            let range = Range { attributes: 0, blocks: count as u32, first };
            self.run_blocking(&operation, |library, namespace, pair, word| {
                // SAFETY: as in `sync`; SPDK copies the range.
                unsafe {
                    (library.deallocate)(namespace, pair, DEALLOCATE, &raw const range, 1, completed, word)
                }
            })?;
            (first, blocks) = (first + count, blocks - count);
        }
        Ok(true)
    }
}
