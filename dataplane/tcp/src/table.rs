//! Values by number: the low bits are a position, the high bits the generation of the value at that position.

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

struct Entry<T> {
    generation: u64,
    value: Option<Box<T>>,
}

/// At most `capacity` boxed values, which do not move while they are in the table.
pub(crate) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    capacity: usize,
}

impl<T> Table<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity <= INDEX_MASK as usize, "{capacity} entries");
        Self { entries: Vec::new(), free: Vec::new(), capacity }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Inserts a value and returns its position; `None` when the table is full.
    pub(crate) fn insert(&mut self, value: Box<T>) -> Option<u32> {
        if let Some(index) = self.free.pop() {
            self.entries[index as usize].value = Some(value);
            return Some(index);
        }
        if self.entries.len() >= self.capacity {
            return None;
        }
        // Generations start at 1, so that no number is zero.
        self.entries.push(Entry { generation: 1, value: Some(value) });
        Some((self.entries.len() - 1) as u32)
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Box<T>> {
        let entry = self.entries.get_mut(index as usize)?;
        let value = entry.value.take()?;
        entry.generation += 1;
        self.free.push(index);
        Some(value)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.entries.get(index as usize)?.value.as_deref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.value.as_deref_mut()
    }

    /// Returns the number of the value at `index`. It is not reused after the value is removed.
    pub(crate) fn number(&self, index: u32) -> u64 {
        self.entries[index as usize].generation << INDEX_BITS | u64::from(index)
    }

    /// Returns the position of the value with this number; `None` once it is removed.
    pub(crate) fn find(&self, number: u64) -> Option<u32> {
        let index = (number & INDEX_MASK) as u32;
        let entry = self.entries.get(index as usize)?;
        (entry.generation == number >> INDEX_BITS && entry.value.is_some()).then_some(index)
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = u32> {
        let is_used = |(index, entry): (usize, &Entry<T>)| entry.value.is_some().then_some(index as u32);
        self.entries.iter().enumerate().filter_map(is_used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_used_twice() {
        let mut table = Table::new(2);
        let a = table.insert(Box::new('a')).expect("room");
        let b = table.insert(Box::new('b')).expect("room");
        assert!(table.insert(Box::new('c')).is_none(), "capacity is a bound");
        let (old, other) = (table.number(a), table.number(b));
        assert_eq!(table.find(old), Some(a));
        assert_eq!(table.remove(a).as_deref(), Some(&'a'));
        assert_eq!(table.find(old), None);
        let c = table.insert(Box::new('c')).expect("room");
        assert_eq!((c, table.find(old), table.find(other)), (a, None, Some(b)));
        assert_ne!(table.number(c), old);
        assert_eq!(table.len(), 2);
        assert_eq!(table.find(0), None);
        assert_eq!(table.find(u64::MAX), None);
    }
}
