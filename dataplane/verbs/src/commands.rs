//! A thread that makes, connects, stops and destroys queue pairs.
//!
//! Each of these verbs is a command to the card's firmware (ibv_create_qp(3), ibv_modify_qp(3),
//! ibv_destroy_qp(3)) that takes tens of microseconds to milliseconds, and all of a node's peers may
//! connect or disconnect at once. The fabric's thread submits the pairs of a connection with a [`Command`]
//! and gets them back with its [`Outcome`]; meanwhile it neither posts to them nor reports the connection's
//! end. A connection has one command in flight at a time.
//!
//! A command allocates, and makes a system call to wake each thread: a few times in a connection's life.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;

use dataplane_fabric::PeerAccess;
use rustix::event::EventfdFlags;

use crate::VerbsError;
use crate::completion::CompletionQueue;
use crate::lane::Pair;
use crate::protection::ProtectionDomain;
use crate::queue_pair::{Capacity, Failed, Initialised, Path, QueuePair, ReadyToSend, Retries, Stopped};
use crate::shared_receive::SharedReceiveHandle;

/// The pairs of a connection's lanes.
pub(crate) type Pairs<State> = [QueuePair<State>; 2];

/// The parameters of `ibv_create_qp` and of the step to INIT.
#[derive(Debug, Clone)]
pub(crate) struct PairParameters {
    pub(crate) domain: Arc<ProtectionDomain>,
    pub(crate) completions: Arc<CompletionQueue>,
    pub(crate) receives: Arc<SharedReceiveHandle>,
    pub(crate) capacity: Capacity,
    pub(crate) port: u8,
    /// Row of the port's partition key table.
    pub(crate) partition_index: u16,
    pub(crate) access: PeerAccess,
}

/// The peer's ends of both pairs.
#[derive(Debug, Clone)]
pub(crate) struct Destination {
    pub(crate) lanes: [(Path, Retries); 2],
    /// Address of the peer, for error messages.
    pub(crate) peer: std::net::SocketAddr,
}

/// The error of a failed set-up, and the pairs that remain.
pub(crate) type NotConnected = (VerbsError, [Pair; 2]);

/// Whether a connection has ended, so that the thread skips its set-up and serves the commands of other
/// connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    /// Relaxed: a set-up that reads the flag too late is stopped afterwards.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn check(&self) -> Result<(), VerbsError> {
        if self.0.load(Ordering::Relaxed) { Err(VerbsError::Abandoned) } else { Ok(()) }
    }
}

/// A command for the pairs of one connection, with what it needs.
#[derive(Debug)]
pub(crate) enum Command {
    /// Make both pairs and bind them to a port.
    Make(PairParameters, Abandoned),
    /// Connect the pairs to the peer's (RTR and RTS).
    Connect(Pairs<Initialised>, Destination, Abandoned),
    /// Make and connect in one step, for a peer whose hello is known.
    MakeConnected(PairParameters, Destination, Abandoned),
    /// Stop each pair that may have work.
    Stop([Pair; 2]),
    /// Destroy the pairs.
    Destroy([Option<QueuePair<Failed>>; 2]),
}

/// The result of a [`Command`]; returns the pairs.
#[derive(Debug)]
pub(crate) enum Outcome {
    Made(Result<Pairs<Initialised>, VerbsError>),
    /// On failure: the pairs, stopped or not, which may still hold receives.
    Connected(Result<Pairs<ReadyToSend>, Box<NotConnected>>),
    /// The pairs, and the error of each that did not go to its error state.
    Stopped([Pair; 2], Vec<String>),
    /// By lane: whether the device destroyed the pair.
    Destroyed([bool; 2]),
}

/// The fabric's handle to the command thread.
#[derive(Debug)]
pub(crate) struct CommandThread {
    /// Commands, each with the number of its connection.
    commands: Option<Sender<(u64, Command)>>,
    outcomes: Receiver<(u64, Outcome)>,
    /// Outcomes of commands that [`Self::submit`] executed itself.
    inline_outcomes: VecDeque<(u64, Outcome)>,
    /// Readable when an outcome is pending, or the thread has ended.
    wakeup: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    has_died: bool,
}

/// The thread's side. Dropped in the order of the fields: the channel closes before the fabric is woken, so
/// that the fabric sees that no outcome will come.
struct Worker {
    outcomes: Sender<(u64, Outcome)>,
    wakeup: WakeOnDrop,
}

struct WakeOnDrop(Arc<OwnedFd>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        wake(&self.0);
    }
}

impl CommandThread {
    pub(crate) fn start(device: &str) -> Result<Self, VerbsError> {
        Self::start_with(device, Command::run)
    }

