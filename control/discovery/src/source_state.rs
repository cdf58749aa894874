//! The objects of one source, and the guard against lists that lose too many.
//!
//! A successful list may still be wrong: an API server restored from a backup, a selector mistyped for a
//! moment, a truncated file. [`RemovalLimit`] therefore limits how many endpoints a list may remove without deletion
//! events: if more than `share` of the endpoints are missing from it, the missing objects become *suspect*.
//! They are served as long as they answer the fleet's health checks, and are removed after `time`, or as soon
//! as the source deletes them.
//!
//! | Event | Object |
//! | --- | --- |
//! | `Changed`, or in a list | trusted, with the new content |
//! | `Deleted` | removed |
//! | `Expired` | suspect for `time` |
//! | missing from a list that lacks at most `share` | removed |
//! | missing from a list that lacks more | suspect for `time` from the first such list on |
//! | missing from the first list after the source selects other objects (`Replaced`) | removed |
//! | `Failed` | as before |
//!
//! Endpoints that lists of the last `time` removed count as missing as well, so that a source cannot lose
//! half after half unnoticed.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use crate::endpoint::Endpoint;
use crate::update::{Object, Update};

/// Limit on the endpoints that a list may remove without deletion events.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RemovalLimit {
    /// Share of a source's endpoints that a list may lack, from 0 to 1.
    pub share: f64,
    /// Time for which objects that a list lacked beyond that share are kept.
    pub time: Duration,
}

#[derive(Debug, PartialEq)]
struct Tracked {
    endpoints: Vec<Endpoint>,
    /// Time at which the object is removed; `None` while its source reports it.
    suspect_until: Option<Instant>,
}

/// The objects of one source after all its updates.
#[derive(Debug, Default)]
pub(crate) struct SourceState {
    objects: BTreeMap<String, Tracked>,
    /// Reason why the source cannot be read; `None` if its last report was a success.
    pub(crate) error: Option<String>,
    /// Whether a list has ever succeeded.
    pub(crate) is_listed: bool,
    /// Updates so far.
    pub(crate) updates: u64,
    /// Number of endpoints that lists have removed, and the time since which they are counted.
    removed: (usize, Option<Instant>),
}

impl SourceState {
    /// Applies an update; returns whether endpoints changed.
    pub(crate) fn apply(&mut self, update: Update, guard: RemovalLimit, now: Instant) -> bool {
        self.updates += 1;
        if !matches!(update, Update::Failed(_)) {
            self.error = None;
        }
        match update {
            Update::Listed(objects) => {
                self.is_listed = true;
                self.list(objects, guard, now)
            }
            Update::Replaced(objects) => {
                self.is_listed = true;
                self.removed = (0, None);
                let before = std::mem::take(&mut self.objects);
                for object in objects {
                    self.put(object);
                }
                before != self.objects
            }
            Update::Changed(object) => self.put(object),
            Update::Deleted(key) => self.objects.remove(&key).is_some_and(|gone| !gone.endpoints.is_empty()),
            Update::Expired(key) => match self.objects.get_mut(&key) {
                Some(object) if object.suspect_until.is_none() => {
                    object.suspect_until = Some(now + guard.time);
                    !object.endpoints.is_empty()
                }
                _ => false,
            },
            Update::Failed(reason) => {
                self.error = Some(reason);
                false
            }
        }
    }

    /// Removes the suspect objects whose time is over; returns whether there were any.
    pub(crate) fn expire(&mut self, now: Instant) -> bool {
        let before = self.objects.len();
        self.objects.retain(|_, object| object.suspect_until.is_none_or(|until| until > now));
        self.objects.len() < before
    }

