//! Layout of commands in the kernel's structures, and parsing of the device's answers. Bytes only: no I/O.

/// `_IO('N', 0x40)`: the namespace's number.
pub(super) const NVME_IOCTL_ID: libc::c_ulong = 0x4E40;
/// `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
pub(super) const NVME_IOCTL_ADMIN_CMD: libc::c_ulong = 0xC048_4E41;
/// `_IOWR('N', 0x43, struct nvme_passthru_cmd)`.
pub(super) const NVME_IOCTL_IO_CMD: libc::c_ulong = 0xC048_4E43;
/// `_IOWR('N', 0x80, struct nvme_uring_cmd)`.
pub(super) const NVME_URING_CMD_IO: u32 = 0xC048_4E80;

pub(super) const OPCODE_FLUSH: u8 = 0x00;
pub(super) const OPCODE_WRITE: u8 = 0x01;
pub(super) const OPCODE_READ: u8 = 0x02;
pub(super) const OPCODE_ADMIN_IDENTIFY: u8 = 0x06;

/// Bytes of an answer to Identify.
pub(super) const IDENTIFY_BYTES: usize = 4096;

/// `struct nvme_passthru_cmd`; `struct nvme_uring_cmd` is the same up to the last field, which is reserved there.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Command {
    pub(super) opcode: u8,
    pub(super) flags: u8,
    pub(super) reserved: u16,
    pub(super) namespace: u32,
    pub(super) dword2: u32,
    pub(super) dword3: u32,
    pub(super) metadata: u64,
    pub(super) address: u64,
    pub(super) metadata_bytes: u32,
    pub(super) bytes: u32,
    pub(super) dword10: u32,
    pub(super) dword11: u32,
    pub(super) dword12: u32,
    pub(super) dword13: u32,
    pub(super) dword14: u32,
    pub(super) dword15: u32,
    pub(super) timeout_ms: u32,
    pub(super) result: u32,
}

const _: () = assert!(size_of::<Command>() == 72);

impl Command {
    /// Returns the 80 command bytes of a submission entry.
    pub(super) fn to_entry(self) -> [u8; 80] {
        let mut entry = [0; 80];
        entry[0] = self.opcode;
        entry[1] = self.flags;
        entry[4..8].copy_from_slice(&self.namespace.to_ne_bytes());
        entry[24..32].copy_from_slice(&self.address.to_ne_bytes());
        entry[36..40].copy_from_slice(&self.bytes.to_ne_bytes());
        entry[40..44].copy_from_slice(&self.dword10.to_ne_bytes());
        entry[44..48].copy_from_slice(&self.dword11.to_ne_bytes());
        entry[48..52].copy_from_slice(&self.dword12.to_ne_bytes());
        entry
    }

    /// Returns a read or a write of whole blocks; `blocks` from 1 to 65536.
    pub(super) fn transfer(
        opcode: u8,
        namespace: u32,
        block: u64,
        blocks: u32,
        address: u64,
        bytes: u32,
    ) -> Self {
        Self {
            opcode,
            namespace,
            address,
            bytes,
            dword10: block as u32,
            dword11: (block >> 32) as u32,
            // The field is zero-based.
            dword12: blocks.wrapping_sub(1) & 0xFFFF,
            ..Self::default()
        }
    }
}

/// Fields of Identify Namespace that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Namespace {
    pub(super) blocks: u64,
    pub(super) block_bytes: usize,
}

/// Fields of Identify Controller that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Controller {
    /// Maximum bytes of a transfer; `None` without a limit.
    pub(super) transfer_bytes_max: Option<usize>,
}

/// Parses the answer to Identify Namespace; the error is the reason why the namespace cannot be used.
pub(super) fn parse_namespace(answer: &[u8; IDENTIFY_BYTES]) -> Result<Namespace, String> {
    let blocks = u64::from_le_bytes(std::array::from_fn(|index| answer[index]));
    let formatted = answer[26];
    let format = usize::from(formatted & 0xF | (formatted >> 5 & 3) << 4);
    let at = 128 + 4 * format;
    let metadata_bytes = u16::from_le_bytes([answer[at], answer[at + 1]]);
    let shift = answer[at + 2];
    if metadata_bytes != 0 {
        return Err(format!("its blocks have {metadata_bytes} bytes of metadata, which is not supported"));
    }
    if !(9..=16).contains(&shift) {
        return Err(format!("its blocks have 2^{shift} bytes"));
    }
    if blocks == 0 {
        return Err("it has no blocks: the namespace is not active".to_owned());
    }
    Ok(Namespace { blocks, block_bytes: 1 << shift })
}

/// Parses the answer to Identify Controller. MDTS counts in the controller's smallest pages, whose size
/// (CAP.MPSMIN) is at least 4 KiB, and not known here.
pub(super) fn parse_controller(answer: &[u8; IDENTIFY_BYTES]) -> Controller {
    let shift = u32::from(answer[77]);
    let transfer_bytes_max =
        (shift > 0).then(|| 4096_usize.checked_shl(shift).unwrap_or(usize::MAX).max(4096));
    Controller { transfer_bytes_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_laid_out_as_the_kernel_has_it() {
        let command = Command::transfer(OPCODE_READ, 7, 0x1_2345_6789, 65536, 0xAABB_CCDD_EEFF, 4096);
        let entry = command.to_entry();
        assert_eq!((entry[0], entry[4], entry[36..40].to_vec()), (2, 7, 4096_u32.to_ne_bytes().to_vec()));
        assert_eq!(entry[40..48], 0x1_2345_6789_u64.to_ne_bytes());
        assert_eq!(entry[48..52], 0xFFFF_u32.to_ne_bytes());
        assert_eq!(std::mem::offset_of!(Command, address), 24);
        assert_eq!(std::mem::offset_of!(Command, bytes), 36);
        assert_eq!(std::mem::offset_of!(Command, dword10), 40);
        assert_eq!(std::mem::offset_of!(Command, dword12), 48);
    }

    #[test]
    fn answers_of_any_bytes_are_read_without_a_panic() {
        let mut answer = [0; IDENTIFY_BYTES];
        assert!(parse_namespace(&answer).is_err());
        answer[0..8].copy_from_slice(&1000_u64.to_le_bytes());
        answer[26] = 0x21;
        answer[128 + 4 * 17 + 2] = 12;
        assert_eq!(parse_namespace(&answer), Ok(Namespace { blocks: 1000, block_bytes: 4096 }));
        answer[128 + 4 * 17] = 8;
        assert!(parse_namespace(&answer).expect_err("metadata").contains("8 bytes of metadata"));
        let mut random = crate::testing::Random(3);
        for _ in 0..2000 {
            answer.fill_with(|| random.draw() as u8);
            let _any = (parse_namespace(&answer), parse_controller(&answer));
        }
        answer[77] = 7;
        assert_eq!(parse_controller(&answer), Controller { transfer_bytes_max: Some(512 << 10) });
    }
}
