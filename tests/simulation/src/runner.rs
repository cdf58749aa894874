//! Runs seeds, each in its own process, which is the simulation; by default as many at a time as there are
//! processors.

use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

use crate::catalog::{self, Catalog, MODEL};
use crate::kernel::{self, report};
use crate::model;
use crate::nodes::KUBECONFIG;
use crate::oracle::Oracle;
use crate::plan::Plan;
use crate::scenario::{self, Summary};

/// Real time after which a run counts as hung: a thread never yields.
const HANGS_AFTER: Duration = Duration::from_secs(60);

/// Result of a run.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    Passed(Summary),
    Failed(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Passed(Summary),
    Failed(String),
}

/// Output of a run beside its result.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RunOutput {
    /// Each step of the kernel.
    pub(crate) trace: bool,
    /// Each step of the plan, and each exchange.
    pub(crate) steps: bool,
    /// Level at which the nodes' logs are printed.
    pub(crate) log: Option<tracing::Level>,
}

/// A run in progress.
struct Run {
    process: libc::pid_t,
    result: std::fs::File,
    folder: PathBuf,
    began: Instant,
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends: [c_int; 2] = [0; 2];
    // SAFETY: there is room for two descriptors.
    let failed = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    if failed != 0 {
        bail!("no pipe: {}", std::io::Error::last_os_error());
    }
    // SAFETY: the descriptors were just made for this.
    let reader = unsafe { OwnedFd::from_raw_fd(ends[0]) };
    // SAFETY: as above.
    let writer = unsafe { OwnedFd::from_raw_fd(ends[1]) };
    Ok((reader, writer))
}

/// State that all runs share: the reference's answers, and a folder.
pub(crate) struct Runner {
    folder: PathBuf,
    catalog: Catalog,
}

impl Drop for Runner {
    fn drop(&mut self) {
        // A remaining folder in memory is harmless.
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

impl Runner {
    /// Returns the reference's answers.
    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Replaces an answer of the reference with one that no engine will give.
    pub(crate) fn plant_wrong_answer(&mut self) {
        for exchanges in [&mut self.catalog.mocks, &mut self.catalog.workers] {
            exchanges[3][0].answer.insert_str(0, "not the reference's ");
        }
    }

    /// Creates the folder, in memory if possible, and computes the reference.
    pub(crate) fn new() -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        // A new folder that no other user can have prepared, nor an earlier process of the same id have left.
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("kvasir-simulation-{}-{}", std::process::id(), since_epoch.as_nanos());
        let folder = parent.join(name);
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o700).create(&folder).with_context(|| folder.display().to_string())?;
        let mut runner = Self { folder, catalog: Catalog::default() };
        model::write(&runner.folder.join(MODEL))?;
        runner.catalog = build_catalog(&runner.folder)?;
        Ok(runner)
    }
}

/// Computes the reference in its own process, whose leftover state must not be in the processes of runs.
fn build_catalog(folder: &Path) -> Result<Catalog> {
    let (reader, writer) = pipe()?;
    // SAFETY: this process has one thread, so that the child finds no lock taken.
    match unsafe { libc::fork() } {
        -1 => bail!("no process: {}", std::io::Error::last_os_error()),
        0 => {
            end_with_parent();
            report::to(writer.as_raw_fd());
            let built = std::env::set_current_dir(folder)
                .map_err(anyhow::Error::from)
                .and_then(|()| catalog::build());
            let built = built.and_then(|catalog| Ok(serde_json::to_string(&catalog)?));
            report::send(&built.unwrap_or_else(|error| format!("{error:#}")));
            report::end(0)
        }
        child => {
            drop(writer);
            let mut text = String::new();
            std::fs::File::from(reader).read_to_string(&mut text)?;
            // SAFETY: the process is a child of this one; its status does not matter.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            serde_json::from_str(&text).with_context(|| format!("the reference: {text}"))
        }
    }
}

