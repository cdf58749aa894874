//! Configuration of an enabled controller: identify, number of queues, creation of the queues.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Controller, Identities, Stage};
use crate::NvmeError;
use crate::bus::Bus;
use crate::command::Command;
use crate::identify::{ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity};
use crate::layout::IDENTIFY;
use crate::queue_pair::{CompletionEntry, QueuePair};

/// Step of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    IdentifyController,
    IdentifyNamespace,
    QueueCount,
    CompletionQueue(usize),
    SubmissionQueue(usize),
}

impl<B: Bus> Controller<B> {
    pub(super) fn begin(&mut self, step: Step, now: Instant) {
        let identify = self.memory_address + IDENTIFY as u64;
        let queue = |pair: usize, pick: fn((usize, usize)) -> usize| {
            (
                pair as u16 + 1,
                self.layout.entries,
                self.memory_address + pick(self.layout.queues(pair)) as u64,
            )
        };
        let command = match step {
            Step::IdentifyController => Command::identify(1, 0, identify),
            Step::IdentifyNamespace => Command::identify(0, self.namespace, identify),
            Step::QueueCount => Command::set_queue_count(self.queue_pairs),
            Step::CompletionQueue(pair) => {
                let (id, entries, address) = queue(pair, |queues| queues.1);
                Command::create_completion_queue(id, entries, address)
            }
            Step::SubmissionQueue(pair) => {
                let (id, entries, address) = queue(pair, |queues| queues.0);
                Command::create_submission_queue(id, entries, address)
            }
        };
        if matches!(step, Step::IdentifyController | Step::IdentifyNamespace) {
            self.memory.clear(IDENTIFY, IDENTIFY_BYTES);
        }
        self.admin_submit(&command);
        self.stage = Stage::Configuring(step);
        self.deadline = now + self.admin_timeout;
    }

    pub(super) fn finish(
        &mut self,
        step: Step,
        completion: CompletionEntry,
        now: Instant,
    ) -> Result<(), NvmeError> {
        if !completion.status.is_success() {
            let device = self.bus.device().to_owned();
            return Err(NvmeError::Command { device, operation: step.name(), status: completion.status });
        }
        match step {
            Step::IdentifyController => {
                self.controller = Some(ControllerIdentity::parse(&self.identify_bytes()));
                self.begin(Step::IdentifyNamespace, now);
            }
            Step::IdentifyNamespace => {
                self.compare_found()?;
                self.begin(Step::QueueCount, now);
            }
            Step::QueueCount => {
                self.make_pairs(completion.result)?;
                self.begin(Step::CompletionQueue(0), now);
            }
            Step::CompletionQueue(pair) => self.begin(Step::SubmissionQueue(pair), now),
            Step::SubmissionQueue(pair) if pair + 1 < self.pairs.len() => {
                self.begin(Step::CompletionQueue(pair + 1), now);
            }
            Step::SubmissionQueue(_) => self.stage = Stage::Ready,
        }
        Ok(())
    }

    fn compare_found(&mut self) -> Result<(), NvmeError> {
        let namespace = NamespaceIdentity::parse(self.bus.device(), self.namespace, &self.identify_bytes())?;
        let Some(controller) = self.controller.clone() else { return Ok(()) };
        let found = Identities { controller, namespace };
        match &self.found {
            Some(before) if *before != found => {
                let what = "after a reset it is another controller or namespace than before".to_owned();
                Err(NvmeError::Protocol { device: self.bus.device().to_owned(), what })
            }
            _ => {
                self.found = Some(found);
                Ok(())
            }
        }
    }

    /// Makes the queue pairs that the controller granted: the smaller of the two numbers in `granted`, which
    /// count from zero. Later starts make as many as the first: the engine's tables have that size.
    fn make_pairs(&mut self, granted: u32) -> Result<(), NvmeError> {
        let granted = (granted & 0xffff).min(granted >> 16) as usize + 1;
        if self.pairs.len() > granted {
            let what = format!("after a reset it grants {granted} queue pairs of {}", self.pairs.len());
            return Err(NvmeError::Protocol { device: self.bus.device().to_owned(), what });
        }
        if self.pairs.is_empty() {
            for pair in 0..granted.min(self.queue_pairs.into()) {
                let queues = self.layout.queues(pair);
                let pair = QueuePair::new(pair as u16 + 1, self.layout.entries, queues, self.stride_bytes);
                if pair.registers_end() > self.bus.register_bytes() {
                    let what = format!("its registers have no room for the doorbells of queue {}", pair.id);
                    return Err(NvmeError::Unsupported { device: self.bus.device().to_owned(), what });
                }
                self.pairs.push(pair);
            }
        }
        Ok(())
    }

    fn identify_bytes(&self) -> [u8; IDENTIFY_BYTES] {
        let mut bytes = [0; IDENTIFY_BYTES];
        for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
            let word = self.memory.word(IDENTIFY + 4 * index).load(Ordering::Relaxed);
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl Step {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::IdentifyController => "identify controller",
            Self::IdentifyNamespace => "identify namespace",
            Self::QueueCount => "set features (number of queues)",
            Self::CompletionQueue(_) => "create I/O completion queue",
            Self::SubmissionQueue(_) => "create I/O submission queue",
        }
    }
}
