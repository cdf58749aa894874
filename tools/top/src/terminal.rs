//! The thread that owns the terminal, and the single frame of `once`.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::{CrosstermBackend, TestBackend};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event};
use ratatui::text::Span;

use crate::config::{FRAME_CELLS_MAX, TopConfig};
use crate::display::Display;
use crate::error::TopError;
use crate::history::SERIES_LENGTH;
use crate::keys::action;
use crate::poll::{self, Message, PauseSwitch};
use crate::screen::Screen;
use crate::state::State;
use crate::view;

/// Longest wait for a key before messages are read.
const KEY_WAIT: Duration = Duration::from_millis(50);
/// Longest time between two frames: ages are shown in seconds.
const FRAME_AFTER: Duration = Duration::from_millis(500);
/// Longest wait of [`once`] for each of its two answers; a poll gives up long before.
const ONCE_WITHIN: Duration = Duration::from_secs(60);

/// Shows the gateway until the user quits or the process gets SIGTERM, SIGHUP or SIGINT; blocks meanwhile and restores the
/// terminal. While the gateway cannot be reached, this is shown and polling continues. After the return these signals no
/// longer end the process by themselves, so the caller must exit.
///
/// # Errors
///
/// A configuration that cannot be used, or no terminal at standard output, or one that fails.
pub fn run(config: TopConfig) -> Result<(), TopError> {
    let view = config.view;
    let target = config.target()?;
    if !io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let state = State::new(target.authority.clone());
    let (messages, pause) = poll::start(target, true)?;
    let screen = Screen::enter().map_err(TopError::Terminal)?;
    show(&screen, Display { view, ..Display::default() }, state, &messages, &pause)
}

fn show(
    screen: &Screen,
    mut display: Display,
    mut state: State,
    messages: &Receiver<Message>,
    pause: &PauseSwitch,
) -> Result<(), TopError> {
    let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout())).map_err(TopError::Terminal)?;
    terminal.clear().map_err(TopError::Terminal)?;
    let started = Instant::now();
    // The clock starts at `SERIES_LENGTH`: a sample from before the start would otherwise have a negative time.
    let now = || SERIES_LENGTH + started.elapsed();
    let mut drawn_at: Option<Instant> = None;
    loop {
        let mut is_changed = drawn_at.is_none_or(|at| at.elapsed() >= FRAME_AFTER);
        loop {
            match messages.try_recv() {
                Ok(Message::Answer(answer)) => state.answer(*answer, now()),
                Ok(Message::Failed(error)) => state.failed(error.to_string(), now()),
                Ok(Message::Stop) => return Ok(()),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(poller_is_gone()),
            }
            is_changed = true;
        }
        if is_changed {
            let now = now();
            let draw = || terminal.draw(|frame| view::draw(frame, &state, &mut display, now)).map(|_| ());
            screen.draw(draw).map_err(TopError::Terminal)?;
            drawn_at = Some(Instant::now());
        }
        if event::poll(KEY_WAIT).map_err(TopError::Terminal)? {
            drawn_at = None;
            let happened = event::read().map_err(TopError::Terminal)?;
            let Event::Key(key) = happened else { continue };
            if action(key).is_some_and(|action| display.apply(action)) {
                return Ok(());
            }
            // The send fails only when the poller has ended; the next round reports that.
            let _ = pause.send(display.is_paused);
        }
    }
}

fn poller_is_gone() -> TopError {
    TopError::Poller(io::Error::other("its thread is gone"))
}

/// Polls once and returns one frame of `width` × `height` as plain text: `height` lines without trailing blanks, each
/// ended by a newline. Rates and latencies are those since the gateway's start. No terminal is touched.
///
/// # Errors
///
/// A configuration or a size that cannot be used (at least 1 × 1, at most [`FRAME_CELLS_MAX`] cells), or the first
/// failure of the gateway.
pub fn once(config: TopConfig, width: u16, height: u16) -> Result<String, TopError> {
    let view = config.view;
    let target = config.target()?;
    let cells = usize::from(width) * usize::from(height);
    if !(1..=FRAME_CELLS_MAX).contains(&cells) {
        let reason = format!("{width} × {height} is not from 1 to {FRAME_CELLS_MAX} cells");
        return Err(TopError::Config { what: "size of the frame", reason });
    }
    let mut state = State::new(target.authority.clone());
    let (messages, pause) = poll::start(target, false)?;
    let now = match messages.recv_timeout(ONCE_WITHIN) {
        Ok(Message::Answer(answer)) => {
            // The origin of time is the gateway's start, when every counter was 0.
            let uptime = answer.status.uptime().max(Duration::from_secs(1));
            state.history.record_start(&answer.status);
            state.answer(*answer, uptime);
            uptime
        }
        Ok(Message::Failed(error)) => return Err(error),
        Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => {
            return Err(poller_is_gone());
        }
    };
    drop(pause);
    let mut display = Display { view, is_since_start: true, ..Display::default() };
    Ok(frame(&state, &mut display, now, width, height))
}

/// One frame as plain text.
pub(crate) fn frame(state: &State, display: &mut Display, now: Duration, width: u16, height: u16) -> String {
    // The in-memory backend cannot fail.
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(|frame| view::draw(frame, state, display, now));
    text_of(terminal.backend().buffer())
}

/// Text of a buffer. The cell behind a wide character belongs to that character and is left out.
fn text_of(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in buffer.area.top()..buffer.area.bottom() {
        let mut line = String::new();
        let mut x = buffer.area.left();
        while x < buffer.area.right() {
            let symbol = buffer.cell((x, y)).map_or(" ", |cell| cell.symbol());
            line.push_str(symbol);
            x += u16::try_from(Span::raw(symbol).width()).unwrap_or(1).max(1);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