/// Has the system kill this process when its parent ends.
fn end_with_parent() {
    // SAFETY: the call has plain numbers as arguments. Where it fails the process only lives longer.
    let _failed = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.process > 0 {
            // SAFETY: the process is a child of this one that was not waited for yet.
            unsafe { libc::kill(self.process, libc::SIGKILL) };
            // SAFETY: as above; its status does not matter.
            unsafe { libc::waitpid(self.process, std::ptr::null_mut(), 0) };
        }
        // A remaining folder goes with that of the runner.
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

impl Run {
    fn start(runner: &Runner, plan: &Plan, output: RunOutput, slot: usize) -> Result<Self> {
        let folder = runner.folder.join(format!("run-{slot}"));
        std::fs::create_dir_all(&folder)?;
        std::os::unix::fs::symlink(runner.folder.join(MODEL), folder.join(MODEL))?;
        let (reader, writer) = pipe()?;
        // SAFETY: this process has one thread, so that the child finds no lock taken.
        let process = unsafe { libc::fork() };
        match process {
            -1 => bail!("no process: {}", std::io::Error::last_os_error()),
            0 => become_run(plan, &runner.catalog, output, &writer, &folder, slot),
            _ => {}
        }
        Ok(Self { process, result: reader.into(), folder, began: Instant::now() })
    }

    fn descriptor(&self) -> c_int {
        self.result.as_raw_fd()
    }

    fn hangs(&self) -> bool {
        self.began.elapsed() > HANGS_AFTER
    }

    /// Waits for the end of the run, or kills it if it hangs.
    fn finish(mut self) -> Result<Verdict> {
        let hung = self.hangs();
        if hung {
            // SAFETY: the process is a child of this one that was not waited for yet.
            unsafe { libc::kill(self.process, libc::SIGKILL) };
        }
        let mut text = String::new();
        self.result.read_to_string(&mut text)?;
        let mut status = 0;
        // SAFETY: there is room for a status.
        unsafe { libc::waitpid(self.process, &raw mut status, 0) };
        self.process = 0;
        if hung {
            let seconds = HANGS_AFTER.as_secs();
            return Ok(Verdict::Failed(format!(
                "[hung] no result after {seconds} s: a thread never gives its turn away, or the machine is very slow"
            )));
        }
        let Some(line) = text.lines().next() else {
            let how = match libc::WIFSIGNALED(status) {
                true => format!("died of signal {}", libc::WTERMSIG(status)),
                false => format!("exited with {}", libc::WEXITSTATUS(status)),
            };
            return Ok(Verdict::Failed(format!("[alive] the run's process {how} before it sent a result")));
        };
        Ok(match serde_json::from_str(line).with_context(|| line.to_owned())? {
            Line::Passed(summary) => Verdict::Passed(summary),
            Line::Failed(reason) => Verdict::Failed(reason),
        })
    }
}

fn become_run(
    plan: &Plan,
    catalog: &Catalog,
    output: RunOutput,
    writer: &OwnedFd,
    folder: &Path,
    slot: usize,
) -> ! {
    end_with_parent();
    report::to(writer.as_raw_fd());
    if std::env::set_current_dir(folder).is_err() {
        report::fail(Oracle::Simulator, "the folder of the run is gone");
    }
    pin(slot);
    // SAFETY: this process has one thread.
    unsafe { std::env::set_var("KVASIR_PEER_KEY", "gateways of one simulated cluster believe each other") };
    // SAFETY: this process has one thread.
    unsafe { std::env::set_var("KUBECONFIG", KUBECONFIG) };
    // SAFETY: this process has one thread.
    unsafe { std::env::set_var("KVASIR_SALT_SECRET", "tenants of one simulated cluster are kept apart") };
    if output.steps || output.log.is_some() {
        report::show_program_output();
    }
    let level = output.log.unwrap_or(tracing::Level::ERROR);
    let quiet = output.log.is_none();
    let writer = move || -> Box<dyn std::io::Write> {
        if quiet { Box::new(std::io::sink()) } else { Box::new(std::io::stderr()) }
    };
    // Log timestamps use simulated time, so that a watched run equals an unwatched one.
    let log = tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_timer(SimulatedTime);
    log.with_writer(writer).init();
    scenario::run(plan, catalog, output.trace, output.steps)
}

/// Simulated time for log lines.
struct SimulatedTime;

impl FormatTime for SimulatedTime {
    fn format_time(&self, line: &mut Writer<'_>) -> std::fmt::Result {
        write!(line, "{:>9.3} s", kernel::now() as f64 / 1e9)
    }
}

/// Pins a run to one processor, on which threads hand over fastest.
fn pin(slot: usize) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    // SAFETY: a set of processors is plain bits.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number is one of a processor.
    unsafe { libc::CPU_SET(slot % processors, &mut set) };
    // SAFETY: the set has the size that is given. Where it is refused the run is only slower.
    let _refused = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

impl Runner {
    /// Runs plans, as many at a time as there are places, and passes on each verdict, until it is told to
    /// stop.
    pub(crate) fn run_all(
        &self,
        plans: impl IntoIterator<Item = Plan>,
        jobs: usize,
        mut on_verdict: impl FnMut(&Plan, Verdict) -> Result<bool>,
    ) -> Result<()> {
        let mut plans = plans.into_iter();
        let mut slots: Vec<Option<(Plan, Run)>> = (0..jobs).map(|_| None).collect();
        let mut has_more = true;
        loop {
            for (slot, running) in slots.iter_mut().enumerate() {
                if running.is_none()
                    && has_more
                    && let Some(plan) = plans.next()
                {
                    let run = Run::start(self, &plan, RunOutput::default(), slot)?;
                    *running = Some((plan, run));
                }
            }
            if slots.iter().all(Option::is_none) {
                return Ok(());
            }
            let polled = |slot: &Option<(Plan, Run)>| libc::pollfd {
                fd: slot.as_ref().map_or(-1, |(_, run)| run.descriptor()),
                events: libc::POLLIN,
                revents: 0,
            };
            let mut polled: Vec<libc::pollfd> = slots.iter().map(polled).collect();
            // SAFETY: there are so many entries.
            unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 1000) };
            for (slot, entry) in slots.iter_mut().zip(&polled) {
                if slot.as_ref().is_some_and(|(_, run)| entry.revents != 0 || run.hangs())
                    && let Some((plan, run)) = slot.take()
                {
                    has_more &= on_verdict(&plan, run.finish()?)?;
                }
            }
        }
    }

    /// Runs one plan.
    pub(crate) fn run_one(&self, plan: &Plan, output: RunOutput) -> Result<Verdict> {
        let run = Run::start(self, plan, output, 0)?;
        let mut polled = libc::pollfd { fd: run.descriptor(), events: libc::POLLIN, revents: 0 };
        // SAFETY: there is one entry.
        unsafe { libc::poll(&raw mut polled, 1, HANGS_AFTER.as_millis() as c_int + 1000) };
        run.finish()
    }
}
