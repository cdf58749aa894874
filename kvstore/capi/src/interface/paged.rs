//! An engine's paged tensors, transfers of blocks between them and the store, and fetches from other nodes.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use super::boundary::{Handle, elements, guarded, invalid, versioned, write_optional};
use crate::backend::{Backend, ChainPosition, Identity};
use crate::device::{DeviceEvent, Job};
use crate::handles::{self, Opened};
use crate::queue::{IDENTITIES_MAX, Submitted, Work};
use crate::registry::OnDevice;
use crate::status::{Failure, Status};
use crate::store::READ_MAX;
use crate::tensors::{Memory, PagedTensors, Tensors};
use crate::transfer::{self, Blocks, Direction};

/// `kvasir_kv_operation` in C.
const SAVE: u32 = 5;
pub(super) const LOAD: u32 = 6;
pub(super) const FETCH: u32 = 9;

/// Blocks to move, `kvasir_kv_transfer` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Transfer {
    /// Value returned in the completion.
    pub user: u64,
    /// Operation: 5 save, 6 load, 9 fetch.
    pub operation: u32,
    /// Bytes of this structure. 0: up to and including `event`.
    pub bytes: u32,
    /// The number of registered tensors.
    pub tensors: u64,
    /// Identities of the blocks.
    pub identities: *const Identity,
    /// Block numbers in the tensors, one for each identity.
    pub blocks: *const u64,
    /// Number of blocks.
    pub count: usize,
    /// Null, or a device event recorded behind earlier work on the blocks.
    pub event: *mut c_void,
    /// Null, or the identity of the block that precedes the first in its chain.
    pub parent: *const Identity,
    /// Number of blocks before the first in its chain.
    pub position: u32,
    /// 1: each block follows the previous one in a chain. 0: the blocks form no chain.
    pub is_chain: u32,
    /// Longest time of a load or a fetch in microseconds. 0: 10 s, or the deadlines of the tiers.
    pub deadline_us: u32,
    /// For a fetch: number of leading blocks that the caller holds; otherwise 0.
    pub held: u32,
    /// For a save or a fetch: tenant of the blocks; 0: no tenant. Otherwise 0.
    pub tenant: u32,
    /// Must be zero.
    pub reserved: u32,
}

impl Transfer {
    /// Longest time of the transfer; `None` if the caller set none.
    fn patience(&self) -> Option<Duration> {
        (self.deadline_us > 0).then(|| Duration::from_micros(self.deadline_us.into()))
    }
}

/// Tenant number reserved for the store.
const TENANT_RESERVED: u32 = u32::MAX;
/// Bound of positions in a chain, exclusive.
const POSITIONS_MAX: usize = 1 << 31;

/// Reads a transfer; fields that the caller's version lacks are null or zero.
///
/// # Safety
/// As in the header: null, or as long as its field `bytes` says, or up to the event.
unsafe fn read(transfer: *const Transfer) -> Result<Transfer, Failure> {
    let least = std::mem::offset_of!(Transfer, parent);
    let bytes_of = |transfer: *const Transfer| {
        // SAFETY: not null, and every version has this field.
        match unsafe { (*transfer).bytes } as usize {
            0 => least,
            bytes => bytes,
        }
    };
    // SAFETY: the caller promised as many bytes; plain numbers and pointers, for which zero is a value.
    unsafe { versioned(transfer, "kvasir_kv_transfer", least, bytes_of) }
}

/// # Safety
/// As in the header for the parent of the transfer.
unsafe fn chain(transfer: &Transfer) -> Result<Option<ChainPosition>, Failure> {
    let is_set = !transfer.parent.is_null() || transfer.position > 0;
    match transfer.is_chain {
        0 if is_set => return Err(invalid("parent or position is set, and is_chain is 0")),
        0 => return Ok(None),
        1 if transfer.operation != SAVE => {
            return Err(invalid("is_chain is 1, and the operation is no save"));
        }
        1 => {}
        other => return Err(invalid(&format!("is_chain is {other}, neither 0 nor 1"))),
    }
    let position = transfer.position;
    if position as usize + transfer.count >= POSITIONS_MAX {
        return Err(invalid(&format!("position {position} with {} blocks is above 2^31", transfer.count)));
    }
    let parent = if transfer.parent.is_null() {
        None
    } else {
        // SAFETY: the caller promised one; an identity is aligned anywhere.
        Some(unsafe { *transfer.parent })
    };
    Ok(Some(ChainPosition { parent, position, tenant: transfer.tenant }))
}

