//! Rooms, in which the two legs of a hand-off meet that were sent at the same time: SGLang's `bootstrap_room`,
//! Mooncake's `transfer_id`. Process-wide, by name.
//!
//! A room exists as long as a leg waits in it, or a lease of its name is held.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

/// Most rooms at a time.
const ROOMS_MAX: usize = 1 << 20;

/// State of a room.
#[derive(Debug, Clone, Default)]
struct RendezvousState {
    /// Engine id of the prefill worker and the number of prompt tokens that it had cached, once the blocks are
    /// available.
    offered_by: Option<(String, usize)>,
    wait_for_decode: bool,
    is_fetched: bool,
    is_given_up: bool,
}

type Rooms = HashMap<String, Arc<watch::Sender<RendezvousState>>>;

fn rooms() -> MutexGuard<'static, Rooms> {
    static ROOMS: OnceLock<Mutex<Rooms>> = OnceLock::new();
    ROOMS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Membership of a leg in a room. Dropping it leaves the room.
#[derive(Debug)]
pub(crate) struct RendezvousGuard {
    name: String,
    room: Option<Arc<watch::Sender<RendezvousState>>>,
}

/// Error of waiting for the other leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RendezvousError {
    /// The other leg did not arrive in time.
    Timeout,
    /// The other leg gave the hand-off up.
    GivenUp,
}

/// Enters a room, creating it if needed. `None`: there are too many rooms.
pub(crate) fn enter(name: &str) -> Option<RendezvousGuard> {
    let mut rooms = rooms();
    if rooms.len() >= ROOMS_MAX && !rooms.contains_key(name) {
        return None;
    }
    let room = rooms.entry(name.to_owned()).or_insert_with(|| Arc::new(watch::Sender::default()));
    Some(RendezvousGuard { name: name.to_owned(), room: Some(Arc::clone(room)) })
}

/// Enters a room if it exists.
pub(crate) fn existing(name: &str) -> Option<RendezvousGuard> {
    let room = rooms().get(name).cloned()?;
    Some(RendezvousGuard { name: name.to_owned(), room: Some(room) })
}

impl RendezvousGuard {
    async fn wait<T>(
        &self,
        within: Duration,
        ready: impl Fn(&RendezvousState) -> Option<T>,
    ) -> Result<T, RendezvousError> {
        let Some(room) = &self.room else { return Err(RendezvousError::GivenUp) };
        let mut view = room.subscribe();
        let known = view.wait_for(|known| ready(known).is_some() || known.is_given_up);
        match tokio::time::timeout(within, known).await {
            Ok(Ok(known)) => ready(&known).ok_or(RendezvousError::GivenUp),
            Ok(Err(_)) => Err(RendezvousError::GivenUp),
            Err(_) => Err(RendezvousError::Timeout),
        }
    }

    fn tell(&self, change: impl FnOnce(&mut RendezvousState)) {
        if let Some(room) = &self.room {
            room.send_modify(change);
        }
    }

    /// The prefill leg: waits for the decode leg to appear.
    pub(crate) async fn wait_for_decode(&self, within: Duration) -> Result<(), RendezvousError> {
        self.wait(within, |known| known.wait_for_decode.then_some(())).await
    }

    /// The prefill leg: offers the blocks under this room's name, `cached` being the prompt tokens that were cached.
    pub(crate) fn offer(&self, engine_id: &str, cached: usize) {
        self.tell(|known| known.offered_by = Some((engine_id.to_owned(), cached)));
    }

    /// The prefill leg: waits for the blocks to be fetched.
    pub(crate) async fn is_fetched(&self, within: Duration) -> Result<(), RendezvousError> {
        self.wait(within, |known| known.is_fetched.then_some(())).await
    }

    /// The decode leg: waits for the blocks. Returns the engine that has them, and the tokens that it had cached.
    pub(crate) async fn offered_by(&self, within: Duration) -> Result<(String, usize), RendezvousError> {
        self.tell(|known| known.wait_for_decode = true);
        self.wait(within, |known| known.offered_by.clone()).await
    }

    /// The decode leg: reports that the blocks were fetched.
    pub(crate) fn fetched(&self) {
        self.tell(|known| known.is_fetched = true);
    }

    /// Either leg: gives the hand-off up.
    pub(crate) fn give_up(&self) {
        self.tell(|known| known.is_given_up = true);
    }
}

impl Drop for RendezvousGuard {
    fn drop(&mut self) {
        let mut rooms = rooms();
        drop(self.room.take());
        if rooms.get(&self.name).is_some_and(|room| Arc::strong_count(room) == 1) {
            rooms.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn legs_meet_and_the_room_is_gone_afterwards() {
        let within = Duration::from_secs(5);
        let (prefill, decode) = (enter("rooms-test-1").expect("room"), enter("rooms-test-1").expect("room"));
        let (met, by) = tokio::join!(
            async {
                prefill.wait_for_decode(within).await?;
                prefill.offer("engine", 32);
                prefill.is_fetched(within).await
            },
            async {
                let by = decode.offered_by(within).await;
                decode.fetched();
                by
            }
        );
        assert_eq!((met, by), (Ok(()), Ok(("engine".to_owned(), 32))));
        drop((prefill, decode));
        assert!(existing("rooms-test-1").is_none());
        let lonely = enter("rooms-test-2").expect("room");
        assert_eq!(lonely.offered_by(Duration::from_millis(5)).await, Err(RendezvousError::Timeout));
        lonely.give_up();
        assert_eq!(lonely.wait_for_decode(within).await, Ok(()), "what is known stays known");
        assert_eq!(lonely.is_fetched(within).await, Err(RendezvousError::GivenUp));
    }
}
