//! Devices and ports: enumeration, state, and the address by which peers reach a port.
//!
//! Used at start-up and by diagnosis. An opened [`Device`] keeps the library loaded and is kept open by every
//! object made from it.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::config::PathMtu;
use crate::error::from_code;
use crate::ffi;
use crate::gid::{GidEntry, choose_gid};
use crate::library::Library;
use crate::{VerbsConfig, VerbsError};

/// Link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: peers are addressed by LID.
    Infiniband,
    /// Ethernet (RoCE): peers are addressed by GID.
    Ethernet,
    /// A code that this crate does not know.
    Unknown(u8),
}

/// A partition key without its membership bit (InfiniBand Architecture Specification, volume 1, 10.9.1.1).
pub(crate) const PARTITION_MASK: u16 = 0x7FFF;

/// Attributes of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortDescription {
    /// Port number, from 1.
    pub number: u8,
    /// Whether the port can carry traffic now.
    pub active: bool,
    /// `enum ibv_port_state`.
    pub state: u32,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Largest packet, as negotiated now.
    pub mtu: PathMtu,
    /// Longest message, bytes.
    pub message_bytes_max: u32,
    /// LID of the port; zero on Ethernet.
    pub lid: u16,
    /// Whether addresses need a global route on InfiniBand too.
    pub needs_global_route: bool,
    /// Nominal speed in Mbit/s; `None` for a code that this crate does not know.
    pub speed_mbps: Option<u32>,
    /// The non-empty rows of the port's GID table.
    pub gids: Vec<GidEntry>,
    /// Rows of the port's partition key table.
    pub partition_key_count: u16,
}

/// Limits of a device, as far as this crate uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests of one queue.
    pub work_requests: u32,
    /// Entries of one work request.
    pub entries: u32,
    /// Entries of one work request that reads; iWARP cards take one.
    pub read_entries: u32,
    /// Entries of a completion queue.
    pub completion_entries: u32,
    /// Memory regions.
    pub regions: u32,
    /// Reads that one queue pair answers at a time.
    pub reads_as_target: u8,
    /// Reads that one queue pair asks for at a time.
    pub reads_as_initiator: u8,
    /// Work requests of a shared receive queue.
    pub shared_receive_requests: u32,
    /// Ports.
    pub ports: u8,
}

/// An opened device.
#[derive(Debug)]
pub struct Device {
    pub(crate) library: Arc<Library>,
    pub(crate) context: NonNull<ffi::Context>,
    name: String,
    limits: Limits,
}

// SAFETY: libibverbs is thread-safe by its specification; the context is used through shared calls only.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// The device list of the library; freed on drop.
struct DeviceList<'library> {
    library: &'library Library,
    list: NonNull<*mut ffi::Device>,
    count: usize,
}

impl<'library> DeviceList<'library> {
    fn new(library: &'library Library) -> Result<Self, VerbsError> {
        let mut count = 0;
        // SAFETY: the count is a valid place to write an int to.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        match NonNull::new(list) {
            Some(list) if count > 0 => {
                Ok(Self { library, list, count: usize::try_from(count).unwrap_or_default() })
            }
            Some(list) => {
                // SAFETY: the list came from the library just now and is not used afterwards.
                unsafe { (library.free_device_list)(list.as_ptr()) };
                Err(VerbsError::NoDevice("libibverbs found no device".to_owned()))
            }
            None => {
                let error = std::io::Error::last_os_error();
                Err(VerbsError::NoDevice(format!("ibv_get_device_list: {error}")))
            }
        }
    }

    fn devices(&self) -> impl Iterator<Item = (*mut ffi::Device, String)> + '_ {
        (0..self.count).map(|index| {
            // SAFETY: the library returned that many entries.
            let entry = unsafe { self.list.add(index) };
            // SAFETY: as above; entries are initialised pointers.
            let device = unsafe { entry.read() };
            // SAFETY: the device is from a list that is still held.
            let name = unsafe { (self.library.get_device_name)(device) };
            // SAFETY: the library returns the zero-ended name inside the device.
            let name = unsafe { CStr::from_ptr(name) };
            (device, name.to_string_lossy().into_owned())
        })
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: the list came from the library and nothing refers to it any more; opened devices stay.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

impl Device {
    /// Returns the names of the devices that exist.
    pub fn names(library: &Library) -> Result<Vec<String>, VerbsError> {
        Ok(DeviceList::new(library)?.devices().map(|(_, name)| name).collect())
    }

