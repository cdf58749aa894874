//! The terminal while it is ours: raw mode and the alternate screen. However it ends, the terminal is given back
//! exactly once: leaving the alternate screen a second time would move the cursor over what was printed since.
//!
//! A panic may come from any thread while the owner draws. The hook therefore waits for the frame, gives the
//! terminal back, and lets the message be printed before the owner goes on and finds that the terminal is gone.
//! That also holds where panics abort, since the hook comes first.

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
    /// Held for a frame, and while a panic is told.
    in_use: Mutex<()>,
    /// Relaxed is enough: between threads, `in_use` orders it.
    is_ours: AtomicBool,
}

impl Terminal {
    /// Nothing can be done about a terminal that does not take this.
    fn give_back(&self) {
        if self.is_ours.swap(false, Ordering::Relaxed) {
            let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
            let _ = disable_raw_mode();
        }
    }
}

/// Gives the terminal back when it is dropped.
pub(crate) struct Screen {
    terminal: Arc<Terminal>,
    previous_hook: Arc<Hook>,
}

impl Screen {
    /// Takes the terminal; the calling thread is the one that draws.
    pub(crate) fn enter() -> io::Result<Self> {
        let previous_hook: Arc<Hook> = Arc::from(panic::take_hook());
        // From here on its drop cleans up, whatever fails.
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
            return Err(io::Error::other("a thread panicked, and the terminal was given back"));
        }
        draw()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.terminal.give_back();
        // A thread that panics may not change the hook; what ours does is then harmless.
        if !thread::panicking() {
            let previous = Arc::clone(&self.previous_hook);
            panic::set_hook(Box::new(move |panic| previous(panic)));
        }
    }
}
