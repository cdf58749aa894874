//! State machine of the controller: disabled, enabled, queues created; the same again after a failure.
//!
//! Start and restart share it, in steps that never wait ([`Controller::advance`]): the engine's `poll` must
//! return at once even while a reset takes seconds. Order and bounds are those of the Base Specification 2.0,
//! 3.5.1 (initialisation), 3.6 (shutdown), 3.7.2 (reset); `CAP.TO` bounds enabling and disabling.
//!
//! Once [`Controller::is_quiet`] after [`Controller::restart`], the controller has dropped every command and accesses
//! no memory, so that buffers can be given back.

mod configure;

use std::time::{Duration, Instant};

use crate::bus::Bus;
use crate::command::Command;
use crate::dma::DmaMemory;
use crate::identify::{ControllerIdentity, NamespaceIdentity};
use crate::layout::{ADMIN_COMPLETION, ADMIN_ENTRIES, ADMIN_SUBMISSION, Layout};
use crate::queue_pair::{CompletionEntry, QueuePair};
use crate::registers::{self, Capabilities, ControllerStatus};
use crate::{NvmeConfig, NvmeError};
use configure::Step;

/// Maximum duration of a shutdown; the controller's own value (RTD3E) is at most this on the drives known.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between reads of a register, where waiting is allowed.
const LOOK_PAUSE: Duration = Duration::from_micros(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Disabling,
    Enabling,
    /// The command of this step is in the admin queue.
    Configuring(Step),
    Ready,
}

/// Identities read at the first start. A later start must read the same, or offsets would mean other bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identities {
    pub(crate) controller: ControllerIdentity,
    pub(crate) namespace: NamespaceIdentity,
}

pub(crate) struct Controller<B: Bus> {
    pub(crate) bus: B,
    pub(crate) memory: DmaMemory,
    /// Address of the memory for the device.
    pub(crate) memory_address: u64,
    pub(crate) layout: Layout,
    /// The I/O queue pairs; empty until the controller said how many it grants.
    pub(crate) pairs: Vec<QueuePair>,
    admin: QueuePair,
    admin_id: u16,
    admin_timeout: Duration,
    namespace: u32,
    queue_pairs: u16,
    timeout: Duration,
    stride_bytes: usize,
    stage: Stage,
    deadline: Instant,
    controller: Option<ControllerIdentity>,
    found: Option<Identities>,
}

impl<B: Bus> Controller<B> {
    /// Checks that the controller can be driven and maps the memory. Nothing is written to the device.
    pub(crate) fn new(mut bus: B, config: &NvmeConfig) -> Result<Self, NvmeError> {
        let device = bus.device().to_owned();
        if bus.register_bytes() < registers::DOORBELLS + 8 {
            return Err(NvmeError::Unsupported {
                device,
                what: "its registers are too few for NVMe".to_owned(),
            });
        }
        let low = bus.read(registers::CAP);
        let capabilities = Capabilities(u64::from(low) | u64::from(bus.read(registers::CAP + 4)) << 32);
        if capabilities.0 == u64::MAX {
            return Err(NvmeError::Removed { device });
        }
        let unsupported =
            |what: &str| NvmeError::Unsupported { device: device.clone(), what: what.to_owned() };
        if !capabilities.has_nvm_command_set() {
            return Err(unsupported("the controller has no NVM command set"));
        }
        if capabilities.page_bytes_min() != 4096 {
            return Err(unsupported("the controller has no 4 KiB memory pages"));
        }
        let entries = u32::from(config.queue_entries).min(capabilities.queue_entries_max()) as u16;
        if entries < 2 {
            return Err(unsupported("the controller's queues have one entry"));
        }
        let stride_bytes = capabilities.doorbell_stride_bytes();
        let layout = Layout::new(config, entries);
        let memory = DmaMemory::allocate(layout.bytes)?;
        // SAFETY: the memory belongs to this value, which unmaps it before it frees it, and is accessed as memory that
        // a device changes.
        let memory_address = unsafe { bus.map(memory.start(), memory.bytes()) }?;
        let admin = QueuePair::new(0, ADMIN_ENTRIES, (ADMIN_SUBMISSION, ADMIN_COMPLETION), stride_bytes);
        let now = Instant::now();
        Ok(Self {
            bus,
            memory,
            memory_address,
            layout,
            pairs: Vec::new(),
            admin,
            admin_id: 0,
            admin_timeout: config.admin_timeout,
            namespace: config.namespace,
            queue_pairs: config.queue_pairs,
            timeout: capabilities.timeout(),
            stride_bytes,
            stage: Stage::Disabling,
            deadline: now,
            controller: None,
            found: None,
        })
    }

    /// Identities of controller and namespace; `None` until the controller was first ready.
    pub(crate) fn found(&self) -> Option<&Identities> {
        self.found.as_ref()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.stage == Stage::Ready
    }

    /// Whether a restart has passed disabling, so that the controller no longer accesses memory of earlier
    /// commands.
    pub(crate) fn is_quiet(&self) -> bool {
        self.stage != Stage::Disabling
    }

    /// Returns CSTS, or an error when the device was removed.
    pub(crate) fn status(&self) -> Result<ControllerStatus, NvmeError> {
        let status = ControllerStatus(self.bus.read(registers::CSTS));
        if status.is_removed() {
            return Err(NvmeError::Removed { device: self.bus.device().to_owned() });
        }
        Ok(status)
    }

    /// Like [`Self::status`], but a fatal status is an error too.
    pub(crate) fn healthy_status(&self) -> Result<ControllerStatus, NvmeError> {
        let status = self.status()?;
        if status.is_fatal() {
            return Err(NvmeError::Fatal { device: self.bus.device().to_owned(), status: status.0 });
        }
        Ok(status)
    }