    /// Opens the named device; without a name the first one that has an active port, else the first.
    pub fn open(library: &Arc<Library>, name: Option<&str>) -> Result<Arc<Self>, VerbsError> {
        let list = DeviceList::new(library)?;
        let mut first = None;
        for (raw, found) in list.devices() {
            if name.is_some_and(|name| name != found) {
                continue;
            }
            let device = Self::open_raw(library, raw, found)?;
            if name.is_some() || device.ports()?.iter().any(|port| port.active) {
                return Ok(Arc::new(device));
            }
            first.get_or_insert(device);
        }
        first.map(Arc::new).ok_or_else(|| VerbsError::UnknownDevice {
            name: name.unwrap_or_default().to_owned(),
            present: list.devices().map(|(_, name)| name).collect::<Vec<_>>().join(", "),
        })
    }

    fn open_raw(library: &Arc<Library>, raw: *mut ffi::Device, name: String) -> Result<Self, VerbsError> {
        let failed = |verb, error, name: &str| VerbsError::Verb {
            verb,
            device: name.to_owned(),
            object: String::new(),
            error,
        };
        // SAFETY: the device is from a list that the caller still holds.
        let context = unsafe { (library.open_device)(raw) };
        let Some(context) = NonNull::new(context) else {
            return Err(failed("ibv_open_device", std::io::Error::last_os_error(), &name));
        };
        let mut attributes = MaybeUninit::<ffi::DeviceAttributes>::zeroed();
        // SAFETY: the context was just opened, and the struct has the size and layout that the library fills.
        let code = unsafe { (library.query_device)(context.as_ptr(), attributes.as_mut_ptr()) };
        // SAFETY: zero is a valid value of every field of this plain struct.
        let found = unsafe { attributes.assume_init() };
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let byte = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        let limits = Limits {
            queue_pairs: count(found.queue_pairs_max),
            work_requests: count(found.work_requests_max),
            entries: count(found.entries_max),
            read_entries: count(found.read_entries_max),
            completion_entries: count(found.completion_entries_max),
            regions: count(found.regions_max),
            reads_as_target: byte(found.reads_as_target_max),
            reads_as_initiator: byte(found.reads_as_initiator_max),
            shared_receive_requests: count(found.shared_receive_requests_max),
            ports: found.port_count,
        };
        let device = Self { library: Arc::clone(library), context, name, limits };
        if code != 0 {
            return Err(failed("ibv_query_device", from_code(code), &device.name));
        }
        Ok(device)
    }

    /// Returns the kernel's name of the device, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limits of the device.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the library that opened the device.
    #[must_use]
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    pub(crate) fn failed(&self, verb: &'static str, object: String, error: std::io::Error) -> VerbsError {
        VerbsError::Verb { verb, device: self.name.clone(), object, error }
    }

    /// Queries all ports.
    pub fn ports(&self) -> Result<Vec<PortDescription>, VerbsError> {
        (1..=self.limits.ports).map(|number| self.port(number)).collect()
    }

    /// Queries one port.
    pub fn port(&self, number: u8) -> Result<PortDescription, VerbsError> {
        let mut found = ffi::PortAttributes::default();
        // SAFETY: the context is open; the struct is as large as the library's, which fills a prefix of it.
        let code = unsafe { (self.library.query_port)(self.context.as_ptr(), number, &raw mut found) };
        if code != 0 {
            return Err(self.failed("ibv_query_port", format!(" port {number}"), from_code(code)));
        }
        let gids = (0..u32::try_from(found.gid_count).unwrap_or(0).min(256))
            .filter_map(|index| self.gid(number, index))
            .collect();
        Ok(PortDescription {
            number,
            active: found.state == ffi::PORT_ACTIVE,
            state: found.state,
            link_layer: match found.link_layer {
                // Drivers that predate RoCE leave zero here.
                0 | ffi::LINK_LAYER_INFINIBAND => LinkLayer::Infiniband,
                ffi::LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                other => LinkLayer::Unknown(other),
            },
            mtu: PathMtu::from_code(found.mtu_active).unwrap_or(PathMtu::B256),
            message_bytes_max: found.message_bytes_max,
            lid: found.lid,
            needs_global_route: found.flags & ffi::PORT_FLAG_GRH_REQUIRED != 0,
            speed_mbps: speed_mbps(found.active_width, found.active_speed),
            gids,
            partition_key_count: found.partition_key_count,
        })
    }