/// Registers an engine's tensors.
///
/// # Safety
/// As in the header: `tensors` with `plane_count` planes, `id` writable; host memory of blocks stays mapped
/// while transfers that name them are in progress, a device's until the tensors are unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_register(
    handle: *mut Handle,
    tensors: *const Tensors,
    id: *mut u64,
) -> i32 {
    guarded(|| {
        if id.is_null() {
            return Err(invalid("the place for the id is a null pointer"));
        }
        // SAFETY: writable by this function's contract.
        unsafe { write_optional(id, 0) };
        // SAFETY: the caller promised tensors.
        let tensors = unsafe { elements(tensors, 1, "tensors is a null pointer or not aligned") }?[0];
        // SAFETY: the caller promised as many planes.
        let planes = unsafe {
            elements(tensors.planes, tensors.plane_count, "planes is a null pointer or not aligned")
        }?;
        let opened = handles::find(handle.addr())?;
        let tensors = PagedTensors::check(&tensors, planes, opened.backend.payload_bytes_max())?;
        let on_device = match (tensors.memory(), &opened.device) {
            (Memory::Host, _) => None,
            (Memory::Cuda(_), None) => {
                return Err(invalid(
                    "memory is KVASIR_KV_CUDA, and the configuration has no section [device]",
                ));
            }
            (Memory::Cuda(_), Some(device)) => {
                // SAFETY: the caller promised that the blocks' memory is there while they are registered.
                let places = unsafe { device.places(&tensors) }?;
                // SAFETY: as above.
                let routes = opened.handoffs.as_ref().map(|handoffs| unsafe { handoffs.routes(&tensors) });
                Some(OnDevice { places, handoff: routes.transpose()?.flatten() })
            }
        };
        let Some(registered) = opened.tensors.add(tensors, on_device) else { return Ok(Status::Throttled) };
        // SAFETY: as above.
        unsafe { write_optional(id, registered) };
        Ok(Status::Ok)
    })
}

/// Unregisters tensors once no transfer uses them.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_unregister(handle: *mut Handle, id: u64) -> i32 {
    guarded(|| {
        let opened = handles::find(handle.addr())?;
        if let Some(handoffs) = &opened.handoffs {
            handoffs.cancel_into(id);
        }
        opened.tensors.remove(id)?;
        Ok(Status::Ok)
    })
}

/// # Safety
/// As in the header for each pointer of the transfer.
unsafe fn blocks(opened: &Opened, transfer: &Transfer) -> Result<Blocks, Failure> {
    let direction = match transfer.operation {
        SAVE => Direction::Save,
        LOAD => Direction::Load,
        other => {
            let text =
                format!("operation {other} is none of KVASIR_KV_SAVE, KVASIR_KV_LOAD and KVASIR_KV_FETCH");
            return Err(invalid(&text));
        }
    };
    if transfer.held != 0 {
        return Err(invalid("held is not 0, and the operation is no fetch"));
    }
    if direction == Direction::Save && transfer.deadline_us != 0 {
        return Err(invalid("deadline_us is not 0, and the operation is a save"));
    }
    let tensors = opened.tensors.find(transfer.tensors)?;
    if tensors.memory() == Memory::Host && !transfer.event.is_null() {
        return Err(invalid("event is not null, and the tensors lie in host memory"));
    }
    // SAFETY: the caller promised as many identities.
    let identities =
        unsafe { elements(transfer.identities, transfer.count, "identities is a null pointer") }?;
    // SAFETY: the caller promised as many numbers.
    let blocks =
        unsafe { elements(transfer.blocks, transfer.count, "blocks is a null pointer or not aligned") }?;
    if let Some(at) = blocks.iter().position(|block| *block >= tensors.blocks()) {
        let text = format!("blocks[{at}] is {}, and the tensors have {}", blocks[at], tensors.blocks());
        return Err(invalid(&text));
    }
    // SAFETY: as above.
    let chain = unsafe { chain(transfer) }?;
    let deadline = Instant::now() + transfer.patience().unwrap_or(READ_MAX);
    Ok(Blocks {
        direction,
        identities: copied(identities)?,
        blocks: copied(blocks)?,
        tensors,
        chain,
        tenant: transfer.tenant,
        deadline,
    })
}

