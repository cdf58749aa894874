//! The scheduler: running and waiting threads, and the processes that they belong to.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use super::network::HostId;
use super::objects::ObjectId;
use super::{Due, Kernel, Nanos, real, report, with};
use crate::oracle::Oracle;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ThreadId(pub(super) u32);

impl ThreadId {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ProcessId(pub(super) u32);

impl ProcessId {
    /// No process.
    pub(crate) const NONE: Self = Self(u32::MAX);

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug)]
pub(super) struct Process {
    pub(super) host: HostId,
    pub(super) name: String,
    pub(super) is_alive: bool,
    is_frozen: bool,
    /// Threads that are runnable but held back while the process is frozen.
    held_back: Vec<ThreadId>,
    threads: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    Waiting,
    Over,
}

#[derive(Debug)]
pub(super) struct Thread {
    pub(super) process: ProcessId,
    /// 1 if it is this thread's turn.
    turn: &'static AtomicU32,
    state: State,
    /// Number of the thread's waits, so that an old timeout does not end a new wait.
    wait: u64,
    timed_out: bool,
    pthread: libc::pthread_t,
    joiner: Option<ThreadId>,
}

/// Reason for which a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeReason {
    Called,
    TimedOut,
}

const NOT_SIMULATED: u32 = u32::MAX;

thread_local! {
    static CURRENT_THREAD: Cell<u32> = const { Cell::new(NOT_SIMULATED) };
    /// Process of threads that this thread starts, if it is not its own.
    static STARTS_IN: Cell<Option<ProcessId>> = const { Cell::new(None) };
}

/// Returns the current thread, if it is simulated.
#[inline]
pub(super) fn current() -> Option<ThreadId> {
    let me = CURRENT_THREAD.get();
    (me != NOT_SIMULATED).then_some(ThreadId(me))
}

pub(super) fn become_simulated(thread: ThreadId) {
    CURRENT_THREAD.set(thread.0);
}

impl Kernel {
    pub(super) fn add_process(&mut self, host: HostId, name: &str) -> ProcessId {
        let id = ProcessId(self.processes.len() as u32);
        let state = &mut self.hosts[host.index()];
        state.is_powered_off = false;
        if !self.processes.iter().any(|process| process.host == host && process.is_alive) {
            // The next process uses the same ports as the previous one, as with a network namespace of its
            // own.
            state.next_port = super::network::EPHEMERAL;
        }
        self.processes.push(Process {
            host,
            name: name.to_owned(),
            is_alive: true,
            is_frozen: false,
            held_back: Vec::new(),
            threads: 0,
        });
        self.trace.step("process", self.now, u64::from(id.0), u64::from(host.0));
        id
    }

    pub(super) fn add_thread(&mut self, process: ProcessId) -> ThreadId {
        let id = ThreadId(self.threads.len() as u32);
        // Leaked, because it lives as long as the simulation, which is a process of the real system.
        let turn = Box::leak(Box::new(AtomicU32::new(0)));
        self.threads.push(Thread {
            process,
            turn,
            state: State::Ready,
            wait: 0,
            timed_out: false,
            pthread: 0,
            joiner: None,
        });
        self.processes[process.index()].threads += 1;
        self.runnable.push(id);
        self.trace.step("thread", self.now, u64::from(id.0), u64::from(process.0));
        id
    }

    /// Returns the process of the running thread.
    pub(super) fn process(&self) -> ProcessId {
        self.threads[self.current.index()].process
    }

    pub(super) fn host(&self) -> HostId {
        self.processes[self.process().index()].host
    }

    /// Makes the running thread wait.
    pub(super) fn begin_wait(&mut self, until: Option<Nanos>) {
        let id = self.current;
        let thread = &mut self.threads[id.index()];
        thread.state = State::Waiting;
        thread.timed_out = false;
        thread.wait += 1;
        let wait = thread.wait;
        if let Some(until) = until {
            self.schedule(until, Due::Timeout(id, wait));
        }
    }

    /// Ends the wait of a thread; returns whether it was waiting.
    pub(super) fn wake(&mut self, id: ThreadId) -> bool {
        let thread = &mut self.threads[id.index()];
        if thread.state != State::Waiting {
            return false;
        }
        thread.state = State::Ready;
        let process = &mut self.processes[thread.process.index()];
        if process.is_frozen {
            process.held_back.push(id);
        } else {
            self.runnable.push(id);
        }
        true
    }

    pub(super) fn time_out(&mut self, id: ThreadId, wait: u64) {
        if self.threads[id.index()].wait == wait && self.wake(id) {
            self.threads[id.index()].timed_out = true;
        }
    }

