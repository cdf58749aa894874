//! Commands of one connection that run side by side, answered in order.
//!
//! The problem: a client sends sixteen `GET`s in one packet, and each may wait for a disk. One after the other they
//! would take sixteen times as long. But a `GET` behind a `SET` of the same key must see it.
//!
//! So each command [`Claims`] keys, to read or to write. It may start when no running command before it claims
//! one of the same keys with either of them writing. Commands that concern all keys run alone. Claims are
//! compared by 64-bit hashes of the keys: equal hashes of different keys only make a command wait.
//!
//! The future of a command lives in a box that is reused, so a command costs no allocation here. On each wake all
//! running futures are polled: their number is small and bounded, and one waker serves all.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::commands::{KeyArguments, Specification};
use crate::values::Value;

/// Keys that a command reads or writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Claims {
    /// All keys.
    Everything,
    /// Some keys, by their hashes. The first is separate because most commands have one key.
    Keys { writes: bool, first: u64, more: Vec<u64> },
}

impl Claims {
    pub(crate) fn of(specification: &Specification, arguments: &[Value], hasher: &impl BuildHasher) -> Self {
        if specification.keys == KeyArguments::Everything {
            return Self::Everything;
        }
        let mut keys =
            specification.keys(arguments).map(|key| hasher.hash_one(key.contiguous().unwrap_or_default()));
        match keys.next() {
            None => Self::Everything,
            Some(first) => Self::Keys { writes: specification.writes, first, more: keys.collect() },
        }
    }

    fn conflicts_with(&self, other: &Self) -> bool {
        let (Self::Keys { writes, first, more }, Self::Keys { writes: wrote, first: one, more: others }) =
            (self, other)
        else {
            return true;
        };
        let claimed = |key: &u64| key == first || more.contains(key);
        (*writes || *wrote) && (claimed(one) || others.iter().any(claimed))
    }
}

struct RunningCommand<F: Future, T> {
    future: Pin<Box<Option<F>>>,
    done: Option<F::Output>,
    claims: Claims,
    tag: T,
}

/// The running commands of a connection; each carries a tag of the caller's.
pub(crate) struct RunningCommands<F: Future, T> {
    running: VecDeque<RunningCommand<F, T>>,
    free: Vec<Pin<Box<Option<F>>>>,
    commands_max: usize,
}

impl<F: Future, T> RunningCommands<F, T> {
    pub(crate) fn new(commands_max: usize) -> Self {
        Self { running: VecDeque::new(), free: Vec::new(), commands_max }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Whether a command with these claims may start now.
    pub(crate) fn admits(&self, claims: &Claims) -> bool {
        self.running.len() < self.commands_max
            && !self.running.iter().any(|command| command.claims.conflicts_with(claims))
    }

    /// Starts a command and polls it once. The caller has checked [`RunningCommands::admits`].
    pub(crate) fn start(&mut self, context: &mut Context<'_>, future: F, claims: Claims, tag: T) {
        debug_assert!(self.running.len() < self.commands_max, "more commands than may run");
        let mut place = self.free.pop().unwrap_or_else(|| Box::pin(None));
        place.as_mut().set(Some(future));
        let mut command = RunningCommand { future: place, done: None, claims, tag };
        command.poll(context);
        self.running.push_back(command);
    }

    /// Returns the output of the oldest command, if it is finished.
    pub(crate) fn pop(&mut self) -> Option<(F::Output, T)> {
        self.running.front()?.done.as_ref()?;
        let command = self.running.pop_front()?;
        self.free.push(command.future);
        command.done.map(|output| (output, command.tag))
    }

    /// Outputs of finished commands that wait for an older command.
    pub(crate) fn finished(&self) -> impl Iterator<Item = &F::Output> {
        self.running.iter().filter_map(|command| command.done.as_ref())
    }

    /// Polls all commands; ready when [`RunningCommands::pop`] would return one, or when a finished command has released
    /// its claims.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut finished = false;
        for command in &mut self.running {
            if command.done.is_none() {
                command.poll(context);
                finished |= command.done.is_some();
            }
        }
        let first = self.running.front().is_some_and(|command| command.done.is_some());
        if first || finished { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl<F: Future, T> RunningCommand<F, T> {
    fn poll(&mut self, context: &mut Context<'_>) {
        let Some(future) = self.future.as_mut().as_pin_mut() else { return };
        if let Poll::Ready(output) = future.poll(context) {
            self.done = Some(output);
            // A finished command's effects are visible to the commands that waited for it, so it needs no
            // claims.
            self.claims = Claims::Keys { writes: false, first: 0, more: Vec::new() };
            self.future.as_mut().set(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::task::Waker;

    use super::*;

    fn claims(writes: bool, keys: &[u64]) -> Claims {
        Claims::Keys { writes, first: keys[0], more: keys[1..].to_vec() }
    }

    #[test]
    fn reads_share_and_writes_do_not() {
        let (read, write) = (claims(false, &[1, 2]), claims(true, &[2, 3]));
        assert!(
            !read.conflicts_with(&read)
                && read.conflicts_with(&write)
                && write.conflicts_with(&read)
                && write.conflicts_with(&write)
        );
        assert!(!write.conflicts_with(&claims(true, &[4])) && !read.conflicts_with(&claims(true, &[3])));
        assert!(Claims::Everything.conflicts_with(&read) && read.conflicts_with(&Claims::Everything));
    }

    #[test]
    fn outputs_come_in_order_whatever_finishes_first() {
        let ready: Vec<Cell<bool>> = (0..3).map(|_| Cell::new(false)).collect();
        let context = &mut Context::from_waker(Waker::noop());
        let wait = |at: usize| {
            let ready = &ready;
            poll_fn(move |_| if ready[at].get() { Poll::Ready(at) } else { Poll::Pending })
        };
        let mut running_commands = RunningCommands::new(3);
        for at in 0..3 {
            let claims = claims(at == 1, &[at as u64 + 1]);
            assert!(running_commands.admits(&claims));
            running_commands.start(context, wait(at), claims, at * 10);
        }
        assert!(!running_commands.admits(&claims(false, &[9])), "as many commands run as may");
        ready[1].set(true);
        assert!(running_commands.poll(context).is_ready());
        assert_eq!(running_commands.pop(), None);
        assert!(running_commands.poll(context).is_pending(), "told once");
        ready[0].set(true);
        assert!(running_commands.poll(context).is_ready());
        assert_eq!(
            (running_commands.pop(), running_commands.pop(), running_commands.pop()),
            (Some((0, 0)), Some((1, 10)), None)
        );
        assert!(
            !running_commands.admits(&claims(true, &[3])) && running_commands.admits(&claims(true, &[2]))
        );
        ready[2].set(true);
        assert!(running_commands.poll(context).is_ready());
        assert_eq!(running_commands.pop(), Some((2, 20)));
        assert!(running_commands.is_empty());
        assert_eq!(running_commands.free.len(), 3, "places are used again");
    }
}
