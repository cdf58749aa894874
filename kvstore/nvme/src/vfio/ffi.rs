//! The ioctls of `linux/vfio.h` that are needed, each as a safe function where it can be one.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use libc::c_ulong;

/// `_IO(VFIO_TYPE, VFIO_BASE + n)`.
const fn number(index: c_ulong) -> c_ulong {
    (b';' as c_ulong) << 8 | (100 + index)
}

const GET_API_VERSION: c_ulong = number(0);
const CHECK_EXTENSION: c_ulong = number(1);
const SET_IOMMU: c_ulong = number(2);
const GROUP_GET_STATUS: c_ulong = number(3);
const GROUP_SET_CONTAINER: c_ulong = number(4);
const GROUP_GET_DEVICE_FD: c_ulong = number(6);
const DEVICE_GET_INFO: c_ulong = number(7);
const DEVICE_GET_REGION_INFO: c_ulong = number(8);
const DEVICE_RESET: c_ulong = number(11);
const IOMMU_GET_INFO: c_ulong = number(12);
const IOMMU_MAP_DMA: c_ulong = number(13);
const IOMMU_UNMAP_DMA: c_ulong = number(14);

const API_VERSION: i32 = 0;
const TYPE1V2_IOMMU: c_ulong = 3;
const GROUP_FLAGS_VIABLE: u32 = 1;
const DEVICE_FLAGS_RESET: u32 = 1;
const REGION_FLAG_MMAP: u32 = 1 << 2;
const IOMMU_INFO_PAGE_SIZES: u32 = 1;
const IOMMU_INFO_CAPABILITIES: u32 = 1 << 1;
const CAPABILITY_ADDRESS_RANGES: u16 = 1;
const DMA_READ_AND_WRITE: u32 = 1 | 1 << 1;

/// Index of the region that is BAR 0, and of the configuration space.
pub(super) const REGION_BAR0: u32 = 0;
pub(super) const REGION_CONFIGURATION: u32 = 7;

/// `struct vfio_region_info`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Region {
    bytes_of_structure: u32,
    flags: u32,
    index: u32,
    capability_offset: u32,
    pub(super) bytes: u64,
    pub(super) offset: u64,
}

impl Region {
    pub(super) fn can_be_mapped(&self) -> bool {
        self.flags & REGION_FLAG_MMAP != 0
    }
}

/// `struct vfio_iommu_type1_dma_map`.
#[repr(C)]
struct DmaMap {
    bytes_of_structure: u32,
    flags: u32,
    process_address: u64,
    device_address: u64,
    bytes: u64,
}

/// `struct vfio_iommu_type1_dma_unmap`.
#[repr(C)]
struct DmaUnmap {
    bytes_of_structure: u32,
    flags: u32,
    device_address: u64,
    bytes: u64,
}

const _: () = assert!(size_of::<Region>() == 32 && size_of::<DmaMap>() == 32 && size_of::<DmaUnmap>() == 24);

