//! The contract of [`IoEngine`] with the faults in between.

use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::Slab;

use super::{FaultyEngine, Held, NAME, gone};
use crate::{Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Operation, Request, Waker};

impl<E: IoEngine> IoEngine for FaultyEngine<E> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        self.inner.register(slab)
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        if self.in_flight() >= self.geometry().depth_max {
            return Err(Full(request));
        }
        if let Err(reason) = self.geometry().check(&request) {
            let result = Err(IoError::invalid(NAME, &request, reason));
            self.hold(Completion { id: request.id, buffer: request.buffer, result }, None);
            return Ok(());
        }
        if self.random.chance(self.faults.device_gone) {
            self.gone = true;
        }
        if self.gone {
            self.counters.device_gone += 1;
            self.fail(request, IoErrorKind::Device, "the device is gone");
            return Ok(());
        }
        match request.operation {
            Operation::Read => self.start_read(request),
            Operation::Write => self.start_write(request),
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.inner.flush()
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.advance();
        self.held.iter_mut().for_each(|held| held.polls = held.polls.saturating_sub(1));
        let mut count = 0;
        while count < budget {
            let due = |held: &Held| held.polls == 0;
            let dues = self.held.iter().filter(|held| due(held)).count() as u64;
            let nth = if self.faults.reorder { self.random.below(dues) } else { 0 };
            let found = self.held.iter().enumerate().filter(|(_, held)| due(held)).nth(nth as usize);
            let Some((index, _)) = found else { break };
            let Held { completion, record, .. } = self.held.remove(index);
            if let Some(record) = self.unsynced.iter_mut().find(|known| Some(known.number) == record) {
                record.completed = completion.result.is_ok();
            }
            completions.push(completion);
            count += 1;
        }
        count
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        if self.held.is_empty() {
            return self.inner.wait(until);
        }
        // Only the next calls of `poll` release held completions.
        self.inner.flush()
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.inner.waker()
    }

    fn in_flight(&self) -> usize {
        self.under_way.len() + self.held.len()
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        if self.gone {
            return Err(gone());
        }
        self.inner.sync(file)?;
        self.unsynced.retain(|record| record.file != file || !record.completed);
        Ok(())
    }
}
