//! Submission entries, 64 bytes each (NVM Express Base Specification 2.0, 3.3.3.1; NVM Command Set 1.0, 3).

/// One submission entry as sixteen words. Its command id is filled in when it is queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Command(pub(crate) [u32; 16]);

/// Opcodes of the admin queue.
pub(crate) mod admin {
    pub(crate) const CREATE_SUBMISSION_QUEUE: u8 = 0x01;
    pub(crate) const CREATE_COMPLETION_QUEUE: u8 = 0x05;
    pub(crate) const IDENTIFY: u8 = 0x06;
    pub(crate) const ABORT: u8 = 0x08;
    pub(crate) const SET_FEATURES: u8 = 0x09;
    /// Feature: number of queues.
    pub(crate) const FEATURE_QUEUES: u32 = 7;
}

/// Opcodes of the I/O queues.
pub(crate) mod nvm {
    pub(crate) const FLUSH: u8 = 0x00;
    pub(crate) const WRITE: u8 = 0x01;
    pub(crate) const READ: u8 = 0x02;
}

/// Bits 14 and 15 of word 0: the data pointer is a scatter-gather descriptor.
const DATA_POINTER_IS_SGL: u32 = 1 << 14;

/// Location of a command's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataPointer {
    /// One or two pages, or a page and a list of pages.
    Prp(u64, u64),
    /// One run of bytes: a data block descriptor with an address (type 0, subtype 0).
    Sgl(u64, u32),
}

impl Command {
    fn new(opcode: u8, namespace: u32) -> Self {
        let mut words = [0; 16];
        words[0] = opcode.into();
        words[1] = namespace;
        Self(words)
    }

    fn long(mut self, word: usize, value: u64) -> Self {
        self.0[word] = value as u32;
        self.0[word + 1] = (value >> 32) as u32;
        self
    }

    fn word(mut self, word: usize, value: u32) -> Self {
        self.0[word] = value;
        self
    }

    pub(crate) fn with_id(mut self, id: u16) -> Self {
        self.0[0] = self.0[0] & 0xffff | u32::from(id) << 16;
        self
    }

    /// `structure`: 0 a namespace, 1 the controller.
    pub(crate) fn identify(structure: u32, namespace: u32, address: u64) -> Self {
        Self::new(admin::IDENTIFY, namespace).long(6, address).word(10, structure)
    }

    /// Requests this number of queue pairs. Both counts in the command are zero-based.
    pub(crate) fn set_queue_count(pairs: u16) -> Self {
        let last = u32::from(pairs) - 1;
        Self::new(admin::SET_FEATURES, 0).word(10, admin::FEATURE_QUEUES).word(11, last << 16 | last)
    }

    /// A completion queue that raises no interrupt.
    pub(crate) fn create_completion_queue(id: u16, entries: u16, address: u64) -> Self {
        Self::new(admin::CREATE_COMPLETION_QUEUE, 0)
            .long(6, address)
            .word(10, u32::from(entries - 1) << 16 | u32::from(id))
            .word(11, 1)
    }

    /// A submission queue that completes into the completion queue of the same number.
    pub(crate) fn create_submission_queue(id: u16, entries: u16, address: u64) -> Self {
        Self::new(admin::CREATE_SUBMISSION_QUEUE, 0)
            .long(6, address)
            .word(10, u32::from(entries - 1) << 16 | u32::from(id))
            .word(11, u32::from(id) << 16 | 1)
    }

    pub(crate) fn abort(queue: u16, id: u16) -> Self {
        Self::new(admin::ABORT, 0).word(10, u32::from(id) << 16 | u32::from(queue))
    }

    /// Reads or writes `blocks` (1 to 65,536) from `block` on.
    #[inline]
    pub(crate) fn transfer(
        opcode: u8,
        namespace: u32,
        pointer: DataPointer,
        block: u64,
        blocks: u32,
    ) -> Self {
        let command = Self::new(opcode, namespace).long(10, block).word(12, blocks - 1);
        match pointer {
            DataPointer::Prp(first, second) => command.long(6, first).long(8, second),
            DataPointer::Sgl(address, bytes) => {
                let flags = command.0[0] | DATA_POINTER_IS_SGL;
                command.word(0, flags).long(6, address).word(8, bytes)
            }
        }
    }

    /// The second pointer of a transfer: the list of its pages after the first.
    #[inline]
    pub(crate) fn with_page_list(self, address: u64) -> Self {
        self.long(8, address)
    }

    pub(crate) fn flush(namespace: u32) -> Self {
        Self::new(nvm::FLUSH, namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_fields_of_the_specification() {
        let read = Command::transfer(nvm::READ, 3, DataPointer::Prp(0x1_0000_1200, 0x2000), 0x5_0000_0007, 8);
        let words = read.with_id(0xabcd).0;
        assert_eq!(words[..4], [0xabcd_0002, 3, 0, 0]);
        assert_eq!(words[6..13], [0x1200, 1, 0x2000, 0, 7, 5, 7]);
        let write = Command::transfer(nvm::WRITE, 1, DataPointer::Sgl(0x3000, 65536), 0, 1).0;
        assert_eq!((write[0], &write[6..10]), (0x4001, &[0x3000, 0, 65536, 0][..]));
        let queue = Command::create_submission_queue(2, 64, 0x8000).0;
        assert_eq!((queue[0], queue[6], queue[10], queue[11]), (1, 0x8000, 63 << 16 | 2, 2 << 16 | 1));
        assert_eq!(Command::abort(1, 9).0[10], 9 << 16 | 1);
        assert_eq!(Command::set_queue_count(4).0[10..12], [7, 3 << 16 | 3]);
    }
}
