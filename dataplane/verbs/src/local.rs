//! State that a fabric creates at start-up: the objects of its device that all connections share.

use std::sync::Arc;

use dataplane_fabric::PeerAccess;
use dataplane_memory::{Slab, SlabKind};

use crate::VerbsError;
use crate::bounce::BounceBuffers;
use crate::commands::PairParameters;
use crate::completion::CompletionQueue;
use crate::config::{PathMtu, VerbsConfig};
use crate::device::{Device, PortDescription};
use crate::gid::GidEntry;
use crate::lane::Lane;
use crate::memory_region::{Access, MemoryRegion, Registration};
use crate::protection::ProtectionDomain;
use crate::queue_pair::{Capacity, QueuePair};
use crate::shared_receive::SharedReceiveQueue;
use crate::wire::{Hello, LaneAddress, RemoteSlots};

/// Ids of receives start here; sends use the numbers below.
const RECEIVE_TAG: u64 = 1 << 63;

/// Declared in the order in which the fields may be dropped: an object comes before the ones that it uses.
#[derive(Debug)]
pub(crate) struct FabricResources {
    pub(crate) receives: SharedReceiveQueue,
    pub(crate) bounce: BounceBuffers,
    /// The region of the slab that the fabric was created with, then those of the other slabs.
    pub(crate) regions: Vec<MemoryRegion>,
    /// Indices of the regions that peers may write, by the kind of their slabs.
    shown: [Option<usize>; SlabKind::COUNT],
    pub(crate) completions: Arc<CompletionQueue>,
    pub(crate) domain: Arc<ProtectionDomain>,
    pub(crate) device: Arc<Device>,
    pub(crate) port: PortDescription,
    pub(crate) gid: GidEntry,
    /// Row of the port's partition key table; `None` when the partition is no longer in the table.
    partition_index: Option<u16>,
    pub(crate) config: VerbsConfig,
    capacity: Capacity,
    /// Send work requests that may be in flight to all peers together.
    pub(crate) outstanding_max: u64,
}

impl FabricResources {
    pub(crate) fn new(
        device: Arc<Device>,
        slab: &Arc<Slab>,
        config: VerbsConfig,
    ) -> Result<Self, VerbsError> {
        config.check()?;
        let (port, gid) = device.choose_port(&config)?;
        if !port.active {
            let (device, port) = (device.name().to_owned(), port.number);
            return Err(VerbsError::Port { device, port, reason: "the link is down".to_owned() });
        }
        let partition_index = device.partition_index(&port, config.partition)?;
        let limits = device.limits();
        let receive_count = config.receive_buffers.min(limits.shared_receive_requests).max(1);
        let completion_entries = config.completion_entries.min(limits.completion_entries);
        if completion_entries < 2 * receive_count {
            return Err(VerbsError::Setting {
                key: "completion_entries",
                value: completion_entries.to_string(),
                expected: "at least twice receive_buffers, within the device's limit",
            });
        }
        let domain = ProtectionDomain::new(&device)?;
        let completions = CompletionQueue::new(&device, completion_entries, config.completion_vector)?;
        let buffer_bytes = config.receive_buffer_bytes as usize;
        let receives = SharedReceiveQueue::new(&domain, receive_count, buffer_bytes, RECEIVE_TAG)?;
        let bounce = BounceBuffers::new(&domain, config.send_buffers, buffer_bytes)?;
        let access = Access { remote: config.access, relaxed_ordering: config.relaxed_ordering };
        let mut regions = Vec::with_capacity(1 + config.slabs_max);
        regions.push(MemoryRegion::of_slab(&domain, slab, access)?);
        let mut shown = [None; SlabKind::COUNT];
        shown[slab.kind().index()] = config.access.allows_writes().then_some(0);
        let capacity = Capacity {
            send_requests: config.send_queue_depth.min(limits.work_requests),
            entries: config.entries_max.min(limits.entries).max(1),
            inline_bytes: config.inline_bytes,
        };
        let capacity = possible_capacity(&domain, &completions, &receives, capacity)?;
        let outstanding_max = u64::from(completion_entries - receive_count);
        Ok(Self {
            receives,
            bounce,
            regions,
            shown,
            completions,
            domain,
            device,
            port,
            gid,
            partition_index: Some(partition_index),
            config,
            capacity,
            outstanding_max,
        })
    }

    /// Selects the best port address and partition row again after the port has changed. Existing
    /// connections keep theirs.
    pub(crate) fn refresh_port(&mut self) {
        match self.device.choose_port(&self.config) {
            Ok((port, gid)) => {
                let found = self.device.partition_index(&port, self.config.partition);
                self.partition_index =
                    found.inspect_err(|error| tracing::warn!(%error, "RDMA partition")).ok();
                (self.port, self.gid) = (port, gid);
            }
            Err(error) => tracing::warn!(%error, "RDMA port"),
        }
    }

    pub(crate) fn mtu(&self) -> PathMtu {
        self.config.path_mtu.min(self.port.mtu)
    }

    pub(crate) fn reads_as_target(&self) -> u8 {
        self.config.reads_in_flight.min(self.device.limits().reads_as_target).max(1)
    }

    pub(crate) fn reads_as_initiator(&self) -> u8 {
        self.config.reads_in_flight.min(self.device.limits().reads_as_initiator).max(1)
    }

