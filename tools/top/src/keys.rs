//! Key bindings.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// Action of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Quit,
    NextView,
    PreviousView,
    /// Shows the view with this number, from 0.
    View(usize),
    Pause,
    Help,
    /// Selects the next sort key of workers.
    Sort,
    /// Switches latencies between the last minute and the time since the gateway's start.
    Window,
    Scroll(Step),
}

/// Distance to scroll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Up,
    Down,
    PageUp,
    PageDown,
    First,
    Last,
}

/// Help text: one line per group of keys.
pub(crate) const HELP: [(&str, &str); 6] = [
    ("q Esc ^C", "quit"),
    ("Tab 1-6", "view"),
    ("↑↓ PgUp PgDn Home End", "scroll"),
    ("s", "sort workers"),
    ("w", "latency: last minute / since start"),
    ("p", "pause"),
];

/// Returns the action of a key, if it has one.
pub(crate) fn action(key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) {
        let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        return is_interrupt.then_some(Action::Quit);
    }
    Some(match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Action::Quit,
        KeyCode::Tab | KeyCode::Right => Action::NextView,
        KeyCode::BackTab | KeyCode::Left => Action::PreviousView,
        KeyCode::Char(digit @ '1'..='6') => Action::View(digit as usize - '1' as usize),
        KeyCode::Char('p') => Action::Pause,
        KeyCode::Char('?' | 'h') => Action::Help,
        KeyCode::Char('s') => Action::Sort,
        KeyCode::Char('w') => Action::Window,
        KeyCode::Up | KeyCode::Char('k') => Action::Scroll(Step::Up),
        KeyCode::Down | KeyCode::Char('j') => Action::Scroll(Step::Down),
        KeyCode::PageUp => Action::Scroll(Step::PageUp),
        KeyCode::PageDown | KeyCode::Char(' ') => Action::Scroll(Step::PageDown),
        KeyCode::Home => Action::Scroll(Step::First),
        KeyCode::End => Action::Scroll(Step::Last),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let plain = KeyModifiers::NONE;
        for (code, modifiers, expected) in [
            (KeyCode::Char('q'), plain, Some(Action::Quit)),
            (KeyCode::Esc, plain, Some(Action::Quit)),
            (KeyCode::Char('c'), KeyModifiers::CONTROL, Some(Action::Quit)),
            (KeyCode::Char('c'), plain, None),
            (KeyCode::Char('q'), KeyModifiers::ALT, None),
            (KeyCode::Tab, plain, Some(Action::NextView)),
            (KeyCode::BackTab, KeyModifiers::SHIFT, Some(Action::PreviousView)),
            (KeyCode::Char('5'), plain, Some(Action::View(4))),
            (KeyCode::Char('7'), plain, None),
            (KeyCode::Char('?'), KeyModifiers::SHIFT, Some(Action::Help)),
            (KeyCode::PageDown, plain, Some(Action::Scroll(Step::PageDown))),
        ] {
            assert_eq!(action(KeyEvent::new(code, modifiers)), expected, "{code:?} {modifiers:?}");
        }
        let released = KeyEvent::new_with_kind(KeyCode::Char('q'), plain, KeyEventKind::Release);
        assert_eq!(action(released), None);
    }
}