    /// Wakes at most `count` threads that wait on a futex; returns how many.
    pub(super) fn wake_futex(&mut self, address: usize, count: usize) -> usize {
        let mut woken = 0;
        while woken < count {
            let Some(waiting) = self.futexes.get_mut(&address) else { break };
            let Some(thread) = waiting.pop_front() else {
                self.futexes.remove(&address);
                break;
            };
            woken += usize::from(self.wake(thread));
        }
        woken
    }

    pub(super) fn kill(&mut self, process: super::ProcessId, silently: bool) {
        if silently && let Some(state) = self.processes.get(process.index()) {
            // The machine loses its power, whether the process still runs or not.
            self.lose_unsynced(state.host);
        }
        let Some(state) = self.processes.get_mut(process.index()).filter(|state| state.is_alive) else {
            return;
        };
        state.is_alive = false;
        self.hosts[state.host.index()].is_powered_off = silently;
        self.trace.step("kill", self.now, u64::from(process.0), u64::from(silently));
        for thread in self.threads.iter_mut().filter(|thread| thread.process == process) {
            thread.state = State::Over;
        }
        let threads = &self.threads;
        self.runnable.retain(|id| threads[id.index()].process != process);
        self.futexes
            .values_mut()
            .for_each(|waiting| waiting.retain(|id| threads[id.index()].process != process));
        self.close_all(process, silently);
    }

    pub(super) fn freeze(&mut self, process: super::ProcessId, is_frozen: bool) {
        self.trace.step("freeze", self.now, u64::from(process.0), u64::from(is_frozen));
        self.processes[process.index()].is_frozen = is_frozen;
        let threads = &self.threads;
        if is_frozen {
            let mut held_back = Vec::new();
            self.runnable.retain(|id| {
                let stays = threads[id.index()].process != process;
                if !stays {
                    held_back.push(*id);
                }
                stays
            });
            self.processes[process.index()].held_back.append(&mut held_back);
        } else {
            let held_back = std::mem::take(&mut self.processes[process.index()].held_back);
            self.runnable
                .extend(held_back.into_iter().filter(|id| threads[id.index()].state == State::Ready));
        }
    }

    /// Selects the next thread; returns the turn words of the current and of the next thread.
    fn select_next_thread(&mut self) -> (&'static AtomicU32, &'static AtomicU32) {
        let mine = self.threads[self.current.index()].turn;
        self.current = self.next_thread();
        (mine, self.threads[self.current.index()].turn)
    }
}

fn real_futex(word: &AtomicU32, operation: i32, value: u32) {
    let function = real::SYSCALL.get();
    let address = std::ptr::from_ref(word) as usize;
    // SAFETY: the word lives as long as the process.
    unsafe {
        function(
            libc::SYS_futex,
            address,
            (operation | libc::FUTEX_PRIVATE_FLAG) as usize,
            value as usize,
            0,
            0,
            0,
        )
    };
}

fn give(turn: &AtomicU32) {
    turn.store(1, Ordering::Release);
    real_futex(turn, libc::FUTEX_WAKE, 1);
}

fn await_turn(turn: &AtomicU32) {
    while turn.load(Ordering::Acquire) == 0 {
        real_futex(turn, libc::FUTEX_WAIT, 0);
    }
    turn.store(0, Ordering::Relaxed);
}

/// Yields to the next thread, and returns at this thread's next turn.
pub(super) fn switch() {
    let (mine, next) = with(Kernel::select_next_thread);
    if !std::ptr::eq(mine, next) {
        give(next);
        await_turn(mine);
    }
}

/// Waits as set up with [`Kernel::begin_wait`].
pub(super) fn wait() -> WakeReason {
    switch();
    with(|kernel| {
        let thread = &kernel.threads[kernel.current.index()];
        if thread.timed_out { WakeReason::TimedOut } else { WakeReason::Called }
    })
}

/// Point at which a thread may lose its turn.
pub(super) fn preemption_point() {
    let is_preempted = with(|kernel| {
        let is_preempted = kernel.random.one_in(super::PREEMPT_ONE_IN) && !kernel.runnable.is_empty();
        if is_preempted {
            let id = kernel.current;
            kernel.runnable.push(id);
        }
        is_preempted
    });
    if is_preempted {
        switch();
    }
}

/// Yields to the other runnable threads.
pub(super) fn yield_now() {
    with(|kernel| {
        let id = kernel.current;
        kernel.runnable.push(id);
    });
    switch();
}

