//! Creation of XDP links without aya: aya falls back to netlink where the kernel refuses a link, and a
//! netlink attachment outlives the process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

// include/uapi/linux/bpf.h: enum bpf_cmd, enum bpf_attach_type.
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_XDP: u32 = 37;

// include/uapi/linux/if_link.h.
pub(crate) const NATIVE: u32 = 1 << 2;
pub(crate) const GENERIC: u32 = 1 << 1;

/// The part of `union bpf_attr` for `BPF_LINK_CREATE`, up to the fields that stay zero.
#[repr(C)]
struct LinkCreate {
    program: u32,
    interface_index: u32,
    attach_type: u32,
    flags: u32,
    rest: [u64; 6],
}
const _: () = assert!(size_of::<LinkCreate>() == 64);

/// Attaches an XDP program to an interface. Closing the returned descriptor detaches it, also when the kernel
/// closes it for a process that died.
pub(crate) fn attach_xdp(program: BorrowedFd<'_>, interface_index: u32, flags: u32) -> io::Result<OwnedFd> {
    let attributes = LinkCreate {
        program: program.as_raw_fd().cast_unsigned(),
        interface_index,
        attach_type: BPF_XDP,
        flags,
        rest: [0; 6],
    };
    // SAFETY: bpf(2) reads `size` bytes at `attributes`, which lives until the call returns and is that large;
    // `program` is open for as long, by its type.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_LINK_CREATE, &raw const attributes, size_of::<LinkCreate>())
    };
    let fd = i32::try_from(result).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so `fd` is a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