    fn gid(&self, port: u8, index: u32) -> Option<GidEntry> {
        let mut gid = ffi::Gid::default();
        // SAFETY: the context is open and the GID a valid place to write to.
        let code =
            unsafe { (self.library.query_gid)(self.context.as_ptr(), port, index as i32, &raw mut gid) };
        (code == 0 && gid.raw != [0; 16]).then(|| GidEntry {
            index,
            gid: gid.raw,
            kind: (self.library.gid_type)(&self.name, port, index),
        })
    }

    /// Returns the row of a port's partition key table that holds the partition: as a full member if there
    /// is such a row, else as a limited one. Without a partition: row 0.
    pub fn partition_index(&self, port: &PortDescription, partition: Option<u16>) -> Result<u16, VerbsError> {
        let Some(partition) = partition else { return Ok(0) };
        let key_of = |row: u16| {
            let mut key = 0_u16;
            // SAFETY: the context is open and the key a valid place to write to.
            let code = unsafe {
                let context = self.context.as_ptr();
                (self.library.query_partition_key)(context, port.number, i32::from(row), &raw mut key)
            };
            (code == 0).then(|| u16::from_be(key))
        };
        let rows = (0..port.partition_key_count)
            .filter_map(|row| Some((row, key_of(row)?)))
            .filter(|(_, key)| key & PARTITION_MASK == partition & PARTITION_MASK);
        let row = rows.max_by_key(|&(row, key)| (key & !PARTITION_MASK, std::cmp::Reverse(row)));
        row.map(|(row, _)| row).ok_or_else(|| VerbsError::Port {
            device: self.name.clone(),
            port: port.number,
            reason: format!("it is not in the partition {partition:#06x} (rdma.partition)"),
        })
    }

    /// Returns the port and the row of its GID table that the configuration selects, or the best ones.
    pub fn choose_port(&self, config: &VerbsConfig) -> Result<(PortDescription, GidEntry), VerbsError> {
        let bad = |port, reason: &str| VerbsError::Port {
            device: self.name.clone(),
            port,
            reason: reason.to_owned(),
        };
        let port = match config.port {
            Some(number) if number <= self.limits.ports => self.port(number)?,
            Some(number) => return Err(bad(number, "there is no such port")),
            None => {
                let ports = self.ports()?;
                let active = ports.iter().position(|port| port.active).unwrap_or(0);
                ports.into_iter().nth(active).ok_or_else(|| bad(0, "the device has no port"))?
            }
        };
        let gid = match config.gid_index {
            Some(index) => port.gids.iter().find(|entry| entry.index == u32::from(index)).copied(),
            None => choose_gid(port.link_layer, &port.gids),
        };
        let gid = gid.ok_or_else(|| bad(port.number, "its GID table has no such row, or no usable one"))?;
        Ok((port, gid))
    }

    /// Descriptor that is readable when an asynchronous event is pending.
    #[must_use]
    pub fn async_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open.
        let descriptor = unsafe { (*self.context.as_ptr()).async_descriptor };
        // SAFETY: the library keeps this descriptor open as long as the context, which `self` keeps open.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }

    /// Returns the next asynchronous event. Blocks unless the descriptor is nonblocking or readable. The
    /// event is acknowledged before the return, so its element is valid for comparison only.
    pub(crate) fn next_async_event(&self) -> Option<ffi::AsyncEvent> {
        let mut event = ffi::AsyncEvent { element: std::ptr::null_mut(), kind: 0 };
        // SAFETY: the context is open and the event a valid place to write to.
        let code = unsafe { (self.library.get_async_event)(self.context.as_ptr(), &raw mut event) };
        if code != 0 {
            return None;
        }
        let copy = event;
        // SAFETY: the event came from the library and is acknowledged once.
        unsafe { (self.library.acknowledge_async_event)(&raw mut event) };
        Some(copy)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: every object made from the context holds an `Arc` of this, so none is left.
        let code = unsafe { (self.library.close_device)(self.context.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.name, error = %from_code(code), "ibv_close_device");
        }
    }
}

/// Number of lanes times the speed of one lane; codes as in `ibv_devinfo` (rdma-core,
/// libibverbs/examples/devinfo.c).
fn speed_mbps(width: u8, speed: u8) -> Option<u32> {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    let lane = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    };
    Some(lanes * lane)
}

#[cfg(test)]
mod tests {
    use super::speed_mbps;

    #[test]
    fn speeds_are_lanes_times_lane_speed() {
        assert_eq!(speed_mbps(2, 64), Some(200_000));
        assert_eq!(speed_mbps(1, 32), Some(25_000));
        assert_eq!((speed_mbps(3, 1), speed_mbps(1, 3)), (None, None));
    }
}