    /// Returns the next time at which [`Self::expire`] has an effect.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.objects.values().filter_map(|object| object.suspect_until).min()
    }

    /// Returns the endpoints in the order of their objects' keys, and whether the object is suspect.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (&Endpoint, bool)> {
        self.objects.values().flat_map(|object| {
            object.endpoints.iter().map(|endpoint| (endpoint, object.suspect_until.is_some()))
        })
    }

    /// Returns the number of endpoints that the last list lacked or whose registration expired, which are
    /// served while they answer.
    pub(crate) fn suspects(&self) -> usize {
        self.endpoints().filter(|(_, is_suspect)| *is_suspect).count()
    }

    fn put(&mut self, object: Object) -> bool {
        let Object { key, endpoints } = object;
        match self.objects.get_mut(&key) {
            Some(tracked) => {
                // A change of suspicion counts as a change: it decides between two endpoints with one
                // address.
                let is_changed = tracked.endpoints != endpoints || tracked.suspect_until.is_some();
                *tracked = Tracked { endpoints, suspect_until: None };
                is_changed
            }
            None => {
                let has_endpoints = !endpoints.is_empty();
                self.objects.insert(key, Tracked { endpoints, suspect_until: None });
                has_endpoints
            }
        }
    }

    fn list(&mut self, objects: Vec<Object>, guard: RemovalLimit, now: Instant) -> bool {
        let listed: HashSet<&str> = objects.iter().map(|object| object.key.as_str()).collect();
        if self.removed.1.is_some_and(|since| now.duration_since(since) > guard.time) {
            self.removed = (0, None);
        }
        let (mut all, mut missing) = (self.removed.0, self.removed.0);
        for (key, object) in &self.objects {
            all += object.endpoints.len();
            missing += if listed.contains(key.as_str()) { 0 } else { object.endpoints.len() };
        }
        let is_suspicious = missing as f64 > guard.share * all as f64;
        let (mut is_changed, mut removed) = (false, 0);
        self.objects.retain(|key, object| {
            if listed.contains(key.as_str()) || object.suspect_until.is_some() {
                return true;
            }
            if is_suspicious {
                object.suspect_until = Some(now + guard.time);
                is_changed = true;
                return true;
            }
            removed += object.endpoints.len();
            false
        });
        drop(listed);
        if removed > 0 {
            is_changed = true;
            self.removed = (self.removed.0 + removed, self.removed.1.or(Some(now)));
        }
        objects.into_iter().fold(is_changed, |is_changed, object| self.put(object) || is_changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUARD: RemovalLimit = RemovalLimit { share: 0.5, time: Duration::from_secs(600) };

    fn object(key: &str) -> Object {
        Object { key: key.to_owned(), endpoints: vec![Endpoint::new(format!("http://{key}:8000"))] }
    }

    fn listed(keys: &[&str]) -> Update {
        Update::Listed(keys.iter().map(|key| object(key)).collect())
    }

    fn hosts(state: &SourceState) -> Vec<(String, bool)> {
        let host = |url: &str| url["http://".len()..url.len() - ":8000".len()].to_owned();
        state.endpoints().map(|(endpoint, suspect)| (host(&endpoint.url), suspect)).collect()
    }

    fn trusted(keys: &[&str]) -> Vec<(String, bool)> {
        keys.iter().map(|key| ((*key).to_owned(), false)).collect()
    }

    #[test]
    fn a_list_that_loses_few_removes_them_and_one_that_loses_many_makes_them_suspect() {
        let (mut state, start) = (SourceState::default(), Instant::now());
        assert!(state.apply(listed(&["a", "b", "c", "d"]), GUARD, start));
        assert!(state.apply(listed(&["a", "b"]), GUARD, start), "half is the bound itself");
        assert_eq!(hosts(&state), trusted(&["a", "b"]));
        assert!(state.apply(listed(&[]), GUARD, start), "they are suspect");
        assert_eq!(hosts(&state), [("a".to_owned(), true), ("b".to_owned(), true)]);
        let later = start + Duration::from_secs(300);
        assert!(!state.apply(listed(&[]), GUARD, later), "their time does not begin again");
        assert_eq!(state.next_expiry(), Some(start + GUARD.time));
        assert!(state.apply(listed(&["a"]), GUARD, later), "one is there again");
        assert_eq!(hosts(&state), [("a".to_owned(), false), ("b".to_owned(), true)]);
        assert!(!state.expire(later));
        assert!(state.expire(start + GUARD.time));
        assert_eq!(hosts(&state), trusted(&["a"]));
        assert_eq!(state.next_expiry(), None);
    }

    #[test]
    fn a_deletion_event_removes_at_once_a_suspect_object_too() {
        let (mut state, now) = (SourceState::default(), Instant::now());
        state.apply(listed(&["a", "b"]), GUARD, now);
        state.apply(listed(&[]), GUARD, now);
        assert!(state.apply(Update::Deleted("a".to_owned()), GUARD, now));
        assert!(!state.apply(Update::Deleted("a".to_owned()), GUARD, now));
        assert_eq!(hosts(&state), [("b".to_owned(), true)]);
        assert!(state.apply(Update::Changed(object("b")), GUARD, now));
        assert!(!state.apply(Update::Changed(object("b")), GUARD, now));
        assert_eq!(hosts(&state), trusted(&["b"]));
    }

    #[test]
    fn an_object_whose_time_ran_out_is_suspect_until_somebody_vouches_for_it_again() {
        let (mut state, now) = (SourceState::default(), Instant::now());
        state.apply(listed(&["a", "b"]), GUARD, now);
        assert!(state.apply(Update::Expired("a".to_owned()), GUARD, now));
        let later = now + Duration::from_secs(300);
        assert!(!state.apply(Update::Expired("a".to_owned()), GUARD, later), "its time does not begin again");
        assert!(!state.apply(Update::Expired("z".to_owned()), GUARD, now));
        assert_eq!(hosts(&state), [("a".to_owned(), true), ("b".to_owned(), false)]);
        assert!(!state.apply(listed(&["b"]), GUARD, later), "a list that lacks it changes nothing");
        assert_eq!(state.next_expiry(), Some(now + GUARD.time));
        assert!(state.apply(Update::Changed(object("a")), GUARD, later));
        assert_eq!(hosts(&state), trusted(&["a", "b"]));
    }

    #[test]
    fn lists_that_lose_half_after_half_are_not_believed() {
        let (mut state, now) = (SourceState::default(), Instant::now());
        let keys: Vec<String> = (0..16).map(|number| format!("w{number:02}")).collect();
        let first = |count: usize| Update::Listed(keys[..count].iter().map(|key| object(key)).collect());
        state.apply(first(16), GUARD, now);
        state.apply(first(8), GUARD, now);
        assert_eq!((state.endpoints().count(), state.suspects()), (8, 0), "half is the bound itself");
        state.apply(first(4), GUARD, now);
        assert_eq!((state.endpoints().count(), state.suspects()), (8, 4));
        let later = now + GUARD.time + Duration::from_secs(1);
        state.expire(later);
        state.apply(first(2), GUARD, later);
        assert_eq!((state.endpoints().count(), state.suspects()), (2, 0), "that was long ago");
    }

    #[test]
    fn what_a_source_selects_anew_replaces_what_it_selected() {
        let (mut state, now) = (SourceState::default(), Instant::now());
        state.apply(listed(&["a", "b"]), GUARD, now);
        assert!(state.apply(Update::Replaced(vec![object("c")]), GUARD, now));
        assert!(!state.apply(Update::Replaced(vec![object("c")]), GUARD, now));
        assert_eq!(hosts(&state), trusted(&["c"]));
    }

    #[test]
    fn all_of_an_object_counts_not_its_key_alone() {
        let (mut state, now) = (SourceState::default(), Instant::now());
        state.apply(listed(&["a"]), GUARD, now);
        let mut other = object("a");
        other.endpoints[0].uid = Some("2".to_owned());
        assert!(state.apply(Update::Changed(other.clone()), GUARD, now));
        assert!(!state.apply(Update::Changed(other.clone()), GUARD, now));
        other.endpoints.clear();
        assert!(state.apply(Update::Listed(vec![other]), GUARD, now));
        assert_eq!(hosts(&state), []);
    }

    #[test]
    fn a_source_that_fails_changes_nothing_and_is_shown() {
        let (mut state, now) = (SourceState::default(), Instant::now());
        state.apply(listed(&["a"]), GUARD, now);
        assert!(!state.apply(Update::Failed("refused".to_owned()), GUARD, now));
        assert_eq!((hosts(&state), state.error.as_deref()), (trusted(&["a"]), Some("refused")));
        state.apply(listed(&["a"]), GUARD, now);
        assert_eq!(state.error, None);
    }
}
