//! A simulated kernel beneath unmodified programs.
//!
//! Programs call the system through the C library: threads, blocking locks, time, randomness, sockets, polled
//! descriptors. This executable defines these functions (`calls`), and the linker prefers an executable's own
//! definition. On a simulated thread they answer from the state in this module; on any other thread they call
//! the C library's function.
//!
//! * One thread runs at a time. A thread yields where it would block, and sometimes where it could be
//!   preempted; the next thread is drawn from the seed.
//! * Time stands still while a thread runs, except for a small cost of each call. If no thread can run, it
//!   jumps to the next due event.
//! * All random choices come from the seed, and every step goes into a hash ([`mod@trace`]).
//!
//! Files are real ones, in the run's own folder; ring operations on them, and fsync, have faults (`disks`).
//! Not simulated: memory, and system calls that bypass the C library. Interleavings within lock-free code are
//! not explored, since threads switch only in calls: loom's models do that.

mod calls;
mod connections;
mod disks;
mod network;
mod objects;
pub(crate) mod random;
mod real;
pub(crate) mod report;
mod rings;
mod sockets;
mod threads;
mod trace;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Mutex, TryLockError};

pub(crate) use disks::{DiskCounts, DiskFaults};
use disks::{Unsynced, UnsyncedFiles};
pub(crate) use network::{Cut, HostId, LinkFaults, NetworkCounts, host_address};
use network::{Host, Network};
use objects::{Object, ObjectId};
use random::Random;
use rings::FileOperation;
pub(crate) use threads::ProcessId;
use threads::{Process, Thread, ThreadId};
use trace::Trace;

use crate::oracle::Oracle;

/// Nanoseconds since the simulation began.
pub(crate) type Nanos = u64;

pub(crate) const MICROSECOND: Nanos = 1_000;
pub(crate) const MILLISECOND: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// Simulated time of one call.
const CALL: Nanos = 200;
/// Shortest simulated time of a thread's turn.
const TURN: Nanos = 2 * MICROSECOND;
/// Wall-clock time at the start: 2026-01-01.
const EPOCH: Nanos = 1_767_225_600 * SECOND;
/// One preemption point in this many ends a turn.
const PREEMPT_ONE_IN: u64 = 16;
/// Turns after which a run counts as a livelock; no valid run takes as many.
const TURNS_MAX: u64 = 30_000_000;

/// An event that is due at a time.
#[derive(Debug)]
enum Due {
    /// The wait of a thread times out, if the thread is still in this wait.
    Timeout(ThreadId, u64),
    /// A packet arrives at an end of a connection.
    Arrival(ObjectId),
    /// A timer fires, unless it was set again since.
    Timer(ObjectId, u64),
    /// A connection attempt reaches its target.
    Connect(ObjectId),
    /// A connection had no sign of its peer for too long.
    GiveUp(ObjectId),
    /// A ring operation on a file takes effect.
    File(Box<FileOperation>),
}

