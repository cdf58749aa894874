//! The terminal while the view owns it: raw mode and the alternate screen. The terminal is restored exactly once on every
//! path: leaving the alternate screen a second time would move the cursor over text printed since.
//!
//! A panic may come from any thread while the owner draws. The hook therefore waits for the frame, restores the terminal,
//! and prints the message before the owner continues and finds that the terminal is gone. This also holds where panics
//! abort, since the hook runs first.

use std::io;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

type Hook = dyn Fn(&panic::PanicHookInfo<'_>) + Send + Sync;

#[derive(Default)]
struct Terminal {
    /// Held during a frame, and while a panic is printed.
    in_use: Mutex<()>,
    /// Whether the view owns the terminal. Relaxed is enough: between threads, `in_use` orders it.
    is_ours: AtomicBool,
}

impl Terminal {
    /// Restores the terminal. Errors are ignored: there is nothing else to try.
    fn give_back(&self) {
        if self.is_ours.swap(false, Ordering::Relaxed) {
            let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
            let _ = disable_raw_mode();
        }
    }
}

/// Restores the terminal when it is dropped.
pub(crate) struct Screen {
    terminal: Arc<Terminal>,
    previous_hook: Arc<Hook>,
}

impl Screen {
    /// Takes the terminal; the calling thread is the one that draws.
    pub(crate) fn enter() -> io::Result<Self> {
        let previous_hook: Arc<Hook> = Arc::from(panic::take_hook());
        // From here on, dropping `screen` cleans up on every error.
        let screen = Self { terminal: Arc::default(), previous_hook };
        let (terminal, previous) = (Arc::clone(&screen.terminal), Arc::clone(&screen.previous_hook));
        let owner = thread::current().id();
        panic::set_hook(Box::new(move |panic| {
            // The owner may hold the lock itself.
            let is_other = thread::current().id() != owner;
            let guard = is_other.then(|| terminal.in_use.lock().unwrap_or_else(PoisonError::into_inner));
            terminal.give_back();
            previous(panic);
            drop(guard);
        }));
        screen.terminal.is_ours.store(true, Ordering::Relaxed);
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen)?;
        Ok(screen)
    }

    /// Draws, unless a panic took the terminal away.
    pub(crate) fn draw(&self, draw: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _guard = self.terminal.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.terminal.is_ours.load(Ordering::Relaxed) {
            return Err(io::Error::other("a thread panicked; the terminal was restored"));
        }
        draw()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.terminal.give_back();
        // A panicking thread may not change the hook; the hook that stays is then harmless.
        if !thread::panicking() {
            let previous = Arc::clone(&self.previous_hook);
            panic::set_hook(Box::new(move |panic| previous(panic)));
        }
    }
}
