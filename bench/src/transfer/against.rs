//! The peers: memcpy in this process, and perftest as two child processes. A child is killed by its handle,
//! never by name.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use super::error::Unavailable;
use super::node::Node;
use super::perftest::{Measured, PerftestPlan, parse};
use super::places::shuffled;
use super::session::Initiator;
use super::stream::Plan;

/// Longest run of a perftest program.
const RUN_MAX: Duration = Duration::from_secs(120);
const LISTEN_MAX: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_millis(5);
const DEVICES: &str = "/sys/class/infiniband";

/// A second slab, into which the pieces of a plan are copied.
pub(super) struct Copies {
    source: Arc<Slab>,
    target: Slab,
}

impl Copies {
    pub(super) fn new(node: &Node, layout: SlabLayout, pages: PageSize) -> Result<Self> {
        Ok(Self { source: Arc::clone(&node.slab), target: Slab::create("bench-copies", layout, pages)? })
    }

    /// Returns the seconds that copying `batches` batches takes.
    pub(super) fn time(&self, node: &Node, plan: &Plan, batches: u64) -> f64 {
        let started = Instant::now();
        for batch in 0..batches {
            for index in 0..plan.batch {
                let local = (batch % u64::from(plan.depth)) as u32 * plan.batch + index;
                self.copy(node, plan, local);
            }
        }
        started.elapsed().as_secs_f64()
    }

    fn copy(&self, node: &Node, plan: &Plan, local: u32) {
        let here = plan.shape.place(node.slot_bytes(), local);
        let there = plan.shape.place(node.slot_bytes(), shuffled(local, plan.window()));
        let from = (node.out[here.slot].slot(), here.offset as usize);
        let to = (node.in_[there.slot].slot(), there.offset as usize);
        match plan.shape.rows {
            None => self.target.copy_from(&self.source, from, to, plan.shape.bytes as usize),
            Some(rows) => {
                let strides = (rows.local_stride as usize, rows.remote_stride as usize);
                let count = (plan.shape.bytes / rows.bytes) as usize;
                self.target.copy_rows_from(&self.source, from, to, strides, rows.bytes as usize, count);
            }
        }
    }
}

/// Fails if perftest cannot run here. The error says what is missing.
pub(super) fn require_perftest(plan: &PerftestPlan, device: Option<&str>) -> Result<()> {
    let program = plan.tool.program();
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|folder| folder.join(program).is_file()) {
        return Err(Unavailable(format!("{program} is not installed (package perftest)")).into());
    }
    let devices: Vec<String> = std::fs::read_dir(DEVICES)
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    match device {
        _ if devices.is_empty() => {
            Err(Unavailable(format!("no RDMA device on this machine ({DEVICES} is empty)")).into())
        }
        Some(device) if !devices.iter().any(|known| known == device) => {
            Err(Unavailable(format!("no RDMA device '{device}' here; there are {}", devices.join(", ")))
                .into())
        }
        _ => Ok(()),
    }
}

/// A child process; killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended already.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

impl Running {
    fn has_ended(&mut self, within: Duration) -> bool {
        let started = Instant::now();
        while started.elapsed() < within {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return true;
            }
            std::thread::sleep(POLL_EVERY);
        }
        false
    }
}

/// The server of a perftest program.
pub(super) struct Server(Running);

impl Server {
    /// Starts the server and waits until it listens.
    pub(super) fn start(plan: &PerftestPlan, device: Option<&str>) -> Result<Self> {
        require_perftest(plan, device)?;
        let program = plan.tool.program();
        let mut command = Command::new(program);
        command.args(plan.arguments(device)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut running = Running(command.spawn().with_context(|| format!("start {program}"))?);
        let started = Instant::now();
        while !is_listening(plan.port) {
            if running.has_ended(POLL_EVERY) {
                bail!("the server of {program} ended at once");
            }
            if started.elapsed() > LISTEN_MAX {
                bail!("the server of {program} does not listen on port {} after {LISTEN_MAX:?}", plan.port);
            }
        }
        Ok(Self(running))
    }

    /// Waits a while for the server to end by itself.
    pub(super) fn finish(mut self) {
        self.0.has_ended(Duration::from_secs(5));
    }
}

/// Whether a process of this network namespace listens on the port. A test connection would be taken for the
/// client's.
fn is_listening(port: u16) -> bool {
    const LISTEN: &str = "0A"; // include/net/tcp_states.h, TCP_LISTEN
    ["/proc/net/tcp", "/proc/net/tcp6"].into_iter().filter_map(|file| std::fs::read_to_string(file).ok()).any(
        |table| {
            table.lines().skip(1).any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let local = fields.next().and_then(|address| address.rsplit_once(':')).map(|(_, port)| port);
                local.and_then(|hex| u16::from_str_radix(hex, 16).ok()) == Some(port)
                    && fields.nth(1) == Some(LISTEN)
            })
        },
    )
}

/// Runs perftest once between the two ends, as `near` describes them.
pub(super) fn run_perftest(
    near: &mut Initiator,
    plan: PerftestPlan,
    device: Option<&str>,
    host: &str,
) -> Result<Measured> {
    near.order(&super::command::Command::Perftest(plan))?;
    let measured = run_client(&plan, device, host);
    near.order(&super::command::Command::PerftestEnd)?;
    measured
}

fn run_client(plan: &PerftestPlan, device: Option<&str>, host: &str) -> Result<Measured> {
    let program = plan.tool.program();
    let mut command = Command::new(program);
    command.args(plan.arguments(device)).arg(host);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().with_context(|| format!("start {program}"))?);
    // The table of one size is far smaller than a pipe's buffer, so the child cannot block on it.
    if !running.has_ended(RUN_MAX) {
        bail!("{program} did not end within {RUN_MAX:?}");
    }
    let mut output = String::new();
    if let Some(mut pipe) = running.0.stdout.take() {
        pipe.read_to_string(&mut output).with_context(|| format!("output of {program}"))?;
    }
    if let Some(mut pipe) = running.0.stderr.take() {
        pipe.read_to_string(&mut output).with_context(|| format!("errors of {program}"))?;
    }
    let lines = parse(&output).with_context(|| format!("{program} {}", plan.arguments(device).join(" ")))?;
    lines.first().copied().with_context(|| format!("{program} printed nothing"))
}