    pub(crate) fn entries_max(&self) -> usize {
        self.capacity.entries as usize
    }

    pub(crate) fn batch_max(&self) -> usize {
        self.capacity.send_requests as usize
    }

    /// Returns the bytes of slabs that the card reaches by this path.
    pub(crate) fn bytes_by(&self, registration: Registration) -> u64 {
        let slabs = self.regions.iter().filter(|region| region.registration() == registration);
        slabs.map(MemoryRegion::length).sum()
    }

    pub(crate) fn registered_bytes(&self) -> u64 {
        let slabs: u64 = self.regions.iter().map(MemoryRegion::length).sum();
        slabs + self.bounce.region.length() + self.receives.registered_bytes()
    }

    /// Returns the region of the slab of this kind that peers may access.
    pub(crate) fn shown_region(&self, kind: SlabKind) -> Option<&MemoryRegion> {
        self.regions.get(self.shown[kind.index()]?)
    }

    /// Returns the slots of this kind that peers may read and write.
    fn shown_slots(&self, kind: SlabKind) -> RemoteSlots {
        let shown = self.shown_region(kind);
        let Some((region, layout)) = shown.and_then(|region| Some((region, region.slab()?.layout()))) else {
            return RemoteSlots::default();
        };
        RemoteSlots {
            address: region.address(),
            slot_stride: layout.stride() as u64,
            slot_bytes: layout.slot_bytes as u64,
            slot_count: layout.slot_count,
            key: region.remote_key(),
        }
    }

    pub(crate) fn hello(&self, lanes: [LaneAddress; 2]) -> Hello {
        Hello {
            mtu: self.mtu(),
            link_layer: self.port.link_layer,
            reads_as_target: self.reads_as_target(),
            gid: self.gid.gid,
            lid: self.port.lid,
            receive_credits: u16::try_from(self.config.receive_credits).unwrap_or(u16::MAX),
            receive_buffer_bytes: self.config.receive_buffer_bytes,
            lanes,
            slots: SlabKind::ALL.map(|kind| self.shown_slots(kind)),
            message_bytes_max: self.port.message_bytes_max,
        }
    }

    /// Returns the parameters of a new connection's pairs.
    pub(crate) fn pair_parameters(&self) -> Result<PairParameters, VerbsError> {
        let partition_index = self.partition_index.ok_or_else(|| VerbsError::Port {
            device: self.device.name().to_owned(),
            port: self.port.number,
            reason: "it is not in the partition of rdma.partition any more".to_owned(),
        })?;
        Ok(PairParameters {
            domain: Arc::clone(&self.domain),
            completions: Arc::clone(&self.completions),
            receives: Arc::clone(&self.receives.handle),
            capacity: self.capacity,
            port: self.port.number,
            partition_index,
            access: self.config.access,
        })
    }

    /// Allocates the memory that a lane needs for work on its pair.
    pub(crate) fn reserve_queues<State>(&self, lane: &mut Lane, pair: &QueuePair<State>) {
        let Capacity { send_requests, entries, inline_bytes } = self.capacity;
        // Drivers that do not report the limit leave zero here.
        let read_entries = match self.device.limits().read_entries {
            0 => entries,
            most => most.min(entries),
        };
        lane.reserve_queues(pair, send_requests, (entries, read_entries), inline_bytes);
    }

    /// Returns the index of the region of a slab, if the slab is registered.
    pub(crate) fn region_of(&self, slab: &Arc<Slab>) -> Option<usize> {
        self.regions.iter().position(|region| region.slab().is_some_and(|known| Arc::ptr_eq(known, slab)))
    }

    /// Registers a slab as a source of writes and a destination of reads; peers have the access `remote`.
    /// Slow: call it at start-up. A registered slab keeps its registration.
    pub(crate) fn register(&mut self, slab: &Arc<Slab>, remote: PeerAccess) -> Result<usize, VerbsError> {
        if let Some(index) = self.region_of(slab) {
            return Ok(index);
        }
        if self.regions.len() > self.config.slabs_max {
            let (device, limit) = (self.device.name().to_owned(), self.config.slabs_max);
            return Err(VerbsError::TooMany { what: "registered slabs", device, limit });
        }
        let access = Access { remote, relaxed_ordering: self.config.relaxed_ordering };
        self.regions.push(MemoryRegion::of_slab(&self.domain, slab, access)?);
        let index = self.regions.len() - 1;
        if remote.allows_writes() {
            self.shown[slab.kind().index()] = Some(index);
        }
        Ok(index)
    }
}

/// Returns the largest inline size, from the wanted one downwards, with which the device creates a queue
/// pair. Several devices refuse a size beyond their limit and do not report the limit.
fn possible_capacity(
    domain: &Arc<ProtectionDomain>,
    completions: &Arc<CompletionQueue>,
    receives: &SharedReceiveQueue,
    wanted: Capacity,
) -> Result<Capacity, VerbsError> {
    let mut capacity = wanted;
    loop {
        match QueuePair::new(domain, completions, receives, capacity) {
            Ok(_probe) => return Ok(capacity),
            Err(_) if capacity.inline_bytes > 0 => capacity.inline_bytes /= 2,
            Err(error) => return Err(error),
        }
    }
}
