//! Checks of clause 5 of the contract, in one place: every engine calls them before it does I/O.
//!
//! Hot path: comparisons only.

use std::ptr::NonNull;

use crate::{Geometry, Request};

impl Geometry {
    /// Returns the address of the request's buffer, or the reason why the request violates the contract.
    pub fn check(&self, request: &Request) -> Result<NonNull<u8>, &'static str> {
        let len = request.buffer.len();
        if len == 0 {
            return Err("no bytes");
        }
        if len > self.transfer_bytes_max {
            return Err("longer than the longest request");
        }
        self.check_range(request.file, request.offset, len as u64)?;
        let address = request.buffer.address().ok_or("the buffer leaves its slot")?;
        if !address.addr().get().is_multiple_of(self.block_bytes) {
            return Err("the buffer's address is not aligned");
        }
        Ok(address)
    }

    /// Checks that a range is aligned and inside of its file; the error is the reason why not.
    pub(crate) fn check_range(&self, file: u32, offset: u64, bytes: u64) -> Result<(), &'static str> {
        let Some(&file_bytes) = self.files.get(file as usize) else { return Err("no such file") };
        let block = self.block_bytes as u64;
        if !offset.is_multiple_of(block) {
            return Err("the offset is not aligned");
        }
        if !bytes.is_multiple_of(block) {
            return Err("the length is not aligned");
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= file_bytes => Ok(()),
            _ => Err("beyond the end of the file"),
        }
    }
}
