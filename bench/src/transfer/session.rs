//! Brings the two ends together: both in one thread, in one thread each, or in two processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use dataplane_fabric::Fabric;
use dataplane_memory::{Slab, SlabLayout};

use super::args::{Threads, TransferArgs};
use super::command::{Command, VERSION};
use super::memory::Memory;
use super::node::Node;
use super::piece::Remote;
use super::responder::Responder;

/// The `listen` argument of [`Rails::make`] if both ends are in this process: any free address.
pub const ANY_ADDRESS: &str = "any";
/// Time without progress after which a test fails.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
pub(super) const IDLE_STEPS_BEFORE_YIELD: u32 = 1000;

/// Creates fabrics. Called once for each end and rail, on the thread that drives the fabric.
pub trait Rails: Sync {
    /// Creates a fabric of `transport` over `slab`. Returns it with the address at which it is reached if it
    /// listens. `listen` is an address as the user wrote it, or [`ANY_ADDRESS`]; without it this end accepts no
    /// connections. A missing device is [`super::Unavailable`].
    fn make(
        &self,
        transport: &str,
        slab: Arc<Slab>,
        listen: Option<&str>,
        rail: usize,
    ) -> Result<(Box<dyn Fabric>, String)>;
}

/// Tells a thread to end.
#[derive(Debug, Default)]
pub(super) struct Stop(AtomicBool);

impl Stop {
    pub(super) fn is_set(&self) -> bool {
        // Relaxed: the flag publishes no other data.
        self.0.load(Ordering::Relaxed)
    }
}

/// Sets the flag on drop, so that a failing initiator ends its partner too.
struct StopOnDrop<'a>(&'a Stop);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// The initiator, with the other end if the same thread drives both.
pub(super) struct Initiator {
    pub(super) node: Node,
    other: Option<Responder>,
    idle: u32,
}

impl Initiator {
    /// Makes progress on the ends that this thread drives.
    pub(super) fn step(&mut self) -> Result<()> {
        let mut happened = self.node.poll()?;
        if let Some(other) = &mut self.other {
            happened += other.step()?;
        } else if happened == 0 {
            self.idle += 1;
            if self.idle > IDLE_STEPS_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        if happened > 0 {
            self.idle = 0;
        }
        Ok(())
    }

    /// Steps until `done` returns true, which is checked first.
    pub(super) fn until(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Node) -> Result<bool>,
    ) -> Result<()> {
        let mut started = Instant::now();
        let mut before = (u64::MAX, 0);
        let mut steps = 0_u32;
        while !done(&mut self.node)? {
            self.step()?;
            steps = steps.wrapping_add(1);
            // The clock is read rarely: a reading costs more than a step.
            if steps.is_multiple_of(1024) {
                self.node.require_peer()?;
                let now = (self.node.completed, self.node.immediates.len() + self.node.messages.len());
                if now != before {
                    (before, started) = (now, Instant::now());
                } else if started.elapsed() > STALL_TIMEOUT {
                    bail!("no progress for {STALL_TIMEOUT:?}, waiting for {what}");
                }
            }
        }
        Ok(())
    }

    /// Sends a command to the other end and waits for its answer.
    pub(super) fn ask(&mut self, command: &Command) -> Result<Command> {
        self.node.send_command(command)?;
        self.answer()
    }

    pub(super) fn answer(&mut self) -> Result<Command> {
        self.until("an answer of the other end", |node| Ok(!node.commands.is_empty()))?;
        match self.node.commands.pop_front() {
            Some(Command::Failed { reason }) => Err(anyhow!("the other end: {reason}")),
            Some(answer) => Ok(answer),
            None => Err(anyhow!("an answer vanished")),
        }
    }

    /// Sends a command that has no result, and waits for its end.
    pub(super) fn order(&mut self, command: &Command) -> Result<()> {
        match self.ask(command)? {
            Command::Done => Ok(()),
            other => bail!("{command:?} was answered with {other:?}"),
        }
    }