    /// [`Self::start`] with another function that executes commands.
    pub(crate) fn start_with(device: &str, carry_out: fn(Command) -> Outcome) -> Result<Self, VerbsError> {
        let system = |operation: &str, error| VerbsError::System { operation: operation.to_owned(), error };
        let wakeup = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wakeup = Arc::new(wakeup.map_err(|errno| system("eventfd", errno.into()))?);
        let (commands, submitted) = mpsc::channel::<(u64, Command)>();
        let (sender, outcomes) = mpsc::channel();
        let worker = Worker { outcomes: sender, wakeup: WakeOnDrop(Arc::clone(&wakeup)) };
        let run = move || {
            let worker = worker;
            for (number, command) in submitted {
                let outcome = carry_out(command);
                // If the fabric is gone, the outcome and its pairs are dropped here.
                let _nobody = worker.outcomes.send((number, outcome));
                wake(&worker.wakeup.0);
            }
        };
        // The kernel keeps 15 bytes of a thread name.
        let thread = std::thread::Builder::new().name(format!("rdma-{device}")).spawn(run);
        let thread = thread.map_err(|error| system("start the thread of an RDMA device", error))?;
        let (inline_outcomes, has_died) = (VecDeque::new(), false);
        Ok(Self {
            commands: Some(commands),
            outcomes,
            inline_outcomes,
            wakeup,
            thread: Some(thread),
            has_died,
        })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Submits a command; its outcome comes later. If the thread has ended, the command is executed at once.
    pub(crate) fn submit(&mut self, number: u64, command: Command) {
        let sent = match &self.commands {
            Some(commands) => commands.send((number, command)).map_err(|refused| refused.0),
            None => Err((number, command)),
        };
        if let Err((number, command)) = sent {
            self.inline_outcomes.push_back((number, command.run()));
            wake(&self.wakeup);
        }
    }

    /// Returns the next outcome, if one is pending.
    pub(crate) fn next(&mut self) -> Option<(u64, Outcome)> {
        match self.outcomes.try_recv() {
            Ok(outcome) => return Some(outcome),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => self.has_died = self.commands.is_some(),
        }
        self.inline_outcomes.pop_front()
    }

    /// Returns true once after [`Self::next`] has detected that the thread panicked: outcomes of commands
    /// that it held will never come.
    pub(crate) fn take_thread_panic(&mut self) -> bool {
        let has_died = std::mem::take(&mut self.has_died);
        if has_died {
            self.commands = None;
        }
        has_died
    }

    /// Clears the wakeup descriptor.
    pub(crate) fn clear(&self) {
        // An empty counter reads as EAGAIN.
        let _empty = rustix::io::read(&*self.wakeup, &mut [0_u8; 8]);
    }

    /// Ends the thread after all submitted commands are executed. Their outcomes can still be taken.
    pub(crate) fn end(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of queue-pair commands panicked");
        }
    }
}

fn wake(wakeup: &OwnedFd) {
    // Fails only when the counter is at its maximum, and then the fabric is woken anyway.
    let _full = rustix::io::write(wakeup, &1_u64.to_ne_bytes());
}

impl Command {
    pub(crate) fn run(self) -> Outcome {
        match self {
            Self::Make(parameters, abandoned) => {
                Outcome::Made(abandoned.check().and_then(|()| parameters.make()))
            }
            Self::Connect(pairs, destination, abandoned) => Outcome::Connected(match abandoned.check() {
                Ok(()) => destination.connect(pairs),
                Err(error) => Err(Box::new((error, pairs.map(Pair::Initialised)))),
            }),
            Self::MakeConnected(parameters, destination, abandoned) => {
                let made = abandoned.check().and_then(|()| parameters.make());
                let made = made.map_err(|error| Box::new((error, [Pair::Absent, Pair::Absent])));
                Outcome::Connected(made.and_then(|pairs| destination.connect(pairs)))
            }
            Self::Stop(pairs) => {
                let mut errors = Vec::new();
                let pairs = pairs.map(|pair| stop(pair, &mut errors));
                Outcome::Stopped(pairs, errors)
            }
            Self::Destroy(pairs) => Outcome::Destroyed(pairs.map(|pair| pair.is_none_or(QueuePair::destroy))),
        }
    }
}

impl PairParameters {
    fn make(&self) -> Result<Pairs<Initialised>, VerbsError> {
        let make = || {
            let pair = QueuePair::with_receive_handle(
                &self.domain,
                &self.completions,
                &self.receives,
                self.capacity,
            )?;
            pair.initialise(self.port, self.partition_index, self.access)
        };
        Ok([make()?, make()?])
    }
}

impl Destination {
    fn connect(&self, pairs: Pairs<Initialised>) -> Result<Pairs<ReadyToSend>, Box<NotConnected>> {
        let [first, second] = pairs;
        let [(first_path, first_retries), (second_path, second_retries)] = &self.lanes;
        let first = match first.connect(first_path, first_retries, &self.peer) {
            Ok(first) => first,
            Err(failure) => {
                let (error, first) = *failure;
                return Err(Box::new((error, [state_of(first), Pair::Initialised(second)])));
            }
        };
        match second.connect(second_path, second_retries, &self.peer) {
            Ok(second) => Ok([first, second]),
            Err(failure) => {
                let (error, second) = *failure;
                Err(Box::new((error, [Pair::Ready(first), state_of(second)])))
            }
        }
    }
}

fn state_of(stopped: Stopped) -> Pair {
    match stopped {
        Stopped::Failed(pair) => Pair::Failed(pair),
        Stopped::Destroyed(_) => Pair::Absent,
        Stopped::Leaked(_) => Pair::Leaked,
    }
}

/// Stops a pair: its work is flushed, or the pair is destroyed, or leaked.
fn stop(pair: Pair, errors: &mut Vec<String>) -> Pair {
    let stopped = match pair {
        Pair::Initialised(pair) => pair.fail(),
        Pair::Ready(pair) => pair.fail(),
        other => return other,
    };
    if let Stopped::Destroyed(error) | Stopped::Leaked(error) = &stopped {
        errors.push(error.to_string());
    }
    state_of(stopped)
}
