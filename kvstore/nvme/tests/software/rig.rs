//! An engine over a software controller, with memory for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_io::{Buffer, Completion, IoEngine, IoError, Operation, Request};
use kvstore_nvme::testing::{Faults, SoftwareBus, SoftwareController, SoftwareDevice};
use kvstore_nvme::{NvmeConfig, NvmeEngine};

pub(crate) const SLOT_BYTES: usize = 64 << 10;

pub(crate) struct Rig {
    pub(crate) engine: NvmeEngine<SoftwareBus>,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) controller: SoftwareController,
}

/// Timeouts that a test can wait for.
pub(crate) fn short_timeouts() -> NvmeConfig {
    NvmeConfig {
        command_timeout: Duration::from_millis(200),
        admin_timeout: Duration::from_millis(300),
        ..NvmeConfig::default()
    }
}

pub(crate) fn slots(count: u32) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes: SLOT_BYTES, slot_count: count };
    let slab = Slab::create("nvme test", layout, PageSize::Standard).expect("slab");
    SlotPool::new(Arc::new(slab))
}

impl Rig {
    pub(crate) fn new(device: SoftwareDevice, faults: Faults, config: &NvmeConfig) -> Self {
        let controller = SoftwareController::start(device, faults);
        let mut engine = NvmeEngine::attach(controller.bus(), config).expect("attach");
        let slots = slots(64);
        engine.register(slots.slab()).expect("register");
        Self { engine, slots, controller }
    }

    pub(crate) fn buffer(&self, len: usize) -> Buffer {
        Buffer::Slot { slot: self.slots.acquire().expect("a slot"), offset: 0, len }
    }

    pub(crate) fn submit(&mut self, id: u64, operation: Operation, offset: u64, buffer: Buffer) {
        self.engine.submit(Request { id, operation, file: 0, offset, buffer }).expect("room");
    }

    /// Collects everything in flight.
    pub(crate) fn collect(&mut self) -> Vec<Completion> {
        self.engine.flush().expect("flush");
        let (mut completions, started) = (Vec::new(), Instant::now());
        while self.engine.in_flight() > 0 {
            if self.engine.poll(usize::MAX, &mut completions) == 0 {
                assert!(started.elapsed() < Duration::from_secs(60), "{} stuck", self.engine.in_flight());
                self.engine.wait(Some(Instant::now() + Duration::from_millis(50))).expect("wait");
            }
        }
        completions
    }

    /// Runs one request.
    pub(crate) fn run(
        &mut self,
        operation: Operation,
        offset: u64,
        buffer: Buffer,
    ) -> Result<Buffer, IoError> {
        self.submit(7, operation, offset, buffer);
        let mut completions = self.collect();
        assert_eq!(completions.len(), 1);
        let completion = completions.pop().expect("counted");
        completion.result.map(|()| completion.buffer)
    }

    /// Writes and reads back, to check that the engine works.
    pub(crate) fn check_write_and_read(&mut self) {
        let buffer = self.buffer(SLOT_BYTES);
        let Buffer::Slot { slot, .. } = &buffer else { panic!("a slot") };
        slot.slab().write(slot.slot(), 0, &[0xA5; SLOT_BYTES]);
        self.run(Operation::Write, 1 << 20, buffer).expect("write");
        let buffer = self.buffer(SLOT_BYTES);
        let buffer = self.run(Operation::Read, 1 << 20, buffer).expect("read");
        let Buffer::Slot { slot, .. } = &buffer else { panic!("a slot") };
        let mut bytes = vec![0; SLOT_BYTES];
        slot.slab().read(slot.slot(), 0, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0xA5));
    }

    /// Checks what must hold after every test, then drops the engine and checks that nothing is left.
    pub(crate) fn close(self) -> SoftwareController {
        let Self { engine, slots, controller } = self;
        drop(engine);
        let counters = controller.counters();
        assert_eq!((counters.unmapped_accesses, counters.violations), (0, 0), "{counters:?}");
        assert_eq!(controller.mapping_count(), 0, "every mapping was taken back");
        assert_eq!(slots.used_count(), 0, "every slot was given back");
        controller
    }
}
