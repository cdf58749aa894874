//! Display settings chosen by the user: the view, the order of the workers, the scroll position of each view.

use crate::keys::{Action, Step};

/// The views, in the order of their tabs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum View {
    /// Summary of all views.
    #[default]
    Overview,
    /// Load and state of the workers.
    Workers,
    /// Distributions of latencies.
    Latency,
    /// Use of the tiers of KV blocks.
    Pools,
    /// Hand-offs of blocks between workers.
    Transfers,
    /// Routing decisions and their reasons.
    Decisions,
}

impl View {
    /// All views.
    pub const ALL: [Self; 6] =
        [Self::Overview, Self::Workers, Self::Latency, Self::Pools, Self::Transfers, Self::Decisions];

    /// Title of the view; in lower case its name.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Workers => "Workers",
            Self::Latency => "Latency",
            Self::Pools => "Pools",
            Self::Transfers => "Transfers",
            Self::Decisions => "Decisions",
        }
    }

    /// Returns the view with this title, in letters of either case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|view| view.title().eq_ignore_ascii_case(name))
    }
}

/// Sort order of workers; all except the name are descending, unknown values last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum SortKey {
    #[default]
    Name,
    Requests,
    Waiting,
    KvUsage,
    Slowness,
}

impl SortKey {
    const fn next(self) -> Self {
        match self {
            Self::Name => Self::Requests,
            Self::Requests => Self::Waiting,
            Self::Waiting => Self::KvUsage,
            Self::KvUsage => Self::Slowness,
            Self::Slowness => Self::Name,
        }
    }

    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Requests => "requests",
            Self::Waiting => "waiting",
            Self::KvUsage => "KV usage",
            Self::Slowness => "slowness",
        }
    }
}

/// Scroll position of a list. Each frame bounds it by the number of rows and the height of the page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Scroll {
    offset: usize,
    page: usize,
}

impl Scroll {
    fn step(&mut self, step: Step) {
        let page = self.page.max(1);
        self.offset = match step {
            Step::Up => self.offset.saturating_sub(1),
            Step::Down => self.offset.saturating_add(1),
            Step::PageUp => self.offset.saturating_sub(page),
            Step::PageDown => self.offset.saturating_add(page),
            Step::First => 0,
            Step::Last => usize::MAX,
        };
    }

    /// Bounds the position and returns the visible rows, for `count` rows and `page` lines.
    pub(crate) fn bound(&mut self, count: usize, page: usize) -> std::ops::Range<usize> {
        self.page = page;
        self.offset = self.offset.min(count.saturating_sub(page));
        self.offset..count.min(self.offset.saturating_add(page))
    }
}

/// The user's display settings.
#[derive(Debug, Default)]
pub(crate) struct Display {
    pub(crate) view: View,
    pub(crate) sort: SortKey,
    pub(crate) is_paused: bool,
    pub(crate) has_help: bool,
    /// Whether latencies are shown since the gateway's start instead of for the last minute.
    pub(crate) is_since_start: bool,
    pub(crate) workers: Scroll,
    pub(crate) pools: Scroll,
    pub(crate) transfers: Scroll,
    pub(crate) decisions: Scroll,
}

impl Display {
    /// Applies the action of a key. Returns true if the view is to quit.
    pub(crate) fn apply(&mut self, action: Action) -> bool {
        match action {
            Action::Quit => return true,
            Action::NextView => self.turn(1),
            Action::PreviousView => self.turn(View::ALL.len() - 1),
            Action::View(number) => self.view = View::ALL.get(number).copied().unwrap_or(self.view),
            Action::Pause => self.is_paused = !self.is_paused,
            Action::Help => self.has_help = !self.has_help,
            Action::Sort => self.sort = self.sort.next(),
            Action::Window => self.is_since_start = !self.is_since_start,
            Action::Scroll(step) => self.scrolled().step(step),
        }
        false
    }

    fn turn(&mut self, by: usize) {
        self.view = View::ALL[(self.view as usize + by) % View::ALL.len()];
    }

    fn scrolled(&mut self) -> &mut Scroll {
        match self.view {
            View::Pools => &mut self.pools,
            View::Transfers => &mut self.transfers,
            View::Decisions => &mut self.decisions,
            View::Overview | View::Workers | View::Latency => &mut self.workers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrolling_stays_within_what_there_is() {
        let mut display = Display::default();
        let mut seen = Vec::new();
        for step in [Step::Up, Step::Down, Step::PageDown, Step::Last, Step::Down, Step::PageUp, Step::First]
        {
            display.apply(Action::Scroll(step));
            seen.push(display.workers.bound(100, 10));
        }
        assert_eq!(seen, [0..10, 1..11, 11..21, 90..100, 90..100, 80..90, 0..10]);
        display.apply(Action::Scroll(Step::Last));
        assert_eq!(display.workers.bound(3, 10), 0..3, "fewer rows than lines");
        assert_eq!(display.workers.bound(0, 0), 0..0);
        assert_eq!(display.decisions.bound(50, 10), 0..10, "each list by itself");
    }

    #[test]
    fn views_and_sort_keys_go_round() {
        let mut display = Display::default();
        let round =
            [View::Workers, View::Latency, View::Pools, View::Transfers, View::Decisions, View::Overview];
        for view in round {
            assert!(!display.apply(Action::NextView));
            assert_eq!(display.view, view);
        }
        display.apply(Action::PreviousView);
        assert_eq!(display.view, View::Decisions);
        for _ in 0..5 {
            display.apply(Action::Sort);
        }
        assert_eq!(display.sort, SortKey::Name);
        assert!(display.apply(Action::Quit));
    }
}
