//! Fields of messages: values of fixed size, and lists of them.

use kvstore_block::BlockIdentity;

use super::{BLOCKS_PER_MESSAGE_MAX, Description, FoundBlock, Grant, Offer};

/// A value of fixed size.
pub(super) trait Field: Sized {
    const BYTES: usize;
    fn put(&self, out: &mut Vec<u8>);
    fn get(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! integer_fields {
    ($($integer:ty),*) => {$(
        impl Field for $integer {
            const BYTES: usize = size_of::<Self>();
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
            fn get(from: &mut &[u8]) -> Option<Self> {
                let (head, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(Self::from_le_bytes(*head))
            }
        }
    )*};
}

integer_fields!(u8, u16, u32, u64);

impl Field for BlockIdentity {
    const BYTES: usize = 16;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.0);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let (head, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(Self(*head))
    }
}

impl Field for Description {
    const BYTES: usize = 36;

    fn put(&self, out: &mut Vec<u8>) {
        self.parent.put(out);
        self.bytes.put(out);
        self.checksum.put(out);
        self.meta.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let (parent, bytes) = (Field::get(from)?, Field::get(from)?);
        Some(Self { parent, bytes, checksum: Field::get(from)?, meta: Field::get(from)? })
    }
}

impl Field for Offer {
    const BYTES: usize = BlockIdentity::BYTES + Description::BYTES;

    fn put(&self, out: &mut Vec<u8>) {
        self.identity.put(out);
        self.description.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(Self { identity: Field::get(from)?, description: Field::get(from)? })
    }
}

impl Field for FoundBlock {
    const BYTES: usize = 8 + Description::BYTES;

    fn put(&self, out: &mut Vec<u8>) {
        self.slot.put(out);
        self.generation.put(out);
        self.description.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(Self { slot: Field::get(from)?, generation: Field::get(from)?, description: Field::get(from)? })
    }
}

impl Field for Grant {
    const BYTES: usize = 9;

    fn put(&self, out: &mut Vec<u8>) {
        let (kind, slot, generation) = match *self {
            Self::Slot { slot, generation } => (0_u8, slot, generation),
            Self::Present => (1, 0, 0),
            Self::Pending => (2, 0, 0),
            Self::Full => (3, 0, 0),
            Self::Refused => (4, 0, 0),
        };
        kind.put(out);
        slot.put(out);
        generation.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        match (u8::get(from)?, u32::get(from)?, u32::get(from)?) {
            (0, slot, generation) => Some(Self::Slot { slot, generation }),
            (1, 0, 0) => Some(Self::Present),
            (2, 0, 0) => Some(Self::Pending),
            (3, 0, 0) => Some(Self::Full),
            (4, 0, 0) => Some(Self::Refused),
            _ => None,
        }
    }
}

pub(super) fn put_list<T: Field>(list: &[T], out: &mut Vec<u8>) {
    debug_assert!(list.len() <= BLOCKS_PER_MESSAGE_MAX, "a list of {} is never sent", list.len());
    (list.len() as u16).put(out);
    list.iter().for_each(|item| item.put(out));
}

/// Decodes the list at the end of a message.
pub(super) fn get_list<T: Field>(from: &mut &[u8]) -> Option<Vec<T>> {
    let count = usize::from(u16::get(from)?);
    if count > BLOCKS_PER_MESSAGE_MAX || count * T::BYTES != from.len() {
        return None;
    }
    (0..count).map(|_| T::get(from)).collect()
}
