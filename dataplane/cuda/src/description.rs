//! Properties of a device that the driver reports before a context exists.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering as WritesOrdering, CUdevice, CUdevice_attribute as Attribute,
    CUflushGPUDirectRDMAWritesOptions as FlushOptions, CUuuid,
};

use crate::error::{CudaError, DriverVersion};
use crate::library::{Library, code};

/// Directory in which the kernel lists its modules, and the names of the module for peer memory.
const MODULES: &str = "/sys/module";
const PEER_MEMORY_MODULES: [&str; 2] = ["nvidia_peermem", "nvidia_peer_memory"];

/// PCI address of a device. Printed as sysfs does: `0000:ab:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciAddress {
    /// Domain, also called segment.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number.
    pub device: u8,
    /// Function number.
    pub function: u8,
}

impl PciAddress {
    /// Parses `domain:bus:device.function` in hexadecimal digits of either case, with any number of leading
    /// zeros.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let byte = |digits| u8::from_str_radix(digits, 16).ok();
        let domain = u32::from_str_radix(domain, 16).ok()?;
        Some(Self { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// Properties of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Number in this process. It depends on the environment; `pci_address` is the stable name.
    pub ordinal: u32,
    /// Name of the model.
    pub name: String,
    /// Unique identity, also of a partition of a device.
    pub uuid: [u8; 16],
    /// PCI address; `None` when the driver's text for it cannot be parsed.
    pub pci_address: Option<PciAddress>,
    /// Size of the device's memory in bytes.
    pub memory_bytes: usize,
    /// Compute capability: major and minor number.
    pub compute_capability: (u32, u32),
    /// CUDA version of the driver.
    pub driver_version: DriverVersion,
    /// Whether a NIC can access the device's memory.
    pub has_direct_access: bool,
    /// Whether the writes of a NIC to the device's memory are visible to kernels that start afterwards,
    /// without a flush.
    pub orders_direct_writes: bool,
    /// Whether a call of the host can make such writes visible.
    pub flushes_direct_writes: bool,
    /// Whether the memory can be exported as a DMA buffer. False with drivers before 11.7, which do not
    /// report it.
    pub has_dma_buf: bool,
    /// Whether host and device share one address space. The copy queue requires it.
    pub has_unified_addresses: bool,
    /// Number of copy engines, which run beside kernels. With two or more, both directions run at a time.
    pub copy_engines: u32,
    /// Number of multiprocessors: the number of thread blocks that keep the device busy.
    pub multiprocessors: u32,
    /// Whether the kernel module that lets a NIC register bare device addresses is loaded.
    pub has_peer_memory: bool,
    /// Largest distance between rows of a copy, in bytes.
    pub row_pitch_max: usize,
}

impl DeviceDescription {
    /// Returns the UUID as the vendor's tools print it: `GPU-` and five groups of hexadecimal digits.
    #[must_use]
    pub fn uuid_text(&self) -> String {
        let digits: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let groups = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
        format!("GPU-{}", groups.join("-"))
    }
}

/// Returns the device's handle and its properties.
pub(crate) fn describe(library: &Library, ordinal: i32) -> Result<(CUdevice, DeviceDescription), CudaError> {
    let mut device = 0;
    // SAFETY: writes one handle.
    library.check("cuDeviceGet", unsafe { (library.device)(&mut device, ordinal) })?;
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: writes sixteen bytes.
    library.check("cuDeviceGetUuid", unsafe { (library.device_uuid)(&mut uuid, device) })?;
    let mut memory_bytes = 0;
    // SAFETY: writes one length.
    library.check("cuDeviceTotalMem", unsafe { (library.device_memory)(&mut memory_bytes, device) })?;
    let attribute = |which| attribute(library, which, device);
    let count = |value: c_int| u32::try_from(value).unwrap_or(0);
    let description = DeviceDescription {
        ordinal: count(ordinal),
        name: text(library, "cuDeviceGetName", library.device_name, device)?,
        uuid: uuid.bytes.map(|byte| byte.cast_unsigned()),
        pci_address: PciAddress::parse(&text(
            library,
            "cuDeviceGetPCIBusId",
            library.device_pci_address,
            device,
        )?),
        memory_bytes,
        compute_capability: (
            count(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)),
            count(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)),
        ),
        driver_version: library.version(),
        has_direct_access: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) > 0,
        orders_direct_writes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
            >= WritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as c_int,
        flushes_direct_writes: library.flush_direct.is_some()
            && attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
                & FlushOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int
                != 0,
        has_dma_buf: library.range_handle.is_some()
            && attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) > 0,
        has_unified_addresses: attribute(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) > 0,
        copy_engines: count(attribute(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)),
        multiprocessors: count(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)),
        has_peer_memory: has_peer_memory_module(Path::new(MODULES)),
        row_pitch_max: count(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH)) as usize,
    };
    Ok((device, description))
}

/// Returns an attribute's value; 0 when the driver is too old to know it.
fn attribute(library: &Library, which: Attribute, device: CUdevice) -> c_int {
    let mut value = 0;
    // SAFETY: writes one integer; an attribute that the driver does not know is an error code.
    let asked = unsafe { (library.device_attribute)(&mut value, which, device) };
    if asked == code::SUCCESS { value } else { 0 }
}

type Text = unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> u32;

fn text(
    library: &Library,
    operation: &'static str,
    ask: Text,
    device: CUdevice,
) -> Result<String, CudaError> {
    let mut bytes = [0_u8; 256];
    // SAFETY: the driver writes at most the given number of bytes; the last byte stays zero.
    library.check(operation, unsafe { ask(bytes.as_mut_ptr().cast(), 255, device) })?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn has_peer_memory_module(modules: &Path) -> bool {
    PEER_MEMORY_MODULES.iter().any(|name| modules.join(name).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_printed_as_sysfs_does() {
        for (text, expected) in [
            ("0000:AB:00.0", "0000:ab:00.0"),
            ("00000000:1B:0c.1", "0000:1b:0c.1"),
            ("10000:01:00.0", "10000:01:00.0"),
        ] {
            assert_eq!(PciAddress::parse(text).expect(text).to_string(), expected);
        }
        for text in ["", "0000", "0000:AB:00", "0000:1AB:00.0", "x:00:00.0"] {
            assert_eq!(PciAddress::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_module_for_peer_memory_has_had_two_names() {
        let folder = std::env::temp_dir().join(format!("kvasir-cuda-modules-{}", std::process::id()));
        for name in PEER_MEMORY_MODULES {
            assert!(!has_peer_memory_module(&folder));
            std::fs::create_dir_all(folder.join(name)).expect("folder");
            assert!(has_peer_memory_module(&folder), "{name}");
            std::fs::remove_dir_all(&folder).expect("remove");
        }
    }
}