/// Sleeps until `until`.
pub(super) fn sleep_until(until: Nanos) {
    with(|kernel| kernel.begin_wait(Some(until)));
    wait();
}

/// Waits until an object changes or until `until`.
pub(super) fn wait_for(objects: &[ObjectId], until: Option<Nanos>) -> WakeReason {
    with(|kernel| {
        let me = kernel.current;
        kernel.begin_wait(until);
        for object in objects {
            if let Some(object) = kernel.objects.get_mut(object) {
                object.waiters.push(me);
            }
        }
    });
    let woken = wait();
    with(|kernel| {
        let me = kernel.current;
        for object in objects {
            if let Some(object) = kernel.objects.get_mut(object) {
                object.waiters.retain(|waiter| *waiter != me);
            }
        }
    });
    woken
}

pub(super) type Routine = extern "C" fn(*mut c_void) -> *mut c_void;

struct Start {
    thread: ThreadId,
    turn: &'static AtomicU32,
    routine: Routine,
    argument: *mut c_void,
}

/// Returns the key whose destructor runs after those of a thread's other thread-local values.
fn exit_key() -> libc::pthread_key_t {
    static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
    let mut key = KEY.load(Ordering::Relaxed);
    if key == u32::MAX {
        // SAFETY: the destructor has the type that the C library calls.
        let failed = unsafe { libc::pthread_key_create(&raw mut key, Some(thread_exits)) };
        if failed != 0 {
            report::fail(Oracle::Simulator, "no key for thread-local values");
        }
        KEY.store(key, Ordering::Relaxed);
    }
    key
}

unsafe extern "C" fn thread_exits(_value: *mut c_void) {
    let next = with(|kernel| {
        let id = kernel.current;
        let thread = &mut kernel.threads[id.index()];
        thread.state = State::Over;
        let (joiner, process) = (thread.joiner.take(), thread.process);
        kernel.trace.step("exit", kernel.now, u64::from(id.0), 0);
        if let Some(joiner) = joiner {
            kernel.wake(joiner);
        }
        let process = &mut kernel.processes[process.index()];
        process.threads -= 1;
        if process.threads == 0 {
            let process = kernel.process();
            kernel.kill(process, false);
        }
        kernel.select_next_thread().1
    });
    CURRENT_THREAD.set(NOT_SIMULATED);
    give(next);
}

extern "C" fn thread_begins(start: *mut c_void) -> *mut c_void {
    // SAFETY: `create` made the pointer for this thread alone.
    let start = unsafe { Box::from_raw(start.cast::<Start>()) };
    await_turn(start.turn);
    become_simulated(start.thread);
    // SAFETY: the key exists; any value but null has the destructor called.
    unsafe { libc::pthread_setspecific(exit_key(), std::ptr::without_provenance(1)) };
    (start.routine)(start.argument)
}

/// Starts a thread in this process.
pub(super) fn create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> i32 {
    exit_key();
    let (id, turn) = with(|kernel| {
        kernel.call();
        let process = STARTS_IN.get().unwrap_or_else(|| kernel.process());
        let id = kernel.add_thread(process);
        (id, kernel.threads[id.index()].turn)
    });
    let start = Box::new(Start { thread: id, turn, routine, argument });
    let function = real::PTHREAD_CREATE.get();
    // SAFETY: the caller's pointers are those that the function wants, and the last one is given to the new thread.
    let failed = unsafe { function(thread, attributes, thread_begins, Box::into_raw(start).cast()) };
    if failed != 0 {
        report::fail(Oracle::Simulator, "the system starts no more threads");
    }
    // SAFETY: the function has written the value.
    let pthread = unsafe { *thread };
    with(|kernel| kernel.threads[id.index()].pthread = pthread);
    0
}

/// Waits for a thread to exit.
pub(super) fn join(pthread: libc::pthread_t) {
    let waits = with(|kernel| {
        let me = kernel.current;
        let found = kernel.threads.iter_mut().rev().find(|thread| thread.pthread == pthread);
        let Some(thread) = found.filter(|thread| thread.state != State::Over) else { return false };
        thread.joiner = Some(me);
        kernel.begin_wait(None);
        true
    });
    if waits {
        wait();
    }
}

/// Starts the first thread of a process.
pub(super) fn start_in(process: ProcessId, name: &str, main: impl FnOnce() + Send + 'static) {
    STARTS_IN.set(Some(process));
    let started = std::thread::Builder::new().name(name.to_owned()).stack_size(8 << 20).spawn(main);
    STARTS_IN.set(None);
    if started.is_err() {
        report::fail(Oracle::Simulator, "the system starts no more threads");
    }
}
