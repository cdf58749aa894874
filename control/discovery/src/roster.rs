//! Merge of all sources: one endpoint for each address.

use std::collections::HashMap;
use std::time::Instant;

use crate::endpoint::Endpoint;
use crate::source_state::{RemovalLimit, SourceState};
use crate::update::Update;

/// The endpoints of all sources.
#[derive(Debug)]
pub struct Roster {
    guard: RemovalLimit,
    sources: Vec<(String, SourceState)>,
}

/// State of a source, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    /// Name of the source, like `file /etc/kvasir/workers.toml`.
    pub name: String,
    /// Endpoints that it reports, or reported before it became unreadable.
    pub endpoints: usize,
    /// Endpoints that the last list lacked or whose registration expired, which are served while they answer.
    pub suspects: usize,
    /// Updates so far.
    pub updates: u64,
    /// Reason why the source cannot be read; `None`: it can.
    pub error: Option<String>,
    /// Whether a list has ever succeeded.
    pub is_listed: bool,
}

impl Roster {
    /// Creates a roster of sources with these names, in order of preference; see [`Self::endpoints`].
    #[must_use]
    pub fn new(sources: Vec<String>, guard: RemovalLimit) -> Self {
        Self { guard, sources: sources.into_iter().map(|name| (name, SourceState::default())).collect() }
    }

    /// Applies an update of the source with this index; returns whether endpoints changed.
    pub fn apply(&mut self, source: usize, update: Update, now: Instant) -> bool {
        let guard = self.guard;
        let Some((name, state)) = self.sources.get_mut(source) else { return false };
        if let Update::Failed(reason) = &update {
            // A source that stays unreadable is reported once.
            if state.error.as_ref() != Some(reason) {
                tracing::warn!(source = *name, "{reason}; the source's workers are kept");
            }
        } else if state.error.is_some() {
            tracing::info!(source = *name, "the source can be read again");
        }
        let before = state.suspects();
        let is_changed = state.apply(update, guard, now);
        if state.suspects() > before {
            tracing::warn!(
                source = *name,
                missing = state.suspects(),
                "the list omits more workers than discovery.guard_share allows: missing workers that answer are kept for {:?}",
                guard.time
            );
        }
        is_changed
    }

    /// Removes suspects whose time is over; returns whether there were any.
    pub fn expire(&mut self, now: Instant) -> bool {
        self.sources.iter_mut().fold(false, |is_changed, (_, state)| state.expire(now) || is_changed)
    }

