//! Disks: real files whose reads and writes take time, fail, return wrong bits, and are lost on a power
//! failure.
//!
//! Unsynced writes are recorded with the bytes that they replaced. When a machine loses power, some of them
//! are undone, including parts of a write, and those of processes that ended before: a process that is killed leaves its
//! writes in the page cache, and closing a file synchronises nothing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::c_int;

use super::network::HostId;
use super::threads::ProcessId;
use super::{Kernel, MICROSECOND, Nanos, real, report};
use crate::oracle::Oracle;

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

/// Identity of a file: its device and its inode.
type FileId = (u64, u64);

/// A write that is not on stable storage.
#[derive(Debug)]
pub(super) struct Unsynced {
    host: HostId,
    file: FileId,
    offset: i64,
    before: Vec<u8>,
}

/// Files with unsynced writes, each with a descriptor of its own, which outlives the writing process.
pub(super) type UnsyncedFiles = BTreeMap<FileId, c_int>;

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
        let id = file_id(file);
        if let Entry::Vacant(entry) = self.unsynced_files.entry(id) {
            entry.insert(duplicate(file));
        }
        let host = self.processes[owner.index()].host;
        self.unsynced.push(Unsynced { host, file: id, offset, before });
        really_write(file, content, offset)
    }

    /// Puts the writes to a file on stable storage, unless the disk fails.
    pub(super) fn sync(&mut self, owner: ProcessId, file: c_int) -> Result<(), c_int> {
        if self.disk_fails(owner) {
            return Err(libc::EIO);
        }
        let id = file_id(file);
        self.unsynced.retain(|written| written.file != id);
        self.forget_file(&id);
        Ok(())
    }

    /// Undoes some of the unsynced writes of a machine that has lost power.
    pub(super) fn lose_unsynced(&mut self, host: HostId) {
        let (mut lost, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.unsynced).into_iter().partition(|written| written.host == host);
        self.unsynced = kept;
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
            if let Some(file) = self.unsynced_files.get(&written.file) {
                really_write(*file, &written.before[from..], written.offset + from as i64);
            }
        }
        for written in lost {
            self.forget_file(&written.file);
        }
    }

    fn forget_file(&mut self, file: &FileId) {
        if let Some(descriptor) = self.unsynced_files.remove(file) {
            let function = real::CLOSE.get();
            // SAFETY: the descriptor was made by `duplicate`, and nothing else uses it.
            unsafe { function(descriptor) };
        }
    }
}

fn file_id(file: c_int) -> FileId {
    // SAFETY: the structure is plain numbers.
    let mut status: libc::stat64 = unsafe { std::mem::zeroed() };
    // SAFETY: there is room for the status.
    if unsafe { libc::fstat64(file, &raw mut status) } != 0 {
        report::fail(Oracle::Simulator, "a file of a simulated disk has no status");
    }
    (status.st_dev, status.st_ino)
}

fn duplicate(file: c_int) -> c_int {
    let function = real::FCNTL.get();
    // SAFETY: the call takes two numbers.
    let copy = unsafe { function(file, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        report::fail(Oracle::Simulator, "the system has no more descriptors");
    }
    copy
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
