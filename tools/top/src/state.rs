//! The known state of the gateway: the latest answer, its age, and later failures.

use std::collections::VecDeque;
use std::time::Duration;

use crate::history::History;
use crate::poll::Answer;
use crate::wire::{Decision, Status};

/// Number of kept decisions; a gateway keeps as many.
pub(crate) const DECISIONS_MAX: usize = 256;

/// State shown by the views. Times are [`Duration`]s since an origin of the caller's.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Address of the gateway, for display.
    pub(crate) gateway: String,
    pub(crate) status: Option<Status>,
    /// Decisions, newest first.
    pub(crate) decisions: VecDeque<Decision>,
    pub(crate) decisions_error: Option<String>,
    /// Error of the last poll; `None` if it was answered.
    pub(crate) error: Option<String>,
    pub(crate) answered_at: Option<Duration>,
    pub(crate) history: History,
}

impl State {
    pub(crate) fn new(gateway: String) -> Self {
        Self { gateway, ..Self::default() }
    }

    /// Records an answer.
    pub(crate) fn answer(&mut self, answer: Answer, now: Duration) {
        self.history.record_samples(now, &answer.status, answer.samples);
        self.history.record(now, &answer.status);
        if answer.is_new_run {
            self.decisions.clear();
        }
        match answer.decisions {
            Ok(news) => {
                for decision in news.decisions {
                    let newest = self.decisions.front().map(|newest| newest.sequence);
                    if newest.is_none_or(|newest| decision.sequence > newest) {
                        self.decisions.push_front(decision);
                    }
                }
                self.decisions.truncate(DECISIONS_MAX);
                self.decisions_error = None;
            }
            Err(error) => self.decisions_error = Some(error.to_string()),
        }
        self.status = Some(answer.status);
        self.answered_at = Some(now);
        self.error = None;
    }

    /// Records a failure; the last answer stays.
    pub(crate) fn failed(&mut self, error: String, now: Duration) {
        self.history.record_gap(now);
        self.error = Some(error);
    }

    /// Age of the last answer.
    pub(crate) fn age(&self, now: Duration) -> Option<Duration> {
        Some(now.saturating_sub(self.answered_at?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::answer;

    #[test]
    fn decisions_come_once_newest_first_and_bounded() {
        let mut state = State::new("h:1".to_owned());
        let sequences =
            |state: &State| state.decisions.iter().map(|decision| decision.sequence).collect::<Vec<_>>();
        state.answer(answer(1, 1..4), Duration::ZERO);
        state.answer(answer(1, 3..6), Duration::from_secs(1));
        assert_eq!(sequences(&state), [5, 4, 3, 2, 1]);
        state.answer(answer(1, 6..1000), Duration::from_secs(2));
        assert_eq!((state.decisions.len(), state.decisions[0].sequence), (DECISIONS_MAX, 999));
        let restarted = Answer { is_new_run: true, ..answer(2, 1..3) };
        state.answer(restarted, Duration::from_secs(3));
        assert_eq!(sequences(&state), [2, 1]);
    }

    #[test]
    fn a_failure_keeps_what_is_known_and_it_ages() {
        let mut state = State::new("h:1".to_owned());
        state.failed("refused".to_owned(), Duration::from_secs(1));
        assert_eq!(state.age(Duration::from_secs(2)), None);
        state.answer(answer(1, 1..2), Duration::from_secs(3));
        assert_eq!(state.error, None);
        state.failed("refused".to_owned(), Duration::from_secs(10));
        assert_eq!(state.age(Duration::from_secs(15)), Some(Duration::from_secs(12)));
        assert!(state.status.is_some() && state.error.is_some());
    }
}