#[derive(Debug)]
struct Scheduled {
    at: Nanos,
    order: u64,
    due: Due,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Initial configuration of a simulation.
#[derive(Debug, Clone)]
pub(crate) struct KernelConfig {
    pub(crate) seed: u64,
    pub(crate) prints_trace: bool,
}

/// The whole state. Only the thread whose turn it is accesses it.
struct Kernel {
    now: Nanos,
    random: Random,
    /// Source of random bytes for programs.
    entropy: Random,
    threads: Vec<Thread>,
    processes: Vec<Process>,
    runnable: Vec<ThreadId>,
    current: ThreadId,
    turns: u64,
    scheduled: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
    /// Threads that wait on a futex, by its address.
    futexes: HashMap<usize, VecDeque<ThreadId>>,
    objects: BTreeMap<ObjectId, Object>,
    next_object: u32,
    descriptors: BTreeMap<c_int, (ObjectId, ProcessId)>,
    /// Real files that simulated processes have open.
    files: BTreeMap<c_int, ProcessId>,
    unsynced: Vec<Unsynced>,
    unsynced_files: UnsyncedFiles,
    disk_counts: DiskCounts,
    network_counts: NetworkCounts,
    hosts: Vec<Host>,
    network: Network,
    trace: Trace,
}

static KERNEL: Mutex<Option<Kernel>> = Mutex::new(None);

/// Runs `work` on the state. `work` must not call a simulated function: the state is locked.
fn with<R>(work: impl FnOnce(&mut Kernel) -> R) -> R {
    match KERNEL.try_lock() {
        Ok(mut kernel) => match kernel.as_mut() {
            Some(kernel) => work(kernel),
            None => report::fail(Oracle::Simulator, "a simulated call before `kernel::begin`"),
        },
        Err(TryLockError::WouldBlock) => report::fail(
            Oracle::Simulator,
            "code that holds the kernel's state has called a simulated function",
        ),
        Err(TryLockError::Poisoned(_)) => report::fail(Oracle::Simulator, "a simulated call has panicked"),
    }
}

/// Turns this thread into the first one of a simulation, on a host of its own.
pub(crate) fn begin(config: &KernelConfig) {
    let mut random = Random::new(config.seed);
    let entropy = random.fork();
    let mut kernel = Kernel {
        now: 0,
        random,
        entropy,
        threads: Vec::new(),
        processes: Vec::new(),
        runnable: Vec::new(),
        current: ThreadId(0),
        turns: 0,
        scheduled: BinaryHeap::new(),
        order: 0,
        futexes: HashMap::new(),
        objects: BTreeMap::new(),
        next_object: 0,
        descriptors: BTreeMap::new(),
        files: BTreeMap::new(),
        unsynced: Vec::new(),
        unsynced_files: UnsyncedFiles::new(),
        disk_counts: DiskCounts::default(),
        network_counts: NetworkCounts::default(),
        hosts: Vec::new(),
        network: Network::default(),
        trace: Trace::new(config.seed, config.prints_trace),
    };
    let host = kernel.add_host("world");
    let process = kernel.add_process(host, "world");
    let thread = kernel.add_thread(process);
    kernel.runnable.clear();
    kernel.current = thread;
    *KERNEL.lock().expect("nobody else is here") = Some(kernel);
    threads::become_simulated(thread);
}

impl Kernel {
    /// Advances time by the cost of a call.
    fn call(&mut self) {
        self.now += CALL;
    }

    fn schedule(&mut self, at: Nanos, due: Due) {
        self.order += 1;
        self.scheduled.push(Reverse(Scheduled { at, order: self.order, due }));
    }

    /// Processes all events that are due.
    fn catch_up(&mut self) {
        while self.scheduled.peek().is_some_and(|Reverse(next)| next.at <= self.now) {
            if let Some(Reverse(next)) = self.scheduled.pop() {
                self.fire(next.due);
            }
        }
    }

    fn fire(&mut self, due: Due) {
        match due {
            Due::Timeout(thread, wait) => self.time_out(thread, wait),
            Due::Arrival(object) => self.arrive(object),
            Due::Timer(object, setting) => self.fire_timer(object, setting),
            Due::Connect(object) => self.reach(object),
            Due::GiveUp(object) => self.give_up(object),
            Due::File(operation) => self.finish_file_operation(&operation),
        }
    }