    /// Returns the next time at which [`Self::expire`] has an effect.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.sources.iter().filter_map(|(_, state)| state.next_expiry()).min()
    }

    /// Returns one endpoint for each address, in the order of sources and keys. Of several, one that is not
    /// suspect is preferred, then one of the first source that names the address, then the one in the best
    /// state: a pod that is being deleted may still be listed while another one already has its address.
    #[must_use]
    pub fn endpoints(&self) -> Vec<Endpoint> {
        let mut merged = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (number, (_, state)) in self.sources.iter().enumerate() {
            for (endpoint, is_suspect) in state.endpoints() {
                let rank = (is_suspect, number, endpoint.state);
                match places.get(&endpoint.address()) {
                    Some(&place) => {
                        let best: &mut (_, &Endpoint) = &mut merged[place];
                        if rank < best.0 {
                            *best = (rank, endpoint);
                        }
                    }
                    None => {
                        places.insert(endpoint.address(), merged.len());
                        merged.push((rank, endpoint));
                    }
                }
            }
        }
        merged.into_iter().map(|(_, endpoint)| endpoint.clone()).collect()
    }

    /// Returns the state of each source.
    #[must_use]
    pub fn status(&self) -> Vec<SourceStatus> {
        let status = |(name, state): &(String, SourceState)| SourceStatus {
            name: name.clone(),
            endpoints: state.endpoints().count(),
            suspects: state.suspects(),
            updates: state.updates,
            error: state.error.clone(),
            is_listed: state.is_listed,
        };
        self.sources.iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::endpoint::EndpointState;
    use crate::update::Object;

    const GUARD: RemovalLimit = RemovalLimit { share: 0.5, time: Duration::from_secs(60) };

    fn roster(sources: usize) -> Roster {
        Roster::new((0..sources).map(|number| format!("source {number}")).collect(), GUARD)
    }

    #[test]
    fn one_address_is_one_worker_in_its_best_state() {
        let (mut roster, now) = (roster(2), Instant::now());
        let old = Endpoint { state: EndpointState::Draining, ..Endpoint::new("http://A:1/") };
        let new = Endpoint { uid: Some("new".to_owned()), ..Endpoint::new("http://a:1") };
        roster.apply(0, Update::Changed(Object { key: "old".to_owned(), endpoints: vec![old.clone()] }), now);
        roster.apply(0, Update::Changed(Object { key: "z".to_owned(), endpoints: vec![new.clone()] }), now);
        assert_eq!(roster.endpoints(), [new]);
        roster.apply(0, Update::Deleted("z".to_owned()), now);
        assert_eq!(roster.endpoints(), [old]);
        let elsewhere = Endpoint { pool: Some("p".to_owned()), ..Endpoint::new("http://a:1") };
        let mine = Endpoint::new("http://a:1");
        roster.apply(0, Update::Listed(vec![Object::of(mine.clone())]), now);
        roster.apply(1, Update::Listed(vec![Object::of(elsewhere)]), now);
        assert_eq!(roster.endpoints(), [mine], "the first source counts");
    }

    #[test]
    fn a_suspect_does_not_keep_its_address_from_the_worker_that_has_it_now() {
        let (mut roster, now) = (roster(2), Instant::now());
        let object = |key: &str, endpoint: &Endpoint| Object {
            key: key.to_owned(),
            endpoints: vec![endpoint.clone()],
        };
        let old = Endpoint { uid: Some("old".to_owned()), ..Endpoint::new("http://a:1") };
        let new = Endpoint {
            uid: Some("new".to_owned()),
            state: EndpointState::NotReady,
            ..Endpoint::new("http://a:1")
        };
        roster.apply(0, Update::Listed(vec![object("old", &old)]), now);
        assert!(roster.apply(0, Update::Listed(vec![object("new", &new)]), now));
        assert_eq!(roster.endpoints(), [new]);
    }

    #[test]
    fn what_the_first_source_says_of_an_address_counts() {
        let (mut roster, now) = (roster(2), Instant::now());
        let draining = Endpoint { state: EndpointState::Draining, ..Endpoint::new("http://a:80") };
        roster.apply(0, Update::Listed(vec![Object::of(draining.clone())]), now);
        roster.apply(1, Update::Listed(vec![Object::of(Endpoint::new("http://A"))]), now);
        assert_eq!(roster.endpoints(), [draining]);
    }

    #[test]
    fn the_status_says_how_each_source_is() {
        let (mut roster, now) = (roster(2), Instant::now());
        roster.apply(0, Update::Listed(vec![Object::of(Endpoint::new("http://a:1"))]), now);
        roster.apply(0, Update::Listed(Vec::new()), now);
        roster.apply(1, Update::Failed("no such file".to_owned()), now);
        let status = roster.status();
        assert_eq!((status[0].endpoints, status[0].suspects, status[0].updates), (1, 1, 2));
        assert_eq!((status[1].error.as_deref(), status[1].is_listed), (Some("no such file"), false));
        assert!(roster.expire(now + GUARD.time) && roster.endpoints().is_empty());
        assert!(!roster.apply(7, Update::Listed(Vec::new()), now), "there is no such source");
    }

    /// Compares the roster with an oracle that has no states: the last report of each object is used. The
    /// histories have no lists that lack many objects, so nothing is suspect.
    #[test]
    fn random_histories_end_in_the_last_report_of_each_object() {
        for seed in 0..2_000_u64 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut next = |below: u64| random.u64(..below);
            let (mut roster, mut truth) = (roster(2), [BTreeMap::new(), BTreeMap::new()]);
            for _ in 0..next(60) {
                let (source, key) = (next(2) as usize, format!("pod-{}", next(8)));
                let endpoint = Endpoint {
                    uid: Some(next(4).to_string()),
                    state: [EndpointState::Ready, EndpointState::NotReady, EndpointState::Draining]
                        [next(3) as usize],
                    ..Endpoint::new(format!("http://10.0.{source}.{}:8000", next(6)))
                };
                match next(4) {
                    0 => {
                        truth[source].remove(&key);
                        roster.apply(source, Update::Deleted(key), Instant::now());
                    }
                    1 => {
                        roster.apply(source, Update::Failed("unreachable".to_owned()), Instant::now());
                    }
                    2 => {
                        let object = |(key, endpoint): (&String, &Endpoint)| Object {
                            key: key.clone(),
                            endpoints: vec![endpoint.clone()],
                        };
                        let all = truth[source].iter().map(object).collect();
                        roster.apply(source, Update::Listed(all), Instant::now());
                    }
                    _ => {
                        truth[source].insert(key.clone(), endpoint.clone());
                        let object = Object { key, endpoints: vec![endpoint] };
                        roster.apply(source, Update::Changed(object), Instant::now());
                    }
                }
            }
            let mut best: BTreeMap<String, EndpointState> = BTreeMap::new();
            for endpoint in truth.iter().flat_map(BTreeMap::values) {
                let state = best.entry(endpoint.url.clone()).or_insert(endpoint.state);
                *state = (*state).min(endpoint.state);
            }
            let found = roster.endpoints();
            assert_eq!(found.len(), best.len(), "seed {seed}");
            for endpoint in &found {
                assert_eq!(Some(&endpoint.state), best.get(&endpoint.url), "seed {seed}");
                let is_reported =
                    truth.iter().flat_map(BTreeMap::values).any(|reported| reported == endpoint);
                assert!(is_reported, "seed {seed}: {endpoint:?}");
            }
        }
    }
}
