//! A queue with a limit on messages and a limit on bytes, one reader, and writers that never wait.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Sending side of a queue.
#[derive(Debug)]
pub struct QueueSender<T> {
    items: mpsc::Sender<Queued<T>>,
    bytes: Arc<Semaphore>,
    bytes_max: u32,
}

/// Receiving side of a queue.
#[derive(Debug)]
pub struct QueueReceiver<T> {
    items: mpsc::Receiver<Queued<T>>,
}

/// An item taken from the queue. Its bytes count as queued until it is dropped.
#[derive(Debug)]
pub struct Queued<T> {
    /// The queued item.
    pub item: T,
    _held: OwnedSemaphorePermit,
}

/// Reason for which the queue refused an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Too many messages or bytes are queued.
    Full,
    /// The receiver was dropped.
    Closed,
}

impl<T> Clone for QueueSender<T> {
    fn clone(&self) -> Self {
        Self { items: self.items.clone(), bytes: Arc::clone(&self.bytes), bytes_max: self.bytes_max }
    }
}

/// Returns a queue of at most `messages_max` items and `bytes_max` bytes. An item longer than `bytes_max` is accepted only when
/// the queue is empty.
#[must_use]
pub fn queue<T>(messages_max: usize, bytes_max: usize) -> (QueueSender<T>, QueueReceiver<T>) {
    let (sender, receiver) = mpsc::channel(messages_max);
    let bytes_max = u32::try_from(bytes_max).unwrap_or(u32::MAX);
    let bytes = Arc::new(Semaphore::new(bytes_max as usize));
    (QueueSender { items: sender, bytes, bytes_max }, QueueReceiver { items: receiver })
}

impl<T> QueueSender<T> {
    /// Queues an item that counts as `bytes`, or drops it.
    ///
    /// # Errors
    ///
    /// [`Refused`] says why it was dropped.
    pub fn offer(&self, item: T, bytes: usize) -> Result<(), Refused> {
        let counted = u32::try_from(bytes).unwrap_or(u32::MAX).min(self.bytes_max);
        let held = Arc::clone(&self.bytes).try_acquire_many_owned(counted).map_err(|_| Refused::Full)?;
        self.items.try_send(Queued { item, _held: held }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Refused::Full,
            mpsc::error::TrySendError::Closed(_) => Refused::Closed,
        })
    }
}

impl<T> QueueReceiver<T> {
    /// Returns the next item, or `None` when every sender was dropped. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Queued<T>> {
        self.items.recv().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bounds_hold_and_bytes_come_back() {
        let (sender, mut receiver) = queue(3, 100);
        assert_eq!(sender.offer("longer than all", 1000), Ok(()));
        assert_eq!(sender.offer("b", 1), Err(Refused::Full), "the long one is alone");
        let long = receiver.recv().await.expect("an item");
        assert_eq!(sender.offer("b", 1), Err(Refused::Full), "its bytes count until it is dropped");
        drop(long);
        for _ in 0..3 {
            assert_eq!(sender.offer("c", 10), Ok(()));
        }
        assert_eq!(sender.offer("d", 10), Err(Refused::Full), "three items at most");
        assert_eq!(receiver.recv().await.expect("an item").item, "c");
        assert_eq!(sender.offer("e", 81), Err(Refused::Full), "100 bytes at most");
        assert_eq!(sender.offer("e", 80), Ok(()));
        drop(receiver);
        assert_eq!(sender.offer("f", 0), Err(Refused::Closed));
    }
}