    /// Returns the next thread to run; time passes until there is one.
    fn next_thread(&mut self) -> ThreadId {
        self.now += TURN;
        self.turns += 1;
        if self.turns > TURNS_MAX {
            report::fail(Oracle::Progress, "livelock: threads took as many turns as no valid run takes");
        }
        loop {
            self.catch_up();
            if !self.runnable.is_empty() {
                let index = self.random.below(self.runnable.len() as u64) as usize;
                let thread = self.runnable.swap_remove(index);
                self.trace.step("turn", self.now, u64::from(thread.0), self.runnable.len() as u64);
                return thread;
            }
            match self.scheduled.peek() {
                Some(Reverse(next)) => self.now = self.now.max(next.at),
                None => {
                    report::fail(Oracle::Progress, "deadlock: all threads wait, and no event is scheduled")
                }
            }
        }
    }
}

/// Returns the present time, if the state exists and is not locked.
fn failing_at() -> Option<Nanos> {
    Some(KERNEL.try_lock().ok()?.as_ref()?.now)
}

/// Returns the time since the start.
pub(crate) fn now() -> Nanos {
    with(|kernel| kernel.now)
}

/// Returns the hash and the number of steps of the trace so far, and the number of turns.
pub(crate) fn trace() -> (u64, u64, u64) {
    with(|kernel| (kernel.trace.hash(), kernel.trace.steps(), kernel.turns))
}

/// Adds a fact of the scenario to the trace.
pub(crate) fn note(kind: &'static str, first: u64, second: u64) {
    with(|kernel| {
        let now = kernel.now;
        kernel.trace.step(kind, now, first, second);
    });
}

/// Adds a host to the network.
pub(crate) fn add_host(name: &str) -> HostId {
    with(|kernel| kernel.add_host(name))
}

/// Starts a process on a host: a new thread, and all threads that it starts.
pub(crate) fn start_process(host: HostId, name: &str, main: impl FnOnce() + Send + 'static) -> ProcessId {
    let process = with(|kernel| kernel.add_process(host, name));
    threads::start_in(process, name, main);
    process
}

/// Ends a process as SIGKILL does: its threads never run again, its sockets are closed. With `silently`, as
/// when its machine loses power: its peers are not notified.
pub(crate) fn kill(process: ProcessId, silently: bool) {
    with(|kernel| kernel.kill(process, silently));
}

/// Ends the calling process, as exit does.
pub(crate) fn exit() -> ! {
    with(|kernel| kernel.kill(kernel.process(), false));
    loop {
        threads::switch();
    }
}

/// Whether a process has threads left.
pub(crate) fn is_alive(process: ProcessId) -> bool {
    with(|kernel| kernel.processes.get(process.index()).is_some_and(|process| process.is_alive))
}

/// Stops the threads of a process, as SIGSTOP does, or continues them.
pub(crate) fn freeze(process: ProcessId, is_frozen: bool) {
    with(|kernel| kernel.freeze(process, is_frozen));
}

/// Sets delay, loss and rate between two hosts, in both directions.
pub(crate) fn set_link(a: HostId, b: HostId, faults: LinkFaults) {
    with(|kernel| kernel.set_link(a, b, faults));
}

/// Cuts connections between two hosts.
pub(crate) fn cut(a: HostId, b: HostId, how: Cut) {
    with(|kernel| kernel.cut(a, b, how));
}

/// Sets the faults of a host's disks.
pub(crate) fn set_disk(host: HostId, faults: DiskFaults) {
    with(|kernel| kernel.hosts[host.index()].disk = faults);
}

/// Present faults of a host's disks.
pub(crate) fn disk_of(host: HostId) -> DiskFaults {
    with(|kernel| kernel.hosts[host.index()].disk)
}

/// Counts of what the network has shown so far.
pub(crate) fn network_counts() -> NetworkCounts {
    with(|kernel| kernel.network_counts)
}

/// Counts of faults that disks have shown so far.
pub(crate) fn disk_counts() -> DiskCounts {
    with(|kernel| kernel.disk_counts)
}

/// Shifts the wall clock of a host.
pub(crate) fn jump_clock(host: HostId, nanos: i64) {
    with(|kernel| kernel.hosts[host.index()].clock_offset += nanos);
}

/// Returns the open sockets of a process, as text for diagnosing leaks.
pub(crate) fn open_sockets(process: ProcessId) -> Vec<String> {
    with(|kernel| kernel.open_sockets(process))
}
