//! The state of a worker.
//!
//! | Last health check | Described | Drain wanted | Events caught up | State |
//! | --- | --- | --- | --- | --- |
//! | none yet, or the pool still chooses a model | any | any | any | `Joining` |
//! | late, or a request failed since | any | any | any | `Suspect` |
//! | unanswered, refused, or unfit | any | any | any | `Down` |
//! | answered: it is asleep | any | any | any | `Sleeping` |
//! | answered | no | any | any | `Joining` |
//! | answered | yes | yes | any | `Draining` |
//! | answered | yes | no | no | `Warming` |
//! | answered | yes | no | yes | `Ready` |
//!
//! A worker that was removed is `Down` whatever else is known. [`Condition::state`] is the only place where a state is made,
//! so the facts behind it cannot disagree with it. The worker's health task, its event tasks and administrators change
//! conditions; readers load an `AtomicU8` (`Worker::state`).

use crate::spec::AsleepRun;

/// State of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WorkerState {
    /// The address is known; the worker has not described itself, or its pool has not chosen a model.
    Joining,
    /// Described; the index has not yet caught up with the worker's past events.
    Warming,
    /// Takes requests.
    Ready,
    /// Takes no new requests; requests that it has go on.
    Draining,
    /// The engine has released its memory, and requests would wait until it is woken; it takes none.
    Sleeping,
    /// A health check is late, or a request failed in a way that indicates a broken worker. It takes no new requests until it
    /// answers its health check.
    Suspect,
    /// Does not answer, refuses connections, does not fit its pool, or was removed.
    Down,
}

impl WorkerState {
    const ALL: [Self; 7] = [
        Self::Joining,
        Self::Warming,
        Self::Ready,
        Self::Draining,
        Self::Sleeping,
        Self::Suspect,
        Self::Down,
    ];

    /// Name in outputs: lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Warming => "warming",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Sleeping => "sleeping",
            Self::Suspect => "suspect",
            Self::Down => "down",
        }
    }

    pub(crate) fn from_u8(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Down)
    }
}

/// Result of the last health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Health {
    /// No health check has ended yet.
    #[default]
    Unknown,
    /// The last one was answered, and the description fits the pool.
    Answers,
    /// A health check is late, or a request failed since the last answer.
    Suspect,
    /// The check was refused or given up, or the worker cannot be used.
    Down,
}

/// The facts that a state is derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Condition {
    pub(crate) health: Health,
    /// Whether the worker has described itself: this run of its process has places in the index.
    pub(crate) has_run: bool,
    /// Whether the index has caught up with the events of at least one rank.
    pub(crate) is_warm: bool,
    /// Whether the operator wants no new requests at the worker.
    pub(crate) is_draining: bool,
    /// The run of the process that was put to sleep, if its engine does not report sleep.
    pub(crate) sleep_request: Option<AsleepRun>,
    /// Whether the engine has released its memory.
    pub(crate) is_asleep: bool,
    /// Whether the worker was removed from the fleet.
    pub(crate) is_removed: bool,
}

impl Condition {
    pub(crate) fn state(self) -> WorkerState {
        match self.health {
            _ if self.is_removed => WorkerState::Down,
            Health::Unknown => WorkerState::Joining,
            Health::Suspect => WorkerState::Suspect,
            Health::Down => WorkerState::Down,
            Health::Answers if self.is_asleep => WorkerState::Sleeping,
            Health::Answers if !self.has_run => WorkerState::Joining,
            Health::Answers if self.is_draining => WorkerState::Draining,
            Health::Answers if !self.is_warm => WorkerState::Warming,
            Health::Answers => WorkerState::Ready,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every combination of facts: a worker gets requests only if all of them allow it.
    #[test]
    fn only_a_healthy_described_warm_worker_that_is_wanted_is_ready() {
        let bools = [false, true];
        for health in [Health::Unknown, Health::Answers, Health::Suspect, Health::Down] {
            for (has_run, is_warm, is_draining) in bools.iter().flat_map(|&run| {
                bools.iter().flat_map(move |&warm| bools.map(move |drain| (run, warm, drain)))
            }) {
                let condition = Condition { health, has_run, is_warm, is_draining, ..Condition::default() };
                let asleep = Condition { is_asleep: true, ..condition };
                assert_eq!(asleep.state() == WorkerState::Sleeping, health == Health::Answers);
                assert_ne!(asleep.state(), WorkerState::Ready);
                let removed = Condition { is_removed: true, ..condition };
                assert_eq!(removed.state(), WorkerState::Down);
                let expected = health == Health::Answers && has_run && is_warm && !is_draining;
                assert_eq!(condition.state() == WorkerState::Ready, expected, "{condition:?}");
                if health == Health::Answers && has_run && is_draining {
                    assert_eq!(condition.state(), WorkerState::Draining);
                }
            }
        }
    }

    #[test]
    fn a_state_survives_the_way_through_its_number() {
        for state in WorkerState::ALL {
            assert_eq!(WorkerState::from_u8(state as u8), state);
        }
        let names: std::collections::HashSet<&str> =
            WorkerState::ALL.iter().map(|state| state.name()).collect();
        assert_eq!(names.len(), WorkerState::ALL.len());
    }
}
