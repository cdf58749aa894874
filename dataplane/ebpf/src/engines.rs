//! Loads `bpf/engines.bpf.c`: per engine of this machine, the waiting times of its requests and threads,
//! measured in the kernel.

use aya::maps::{HashMap, MapData, PerCpuArray};
use aya::programs::raw_trace_point::RawTracePoint;
use aya::programs::tp_btf::BtfTracePoint;
use aya::programs::{RawTracePointRunOptions, TestRun};
use aya::{Btf, Ebpf};

use crate::error::EbpfError;
use crate::histogram::Histogram;
use crate::host;
use crate::layout::{ENGINE_HISTOGRAMS, ENGINES_MAX, EnginePort, HistogramValues};
use crate::load::{self, refused};

const FEATURE: &str = "kernel times of engines";

const PROGRAMS: &[(&str, &str)] = &[
    ("request_arrives", "tcp_probe"),
    ("request_read", "sock_recv_length"),
    ("answer_begins", "sock_send_length"),
    ("socket_ends", "inet_sock_set_state"),
    ("engine_resends", "tcp_retransmit_skb"),
    ("task_wakes", "sched_wakeup"),
    ("task_begins", "sched_wakeup_new"),
    ("task_switches", "sched_switch"),
    ("read_issued", "block_rq_issue"),
    ("read_done", "block_rq_complete"),
];

/// An engine: its listening address and its processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchedEngine {
    /// Inode number of the engine's network namespace.
    pub netns: u32,
    /// TCP port that the engine listens on.
    pub port: u16,
    /// The listening process and its descendants.
    pub processes: Vec<u32>,
}

/// Times of one engine since the engine was first watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineTimes {
    /// From the arrival of a request's first bytes to the first bytes of its answer.
    pub first_byte: Histogram,
    /// From the arrival of a request's first bytes to the read that returns them.
    pub read_late: Histogram,
    /// From the moment at which a thread becomes runnable to the moment at which it runs.
    pub run_queue: Histogram,
    /// Disk reads, from issue to completion.
    pub disk_read: Histogram,
    /// Retransmitted segments.
    pub retransmits: u64,
}

impl EngineTimes {
    /// Returns the difference to an earlier value.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            first_byte: self.first_byte.since(&before.first_byte),
            read_late: self.read_late.since(&before.read_late),
            run_queue: self.run_queue.since(&before.run_queue),
            disk_read: self.disk_read.since(&before.disk_read),
            retransmits: self.retransmits.saturating_sub(before.retransmits),
        }
    }
}

/// The attached programs. Dropping the probe detaches them.
pub struct EngineProbe {
    ports: HashMap<MapData, EnginePort, u32>,
    processes: HashMap<MapData, u32, u32>,
    histograms: PerCpuArray<MapData, HistogramValues>,
    resent: PerCpuArray<MapData, u64>,
    /// Engine whose entries are in the maps, by engine number.
    watched: Vec<Option<WatchedEngine>>,
    ebpf: Ebpf,
}

impl EngineProbe {
    /// Largest number of engines that are watched at a time.
    pub const ENGINES_MAX: usize = ENGINES_MAX as usize;

    /// Loads and attaches the programs; no engine is watched yet.
    ///
    /// # Errors
    ///
    /// [`EbpfError`]: not built, capabilities, BTF, another PID namespace than the machine's, or the kernel
    /// refused: before Linux 6.3 the kernel has no tracepoint of sends.
    pub fn attach() -> Result<Self, EbpfError> {
        let (mut probe, btf) = Self::load()?;
        for (name, tracepoint) in PROGRAMS {
            let program: &mut BtfTracePoint =
                load::program(&mut probe.ebpf, name, |program: &mut BtfTracePoint| {
                    program.load(tracepoint, &btf)
                })?;
            program.attach().map_err(|error| refused(format!("attaching to {tracepoint}"), &error))?;
        }
        Ok(probe)
    }

    /// Loads all programs and attaches none, to find out whether [`EngineProbe::attach`] would work.
    pub(crate) fn check() -> Result<(), EbpfError> {
        let (mut probe, btf) = Self::load()?;
        for (name, tracepoint) in PROGRAMS {
            load::program(&mut probe.ebpf, name, |program: &mut BtfTracePoint| {
                program.load(tracepoint, &btf)
            })?;
        }
        Ok(())
    }

