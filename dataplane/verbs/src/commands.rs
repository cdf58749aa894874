//! Queue pairs are made, connected, stopped and destroyed on a thread of their own.
//!
//! Each of these verbs is a command to the card's firmware (ibv_create_qp(3), ibv_modify_qp(3), ibv_destroy_qp(3)): tens of
//! microseconds to milliseconds, and all of a node's peers may come or go at once. The thread that drives the fabric hands the
//! pairs of a connection over with a [`Command`] and gets them back with its [`Outcome`]; while they are away it neither posts
//! to them nor reports the connection's end. One command of a connection is under way at a time.
//!
//! A command allocates, and takes a system call to wake each thread: a few times in a connection's life.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
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

/// What a pair is made of.
#[derive(Debug, Clone)]
pub(crate) struct Making {
    pub(crate) domain: Arc<ProtectionDomain>,
    pub(crate) completions: Arc<CompletionQueue>,
    pub(crate) receives: Arc<SharedReceiveHandle>,
    pub(crate) capacity: Capacity,
    pub(crate) port: u8,
    /// Row of the port's partition key table.
    pub(crate) partition_index: u16,
    pub(crate) access: PeerAccess,
}

/// Where both pairs lead.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    pub(crate) lanes: [(Path, Retries); 2],
    /// The peer, for errors.
    pub(crate) peer: std::net::SocketAddr,
}

/// What is to be done for a connection.
#[derive(Debug)]
pub(crate) enum Command {
    /// Make both pairs, and bind them to a port.
    Make(Making),
    /// Bring them to where they can send to the peer.
    Connect(Pairs<Initialised>, Way),
    /// Both at once, where the peer is known already.
    MakeConnected(Making, Way),
    /// End the work of each pair that can have some.
    Stop([Pair; 2]),
    /// Destroy them.
    Destroy([Option<QueuePair<Failed>>; 2]),
}

/// What became of it.
#[derive(Debug)]
pub(crate) enum Outcome {
    Made(Result<Pairs<Initialised>, VerbsError>),
    Connected(Result<Pairs<ReadyToSend>, VerbsError>),
    /// And why a pair did not go to its error state.
    Stopped([Pair; 2], Vec<VerbsError>),
    /// Whether the device gave each of them up.
    Destroyed([bool; 2]),
}

/// The number of a connection, and the command for it.
type Order = (u64, Command);

/// The fabric's side of the thread.
#[derive(Debug)]
pub(crate) struct CommandThread {
    orders: Option<Sender<Order>>,
    outcomes: Receiver<(u64, Outcome)>,
    /// Of orders that were given after the thread's end.
    late: VecDeque<(u64, Outcome)>,
    /// Readable when an outcome waits.
    news: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl CommandThread {
    pub(crate) fn start(device: &str) -> Result<Self, VerbsError> {
        let system = |operation: &str, error| VerbsError::System { operation: operation.to_owned(), error };
        let news = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let news = Arc::new(news.map_err(|errno| system("eventfd", errno.into()))?);
        let (orders, taken) = mpsc::channel::<Order>();
        let (give, outcomes) = mpsc::channel();
        let told = Arc::clone(&news);
        let run = move || {
            for (number, command) in taken {
                let outcome = command.run();
                // The fabric is gone: whatever the outcome holds is destroyed with it.
                let _nobody = give.send((number, outcome));
                tell(&told);
            }
        };
        // The kernel keeps fifteen bytes of it.
        let thread = std::thread::Builder::new().name(format!("rdma-{device}")).spawn(run);
        let thread = thread.map_err(|error| system("start the thread of an RDMA device", error))?;
        Ok(Self { orders: Some(orders), outcomes, late: VecDeque::new(), news, thread: Some(thread) })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }

    /// Has a command carried out; its outcome comes later. Without the thread it is carried out here.
    pub(crate) fn order(&mut self, number: u64, command: Command) {
        let sent = match &self.orders {
            Some(orders) => orders.send((number, command)).map_err(|refused| refused.0),
            None => Err((number, command)),
        };
        if let Err((number, command)) = sent {
            self.late.push_back((number, command.run()));
            tell(&self.news);
        }
    }

    /// The next outcome, if there is one.
    pub(crate) fn next(&mut self) -> Option<(u64, Outcome)> {
        self.outcomes.try_recv().ok().or_else(|| self.late.pop_front())
    }

    /// Notes that outcomes were looked for.
    pub(crate) fn clear(&self) {
        // An empty counter reads as EAGAIN.
        let _empty = rustix::io::read(&*self.news, &mut [0_u8; 8]);
    }

    /// Ends the thread when all orders are carried out. Their outcomes can still be taken.
    pub(crate) fn end(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of an RDMA device panicked");
        }
    }
}

fn tell(news: &OwnedFd) {
    // Fails only when the counter is at its maximum, and then the fabric is being woken anyway.
    let _full = rustix::io::write(news, &1_u64.to_ne_bytes());
}

impl Command {
    pub(crate) fn run(self) -> Outcome {
        match self {
            Self::Make(making) => Outcome::Made(making.make()),
            Self::Connect(pairs, way) => Outcome::Connected(way.connect(pairs)),
            Self::MakeConnected(making, way) => {
                Outcome::Connected(making.make().and_then(|pairs| way.connect(pairs)))
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

impl Making {
    fn make(&self) -> Result<Pairs<Initialised>, VerbsError> {
        let make = || {
            let pair = QueuePair::made(&self.domain, &self.completions, &self.receives, self.capacity)?;
            pair.initialise(self.port, self.partition_index, self.access)
        };
        Ok([make()?, make()?])
    }
}

impl Way {
    fn connect(&self, pairs: Pairs<Initialised>) -> Result<Pairs<ReadyToSend>, VerbsError> {
        let connect = |pair: QueuePair<Initialised>, (path, retries): &(Path, Retries)| {
            pair.ready_to_receive(path, &self.peer)?.ready_to_send(retries, &self.peer)
        };
        let [first, second] = pairs;
        Ok([connect(first, &self.lanes[0])?, connect(second, &self.lanes[1])?])
    }
}

/// Ends the work of a pair: flushed by the device, or destroyed, or leaked.
fn stop(pair: Pair, errors: &mut Vec<VerbsError>) -> Pair {
    let stopped = match pair {
        Pair::Initialised(pair) => pair.fail(),
        Pair::Ready(pair) => pair.fail(),
        other => return other,
    };
    match stopped {
        Stopped::Failed(pair) => Pair::Failed(pair),
        Stopped::Destroyed(error) => {
            errors.push(error);
            Pair::Absent
        }
        Stopped::Leaked(error) => {
            errors.push(error);
            Pair::Leaked
        }
    }
}