    /// Begins to disable the controller; [`Self::advance`] continues from there until it is ready.
    pub(crate) fn restart(&mut self, now: Instant) {
        let configuration = self.bus.read(registers::CC);
        self.bus.write(registers::CC, configuration & !(registers::CC_ENABLE | registers::CC_SHUTDOWN_MASK));
        self.stage = Stage::Disabling;
        self.deadline = now + self.timeout;
    }

    /// Takes the next step if it can be taken now. An error means that the controller cannot be made ready this
    /// way.
    pub(crate) fn advance(&mut self, now: Instant) -> Result<(), NvmeError> {
        match self.stage {
            Stage::Ready => Ok(()),
            Stage::Disabling if self.status()?.is_ready() => self.in_time(now, self.timeout, "disable"),
            Stage::Disabling => {
                self.enable(now);
                Ok(())
            }
            Stage::Enabling if !self.healthy_status()?.is_ready() => {
                self.in_time(now, self.timeout, "enable")
            }
            Stage::Enabling => {
                self.begin(Step::IdentifyController, now);
                Ok(())
            }
            Stage::Configuring(step) => {
                self.healthy_status()?;
                match self.admin_completion()? {
                    Some(completion) => self.finish(step, completion, now),
                    None => self.in_time(now, self.admin_timeout, step.name()),
                }
            }
        }
    }

    /// Restarts the controller and waits until it is ready. Blocks; for start-up.
    pub(crate) fn run_to_ready(&mut self) -> Result<(), NvmeError> {
        self.restart(Instant::now());
        while !self.is_ready() {
            let stage = self.stage;
            self.advance(Instant::now())?;
            if self.stage == stage {
                std::thread::sleep(LOOK_PAUSE);
            }
        }
        Ok(())
    }

    fn in_time(&self, now: Instant, limit: Duration, operation: &'static str) -> Result<(), NvmeError> {
        if now < self.deadline {
            return Ok(());
        }
        let (device, waited_ms) = (self.bus.device().to_owned(), limit.as_millis() as u64);
        Err(NvmeError::Timeout { device, operation, waited_ms })
    }

    fn enable(&mut self, now: Instant) {
        self.admin.reset(&self.memory);
        for pair in &mut self.pairs {
            pair.reset(&self.memory);
        }
        let last = u32::from(ADMIN_ENTRIES) - 1;
        self.bus.write(registers::AQA, last << 16 | last);
        for (register, offset) in [(registers::ASQ, ADMIN_SUBMISSION), (registers::ACQ, ADMIN_COMPLETION)] {
            let address = self.memory_address + offset as u64;
            self.bus.write(register, address as u32);
            self.bus.write(register + 4, (address >> 32) as u32);
        }
        self.bus.write(registers::CC, registers::CC_RUN);
        self.stage = Stage::Enabling;
        self.deadline = now + self.timeout;
    }

    /// At most one admin command is in flight.
    fn admin_submit(&mut self, command: &Command) {
        self.admin_id = self.admin_id.wrapping_add(1);
        self.admin.push(&self.memory, &command.with_id(self.admin_id));
        self.admin.ring_tail(&self.bus);
    }

    fn admin_completion(&mut self) -> Result<Option<CompletionEntry>, NvmeError> {
        let Some(completion) = self.admin.pop(&self.memory) else { return Ok(None) };
        self.admin.ring_head(&self.bus);
        if completion.id != self.admin_id {
            let what = format!("it completed admin command {}, not {}", completion.id, self.admin_id);
            return Err(NvmeError::Protocol { device: self.bus.device().to_owned(), what });
        }
        Ok(Some(completion))
    }

    /// Submits an abort of a command of the pair with this index. Only when ready.
    pub(crate) fn abort(&mut self, pair: usize, id: u16) {
        self.admin_submit(&Command::abort(pair as u16 + 1, id));
    }

    /// Result of the abort: `None` without an answer yet, else whether the command was aborted.
    pub(crate) fn abort_answer(&mut self) -> Result<Option<bool>, NvmeError> {
        let answer = self.admin_completion()?;
        Ok(answer.map(|completion| completion.status.is_success() && completion.result & 1 == 0))
    }

    /// Tells the controller to prepare for loss of power: it writes its cache back. Blocks for a bounded time.
    fn shut_down(&mut self) {
        let wait = |controller: &Self, limit: Duration, over: fn(ControllerStatus) -> bool| {
            let until = Instant::now() + limit;
            while Instant::now() < until && !controller.status().map_or(true, over) {
                std::thread::sleep(LOOK_PAUSE);
            }
        };
        let configuration = self.bus.read(registers::CC);
        if configuration == registers::ALL_ONES {
            return;
        }
        if configuration & registers::CC_ENABLE != 0 {
            let without = configuration & !registers::CC_SHUTDOWN_MASK;
            self.bus.write(registers::CC, without | registers::CC_SHUTDOWN_NORMAL);
            wait(self, SHUTDOWN_TIMEOUT, |status| status.is_shut_down() || status.is_fatal());
        }
        let configuration = self.bus.read(registers::CC);
        self.bus.write(registers::CC, configuration & !(registers::CC_ENABLE | registers::CC_SHUTDOWN_MASK));
        wait(self, self.timeout, |status| !status.is_ready());
    }
}

impl<B: Bus> Drop for Controller<B> {
    fn drop(&mut self) {
        self.shut_down();
        self.bus.isolate();
        let unmapped = self.bus.unmap(self.memory_address, self.memory.bytes());
        debug_assert!(unmapped.is_ok(), "unmapping the queues: {unmapped:?}");
    }
}