fn with_value(file: &impl AsRawFd, request: c_ulong, value: c_ulong) -> io::Result<i32> {
    // SAFETY: the requests made through here take a number, not a pointer.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request, value) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// # Safety
/// `structure` is what the request reads and writes, including what follows it up to the size that it states.
unsafe fn with_structure<T>(file: &impl AsRawFd, request: c_ulong, structure: *mut T) -> io::Result<i32> {
    // SAFETY: the caller upholds that the request takes this structure; it is exclusively borrowed by the caller.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request, structure) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Whether the kernel's interface is the one of this file.
pub(super) fn has_type1v2(container: &OwnedFd) -> io::Result<bool> {
    Ok(with_value(container, GET_API_VERSION, 0)? == API_VERSION
        && with_value(container, CHECK_EXTENSION, TYPE1V2_IOMMU)? == 1)
}

pub(super) fn group_is_viable(group: &OwnedFd) -> io::Result<bool> {
    // `struct vfio_group_status`: its size, flags.
    let mut status = [8_u32, 0];
    // SAFETY: the request takes this structure of two words.
    unsafe { with_structure(group, GROUP_GET_STATUS, &raw mut status) }?;
    Ok(status[1] & GROUP_FLAGS_VIABLE != 0)
}

pub(super) fn set_container(group: &OwnedFd, container: &OwnedFd) -> io::Result<()> {
    let mut descriptor = container.as_raw_fd();
    // SAFETY: the request takes a pointer to a descriptor.
    unsafe { with_structure(group, GROUP_SET_CONTAINER, &raw mut descriptor) }.map(drop)
}

pub(super) fn set_iommu(container: &OwnedFd) -> io::Result<()> {
    with_value(container, SET_IOMMU, TYPE1V2_IOMMU).map(drop)
}

pub(super) fn device(group: &OwnedFd, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: the request takes a string that ends with a zero, and only reads it.
    let descriptor = unsafe { with_structure(group, GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut()) }?;
    // SAFETY: the kernel just made this descriptor, which has no other owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    Ok(File::from(descriptor))
}

pub(super) fn has_reset(device: &File) -> io::Result<bool> {
    // `struct vfio_device_info`: its size, flags, numbers of regions and interrupts, offset of capabilities, padding.
    let mut description = [20_u32, 0, 0, 0, 0, 0];
    // SAFETY: the request takes this structure and writes at most the size that its first word states.
    unsafe { with_structure(device, DEVICE_GET_INFO, &raw mut description) }?;
    Ok(description[1] & DEVICE_FLAGS_RESET != 0)
}

pub(super) fn region(device: &File, index: u32) -> io::Result<Region> {
    let mut region = Region { bytes_of_structure: size_of::<Region>() as u32, index, ..Region::default() };
    // SAFETY: the request takes this structure.
    unsafe { with_structure(device, DEVICE_GET_REGION_INFO, &raw mut region) }?;
    Ok(region)
}

pub(super) fn reset(device: &File) -> io::Result<()> {
    with_value(device, DEVICE_RESET, 0).map(drop)
}

/// Limits of an IOMMU: the smallest page, and the first and last address of each range that it can map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IommuLimits {
    pub(super) page_bytes_min: u64,
    pub(super) ranges: Vec<(u64, u64)>,
}

pub(super) fn iommu_limits(container: &OwnedFd) -> io::Result<IommuLimits> {
    // Capabilities follow the structure; the kernel writes the number of bytes that it needs into the first
    // word.
    let mut words = vec![0_u32; 64];
    for _ in 0..2 {
        words[0] = 4 * words.len() as u32;
        // SAFETY: the request takes a structure of the size that its first word states, which is that of the vector.
        unsafe { with_structure(container, IOMMU_GET_INFO, words.as_mut_ptr()) }?;
        let needed = (words[0] as usize).div_ceil(4);
        if needed <= words.len() {
            break;
        }
        words = vec![0; needed.min(1 << 16)];
    }
    Ok(parse_iommu_limits(&words))
}

/// Parses `struct vfio_iommu_type1_info` and the chain of its capabilities. Fields that older kernels lack get
/// a value that holds on every machine: 4 KiB pages, and 32 bits of addresses below the window of interrupts
/// (0xfee00000).
fn parse_iommu_limits(words: &[u32]) -> IommuLimits {
    let word = |at: usize| words.get(at).copied().unwrap_or(0);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 1)) << 32;
    let flags = word(1);
    let page_bytes_min = match long(2) {
        sizes if flags & IOMMU_INFO_PAGE_SIZES != 0 && sizes != 0 => 1 << sizes.trailing_zeros(),
        _ => 4096,
    };
    let mut ranges = Vec::new();
    let mut at = if flags & IOMMU_INFO_CAPABILITIES != 0 { word(4) as usize / 4 } else { 0 };
    // Offsets in the chain grow; one that does not ends the walk.
    while at >= 6 && at < words.len() {
        if word(at) as u16 == CAPABILITY_ADDRESS_RANGES {
            let count = (word(at + 2) as usize).min(words.len() / 4);
            ranges.extend((0..count).map(|index| (long(at + 4 + 4 * index), long(at + 6 + 4 * index))));
        }
        let next = word(at + 1) as usize / 4;
        if next <= at {
            break;
        }
        at = next;
    }
    ranges.retain(|(first, last)| first < last);
    if ranges.is_empty() {
        ranges.push((0, 0xfedf_ffff));
    }
    IommuLimits { page_bytes_min, ranges }
}

/// Maps memory of this process for the devices of a container. The mapping pins the pages.
pub(super) fn map_dma(
    container: &OwnedFd,
    start: NonNull<u8>,
    device_address: u64,
    bytes: usize,
) -> io::Result<()> {
    let mut map = DmaMap {
        bytes_of_structure: size_of::<DmaMap>() as u32,
        flags: DMA_READ_AND_WRITE,
        process_address: start.addr().get() as u64,
        device_address,
        bytes: bytes as u64,
    };
    // SAFETY: the request takes this structure. What the device may then write to is the contract of `Bus::map`.
    unsafe { with_structure(container, IOMMU_MAP_DMA, &raw mut map) }.map(drop)
}

pub(super) fn unmap_dma(container: &OwnedFd, device_address: u64, bytes: usize) -> io::Result<()> {
    let bytes_of_structure = size_of::<DmaUnmap>() as u32;
    let mut unmap = DmaUnmap { bytes_of_structure, flags: 0, device_address, bytes: bytes as u64 };
    // SAFETY: the request takes this structure and writes the number of bytes that it unmapped.
    unsafe { with_structure(container, IOMMU_UNMAP_DMA, &raw mut unmap) }?;
    if unmap.bytes == bytes as u64 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        assert_eq!((GET_API_VERSION, IOMMU_MAP_DMA, DEVICE_RESET), (0x3b64, 0x3b71, 0x3b6f));
    }

    #[test]
    fn limits_are_read_from_the_chain_of_capabilities() {
        let mut words = vec![0_u32; 32];
        words[..5].copy_from_slice(&[128, 3, 0x4020_1000, 0, 24]);
        // Migration (2), which is skipped, then the ranges (1).
        words[6..8].copy_from_slice(&[1 << 16 | 2, 40]);
        words[10..14].copy_from_slice(&[1 << 16 | 1, 0, 2, 0]);
        words[14..18].copy_from_slice(&[0, 0, 0xfedf_ffff, 0]);
        words[18..22].copy_from_slice(&[0xfef0_0000, 0, 0xffff_ffff, 0x7f]);
        let expected = vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
        assert_eq!(parse_iommu_limits(&words), IommuLimits { page_bytes_min: 4096, ranges: expected });
        // A chain that leads back, and one that leads out.
        words[7] = 24;
        assert_eq!(parse_iommu_limits(&words).ranges, [(0, 0xfedf_ffff)]);
        words[4] = u32::MAX;
        assert_eq!(parse_iommu_limits(&words).ranges.len(), 1);
        assert_eq!(parse_iommu_limits(&[]).page_bytes_min, 4096);
    }
}