    fn load() -> Result<(Self, Btf), EbpfError> {
        load::ENGINES.map_err(EbpfError::NotBuilt)?;
        host::check_capabilities(FEATURE, host::STRUCTURES)?;
        host::check_btf(FEATURE)?;
        let btf = Btf::from_sys_fs().map_err(|error| refused("the kernel's BTF".to_owned(), &error))?;
        let mut ebpf = load::load("engines", load::ENGINES, &[])?;
        let mut probe = Self {
            ports: load::map(&mut ebpf, "ports")?,
            processes: load::map(&mut ebpf, "processes")?,
            histograms: load::map(&mut ebpf, "histograms")?,
            resent: load::map(&mut ebpf, "resent")?,
            watched: vec![None; Self::ENGINES_MAX],
            ebpf,
        };
        let program: &mut RawTracePoint = load::program(&mut probe.ebpf, "own_tgid", RawTracePoint::load)?;
        let told = program
            .test_run(RawTracePointRunOptions::new())
            .map_err(|error| refused("running own_tgid".to_owned(), &error))?;
        if told.return_value != std::process::id() {
            return Err(EbpfError::PidNamespace { feature: FEATURE });
        }
        Ok((probe, btf))
    }

    /// Watches the engine under a number below [`Self::ENGINES_MAX`], in place of the previous engine of that
    /// number.
    ///
    /// # Errors
    ///
    /// [`EbpfError`]: a number that is too large, or a map that is full.
    pub fn watch(&mut self, number: usize, engine: &WatchedEngine) -> Result<(), EbpfError> {
        let too_many = || EbpfError::Configuration {
            key: "engines",
            reason: format!("at most {} are watched", Self::ENGINES_MAX),
        };
        let slot = self.watched.get(number).ok_or_else(too_many)?;
        if slot.as_ref() == Some(engine) {
            return Ok(());
        }
        self.unwatch(number);
        self.watched[number] = Some(engine.clone());
        let inserted = self.insert(number as u32, engine);
        if inserted.is_err() {
            // The next call inserts every entry again.
            self.unwatch(number);
        }
        inserted
    }

    fn insert(&mut self, index: u32, engine: &WatchedEngine) -> Result<(), EbpfError> {
        self.ports
            .insert(port_key(engine), index, 0)
            .map_err(|error| refused(format!("watching port {}", engine.port), &error))?;
        for process in &engine.processes {
            self.processes
                .insert(process, index, 0)
                .map_err(|error| refused(format!("watching process {process}"), &error))?;
        }
        Ok(())
    }

    /// Stops watching the engine with this number. Entries that another number has taken over stay.
    pub fn unwatch(&mut self, number: usize) {
        let Some(before) = self.watched.get_mut(number).and_then(Option::take) else { return };
        let index = number as u32;
        let port = port_key(&before);
        if self.ports.get(&port, 0).is_ok_and(|owner| owner == index) {
            // The entry may have been removed already.
            let _gone = self.ports.remove(&port);
        }
        for process in &before.processes {
            if self.processes.get(process, 0).is_ok_and(|owner| owner == index) {
                let _gone = self.processes.remove(process);
            }
        }
    }

    /// Returns the times of the engine with this number, summed over CPUs.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Refused`] where a map cannot be read.
    pub fn times(&self, number: usize) -> Result<EngineTimes, EbpfError> {
        let first = number as u32 * ENGINE_HISTOGRAMS;
        let histogram = |which| {
            let mut sum = Histogram::default();
            for values in load::per_cpu(&self.histograms, first + which)?.iter() {
                sum.add(&values.counts, values.sum_ns);
            }
            Ok(sum)
        };
        Ok(EngineTimes {
            first_byte: histogram(0)?,
            read_late: histogram(1)?,
            run_queue: histogram(2)?,
            disk_read: histogram(3)?,
            retransmits: load::counter(&self.resent, number as u32)?,
        })
    }
}

fn port_key(engine: &WatchedEngine) -> EnginePort {
    EnginePort { netns: engine.netns, port: u32::from(engine.port) }
}