/// Begins a fetch, if there is room for it.
///
/// # Safety
/// As in the header for the identities of the transfer.
unsafe fn fetch(opened: &Opened, transfer: &Transfer) -> Result<Submitted, Failure> {
    let Transfer { user, tensors, identities, blocks, count, event, held, .. } = *transfer;
    let held = held as usize;
    if held > count {
        return Err(invalid(&format!("held is {held}, and the fetch has {count} identities")));
    }
    if tensors != 0 || !blocks.is_null() || !event.is_null() {
        return Err(invalid("a fetch has no tensors, no blocks and no event: it ends in host memory"));
    }
    if !transfer.parent.is_null() || transfer.position != 0 || transfer.is_chain != 0 {
        return Err(invalid(
            "a fetch is a chain from its first block on: parent, position and is_chain are 0",
        ));
    }
    // SAFETY: the caller promised as many identities.
    let identities = unsafe { elements(identities, count, "identities is a null pointer") }?;
    let admitted = opened.queue.admit(count);
    if admitted == Submitted::Taken {
        let of_fetch = (held, transfer.tenant);
        opened.fetches.begin(&opened.backend, user, identities, of_fetch, transfer.patience());
    }
    Ok(admitted)
}

fn copied<T: Copy>(from: &[T]) -> Result<Vec<T>, Failure> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(from.len()).map_err(|_| Failure::no_memory("the transfer"))?;
    copy.extend_from_slice(from);
    Ok(copy)
}

/// Submits a transfer, if there is room for it.
///
/// # Safety
/// As in the header: one transfer with its arrays; the memory of its blocks stays usable until its completion was polled or
/// `kvasir_kv_close` returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_submit_transfer(handle: *mut Handle, transfer: *const Transfer) -> i32 {
    guarded(|| {
        // SAFETY: the caller promised one.
        let transfer = unsafe { read(transfer) }?;
        let opened = handles::find(handle.addr())?;
        if transfer.tenant == TENANT_RESERVED || transfer.reserved != 0 {
            return Err(invalid("tenant is 2^32 - 1, or reserved is not 0"));
        }
        if transfer.operation == LOAD && transfer.tenant != 0 {
            return Err(invalid("tenant is set, and the operation is a load"));
        }
        if transfer.count > IDENTITIES_MAX {
            return Err(invalid("count is above 2^20"));
        }
        let submitted = if transfer.operation == FETCH {
            // SAFETY: the caller promised its identities.
            unsafe { fetch(&opened, &transfer) }?
        } else {
            // SAFETY: the caller promised its arrays, and that blocks and event stay usable until the completion was polled.
            unsafe { save_or_load(&opened, &transfer) }?
        };
        match submitted {
            Submitted::Taken => Ok(Status::Ok),
            Submitted::Full => Ok(Status::Throttled),
            Submitted::Closed => Err(handles::unknown()),
        }
    })
}

/// Queues a save or a load, if there is room for it.
///
/// # Safety
/// As for [`kvasir_kv_submit_transfer`].
unsafe fn save_or_load(opened: &Opened, transfer: &Transfer) -> Result<Submitted, Failure> {
    // SAFETY: the caller promised its arrays.
    let what = unsafe { blocks(opened, transfer) }?;
    let Some(device) = opened.device.as_ref().filter(|_| what.tensors.places().is_some()) else {
        let work = Work::Shared(transfer::Transfer::new(what).into());
        // SAFETY: the caller promised that blocks stay usable until the completion was polled.
        return Ok(unsafe { opened.queue.submit(transfer.user, work) });
    };
    let admitted = opened.queue.admit(what.identities.len());
    if admitted == Submitted::Taken {
        let job = Job { user: transfer.user, what, event: DeviceEvent(transfer.event) };
        // SAFETY: as above, and the event too.
        unsafe { device.submit(job) };
    }
    Ok(admitted)
}
