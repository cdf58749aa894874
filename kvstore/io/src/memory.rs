//! An engine over memory, for tests: fast, deterministic, with contents that outlive it.
//!
//! Requests are carried out by `flush`, in order, and complete in that order. No allocation per request once
//! the queues have their size.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dataplane_memory::Slab;

use crate::{
    Buffer, Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Operation, Parking, Request, Waker,
};

const NAME: &str = "memory";

/// Files of a [`MemoryEngine`]: clones share their bytes, so that an engine can be opened again over them.
#[derive(Debug, Clone)]
pub struct MemoryFiles(Arc<Mutex<Vec<Vec<u8>>>>);

impl MemoryFiles {
    /// Returns files full of zeros.
    #[must_use]
    pub fn new(sizes: &[usize]) -> Self {
        Self(Arc::new(Mutex::new(sizes.iter().map(|&bytes| vec![0; bytes]).collect())))
    }

    /// Locks the bytes of the files, to inspect or to damage them; engines over the files block meanwhile.
    pub fn bytes(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An engine over [`MemoryFiles`].
pub struct MemoryEngine {
    files: MemoryFiles,
    geometry: Geometry,
    queued: VecDeque<Request>,
    ready: VecDeque<Completion>,
    parking: Arc<Parking>,
}

impl MemoryEngine {
    /// Returns an engine over these files. `block_bytes` must be a power of two.
    ///
    /// # Panics
    /// When `block_bytes` is not a power of two.
    #[must_use]
    pub fn new(files: &MemoryFiles, block_bytes: usize, transfer_bytes_max: usize, depth_max: usize) -> Self {
        assert!(block_bytes.is_power_of_two());
        let sizes = files.bytes().iter().map(|bytes| bytes.len() as u64).collect();
        Self {
            files: files.clone(),
            geometry: Geometry { block_bytes, transfer_bytes_max, depth_max, files: sizes },
            queued: VecDeque::with_capacity(depth_max),
            ready: VecDeque::with_capacity(depth_max),
            parking: Arc::default(),
        }
    }
}

fn perform(files: &mut [Vec<u8>], mut request: Request) -> Completion {
    let start = request.offset as usize;
    let range = &mut files[request.file as usize][start..start + request.buffer.len()];
    match (&mut request.buffer, request.operation) {
        (Buffer::Slot { slot, offset, .. }, Operation::Read) => {
            slot.slab().write(slot.slot(), *offset, range)
        }
        (Buffer::Slot { slot, offset, .. }, Operation::Write) => {
            slot.slab().read(slot.slot(), *offset, range)
        }
        (Buffer::Pages(pages), Operation::Read) => pages.copy_from_slice(range),
        (Buffer::Pages(pages), Operation::Write) => range.copy_from_slice(pages),
    }
    Completion { id: request.id, buffer: request.buffer, result: Ok(()) }
}

impl IoEngine for MemoryEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn register(&mut self, _slab: &Arc<Slab>) -> Result<(), IoError> {
        Ok(())
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        if self.in_flight() >= self.geometry.depth_max {
            return Err(Full(request));
        }
        match self.geometry.check(&request) {
            Ok(_) => self.queued.push_back(request),
            Err(reason) => {
                let result = Err(IoError::invalid(NAME, &request, reason));
                self.ready.push_back(Completion { id: request.id, buffer: request.buffer, result });
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        let mut files = self.files.bytes();
        self.ready.extend(self.queued.drain(..).map(|request| perform(&mut files, request)));
        Ok(())
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        let count = budget.min(self.ready.len());
        completions.extend(self.ready.drain(..count));
        count
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.flush()?;
        if self.ready.is_empty() {
            self.parking.sleep(until);
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(&self.parking) as Arc<dyn Waker>
    }

    fn in_flight(&self) -> usize {
        self.queued.len() + self.ready.len()
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        self.geometry.check_range(file, 0, 0).map_err(|reason| IoError {
            engine: NAME,
            operation: format!("sync file {file}"),
            kind: IoErrorKind::Invalid,
            reason: reason.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Conformance, conformance};

    #[test]
    fn keeps_the_contract() {
        for (block, sizes) in [(512, vec![3 << 20]), (4096, vec![2 << 20, (1 << 20) + 4096, 1 << 20])] {
            let files = MemoryFiles::new(&sizes);
            let mut open = || Box::new(MemoryEngine::new(&files, block, 256 << 10, 33)) as Box<dyn IoEngine>;
            conformance(&mut open, &Conformance { seed: 7 + block as u64, ..Conformance::default() });
        }
    }
}
