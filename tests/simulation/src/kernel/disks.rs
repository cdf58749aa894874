//! Disks: real files whose reads and writes take time, fail, return wrong bits, and are lost on a power
//! failure.
//!
//! Unsynced writes are recorded with the bytes that they replaced. When a machine loses power, some of them
//! are undone, including parts of a write.

use std::ffi::c_int;

use super::threads::ProcessId;
use super::{Kernel, MICROSECOND, Nanos, real};

/// Unit of a disk write, in bytes.
const SECTOR: usize = 512;

/// Faults of a host's disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskFaults {
    /// Additional time of every operation.
    pub(crate) slow: Nanos,
    /// One operation in this many fails; 0: none.
    pub(crate) fail_one_in: u64,
    /// One read in this many returns a wrong bit; 0: none.
    pub(crate) rot_one_in: u64,
}

/// Number of faults that disks have shown.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DiskCounts {
    pub(crate) failed: u64,
    pub(crate) rotten: u64,
    /// Writes that a power failure undid, in part or completely.
    pub(crate) undone: u64,
}

/// A write that is not on stable storage.
#[derive(Debug)]
pub(super) struct Unsynced {
    owner: ProcessId,
    file: c_int,
    offset: i64,
    before: Vec<u8>,
}

impl Kernel {
    /// Returns the time that an operation of this process's disk takes.
    pub(super) fn disk_delay(&mut self) -> Nanos {
        let slow = self.hosts[self.host().index()].disk.slow;
        slow + self.random.between(60 * MICROSECOND, 400 * MICROSECOND)
    }

    fn disk_of(&self, owner: ProcessId) -> DiskFaults {
        self.hosts[self.processes[owner.index()].host.index()].disk
    }

    fn disk_fails(&mut self, owner: ProcessId) -> bool {
        let one_in = self.disk_of(owner).fail_one_in;
        let fails = self.random.one_in(one_in);
        self.disk_counts.failed += u64::from(fails);
        fails
    }

    /// Reads from a file; returns the bytes read, or an error below 0.
    pub(super) fn read_file(&mut self, owner: ProcessId, file: c_int, room: &mut [u8], offset: i64) -> i32 {
        if self.disk_fails(owner) {
            return -libc::EIO;
        }
        let count = really_read(file, room, offset);
        let one_in = self.disk_of(owner).rot_one_in;
        if count > 0 && self.random.one_in(one_in) {
            let bit = self.random.below(count as u64 * 8) as usize;
            room[bit / 8] ^= 1 << (bit % 8);
            self.disk_counts.rotten += 1;
            self.trace.step("rot", self.now, bit as u64, 0);
        }
        count
    }

    /// Writes to a file; returns the bytes written, or an error below 0.
    pub(super) fn write_file(&mut self, owner: ProcessId, file: c_int, content: &[u8], offset: i64) -> i32 {
        if self.disk_fails(owner) {
            return -libc::EIO;
        }
        let mut before = vec![0; content.len()];
        really_read(file, &mut before, offset);
        self.unsynced.push(Unsynced { owner, file, offset, before });
        really_write(file, content, offset)
    }

    /// Puts the writes to a file on stable storage, unless the disk fails.
    pub(super) fn sync(&mut self, owner: ProcessId, file: c_int) -> Result<(), c_int> {
        if self.disk_fails(owner) {
            return Err(libc::EIO);
        }
        self.unsynced.retain(|written| written.file != file);
        Ok(())
    }

    /// Undoes some of a process's unsynced writes if its machine lost power.
    pub(super) fn lose_unsynced(&mut self, process: ProcessId, with_power: bool) {
        let (mut lost, kept) =
            std::mem::take(&mut self.unsynced).into_iter().partition(|written| written.owner == process);
        self.unsynced = kept;
        if !with_power {
            return;
        }
        lost.reverse();
        for written in &lost {
            let sectors = written.before.len() / SECTOR;
            let undone = match self.random.below(3) {
                0 => written.before.len(),
                // A prefix of the write has reached the disk.
                1 if sectors > 1 => self.random.below(sectors as u64) as usize * SECTOR,
                _ => 0,
            };
            self.disk_counts.undone += u64::from(undone > 0);
            let from = written.before.len() - undone;
            really_write(written.file, &written.before[from..], written.offset + from as i64);
        }
    }

    /// Drops the records of a closed file, whose number may be reused.
    pub(super) fn forget_unsynced(&mut self, file: c_int) {
        self.unsynced.retain(|written| written.file != file);
    }
}

fn result_of(count: isize) -> i32 {
    if count < 0 {
        -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        count as i32
    }
}

fn really_read(file: c_int, room: &mut [u8], offset: i64) -> i32 {
    let function = real::PREAD64.get();
    // SAFETY: there is so much room.
    result_of(unsafe { function(file, room.as_mut_ptr().cast(), room.len(), offset) })
}

fn really_write(file: c_int, content: &[u8], offset: i64) -> i32 {
    let function = real::PWRITE64.get();
    // SAFETY: there are so many bytes.
    result_of(unsafe { function(file, content.as_ptr().cast(), content.len(), offset) })
}
