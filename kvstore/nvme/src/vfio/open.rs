//! Opening of the VFIO device at a PCI address.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use super::addresses::Addresses;
use super::{Registers, VfioBus, ffi, sysfs};
use crate::{NvmeError, PciAddress};

const CONTAINER: &str = "/dev/vfio/vfio";

pub(super) fn open(address: PciAddress) -> Result<VfioBus, NvmeError> {
    let sysfs = Path::new("/sys");
    let name = address.to_string();
    let group_number = sysfs::group(sysfs, address)?;
    let group_path = format!("/dev/vfio/{group_number}");
    let failed =
        |operation| move |error: io::Error| NvmeError::system(operation, address.to_string(), &error);

    let container = open_node(CONTAINER)?;
    if !ffi::has_type1v2(&container).map_err(failed("VFIO_CHECK_EXTENSION for"))? {
        let what = "VFIO has no IOMMU of type 1, version 2 (`modprobe vfio_iommu_type1`)".to_owned();
        return Err(NvmeError::Unsupported { device: name, what });
    }
    let group = open_node(&group_path)?;
    if !ffi::group_is_viable(&group).map_err(failed("VFIO_GROUP_GET_STATUS for"))? {
        let members = sysfs::members(sysfs, &group_number);
        return Err(NvmeError::NotViable { address, group: group_number, members });
    }
    ffi::set_container(&group, &container).map_err(failed("VFIO_GROUP_SET_CONTAINER for"))?;
    ffi::set_iommu(&container).map_err(failed("VFIO_SET_IOMMU for"))?;
    let limits = ffi::iommu_limits(&container).map_err(failed("VFIO_IOMMU_GET_INFO for"))?;
    if limits.page_bytes_min > 4096 {
        let what = format!("the IOMMU's smallest page has {} bytes, not 4096", limits.page_bytes_min);
        return Err(NvmeError::Unsupported { device: name, what });
    }
    let device = ffi::device(&group, &name).map_err(failed("VFIO_GROUP_GET_DEVICE_FD for"))?;
    let has_reset = ffi::has_reset(&device).map_err(failed("VFIO_DEVICE_GET_INFO for"))?;
    let bar = ffi::region(&device, ffi::REGION_BAR0).map_err(failed("VFIO_DEVICE_GET_REGION_INFO for"))?;
    let configuration = ffi::region(&device, ffi::REGION_CONFIGURATION)
        .map_err(failed("VFIO_DEVICE_GET_REGION_INFO for"))?
        .offset;
    let bytes = usize::try_from(bar.bytes).unwrap_or(0);
    if bytes == 0 || !bytes.is_multiple_of(4096) || !bar.can_be_mapped() {
        let what = format!("BAR 0 of {bytes} bytes cannot be mapped");
        return Err(NvmeError::Unsupported { device: name, what });
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel picks an address that nothing else uses; the mapping is dropped with `Registers`.
    let start = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &device, bar.offset)
    };
    let start = start.map_err(|errno| NvmeError::system("mmap BAR 0 of", &name, &errno.into()))?;
    let Some(start) = NonNull::new(start.cast()) else {
        return Err(NvmeError::system("mmap BAR 0 of", &name, &io::Error::from_raw_os_error(libc::ENOMEM)));
    };
    let registers = Registers { start, bytes };
    let addresses = Addresses::new(limits.ranges);
    let bus =
        VfioBus { name, registers, addresses, device, configuration, has_reset, container, _group: group };
    bus.switch_on()?;
    Ok(bus)
}

fn open_node(path: &str) -> Result<OwnedFd, NvmeError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map(OwnedFd::from).map_err(|error| match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            NvmeError::Permission { operation: "open", object: path.to_owned() }
        }
        Some(libc::EBUSY) => NvmeError::Busy { object: path.to_owned() },
        _ => NvmeError::system("open", path, &error),
    })
}
