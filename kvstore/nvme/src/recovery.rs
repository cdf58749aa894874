//! Recovery of a controller that does not answer.
//!
//! A command that exceeds its timeout is aborted (others continue); if it does not end within the timeout of an
//! admin command, the controller is reset, as it is at once for a fatal status or a completion of a command
//! that is not in flight. A disabled controller no longer accesses memory of any command: only then do the
//! commands complete, with a device error, and give back their buffers. The controller is then made ready
//! again, and pending requests continue. A controller that cannot be disabled is reset from outside, once; one
//! that was removed or does not recover is cut off from memory, and from then on every request completes with
//! that error. No step waits.

use std::time::{Duration, Instant};

use crate::NvmeError;
use crate::bus::Bus;
use crate::data_path::Failure;
use crate::engine::NvmeEngine;
use crate::request_queue::describe;

/// An abort in progress.
#[derive(Debug)]
pub(crate) struct Abort {
    pair: usize,
    id: u16,
    until: Instant,
    is_answered: bool,
    is_ended: bool,
}

/// A reset in progress.
#[derive(Debug)]
pub(crate) struct Reset {
    reason: NvmeError,
    was_reset_from_outside: bool,
}

/// State of the controller.
#[derive(Debug)]
pub(crate) enum Health {
    Running,
    Aborting(Abort),
    Resetting(Reset),
    /// Failed permanently.
    Failed(NvmeError),
}

impl Health {
    pub(crate) fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }

    /// Whether the I/O queues exist.
    pub(crate) fn may_issue(&self) -> bool {
        matches!(self, Self::Running | Self::Aborting(_))
    }

    /// Whether the state changes only because of a failure or a request.
    pub(crate) fn is_stable(&self) -> bool {
        matches!(self, Self::Running | Self::Failed(_))
    }

    /// Records the end of a command: its id may be reused, and the new command must not be taken for the
    /// aborted one.
    #[inline]
    pub(crate) fn note_end(&mut self, pair: usize, id: u16) {
        if let Self::Aborting(abort) = self {
            abort.is_ended |= (abort.pair, abort.id) == (pair, id);
        }
    }
}

impl<B: Bus> NvmeEngine<B> {
    /// Checks deadlines, and advances an abort or a reset.
    pub(crate) fn watch(&mut self, now: Instant) {
        match &self.health {
            Health::Running => self.watch_commands(now),
            Health::Aborting(_) => self.watch_abort(now),
            Health::Resetting(_) => self.continue_reset(now),
            Health::Failed(_) => {}
        }
    }

    fn watch_commands(&mut self, now: Instant) {
        if now < self.next_check {
            return;
        }
        let period = (self.command_timeout / 16).clamp(Duration::from_millis(1), Duration::from_millis(100));
        self.next_check = now + period;
        if self.commands_in_flight() == 0 {
            return;
        }
        if let Err(error) = self.controller.healthy_status() {
            self.begin_reset(error, now);
            return;
        }
        let overdue = |pair: usize| self.commands[pair].overdue(now).map(|id| (pair, id));
        if let Some((pair, id)) = (0..self.commands.len()).find_map(overdue) {
            self.controller.abort(pair, id);
            self.counters.aborts += 1;
            let until = now + self.admin_timeout;
            self.health = Health::Aborting(Abort { pair, id, until, is_answered: false, is_ended: false });
        }
    }

    fn watch_abort(&mut self, now: Instant) {
        let Health::Aborting(abort) = &mut self.health else { return };
        let answer = match abort.is_answered {
            true => Ok(None),
            false => self.controller.abort_answer(),
        };
        let is_refused = matches!(answer, Ok(Some(false)));
        abort.is_answered |= matches!(answer, Ok(Some(_)));
        if let Err(error) = answer.and_then(|_| self.controller.healthy_status().map(drop)) {
            self.begin_reset(error, now);
        } else if abort.is_answered && abort.is_ended {
            self.health = Health::Running;
            self.next_check = now;
        } else if now >= abort.until || (is_refused && !abort.is_ended) {
            let waited = self.command_timeout + self.admin_timeout;
            let device = self.controller.bus.device().to_owned();
            let waited_ms = waited.as_millis() as u64;
            self.begin_reset(
                NvmeError::Timeout { device, operation: "a command and its abort", waited_ms },
                now,
            );
        }
    }

    #[cold]
    pub(crate) fn unexpected_completion(&mut self, pair: usize, id: u16) {
        let what = format!("it completed command {id} of queue {}, which is not in flight", pair + 1);
        let device = self.controller.bus.device().to_owned();
        self.begin_reset(NvmeError::Protocol { device, what }, Instant::now());
    }

    pub(crate) fn begin_reset(&mut self, reason: NvmeError, now: Instant) {
        self.counters.resets += 1;
        if self.identity().has_volatile_cache {
            self.cache.note_reset();
        }
        if matches!(reason, NvmeError::Removed { .. }) {
            self.give_up(reason);
            return;
        }
        self.controller.restart(now);
        self.health = Health::Resetting(Reset { reason, was_reset_from_outside: false });
    }

    fn continue_reset(&mut self, now: Instant) {
        let advanced = self.controller.advance(now);
        let Health::Resetting(reset) = &mut self.health else { return };
        match advanced {
            Ok(()) => {
                let reason = reset.reason.clone();
                if self.controller.is_quiet() {
                    self.fail_commands(&reason);
                }
                if self.controller.is_ready() {
                    self.health = Health::Running;
                    self.next_check = now;
                    self.issue();
                }
            }
            Err(NvmeError::Removed { device }) => self.give_up(NvmeError::Removed { device }),
            Err(error) if reset.was_reset_from_outside => self.give_up(error),
            Err(error) => match self.controller.bus.reset() {
                Ok(()) => {
                    reset.was_reset_from_outside = true;
                    self.controller.restart(now);
                }
                Err(_) => self.give_up(error),
            },
        }
    }

    /// Fails the engine permanently. Without access to memory the device cannot change anything any more.
    fn give_up(&mut self, error: NvmeError) {
        self.controller.bus.isolate();
        self.health = Health::Failed(error.clone());
        self.fail_commands(&error);
        self.queue.fail_pending(|request| error.clone().into_io(describe(request)));
    }

    /// Completes every command in flight with an error.
    fn fail_commands(&mut self, reason: &NvmeError) {
        for pair in 0..self.commands.len() {
            while let Some(id) = self.commands[pair].any() {
                if let Some(ended) = self.commands[pair].end(id) {
                    self.end(ended.owner, Some(Failure::Reset(reason)));
                }
            }
        }
    }
}