    fn meet(mut node: Node, addresses: &[String], other: Option<Responder>) -> Result<Self> {
        node.connect(addresses)?;
        let mut near = Self { node, other, idle: 0 };
        near.until("a connection", |node| {
            node.require_peer()?;
            Ok(node.is_connected())
        })?;
        let greeting = near.node.hello();
        match near.ask(&greeting)? {
            Command::Hello { version: VERSION, on_device, slot_bytes, out, in_ } => {
                near.node.remote = Remote::checked(on_device, slot_bytes, out, in_)?;
                Ok(near)
            }
            Command::Hello { version, .. } => {
                bail!("the other end speaks version {version}, this one {VERSION}")
            }
            other => bail!("greeted with {other:?}"),
        }
    }

    /// Sends `Quit` and gives the message time to go out.
    fn part(mut self) -> Result<()> {
        self.node.send_command(&Command::Quit)?;
        for _ in 0..100 {
            self.step()?;
        }
        Ok(())
    }
}

/// Parameters with which both ends are opened.
pub(super) struct Opening<'a> {
    pub(super) args: &'a TransferArgs,
    pub(super) rails: &'a dyn Rails,
    pub(super) transport: &'a str,
    pub(super) layout: SlabLayout,
    /// Memory of this process's one end, or of the near one.
    pub(super) memory: Memory,
    /// Memory of the far end, if it is in this process too.
    pub(super) far_memory: Memory,
}

impl Opening<'_> {
    fn open(&self, memory: Memory, listen: Option<&[String]>) -> Result<(Node, Vec<String>)> {
        Node::open(self.rails, self.transport, (self.layout, memory), listen, self.args.rails as usize)
    }

    fn far(&self, memory: Memory, listen: &[String]) -> Result<(Responder, Vec<String>)> {
        let (node, addresses) = self.open(memory, Some(listen))?;
        Ok((Responder::new(node, self.args.devices.first().cloned()), addresses))
    }

    fn near(&self, addresses: &[String], other: Option<Responder>) -> Result<Initiator> {
        let (node, _) = self.open(self.memory, None)?;
        Initiator::meet(node, addresses, other)
    }

    /// Runs the far end until the initiator leaves.
    pub(super) fn listen(&self) -> Result<()> {
        let (far, addresses) = self.far(self.memory, &self.args.listen)?;
        println!("{} listens on {}", self.transport, addresses.join(","));
        far.serve(&Stop::default())
    }

    /// Connects to the far end and measures.
    pub(super) fn measure(&self, work: impl FnOnce(&mut Initiator) -> Result<()>) -> Result<()> {
        if !self.args.connect.is_empty() {
            return finish(self.near(&self.args.connect, None)?, work);
        }
        let anywhere = vec![ANY_ADDRESS.to_owned(); self.args.rails as usize];
        match self.args.threads {
            Threads::One => {
                let (far, addresses) = self.far(self.far_memory, &anywhere)?;
                finish(self.near(&addresses, Some(far))?, work)
            }
            Threads::Two => self.measure_with_two_threads(&anywhere, work),
        }
    }

    fn measure_with_two_threads(
        &self,
        anywhere: &[String],
        work: impl FnOnce(&mut Initiator) -> Result<()>,
    ) -> Result<()> {
        let stop = Stop::default();
        std::thread::scope(|scope| {
            let _stop_far = StopOnDrop(&stop);
            let (ready, opened) = mpsc::sync_channel(1);
            let far = scope.spawn(|| {
                let ready = ready;
                match self.far(self.far_memory, anywhere) {
                    Ok((far, addresses)) => {
                        // The receiver waits for this one message.
                        let _received = ready.send(addresses);
                        drop(ready);
                        far.serve(&stop)
                    }
                    Err(error) => Err(error),
                }
            });
            let near = match opened.recv() {
                Ok(addresses) => self.near(&addresses, None).and_then(|near| finish(near, work)),
                Err(_) => Err(anyhow!("the far end did not open")),
            };
            drop(_stop_far);
            let far = far.join().map_err(|_| anyhow!("the far end's thread panicked"))?;
            // If both failed, the cause is the far end's error if it never opened, otherwise the near end's.
            match (near, far) {
                (Err(error), Ok(())) => Err(error),
                (Err(near), Err(far)) => Err(far.context(format!("near end: {near:#}"))),
                (Ok(()), far) => far.context("far end"),
            }
        })
    }
}

fn finish(mut near: Initiator, work: impl FnOnce(&mut Initiator) -> Result<()>) -> Result<()> {
    work(&mut near)?;
    near.part()
}
